"""Cached runs under horovodrun, on this machine and on an emulated cluster.

So an interrupted study resumes, and two studies can share a run. `forget` has a claim measured again.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, NamedTuple

from horovod_quant.frontends import methods

NAMES = 1
"""Version of the names of methods in results, see `horovod_quant.frontends.former_names`."""

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KEPT = ROOT / "docs" / "results" / "runs"
APART = (
    "by-workers",
    "bytes-count",
    "emulated",
    "more-workers",
)  # claims whose cached runs begin with their names, and are shared with no other claim
LAB = {"LAB": "reproduce", "VENV": sys.prefix}
_forgotten: set[Path] = set()  # cached runs that count as missing, until this process has measured them again
TIME_LIMIT = 3600  # seconds per launch, or per training: generous, since a loaded machine is no failure


class RunFailed(Exception):
    """A launch failed; the message has the end of its output."""


# ---- cached runs -------------------------------------------------------------------------------------------------


def key(settings: Any, programs: Sequence[Path]) -> str:
    """Return a cache key of settings and programs."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for program in programs:
        digest.update(program.read_bytes())
    return digest.hexdigest()[:12]


def kept(name: str) -> Any:
    """Return the result that `keep` wrote under a name, or None."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and path not in _forgotten else None


def keep(name: str, result: Any) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    partial = KEPT / f"{name}.partial"
    partial.write_text(json.dumps(result))
    path = KEPT / f"{name}.json"
    partial.replace(path)
    _forgotten.discard(path)


def keep_in(folder: Path) -> None:
    """Set the folder of cached runs."""
    global KEPT
    KEPT = folder


def forget(claim: str) -> None:
    """Have a claim measured again: remove its cached runs.

    Runs that claims share stay, for the others, and count as missing in this process.
    """
    for path in KEPT.glob("*"):
        owner = next((each for each in APART if path.name.startswith(f"{each}-")), None)
        if owner is None and claim not in APART:
            _forgotten.add(path)
        elif owner == claim:
            path.unlink()


# ---- trainings ---------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """Settings of a training, except for the seed.

    Attributes:
        script, imported: file names in examples/, or whole paths: of the script, and of the modules it imports.
        method: a name of `horovod_quant.frontends.methods`.
        options: further options of the script.
        workers: their number.
    """

    script: str
    imported: tuple[str, ...]
    method: str
    options: tuple[str, ...]
    workers: int

    @property
    def programs(self) -> list[Path]:
        return [EXAMPLES / name for name in (self.script, *self.imported)]

    def kept_as(self, seed: int) -> str:
        digest = key([self.workers, *self.options], self.programs)
        return f"{self.method}-seed-{seed}-{digest}"


def trainings(job: Job, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train once with each seed; return the figures of the script."""
    missing = [seed for seed in seeds if kept(job.kept_as(seed)) is None]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            command = [sys.executable, str(job.programs[0]), *method_options(job.method), *job.options]
            command += ["--quiet", "--seed", *map(str, missing), "--json", str(file)]
            try:
                horovodrun(command, job.workers, TIME_LIMIT * len(missing))
            finally:  # keep those that ended before a failure or an interrupt
                for run in json.loads(file.read_text())["runs"] if file.exists() else ():
                    keep(job.kept_as(run["seed"]), run)
    return [kept(job.kept_as(seed)) for seed in seeds]


def kept_trainings(job: Job, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the cached `trainings`, up to the first missing seed."""
    return list(itertools.takewhile(bool, (kept(job.kept_as(seed)) for seed in seeds)))


def once(name: str, compute: Callable[[], Any]) -> Any:
    """Return the cached result of a name.

    Compute and cache it first if it is missing.
    """
    if kept(name) is None:
        keep(name, compute())
    return kept(name)


def method_options(name: str) -> list[str]:
    """Return the options of the examples for a method."""
    method = methods.parse(name, version=NAMES, workers=4)
    if method.class_name is None:
        return ["--compression", name]
    compressors = import_example("training").COMPRESSORS
    (compression,) = (name for name, class_name in compressors.items() if class_name == method.class_name)
    options = {name.replace("_", "-"): value for name, value in method.arguments.items()}
    flags = (f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items())
    return ["--compression", compression, *flags]


def present_name(name: str, workers: int) -> str:
    """Return the current name of a method in results."""
    return methods.parse(name, version=NAMES, workers=workers).name


def import_example(module: str) -> Any:
    """Import a module of examples/, which is no package."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(module)


def horovodrun(command: Sequence[str], workers: int, limit: float) -> None:
    """Run a program on this machine, over Gloo.

    Args:
        limit: maximum seconds.

    Raises:
        RunFailed: it ended with an error.
    """
    program = str(Path(sys.executable).with_name("horovodrun"))
    launch([program, "--gloo", "-np", str(workers), *command], None, limit)


# ---- the lab -----------------------------------------------------------------------------------------------------


def why_no_lab() -> str | None:
    """Return the reason why no lab can run here, or None."""
    check = subprocess.run(
        [ROOT / "scripts" / "lab", "check"], env={**os.environ, **LAB}, capture_output=True, text=True
    )
    return (check.stdout + check.stderr).strip() if check.returncode else None


class Lab:
    """Handle of a running lab."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def rate(self, rate: str) -> None:
        launch([str(ROOT / "scripts" / "lab"), "rate", rate], LAB)

    def horovodrun(self, command: Sequence[str], per_host: int, variables: dict[str, str]) -> None:
        """Run a program on every host, over Gloo.

        Args:
            per_host: workers on each host.
            variables: of the program's environment.

        Raises:
            RunFailed: it ended with an error.
        """
        hosts = ",".join(f"host{number}:{per_host}" for number in range(1, self._hosts + 1))
        environment = [
            f"{name}={value}" for name, value in {"TF_CPP_MIN_LOG_LEVEL": "3", **variables}.items()
        ]
        started = [str(ROOT / "scripts" / "lab"), "exec", "host1", "env", *environment]
        started += ["horovodrun", "--gloo", "-np", str(self._hosts * per_host), "-H", hosts, *command]
        launch(started, LAB)


@contextmanager
def lab(hosts: int, rate: str) -> Iterator[Lab]:
    """Start a lab; stop it when the context ends."""
    script = str(ROOT / "scripts" / "lab")
    try:
        launch([script, "up", str(hosts), rate], LAB)
        yield Lab(hosts)
    finally:
        launch([script, "down"], LAB)


# ---- processes ---------------------------------------------------------------------------------------------------


def launch(
    command: Sequence[str], variables: dict[str, str] | None = None, limit: float = TIME_LIMIT
) -> None:
    """Run a command with a time limit.

    Its processes are killed at the time limit or an interrupt.

    Raises:
        RunFailed: it ended with an error, or not in time.
    """
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(variables or {})}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0:
            output.seek(0)
            tail = "".join(f"    {line}" for line in last_lines(output.readlines()))
            what = f"did not end within {limit} s" if status is None else f"ended with exit status {status}"
            raise RunFailed(f"{' '.join(command)}\n{what}. It printed last:\n{tail}")


def last_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines of the workers, and few of horovodrun.

    The traceback of horovodrun states only that a worker failed.
    """
    workers = [line for line in lines if re.match(r"\[[\d,]+\]<std(out|err)>", line)]
    launcher = [line for line in lines if line not in workers]
    return workers[-20:] + launcher[-3 if workers else -20 :]
