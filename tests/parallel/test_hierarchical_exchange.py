"""Hierarchical exchanges in real processes, with nodes that are hosts for Horovod, and with nodes by number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import extended
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, horovodrun
from plan import hierarchical, parametrize

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: Any) -> None:
    if "scenario" in metafunc.fixturenames:
        parametrize(metafunc, hierarchical(metafunc.config.getoption("tier")))


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)


IMPOSSIBLE = [
    (
        ["-np", 3, "-H", "localhost:2,127.0.0.1:1"],
        "True",
        "construction: ValueError: hierarchical=True: some hosts have more workers",
    ),
    extended(["-np", 3], "2", "construction: ValueError: hierarchical: 3 workers cannot form nodes of 2"),
    (
        ["-np", 4],
        "2",
        "construction: RuntimeError: hierarchical: Horovod has no process set for ranks [0, 1], and cannot add one "
        '(HOROVOD_DYNAMIC_PROCESS_SETS is not set); start with hvd.init(process_sets="dynamic"), or '
        "hvd.init(process_sets=hvq.hierarchical_process_sets(2))",
    ),
    extended(
        ["-np", 4, "-H", "localhost:2,127.0.0.1:2"],
        "True",
        "construction: RuntimeError: hierarchical: Horovod has no process set for ranks [0, 1]",
    ),
]


@pytest.mark.parametrize("framework", ["torch", extended("tensorflow")])
@pytest.mark.parametrize(("options", "by", "message"), IMPOSSIBLE)
def test_every_worker_says_what_is_wrong(
    framework: str, options: list[Any], by: str, message: str, tmp_path: Path
) -> None:
    _, workers, *hosts = options
    command = [*hosts, sys.executable, HERE / "nodes_worker.py", tmp_path, framework, by]
    done = horovodrun("gloo", workers, command, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    for rank in range(workers):
        assert (tmp_path / str(rank)).read_text().startswith(message)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("framework", ["torch", extended("tensorflow")])
def test_horovod_is_initialized_again(framework: str, tmp_path: Path) -> None:
    """Process sets are looked for again: those of before may be gone, or others have their numbers."""
    command = [sys.executable, HERE / "reinit_worker.py", tmp_path, framework]
    done = horovodrun("gloo", 4, command, timeout=300)  # under MPI Horovod itself cannot
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("FINISHED") == 4
