"""Starts programs under torchrun, as a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timings
from parallel.launching import ROOT, Outcome, environment

HERE = Path(__file__).parent

ON_A_GPU = [
    "every_method_has_the_simulators_bits",
    "narrow_gradients",
    "gradients_that_are_views_of_buckets",
    "accumulation_without_synchronizing",
    "two_models_at_once",
    "parameters_that_are_not_used_by_all",
]
"""Scenarios of DDP that also run on a GPU."""


def torchrun(
    workers: int, command: Sequence[Any], timeout: float = 300, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``torchrun --nproc-per-node WORKERS COMMAND``; kills the whole session when time is up."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    launch += [str(part) for part in command]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, stdin=subprocess.DEVNULL,
        env=environment({"PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})}), start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(launch, -9, f"{output}\n[killed after {timeout:.0f} seconds]")
    return subprocess.CompletedProcess(launch, process.returncode, output)


def scenarios_of(module: str) -> list[str]:
    """The names of a module's scenarios, in order, without importing it."""
    return re.findall(r"^@scenario\ndef (\w+)", (HERE / f"{module}.py").read_text(), re.MULTILINE)


def run_scenarios(
    module: str, workers: int, names: Sequence[str], folder: Path, limit: float, env: dict[str, str]
) -> Outcome:
    """Runs scenarios one after another in one launch, and tells how each ended on each worker."""
    begin = time.monotonic()
    done = torchrun(workers, [HERE / "worker.py", folder, module, *names], limit, env)
    failures, seconds = [], dict[str, float]()
    for rank in range(workers):
        log = folder / f"{rank}.jsonl"
        entries = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
        failures.append({entry["scenario"]: entry["failure"] for entry in entries})
        for entry in entries:
            seconds[entry["scenario"]] = max(entry["seconds"], seconds.get(entry["scenario"], 0.0))
    timings.record(f"{module}, {workers} workers", time.monotonic() - begin, seconds)
    return Outcome(failures, done.stdout[-3000:])
