"""Two workers under elastic horovodrun become three: right answers before and after with every method, no new trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import elastic

pytestmark = pytest.mark.parallel

LIMIT = 400


@pytest.mark.timeout(LIMIT + 60)
def test_a_third_worker_joins(tmp_path: Path) -> None:
    entries, printed = elastic("tf_elastic_worker.py", tmp_path, LIMIT)
    finished = [own[:-1] for own in entries if own and own[-1].get("finished")]
    assert len(finished) == 3, printed[-4000:]
    survivors = [own for own in finished if own[0]["size"] == 2]
    assert len(survivors) == 2
    for own in survivors:
        sizes = [entry["size"] for entry in own]
        assert sizes == sorted(sizes)
        assert set(sizes) == {2, 3}
        assert all(entry["traces"] == [1, 1, 1, 1] for entry in own), "a step was traced again"
