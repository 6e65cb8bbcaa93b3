"""Run the steps one after another, with shares of the remaining time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_checks.report import Report
from gpu_checks.steps import CUT_OFF, FAILED, LEFT_OUT, PASSED, Findings, Part, Step
from gpu_checks.wheels import Horovod

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 6.0
"""Seconds kept for ending processes and for the report."""

LEAST = 5.0
"""Seconds under which a step is not begun."""

GRACE = 3.0


class Runner:
    """One run.

    Args:
        out: folder of the report.
        work: temporary folder.
        limit: seconds for everything.
        rehearse: whether Triton's interpreter replaces the GPU.
        cache: Triton's folder of compiled kernels; None for one in ``work``.
    """

    def __init__(
        self, out: Path, work: Path, limit: float, rehearse: bool, cache: Path | None = None
    ) -> None:
        self.rehearse = rehearse
        self._begin, self._limit, self._work = time.monotonic(), limit, work
        (work / "logs").mkdir()
        self.report = Report(out, work / "logs", limit, rehearse)
        paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
            "TRITON_CACHE_DIR": str((cache or work / "triton").absolute()),
        }
        for name in ("TRITON_INTERPRET", "HOROVOD_QUANT_KERNELS", "HOROVOD_QUANT_STAGING"):
            self.environment.pop(name, None)
        if rehearse:
            self.environment.update(
                TRITON_INTERPRET="1",
                HOROVOD_QUANT_KERNELS="triton",
                TORCH_DEVICE="cpu",
                CUDA_VISIBLE_DEVICES="",
            )
        else:
            self.environment["TORCH_DEVICE"] = "cuda"

    def _left(self) -> float:
        return self._limit - RESERVE - (time.monotonic() - self._begin)

    def run(self, parts: Sequence[Part], horovods: Mapping[str, Horovod]) -> None:
        """Run the parts; the report has each step once it ends."""
        self.report.plan(parts)
        weights = sum(step.weight for part in parts for step in part.steps)
        try:
            for part in parts:
                for step in part.steps:
                    limit = self._left() * step.weight / weights
                    weights -= step.weight
                    self._step(part, step, horovods, limit)
        except KeyboardInterrupt as stopped:
            self.report.data["stopped"] = f"by {stopped or 'SIGINT'}"
        self.report.write()

    def _step(self, part: Part, step: Step, horovods: Mapping[str, Horovod], limit: float) -> None:
        horovod = horovods[step.horovod] if step.horovod else Horovod(None)
        if horovod.problem:
            self.report.end(part, step, LEFT_OUT, 0.0, limit, Findings(summary=horovod.problem))
            return
        if limit < LEAST:
            summary = f"{max(limit, 0):.0f} s were left for it; use a larger --limit, or --only {part.name}"
            self.report.end(part, step, LEFT_OUT, 0.0, limit, Findings(summary=summary))
            return
        print(f"gpu-check: {part.name}: {step.name}, at most {limit:.0f} s", flush=True)
        environment = {**self.environment, **step.environment}
        if horovod.folder is not None:
            environment["PYTHONPATH"] = f"{horovod.folder}{os.pathsep}{environment['PYTHONPATH']}"
            environment["PATH"] = f"{horovod.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        begin, stopped = time.monotonic(), None
        log = self._work / "logs" / f"{part.name}-{part.steps.index(step)}.log"
        try:
            status = run(step.command, environment, log, limit)
        except KeyboardInterrupt as interrupt:
            status, stopped = None, interrupt
        seconds = time.monotonic() - begin
        findings = read(step)
        if findings.failed or status not in (0, None):
            state = FAILED
        else:
            state = CUT_OFF if status is None else PASSED
        if status is None and findings.failed:
            findings = findings._replace(summary=f"{findings.summary}; cut off".lstrip("; "))
        if status not in (0, None) and not findings.failed:
            findings = findings._replace(failed=[f"exit status {status}: {last_words(log)}"])
        self.report.end(part, step, state, seconds, limit, findings)
        if stopped is not None:
            raise stopped

    def finish(self) -> int:
        """Say where the report is; return the exit status."""
        print(f"gpu-check: {self.report.summary()}; see {self.report.page}", file=sys.stderr)
        return 0 if self.report.is_good() else 1


def read(step: Step) -> Findings:
    """Return what a step has left, also one that was cut off."""
    try:
        return step.read()
    except Exception as error:  # a file that was cut off, or has another form: the other parts are valid
        return Findings(failed=[f"its result cannot be read: {type(error).__name__}: {error}"])


def last_words(log: Path) -> str:
    """Return the end of a log.

    Under horovodrun it is that of the workers' errors.
    """
    lines = log.read_text(errors="replace").strip().splitlines()
    of_workers = [line for line in lines if re.match(r"\[\d+\]<stderr>:.*\w", line)]
    return " | ".join((of_workers or lines)[-4:])[-600:]


def run(command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float) -> int | None:
    """Run a command from the root of the tree.

    Returns:
        Its exit status; None if it was cut off.
    """
    with open(log, "w") as output:
        print(*command, file=output, flush=True)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process and its descendants, in whatever sessions they are."""
    if process.poll() is not None:
        return
    family = [process.pid, *descendants(process.pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in {*family, *descendants(process.pid)}:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def descendants(ancestor: int) -> list[int]:
    """Return the processes that a process and its descendants have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found
