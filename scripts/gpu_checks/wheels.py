"""Install carried wheels into folders that only the parts see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("nccl", "host")
PIP_OPTIONS = ("--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check")


class Horovod(NamedTuple):
    """A Horovod for a part.

    Attributes:
        folder: where it was installed; None for that of the environment.
        problem: why there is none; "" if there is one.
    """

    folder: Path | None
    problem: str = ""


def problem(folder: Path) -> str:
    """Return what is wrong with a folder of wheels, or nothing."""
    if not folder.is_dir():
        return "there is no such folder; use one with nccl/*.whl and host/*.whl"
    for kind in KINDS:
        if not list((folder / kind).glob("horovod-*.whl")):
            return f"{kind}/ has no horovod-*.whl; put Horovod's wheel there that was built for {kind}"
    return ""


def install_for_all(folder: Path, target: Path, environment: MutableMapping[str, str]) -> str:
    """Install the wheels in the folder itself for all steps.

    Returns:
        The problem, or nothing.
    """
    files = sorted(folder.glob("*.whl"))
    if not files:
        return ""
    environment["PYTHONPATH"] += f"{os.pathsep}{target}"
    return _install(files, target).problem


def install(folder: Path | None, work: Path, machine: dict[str, Any]) -> Mapping[str, Horovod]:
    """Return the Horovod of each kind; problems also go into ``machine``."""
    if folder is None:
        found = subprocess.run(
            [sys.executable, "-c", "import importlib.metadata as m; print(m.version('horovod'))"],
            capture_output=True,
            text=True,
        )
        missing = "" if found.returncode == 0 else "no Horovod is installed, and --wheels was not given"
        machine["horovod"] = missing or f"{found.stdout.strip()}, the installed one"
        return dict.fromkeys(KINDS, Horovod(None, missing))
    horovods = {kind: _install(sorted((folder / kind).glob("*.whl")), work / kind) for kind in KINDS}
    machine["horovod"] = "; ".join(
        f"{kind}: {horovod.problem or next((folder / kind).glob('horovod-*.whl')).name}"
        for kind, horovod in horovods.items()
    )
    return horovods


def _install(files: list[Path], target: Path) -> Horovod:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *PIP_OPTIONS,
        "--target",
        str(target),
        *map(str, files),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        names = ", ".join(file.name for file in files)
        return Horovod(None, f"pip could not install {names}: {done.stderr[-300:].strip()}")
    return Horovod(target)
