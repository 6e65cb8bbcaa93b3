"""Starts programs under horovodrun, as a user would."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import timings

if TYPE_CHECKING:
    from plan import Run

ELASTIC = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
"""Survivors may wait so long before they notice that a worker is gone; and for a new one, which on a slow machine takes
half of it to import its framework, in ``hvd.init()``.
"""

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]

HOROVODRUN = [sys.executable, str(Path(__file__).with_name("horovodrun.py"))]

SCENARIOS_LIMIT = 2400
"""Seconds of a launch of many scenarios."""

SCENARIO_LIMIT = 600
"""Seconds of one of them."""

SHORT_LIMIT = 150
"""Likewise, where scenarios are short, and somebody waits who shall not wait long for what hangs."""

LOOK = 1.0
"""Seconds between looks at how far a launch is."""

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
    progress: Callable[[], Any] = lambda: None,
    standstill: float = math.inf,
) -> subprocess.CompletedProcess[str]:
    """Runs ``horovodrun --gloo|--mpi -np workers command``; kills the whole session when time is up.

    The time limits are generous: a loaded machine is no failure.

    Args:
        own_network: whether to run it behind a loopback interface of its own, where the system allows it, so that
            nobody else's traffic is counted.
        progress: returns something else whenever the launch has got on.
        standstill: seconds without that, after which time is up as well.
    """
    launch: list[str] = [*HOROVODRUN, f"--{controller}", "-np", str(workers)]
    launch += [str(part) for part in command]
    if own_network:
        launch = [*network_namespace(), *launch]
    process = subprocess.Popen(
        launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(env), cwd=ROOT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    begin = last = time.monotonic()
    seen = progress()
    while True:
        try:
            output, _ = process.communicate(timeout=LOOK)
            return subprocess.CompletedProcess(launch, process.returncode, output)
        except subprocess.TimeoutExpired:
            now, before, seen = time.monotonic(), seen, progress()
            last = last if seen == before else now
            if now - begin > timeout or now - last > standstill:
                break
    os.killpg(process.pid, 9)
    output, _ = process.communicate()
    output += f"\n[killed after {now - begin:.0f} seconds, {now - last:.0f} of them without progress]"
    return subprocess.CompletedProcess(launch, -9, output)


class Outcome(NamedTuple):
    """Of a run of worker.py."""

    failures: list[dict[str, str]]
    """For each worker, how each scenario ended; "" if well."""
    output: str
    """The end of the launch's."""


def scenarios(run: Run, names: Sequence[str], folder: Path, limit: float = SCENARIO_LIMIT) -> Outcome:
    """Runs ``horovodrun OPTIONS worker.py FOLDER MODULE``, with so many seconds for a scenario."""
    (folder / "names").write_text("\n".join(names))
    command = [*run.options, sys.executable, Path(__file__).with_name("worker.py"), folder, run.module]
    begin = time.monotonic()
    logs = [folder / f"{rank}.jsonl" for rank in range(run.workers)]
    done = horovodrun(
        run.controller,
        run.workers,
        command,
        timeout=SCENARIOS_LIMIT,
        env=dict(run.environment),
        progress=lambda: [log.stat().st_size for log in logs if log.exists()],
        standstill=limit,
    )
    failures, seconds = [], dict[str, float]()
    for log in logs:
        entries = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
        failures.append({entry["scenario"]: entry["failure"] for entry in entries})
        for entry in entries:
            seconds[entry["scenario"]] = max(entry["seconds"], seconds.get(entry["scenario"], 0.0))
    timings.record(str(run), time.monotonic() - begin, seconds)
    return Outcome(failures, done.stdout[-3000:])


def assert_passed(scenario: str, outcome: Outcome) -> None:
    """Every worker got as far as the scenario, and it passed there."""
    for rank, log in enumerate(outcome.failures):
        ended = f"rank {rank} did not get this far, its last was {list(log)[-1:]}"
        assert scenario in log, f"{ended}; the launch printed\n{outcome.output}"
        assert not log[scenario], f"rank {rank}:\n{log[scenario]}"


def elastic(worker: str, folder: Path, limit: int) -> tuple[list[list[dict[str, Any]]], str]:
    """Runs ``worker LOG_FOLDER HOSTS_FILE`` under elastic horovodrun (Gloo), with 2 workers at first and 3 at most.

    Returns:
        What each worker has logged, a list of entries; and what the launch printed.
    """
    hosts, discover, logs = folder / "hosts", folder / "discover.sh", folder / "logs"
    hosts.write_text("localhost:2\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    logs.mkdir()
    command = [
        "timeout", "-k", "10", str(limit),
        *HOROVODRUN, "--gloo", "-np", "2", "--min-np", "2", "--max-np", "3", "--network-interface", "lo",
        "--host-discovery-script", str(discover),
        sys.executable, str(Path(__file__).with_name(worker)), str(logs), str(hosts),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(ELASTIC), cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    entries = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs.iterdir()]
    return entries, done.stdout


def network_namespace() -> list[str]:
    """A command prefix that runs a program in a network namespace of its own; empty where that is not allowed."""
    up = [sys.executable, str(Path(__file__).with_name("loopback_up.py"))]
    for unshare in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        prefix = [*unshare, *up]
        if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    return []
