"""Training moves from Horovod to DDP, and back, without a bit that changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from parallel.launching import horovodrun
from torchrun import HERE, torchrun

pytestmark = pytest.mark.parallel

WORKER = HERE / "from_horovod_worker.py"


def losses(door: str, checkpoint: Path, first: int, steps: int, method: str = "eden") -> dict[str, str]:
    """Of two workers, whose uncompressed sums do not depend on the order of their terms."""
    command = [WORKER, door, checkpoint, first, steps, method]
    done = torchrun(2, command) if door == "ddp" else horovodrun("gloo", 2, [sys.executable, *command])
    assert done.returncode == 0, done.stdout[-3000:]
    found = dict(re.findall(r"rank (\d step \d+) loss ([-+\w.]+)\.", done.stdout))
    assert len(found) == 2 * steps, done.stdout[-3000:]
    return found


def test_a_checkpoint_is_carried_over(tmp_path: Path) -> None:
    whole = losses("horovod", tmp_path / "whole", 0, 8)
    moved = losses("horovod", tmp_path / "moved", 0, 4) | losses("ddp", tmp_path / "moved", 4, 4)
    assert moved == whole


def test_binsgdm_trains_as_under_horovod(tmp_path: Path) -> None:
    """Its momentum differs between workers, so a checkpoint of one cannot go on to the bit."""
    assert losses("horovod", tmp_path / "horovod", 0, 6, "binsgdm") == losses(
        "ddp", tmp_path / "ddp", 0, 6, "binsgdm"
    )


@pytest.mark.extended
def test_ddp_trains_as_horovod_does_and_its_checkpoint_goes_back(tmp_path: Path) -> None:
    whole = losses("horovod", tmp_path / "whole", 0, 8)
    assert losses("ddp", tmp_path / "ddp", 0, 8) == whole
    assert losses("ddp", tmp_path / "back", 0, 4) | losses("horovod", tmp_path / "back", 4, 4) == whole
