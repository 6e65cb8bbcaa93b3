"""The scenarios of tests that run on one GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def plan(features: Collection[str] | None) -> dict[str, list[str]]:
    """Return the names of test_gpu_exchange.py's scenarios in each launch.

    For one worker (``direct``) and for two that share a GPU (``staged``).

    Args:
        features: those alone; None for all.
    """
    with _importable(TESTS, TESTS / "parallel"):
        from plan import on_a_gpu
        from scenario_table import split
    return {
        run.label: [name for name in names if features is None or split(name)[0] in features]
        for run, names in on_a_gpu("default", 1, {}).items()
    }


def ddp() -> list[str]:
    """Return the names of DDP's scenarios that run on a GPU."""
    with _importable(TESTS, TESTS / "ddp"):
        from torchrun import ON_A_GPU
    return ON_A_GPU


@contextlib.contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    """The tests' modules import each other, and the package, by these folders."""
    paths = list(map(str, (ROOT, *folders)))
    sys.path[:0] = paths
    try:
        yield
    finally:
        del sys.path[: len(paths)]
