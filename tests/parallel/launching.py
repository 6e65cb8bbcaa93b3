"""Starts programs under horovodrun, as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ELASTIC = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}
"""Survivors may wait so long before they notice that a worker is gone."""

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]

GLOO_TIMEOUT = "300"
"""Seconds. Of 30, its default, a machine with more workers than cores has been seen to take all."""


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = GLOO_TIMEOUT
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.update(extra or {})
    return env


def horovodrun(
    controller: str,
    workers: int,
    command: Sequence[Any],
    timeout: float = 600,
    env: dict[str, str] | None = None,
    own_network: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs ``horovodrun --gloo|--mpi -np workers command``; kills the whole session when time is up.

    The time limit is generous: a loaded machine is no failure. ``own_network``: behind a loopback interface of its
    own, where the system allows it, so that nobody else's traffic is counted.
    """
    launch: list[str] = [str(BIN / "horovodrun"), f"--{controller}", "-np", str(workers)]
    launch += [str(part) for part in command]
    if own_network:
        launch = [*network_namespace(), *launch]
    process = subprocess.Popen(
        launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(env), cwd=ROOT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        output += f"\n[killed after {timeout} seconds]"
        return subprocess.CompletedProcess(launch, -9, output)
    return subprocess.CompletedProcess(launch, process.returncode, output)


def network_namespace() -> list[str]:
    """A command prefix that runs a program in a network namespace of its own; empty where that is not allowed."""
    up = [sys.executable, str(Path(__file__).with_name("loopback_up.py"))]
    for unshare in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        prefix = [*unshare, *up]
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []
