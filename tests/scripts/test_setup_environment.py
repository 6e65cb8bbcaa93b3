"""scripts/setup keeps an environment under each spelling of its name, and the PyTorch that could be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from parallel.launching import ROOT

STEPS = "check_prerequisites configure_mpi install_horovod install_this_package check_horovod"


def setup(folder: Path, venv: str, **variables: str) -> tuple[int, list[str]]:
    """The exit status of the script, and what the steps say that it took, none of which does more than that."""
    script = f"""
        source <(sed '$d; s|^source .*/common.sh"|source {ROOT}/scripts/common.sh|' {ROOT}/scripts/setup)
        for step in {STEPS}; do eval "$step() {{ :; }}"; done
        make_venv() {{ mkdir "$VENV/bin"; ln -s "$BASH" "$PY"; echo made; }}
        install_packages() {{ echo "torch $(torch_version)"; [[ $(torch_version) != mistyped ]] || die nothing; }}
        horovod_key() {{ echo key; }}
        package_inputs() {{ echo inputs; }}
        main"""
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "VENV")}
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", script], cwd=folder, stdin=subprocess.DEVNULL, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**environment, "VENV": venv, **variables},
    )  # fmt: skip
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith(("made", "torch"))]


@pytest.mark.parametrize("first", ["venv", "linked/venv"])
def test_another_spelling_of_its_name_is_the_same_environment(first: str, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    status, said = setup(tmp_path, first)
    assert status == 0
    assert said[0] == "made"
    for spelling in ("venv", "venv/", "./venv", "linked/venv", f"{tmp_path}/venv"):
        assert setup(tmp_path, spelling) == (0, []), spelling
    (tmp_path / "venv").rename(tmp_path / "moved")
    assert setup(tmp_path, "moved") == (0, said)


def test_a_mistyped_pytorch_is_not_remembered(tmp_path: Path) -> None:
    usual = setup(tmp_path, "venv")[1][-1]
    for kept, wanted in ((usual, {}), ("torch 2.12.0+cpu", {"TORCH": "2.12.0+cpu"})):
        assert setup(tmp_path, "venv", **wanted)[0] == 0
        assert setup(tmp_path, "venv", TORCH="mistyped") == (1, ["torch mistyped"])
        assert setup(tmp_path, "venv") == (0, [kept])
        assert setup(tmp_path, "venv") == (0, [])
