"""Environments without a checkout: everything that is installed here, seen through links, but not this package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

ROOT = Path(__file__).resolve().parents[1]

_OURS = ("horovod_quant", "__editable__", "_horovod_quant")
_ITS_OWN = ("pip", "pip-")
_PACKAGES = Path(numpy.__file__).parents[1]
"""Of this environment."""

_HOROVODRUN = """\
#!{python}
import sys
from horovod.runner.launch import run_commandline
if __name__ == "__main__":
    sys.exit(run_commandline())
"""

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


class Environment(NamedTuple):
    """A virtual environment, and an empty folder in which its commands run."""

    bin: Path
    folder: Path

    def run(self, *command: Any, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """One of its commands, as a user would run it who has activated it."""
        program, *arguments = map(str, command)
        return subprocess.run(
            [str(self.bin / program), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
            cwd=self.folder, env=_variables(self.bin),
        )  # fmt: skip


def _variables(bin_folder: Path) -> dict[str, str]:
    left_out = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    return {
        **variables,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(bin_folder.parent),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def make_environment(folder: Path) -> Environment:
    """An environment that has what this one has: nothing is downloaded, and nothing here can be changed."""
    elsewhere, linked = folder / "elsewhere", folder / "packages"
    elsewhere.mkdir()
    linked.mkdir()
    venv.create(folder / "env", with_pip=True, symlinks=True)
    bin_folder = folder / "env" / "bin"
    for source in _PACKAGES.iterdir():
        own = source.name == _ITS_OWN[0] or source.name.startswith((*_OURS, _ITS_OWN[1]))
        if not own and source.suffix != ".pth":
            (linked / source.name).symlink_to(source)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "linked.pth").write_text(f"{linked}\n")
    horovodrun = bin_folder / "horovodrun"
    horovodrun.write_text(_HOROVODRUN.format(python=bin_folder / "python"))
    horovodrun.chmod(0o755)
    return Environment(bin_folder, elsewhere)


def files_of(environment: Environment) -> dict[Path, tuple[int, int]]:
    """Size and time (nanoseconds) of the last change of every file in it, and of those that it sees through links.

    Except for compiled Python, which whoever imports a module may write.
    """
    found = {}
    for folder in (environment.bin.parent, _PACKAGES):
        for path, _, names in os.walk(folder):
            for name in () if path.endswith("__pycache__") else names:
                status = os.lstat(os.path.join(path, name))
                found[Path(path, name)] = status.st_size, status.st_mtime_ns
    return found


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution, made from a copy of this tree, and the wheel, made from that."""
    copy, made = folder / "copy", folder / "dist"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", ".aarch64", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    _check([sys.executable, "-c", _BUILD, made], copy)
    (source,) = made.glob("*.tar.gz")
    _check(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made, source],
        folder,
    )
    (wheel,) = made.glob("*.whl")
    return source, wheel


def _check(command: Sequence[Any], folder: Path) -> None:
    done = subprocess.run(
        list(map(str, command)), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        env={**os.environ, "HOROVOD_QUANT_REQUIRE_NATIVE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
