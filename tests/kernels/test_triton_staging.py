"""Memory for tables that a GPU reads: never written before the GPU has read it. A stand-in says when that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

with pytest.MonkeyPatch.context() as at_import:
    if not torch.cuda.is_available():
        at_import.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from horovod_quant.kernels.triton import staging

GPU = torch.device("cuda", 0)
TABLE = [np.arange(3, dtype=np.int64)]


class Slot:
    """Memory of a GPU that reads it until it is waited for."""

    made: list[Slot] = []

    def __init__(self, numbers: int, device: Any) -> None:
        self.array = np.zeros(numbers, np.int64)
        self.memory = torch.from_numpy(self.array)
        self.address = 4096 * (1 + len(self.made))
        self.is_taken, self.is_read = False, True
        self.made.append(self)

    def is_free(self) -> bool:
        return not self.is_taken and self.is_read

    def wait(self) -> bool:
        self.is_read |= not self.is_taken
        return not self.is_taken

    def take(self) -> None:
        assert self.is_free(), "written while the GPU reads it"
        self.is_taken = True

    def upload(self) -> None:
        pass

    def release(self) -> None:
        self.is_taken, self.is_read = False, False


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("is_prompt", [False, True], ids=["late GPU", "prompt GPU"])
def test_no_table_is_written_while_the_gpu_reads_it(
    most: int, is_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With at least as much memory as batches are open at once, two here."""
    monkeypatch.setattr(Slot, "made", [])
    monkeypatch.setattr(staging, "_Slot", Slot)
    monkeypatch.setattr(staging, "_kept", SimpleNamespace())
    monkeypatch.setattr(staging, "_MOST_SLOTS", most)
    for step in range(6):
        outer = staging.upload(TABLE, GPU, step % 2)
        inner = staging.upload([TABLE[0] + step], GPU, step % 2)
        assert inner.tensor(0)[:3].tolist() == [step, step + 1, step + 2]
        assert outer.tensor(0)[:3].tolist() == [0, 1, 2]
        inner.release()
        outer.release()
        for slot in Slot.made if is_prompt else ():
            slot.is_read = True
