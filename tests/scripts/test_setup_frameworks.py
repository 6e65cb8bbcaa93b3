"""scripts/setup --frameworks: folders of packages that add to an environment, whatever happens on the way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from parallel.launching import ROOT

SCRIPTS = ROOT / "scripts"
PINS = sorted((SCRIPTS / "frameworks").glob("*.txt"))
LINES = 60


def pins_in(file: Path) -> dict[str, str]:
    """Versions by the packages' normalized names."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("file", PINS, ids=lambda file: file.stem)
def test_nothing_of_the_environment_is_replaced(file: Path) -> None:
    assert pins_in(file)
    assert not set(pins_in(file)) & set(pins_in(SCRIPTS / "constraints.txt"))


@pytest.mark.parametrize("file", PINS, ids=lambda file: file.stem)
def test_the_page_has_the_versions(file: Path) -> None:
    """Of what the first lines pin, before the packages that it needs."""
    first, _ = file.read_text().split("# Needed by the above")
    page = (ROOT / "docs" / "examples.md").read_text()
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", first, re.MULTILINE):
        assert f"{name} {version}" in page


@pytest.mark.parametrize("file", PINS, ids=lambda file: file.stem)
def test_the_examples_are_short(file: Path) -> None:
    named = re.findall(r"\w+\.py", file.read_text())
    assert named
    for name in named:
        assert len((ROOT / "examples" / name).read_text().splitlines()) <= LINES


class Installation:
    """scripts/frameworks.sh and pip, which has two wheels and no registry. The environment is a folder of nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        for made in ("pins", "venv", "wheels"):
            (folder / made).mkdir()
        for name in ("one", "two"):
            self.pin(name, f"{name}==1")
            self.wheel(name, "1")

    def pin(self, framework: str, *lines: str) -> None:
        (self.folder / "pins" / f"{framework}.txt").write_text("\n".join(lines) + "\n")

    def wheel(self, name: str, version: str) -> None:
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.wheels / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", f"version = {version!r}\n")
            archive.writestr(
                f"{about}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nothing\n",
            )
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")

    def run(self) -> str:
        """What the script says, after the name that bash gives it."""
        script = f"""
            source {SCRIPTS}/common.sh
            source {SCRIPTS}/frameworks.sh
            source <(sed -n '/^run_pip()/,/^}}/p' {SCRIPTS}/setup)
            PY={sys.executable} PYTHON_VERSION=3 FRAMEWORK_PINS={self.folder}/pins
            install_frameworks"""
        done = subprocess.run(
            [str(shutil.which("bash")), "-c", script], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
            env={**os.environ, "VENV": f"{self.folder}/venv/", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def __getitem__(self, framework: str) -> Path:
        return self.folder / "venv-frameworks" / framework

    def module(self, framework: str) -> str:
        return (self[framework] / "packages" / f"{framework}.py").read_text()


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


@pytest.mark.extended  # seconds of pip
def test_what_is_installed_stays_until_its_pins_change(installation: Installation) -> None:
    assert re.findall(r"installing (\w+) ", installation.run()) == ["one", "two"]
    assert installation.run() == ""
    installation.wheel("two", "2")
    installation.pin("two", "# A newer one", "--no-binary three", "two==2")
    assert "installing two for its examples: two==2" in installation.run()
    assert installation.module("two") == "version = '2'\n"
    assert list((installation.folder / "venv").iterdir()) == []


@pytest.mark.extended
def test_what_was_interrupted_begins_anew(installation: Installation) -> None:
    installation.run()
    (installation["one"] / "installed").unlink()
    (installation["one"] / "packages" / "one.py").write_text("vers")
    assert re.findall(r"installing (\w+) ", installation.run()) == ["one"]
    assert installation.module("one") == "version = '1'\n"


@pytest.mark.extended
def test_what_cannot_be_installed_is_left_out(installation: Installation) -> None:
    installation.pin("one", "one==3")
    why = "No matching distribution found for one==3"
    for _ in range(2):  # tried again each time
        assert f"    left out, with its tests: ERROR: {why}" in installation.run()
    assert why in (installation["one"] / "failure").read_text()
    assert not (installation["one"] / "installed").exists()
    assert (installation["two"] / "installed").exists()
    installation.wheel("one", "3")
    assert "left out" not in installation.run()
    assert not (installation["one"] / "failure").exists()
