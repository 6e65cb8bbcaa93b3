"""Long trainings leave nothing behind: memory, threads and files are the same at the end.

With ``--thorough`` 2,000 steps on 4 workers under MPI, a launch for each method; else 80 steps on 2 under Gloo, all
methods in one launch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import horovodrun
from soak_worker import LEAKING, SAMPLES

from horovod_quant.frontends.methods import FP16, NONE, families

pytestmark = [pytest.mark.parallel, pytest.mark.extended]

METHODS = [family.replace("BITS", "4") for family in families()] + ["qsgd-4 elias", "nuqsgd-4 elias-omega"]
IN_TENSORFLOW = [
    "qsgd-4",
    "qsgd-4 elias",
    "qsgd-4",
    "nuqsgd-4",
    "nuqsgd-4",
    "global-qsgd-4",
    "global-qsgd-4-exponential",
    "eden-3",
    "binsgdm",
]

LIMIT = 1800
"""Seconds of a launch."""

GROWTH = 0.02
"""Of the resident set, since the end of the warm-up."""

BLOCKS, OBJECTS = 500, 50
"""Of Python's memory, and that the garbage collector knows: so many more or less are there at any time."""

CYCLIC = 3 * SAMPLES
"""Objects in reference cycles after the last steps. A few are of ctypes; the gradients must not be among them."""


class Soak(NamedTuple):
    """A launch."""

    framework: str
    controller: str
    methods: Sequence[str]
    workers: int
    steps: int
    warm_up: int


def pytest_generate_tests(metafunc: Any) -> None:
    soaks = {"short": Soak("torch", "gloo", [*METHODS, LEAKING], 2, steps=80, warm_up=30)}
    if metafunc.config.getoption("tier") == "thorough":
        methods = {"torch": METHODS, "tensorflow": IN_TENSORFLOW}
        soaks |= {
            f"{framework} {method}": Soak(framework, "mpi", [method], 4, steps=2000, warm_up=200)
            for framework, own in methods.items()
            for method in own
        }
    metafunc.parametrize("soak", soaks.values(), ids=soaks)


@pytest.mark.timeout(LIMIT + 60)
def test_a_long_training_leaves_nothing_behind(soak: Soak, tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    program = [sys.executable, Path(__file__).with_name("soak_worker.py"), soak.framework, file]
    arguments = [soak.steps, soak.warm_up, *soak.methods]
    done = horovodrun(soak.controller, soak.workers, [*program, *arguments], timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:]
    figures = {found["method"]: found["workers"] for found in map(json.loads, file.read_text().splitlines())}
    assert list(figures) == list(soak.methods)
    for method, workers in figures.items():
        print(f"{soak.framework} {method}: {summary(workers)}")
    for method, workers in figures.items():
        assert len(workers) == soak.workers
        assert len({own["parameters"] for own in workers}) == 1, f"{method}: the workers differ"
        for rank, own in enumerate(workers):
            assert own["trained"], f"{method}, rank {rank}"
            if method.split()[0] not in (NONE, FP16):
                sent, as_float32, _ = own["sent"]
                assert sent < 0.7 * as_float32, f"{method}, rank {rank}: {sent} of {as_float32} bytes"
            cyclic = own["after"]["cyclic"]
            assert cyclic < CYCLIC, f"{method}, rank {rank}: {cyclic} objects wait for the garbage collector"
            grown = growth(own["before"], own["after"])
            if method == LEAKING:
                assert grown.keys() == {"resident", "files", "blocks", "objects"}, f"not what leaks: {own}"
            else:
                assert not grown, f"{method}, rank {rank}: {grown}"


def summary(workers: Sequence[dict[str, Any]]) -> str:
    """Megabytes after the warm-up and at the end, of each worker, and what else the first one held."""
    megabytes = [[own[when]["resident"] / 1e6 for when in ("before", "after")] for own in workers]
    resident = ", ".join(f"{before:.1f} -> {after:.1f}" for before, after in megabytes)
    first = workers[0]
    others = {what: (first["before"][what], first["after"][what]) for what in first["before"]}
    return f"{resident} MB; {1e3 * first['seconds']:.1f} ms a step; {others}"


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What has grown: before and after."""
    allowed = {
        "resident": GROWTH * before["resident"],
        "cyclic": CYCLIC,
        "blocks": BLOCKS,
        "objects": OBJECTS,
    }
    return {
        what: (before[what], after[what])
        for what in before
        if after[what] - before[what] > allowed.get(what, 0)
    }
