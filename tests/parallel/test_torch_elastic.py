"""Elastic training: workers are added, killed in the middle of a backward pass, and removed, several times in one run.

Every step checks, on every worker and with every method, that the gradients are the average of what all workers have at
that time, that parameters are equal, and that BinSGDM's state has survived.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import elastic

pytestmark = pytest.mark.parallel

LIMIT = 500


@pytest.mark.timeout(LIMIT + 60)
def test_workers_come_are_killed_and_go(tmp_path: Path) -> None:
    entries, printed = elastic("torch_elastic_worker.py", tmp_path, LIMIT)
    finished = [own[:-1] for own in entries if own and own[-1].get("finished")]
    assert len(finished) == 2, printed[-6000:]
    killed = [own for own in entries if own and not own[-1].get("finished")]
    assert len(killed) >= 2, "nobody was killed"
    for own in finished:
        sizes = [entry["size"] for entry in own]
        changes = [size for size, before in zip(sizes, [0, *sizes]) if size != before]
        assert changes == [2, 3, 2, 3, 2, 3, 2], sizes
        assert [entry["step"] for entry in own] == list(range(1, len(own) + 1)), "a step was lost or repeated"
