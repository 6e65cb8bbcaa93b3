"""Real runs under horovodrun, here and between the hosts of a lab. One that has ended is kept, and not repeated.

So a study that is interrupted goes on where it was, and two studies can share a run. `forget` removes what is kept.
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

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KEPT = ROOT / "docs" / "results" / "runs"
APART = (
    "by-workers",
    "bytes-count",
    "emulated",
    "more-workers",
    "seconds",
)  # the names of their runs begin so, and no other claim uses them
CLAIMS = {
    *APART,
    "binsgdm",
    "binsgdm-tuning",
    "eden",
    "nuqsgd-training",
    "rivals",
    "transformer",
    "transformer-gpu",
}  # whose runs are kept
LAB = {"LAB": "reproduce", "VENV": sys.prefix}
TIME_LIMIT = 3600  # seconds a launch, or a training: generous, since a loaded machine is no failure


class RunFailed(Exception):
    """A launch did not end well; the message has what it printed last."""


# ---- what is kept ------------------------------------------------------------------------------------------------


def key(settings: Any, programs: Sequence[Path]) -> str:
    """The same for the same settings of the same programs."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for program in programs:
        digest.update(program.read_bytes())
    return digest.hexdigest()[:12]


def kept(name: str) -> Any:
    """What `keep` has written under that name, or None."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def keep(name: str, result: Any) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    partial = KEPT / f"{name}.partial"
    partial.write_text(json.dumps(result))
    partial.replace(KEPT / f"{name}.json")


def keep_in(folder: Path) -> None:
    """Keeps runs there from now on."""
    global KEPT
    KEPT = folder


def forget(claim: str) -> None:
    """Removes what a claim has kept, with all that others share with it."""
    for path in KEPT.glob("*"):
        owner = next((each for each in APART if path.name.startswith(f"{each}-")), None)
        if owner == (claim if claim in APART else None):
            path.unlink()


# ---- trainings ---------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What is trained, but for the seed.

    Attributes:
        script, imported: file names in examples/, or whole paths: of the script, and of what else it runs.
        method: a name of `horovod_quant.frontends.methods`.
        options: further ones of the script.
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
    """Trains once with each seed; returns the script's figures of them."""
    missing = [seed for seed in seeds if kept(job.kept_as(seed)) is None]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            command = [sys.executable, str(job.programs[0]), *method_options(job.method), *job.options]
            command += ["--quiet", "--seed", *map(str, missing), "--json", str(file)]
            try:
                horovodrun(command, job.workers, TIME_LIMIT * len(missing))
            finally:  # those that have ended before a failure, or before somebody has stopped this
                for run in json.loads(file.read_text())["runs"] if file.exists() else ():
                    keep(job.kept_as(run["seed"]), run)
    return [kept(job.kept_as(seed)) for seed in seeds]


def kept_trainings(job: Job, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What is kept of `trainings`, up to the first seed that is missing."""
    return list(itertools.takewhile(bool, (kept(job.kept_as(seed)) for seed in seeds)))


def once(name: str, compute: Callable[[], Any]) -> Any:
    """What is kept under that name; where nothing is, it is computed, and kept."""
    if kept(name) is None:
        keep(name, compute())
    return kept(name)


def method_options(name: str) -> list[str]:
    """The options by which the examples know a method."""
    method = methods.parse(name, version=1, workers=4)
    if method.class_name is None:
        return ["--compression", name]
    compressors = import_example("training").COMPRESSORS
    (compression,) = (name for name, class_name in compressors.items() if class_name == method.class_name)
    options = {name.replace("_", "-"): value for name, value in method.arguments.items()}
    flags = (f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items())
    return ["--compression", compression, *flags]


def present_name(name: str, workers: int) -> str:
    """How the commands of today call a method that the results have by its name of version 0.1.0."""
    return methods.parse(name, version=1, workers=workers).name


def import_example(module: str) -> Any:
    """A module of examples/, which is no package."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(module)


def horovodrun(command: Sequence[str], workers: int, limit: float) -> None:
    """Runs a program on this machine, over Gloo, for so many seconds at most.

    Raises:
        RunFailed: it ended with an error.
    """
    program = str(Path(sys.executable).with_name("horovodrun"))
    launch([program, "--gloo", "-np", str(workers), *command], None, limit)


# ---- the lab -----------------------------------------------------------------------------------------------------


def why_no_lab() -> str | None:
    """Why there can be no lab here, or None."""
    check = subprocess.run(
        [ROOT / "scripts" / "lab", "check"], env={**os.environ, **LAB}, capture_output=True, text=True
    )
    return (check.stdout + check.stderr).strip() if check.returncode else None


class Lab:
    """A running lab."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def rate(self, rate: str) -> None:
        launch([str(ROOT / "scripts" / "lab"), "rate", rate], LAB)

    def horovodrun(self, command: Sequence[str], per_host: int, variables: dict[str, str]) -> None:
        """Runs a program on every host, over Gloo.

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
    """A lab, for as long as the context lasts."""
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
    """Runs a command; ends all that it has started when time is up, or when this is interrupted.

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
    """The workers' last lines, and few of horovodrun's, whose traceback says only that a worker failed."""
    workers = [line for line in lines if re.match(r"\[[\d,]+\]<std(out|err)>", line)]
    launcher = [line for line in lines if line not in workers]
    return workers[-20:] + launcher[-3 if workers else -20 :]
