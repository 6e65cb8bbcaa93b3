"""Horovod's kept wheel: scripts/setup installs what its user has kept, and nothing that somebody else has put there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from parallel.launching import ROOT

NOBODY = 65534
LOCATED = ("HOME", "XDG_CACHE_HOME", "HOROVOD_QUANT_CACHE")

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="root alone can give a folder to another user")


def functions(folder: Path, code: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs code that uses the functions of scripts/horovod.sh; what would build a wheel says so instead."""
    script = f"""
        source {ROOT}/scripts/common.sh
        source {ROOT}/scripts/horovod.sh
        PYTHON_VERSION=3.11 KIND=cpu SITE={folder}/site STATE={folder}
        horovod_key() {{ echo key; }}
        build_horovod() {{ echo "built"; echo new > {folder}/new; keep {folder}/new "$1"; }}
        pip_install() {{ echo "installed $(cat "${{@: -1}}")"; }}
        source <(sed -n '/^install_horovod()/,/^}}/p' {ROOT}/scripts/setup)
        {code}"""
    environment = {name: value for name, value in os.environ.items() if name not in LOCATED}
    environment.update(VENV=str(folder), **{name: str(value) for name, value in variables.items()})
    return subprocess.run(
        [str(shutil.which("bash")), "-c", script], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment,
    )  # fmt: skip


def install(folder: Path) -> subprocess.CompletedProcess[str]:
    code = 'make_private "$CACHE" "$CACHE_REMEDY"; install_horovod'
    return functions(folder, code, HOROVOD_QUANT_CACHE=folder / "cache")


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("cache/*/horovod-*.whl")
    return wheel


def test_without_a_home_the_folder_is_still_the_users_own(tmp_path: Path) -> None:
    home = functions(tmp_path, "unset HOME; echo ~").stdout
    assert functions(tmp_path, 'echo "$CACHE"').stdout == home.strip() + "/.cache/horovod-quant\n"
    assert functions(tmp_path, 'echo "$CACHE"', HOME="").stdout == home.strip() + "/.cache/horovod-quant\n"
    assert functions(tmp_path, 'echo "$CACHE"', HOME="/h").stdout == "/h/.cache/horovod-quant\n"
    assert functions(tmp_path, 'echo "$CACHE"', XDG_CACHE_HOME="/x").stdout == "/x/horovod-quant\n"


def test_what_was_built_is_installed_again(tmp_path: Path) -> None:
    for said in (["built", "installed new"], ["installed new"]):
        done = install(tmp_path)
        assert done.returncode == 0, done.stdout
        assert [line for line in done.stdout.splitlines() if line.startswith(("built", "installed"))] == said
    for folder in (tmp_path / "cache", wheel_in(tmp_path).parent):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["without its hash", "changed", "a link", "cut off"])
def test_a_planted_or_damaged_wheel_is_built_anew(how: str, tmp_path: Path) -> None:
    install(tmp_path)
    wheel = wheel_in(tmp_path)
    if how == "without its hash":
        wheel.with_name(wheel.name + ".sha256").unlink()
    elif how == "a link":
        wheel.rename(tmp_path / "elsewhere")
        wheel.symlink_to(tmp_path / "elsewhere")
    else:
        wheel.write_text("planted" if how == "changed" else "")
    done = install(tmp_path)
    assert "built\n" in done.stdout
    assert "installed new\n" in done.stdout
    assert not wheel.is_symlink()


@needs_root
@pytest.mark.parametrize("suffix", ["", ".sha256"])
def test_a_wheel_of_another_user_is_built_anew(suffix: str, tmp_path: Path) -> None:
    install(tmp_path)
    wheel = wheel_in(tmp_path)
    os.chown(f"{wheel}{suffix}", NOBODY, NOBODY)
    assert "built\n" in install(tmp_path).stdout
    assert wheel.stat().st_uid == os.getuid()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("0777", "can be written to by others"),
        ("0770", "can be written to by others"),
        ("link", "is a link"),
        pytest.param("owner", "belongs to ", marks=needs_root),
    ],
)
def test_a_folder_that_others_can_write_to_is_refused(
    how: str, problem: str, inside: bool, tmp_path: Path
) -> None:
    install(tmp_path)
    folder = wheel_in(tmp_path).parent if inside else tmp_path / "cache"
    if how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "owner":
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(int(how, 8))
    done = install(tmp_path)
    assert done.returncode == 1
    assert f"{folder} {problem}" in done.stdout
    assert "set HOROVOD_QUANT_CACHE=/a/folder/of/yours" in done.stdout
    assert "installed" not in done.stdout.replace("will be installed", "")


def test_a_folder_of_an_earlier_setup_is_taken_and_closed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    assert install(tmp_path).returncode == 0
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_labs_keys_are_in_a_closed_folder(tmp_path: Path) -> None:
    code = f"""
        source <(sed -n '/^take_lock()/,/^}}/p' {ROOT}/scripts/lab)
        ALL_STATE={tmp_path}/labs
        umask 0
        take_lock"""
    assert functions(tmp_path, code).returncode == 0
    assert (tmp_path / "labs").stat().st_mode & 0o777 == 0o700


@needs_root
@pytest.mark.parametrize("made", ["venv", "venv-frameworks"])
def test_an_environment_of_another_user_is_refused(made: str, tmp_path: Path) -> None:
    """The checkout's owner, whose scripts these are, would be taken."""
    for name in ("venv", "venv-frameworks"):
        (tmp_path / name).mkdir()
    (tmp_path / "venv" / ".setup").mkdir()
    os.chown(tmp_path / made, NOBODY, NOBODY)
    code = f"""
        VENV={tmp_path}/venv PY=python STATE={tmp_path}/venv/.setup
        source {ROOT}/scripts/frameworks.sh
        FRAMEWORK_PINS={tmp_path}
        for function in take_ownership lock; do
            source <(sed -n "/^$function()/,/^}}/p" {ROOT}/scripts/setup)
        done
        take_ownership
        install_frameworks"""
    done = functions(tmp_path, code)
    assert done.returncode == 1
    assert "belongs to " in done.stdout
    assert done.stdout.strip().endswith("set VENV=/a/folder/of/yours")
