"""A launch that stands still is no wait until the end of all days."""

from __future__ import annotations

import time

import pytest
from launching import horovodrun

pytestmark = pytest.mark.parallel


def test_a_launch_without_progress_is_killed_with_all_its_workers() -> None:
    begin = time.monotonic()
    done = horovodrun("gloo", 2, ["sleep", "500"], progress=lambda: "the same", standstill=1.0)
    assert done.returncode == -9
    assert "of them without progress]" in done.stdout
    assert time.monotonic() - begin < 300


@pytest.mark.extended
def test_progress_puts_the_end_off() -> None:
    looks: list[int] = []
    done = horovodrun(
        "gloo", 2, ["sleep", "12"], progress=lambda: looks.append(1) or len(looks), standstill=1.0
    )
    assert done.returncode == 0
    assert len(looks) > 1
