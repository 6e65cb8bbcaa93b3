"""What a job under elastic horovodrun goes through in any framework: workers come, are killed, and are let go."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.schemes import GlobalQSGD


class Phase(NamedTuple):
    """So many steps with so many workers; then another list of hosts, or the end of a host's worker, by SIGKILL.

    ``method`` is the one that has exchanges under way then.
    """

    size: int
    steps: int
    hosts: str = ""
    kill: str = ""
    method: str = ""


# A host whose worker has failed is never used again. All these names are this machine's.
ALL_PHASES = [
    Phase(2, 3, hosts="localhost:2\n127.0.0.1:1\n"),
    Phase(3, 3, kill="127.0.0.1", method="global-qsgd"),
    Phase(2, 2, hosts="localhost:2\n127.1:1\n"),
    Phase(3, 3, kill="127.1", method="binsgdm"),
    Phase(2, 2, hosts="localhost:2\n127.0.1:1\n"),
    Phase(3, 3, hosts="localhost:2\n"),
    Phase(2, 3),
]
FEW_PHASES = [*ALL_PHASES[2:4], Phase(2, 2)]
PHASES = ALL_PHASES if os.environ.get("ELASTIC_PHASES") == "all" else FEW_PHASES


class Log:
    """What a worker writes down for the test: a file of its own, an entry a line."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"{os.getpid()}.jsonl", "w")

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def die(self, method: str) -> None:
        """Ends this worker, as the system does when it needs memory."""
        self.write(killed=method)
        os.kill(os.getpid(), signal.SIGKILL)


def fatal_method(phase: int) -> str:
    """The method during whose next backward pass this worker is to die; "" if it is to live."""
    before = PHASES[phase - 1] if phase else None
    return before.method if before is not None and before.kill == os.environ["HOROVOD_HOSTNAME"] else ""


def count_step(state: Any, size: int, rank: int, hosts: Path) -> None:
    """Counts a step in the elastic state; after a phase's last one, the next list of hosts comes into force."""
    state.step += 1
    phase = PHASES[state.phase]
    state.steps_in_phase += size == phase.size
    if state.steps_in_phase == phase.steps:
        state.phase += 1
        state.steps_in_phase = 0
        if phase.hosts and rank == 0:
            hosts.write_text(phase.hosts)


class Kept:
    """Follows a state that must survive every change of the workers.

    Horovod gives every worker that of rank 0, or, when workers have merely been let go, leaves each its own.
    """

    def __init__(self) -> None:
        self._digest = ""

    def note(self, arrays: Iterable[np.ndarray]) -> None:
        """To be called before each commit."""
        self._digest = _digest(arrays)

    def now(self, arrays: Iterable[np.ndarray]) -> tuple[str, str]:
        """For `assert_survived`: the state after a change, and that of this worker's last commit."""
        return _digest(arrays), self._digest

    @staticmethod
    def assert_survived(everyone: Sequence[tuple[str, str]]) -> None:
        """Takes all workers' `now`, in rank order."""
        first = everyone[0][1]
        for rank, (digest, own) in enumerate(everyone):
            assert digest in (own, first), f"rank {rank} has lost its state, or has one that nobody committed"


def _digest(arrays: Iterable[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def assert_levels(scheme: Any, gradients: Sequence[np.ndarray], reduced: np.ndarray, what: str) -> None:
    """GlobalQSGD has rounded to the levels that belong to this number of workers, and no others."""
    assert isinstance(scheme, GlobalQSGD)
    assert (scheme.norm, scheme.levels) == ("max", "uniform")
    for start in range(0, reduced.size, scheme.bucket_size):
        bucket = slice(start, start + scheme.bucket_size)
        scale = max(np.abs(gradient[bucket]).max() for gradient in gradients)
        multiples = reduced[bucket] * (len(gradients) * scheme.levels_for(len(gradients)) / scale)
        off = np.abs(multiples - np.rint(multiples)).max()
        assert off < 1e-3, f"{what}: {off} of a level off, with {len(gradients)} workers"


def assert_nothing_lost(entries: Sequence[list[dict[str, Any]]], printed: str) -> list[list[dict[str, Any]]]:
    """The job went through all phases, from its first workers' point of view without losing or repeating a step.

    Args:
        entries: what `launching.elastic` returns.
        printed: by the launch.

    Returns:
        The entries of those who were there from the beginning to the end.
    """
    finished = [own[:-1] for own in entries if own and own[-1].get("finished")]
    assert len(finished) == PHASES[-1].size, printed[-6000:]
    killed = [own[-1]["killed"] for own in entries if own and "killed" in own[-1]]
    assert sorted(killed) == sorted(phase.method for phase in PHASES if phase.kill), printed[-6000:]
    for own in finished:
        sizes = [entry["size"] for entry in own]
        changes = [size for size, before in zip(sizes, [0, *sizes]) if size != before]
        assert changes == [phase.size for phase in PHASES], sizes
        assert [entry["step"] for entry in own] == list(range(1, len(own) + 1)), "a step was lost or repeated"
    steps = [{entry["step"]: entry["exchanges"] for entry in own if "step" in entry} for own in entries]
    late = [own for own in steps if 1 not in own]
    first = {entry["step"]: entry["exchanges"] for entry in finished[0]}
    assert any(late), "no worker has come later"
    assert all(own[step] < first[step] for own in late for step in own), "a new worker has old counts"
    return finished


def exchanges_of(compressors: Iterable[Any]) -> int:
    """How many exchanges the compressors have counted together."""
    return sum(sum(each.state_dict()["exchanges"].values()) for each in compressors)
