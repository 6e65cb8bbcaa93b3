"""The scenarios of tests/parallel/test_gpu_exchange.py, in its form for one GPU."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def plan(features: Collection[str] | None) -> dict[str, list[str]]:
    """Return the names of the scenarios of each launch.

    For one worker (``direct``) and for two that share a GPU (``staged``).

    Args:
        features: those alone; None for all.
    """
    # The tests' modules import each other, and the package, by these folders.
    folders = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]
    sys.path[:0] = folders
    try:
        from plan import on_a_gpu
        from scenario_table import split
    finally:
        del sys.path[: len(folders)]
    return {
        run.label: [name for name in names if features is None or split(name)[0] in features]
        for run, names in on_a_gpu("default", 1, {}).items()
    }
