"""Elastic training: workers are added, killed in the middle of a backward pass, and removed, in one run of a framework.

Every step checks, on every worker and with every method, that the gradients are the average of what all workers have at
that time, rounded to that many workers' levels, that parameters are equal, and that BinSGDM's state has survived.

The frameworks' runs are side by side: after a kill the survivors do nothing but wait, as long as Gloo's time limit is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from elastic_job import assert_nothing_lost
from launching import elastic

pytestmark = pytest.mark.parallel

LIMIT = 700
WORKERS = {"torch": "torch_elastic_worker.py", "tensorflow": "tf_elastic_worker.py"}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Any]]]:
    """Of the frameworks that pytest was asked for."""
    function = test_workers_come_are_killed_and_go
    items = [item for item in request.session.items if getattr(item, "function", None) is function]
    with ThreadPoolExecutor(len(WORKERS)) as pool:
        yield {
            framework: pool.submit(elastic, WORKERS[framework], tmp_path_factory.mktemp(framework), LIMIT)
            for framework in (item.callspec.params["framework"] for item in items)
        }


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("framework", WORKERS)
def test_workers_come_are_killed_and_go(framework: str, runs: Mapping[str, Future[Any]]) -> None:
    for own in assert_nothing_lost(*runs[framework].result()):
        if framework == "tensorflow":
            traces = [count for entry in own for count in entry["traces"]]
            assert set(traces) == {1}, "a step was traced again"
