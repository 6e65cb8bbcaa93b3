"""What Triton launches need besides kernels: compiled kernels launched directly, and tables in memory used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

with pytest.MonkeyPatch.context() as at_import:
    if not torch.cuda.is_available():
        at_import.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from horovod_quant.kernels.triton import direct, staging

GPU = torch.device("cuda", 0)

# ---- compiled kernels


ALIGNED = (64, 128)
TRITONS, DIRECT = "Triton's", "direct"


class Function:
    """A Triton kernel; its compiled ones take what they were compiled for and nothing else."""

    arg_names: tuple[str, ...] = ("table", "owners", "KIND", "WIDTH")
    takes_others = False  # its compiled kernels take other arguments than expected

    def __init__(self) -> None:
        self.device, self.ways = 0, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(first: Any, second: Any, *, KIND: str, WIDTH: int, option: int) -> Any:
            assert (grid, first, second, option) == ((3,), "table", "owners", 1)
            self.ways.append(TRITONS)
            device = self.device

            def run(*arguments: Any) -> None:
                if self.takes_others:
                    raise TypeError("other arguments")
                assert arguments == (3, 1, 1, 77, "f", "m", None, None, None, *ALIGNED, KIND, WIDTH)
                assert device == self.device
                self.ways.append(DIRECT)

            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return launch


class Launch(NamedTuple):
    addresses: tuple[int, int] = ALIGNED
    device: int = 0
    width: int = 4


USUAL = Launch()


def ways_of(*launches: Launch, function: Function | None = None) -> list[str]:
    """How each launch goes."""
    function = function or Function()
    launcher = direct.Launcher(function, {"option": 1})
    for addresses, function.device, width in launches:
        constants = {"WIDTH": width, "KIND": "float32"}
        launcher.launch(3, addresses, lambda: ("table", "owners"), constants, function.device, 77)
    return function.ways


def test_a_kernel_that_was_compiled_for_the_launch_is_called_directly() -> None:
    assert ways_of(USUAL, USUAL, USUAL) == [TRITONS, DIRECT, DIRECT]
    assert ways_of(USUAL, Launch(device=1), Launch(width=8), USUAL) == [*[TRITONS] * 3, DIRECT]
    assert ways_of(Launch((8, 128)), USUAL, Launch((64, 136)), USUAL) == [*[TRITONS] * 3, DIRECT]


def test_what_is_not_as_expected_goes_tritons_way(monkeypatch: pytest.MonkeyPatch) -> None:
    other_form, other_launcher = Function(), Function()
    other_form.arg_names, other_launcher.takes_others = (*Function.arg_names, "more"), True
    for function in (other_form, other_launcher):
        assert ways_of(USUAL, USUAL, USUAL, function=function) == [TRITONS] * 3
    hooks = {
        "launch_enter_hook": SimpleNamespace(calls=[print]),
        "launch_exit_hook": SimpleNamespace(calls=[]),
    }
    monkeypatch.setattr(direct, "knobs", SimpleNamespace(runtime=SimpleNamespace(**hooks)))
    assert ways_of(USUAL, USUAL, USUAL) == [TRITONS] * 3


# ---- tables


class Slot:
    """Memory of a GPU whose work ends when the test says so."""

    made: list[Slot] = []

    def __init__(self, numbers: int, device: Any) -> None:
        self.array = np.zeros(numbers, np.int64)
        self.memory = torch.from_numpy(self.array)
        self.address = 4096 * (1 + len(self.made))
        self.is_taken, self.has_ended = False, True
        self.made.append(self)

    def is_free(self) -> bool:
        return not self.is_taken and self.has_ended

    def wait(self) -> bool:
        self.has_ended |= not self.is_taken
        return not self.is_taken

    def take(self) -> None:
        assert self.is_free(), "written while the GPU reads it"
        self.is_taken = True

    def upload(self) -> None:
        pass

    def release(self) -> None:
        self.is_taken, self.has_ended = False, False


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    monkeypatch.setattr(Slot, "made", [])
    monkeypatch.setattr(staging, "_Slot", Slot)
    monkeypatch.setattr(staging, "_kept", SimpleNamespace())
    return Slot.made


TABLES = [np.arange(3, dtype=np.int64), np.arange(10, 20, dtype=np.int64)]


def test_tables_are_one_upload(slots: list[Slot]) -> None:
    uploaded = staging.upload(TABLES, GPU, 0)
    assert len(slots) == 1
    for number, table in enumerate(TABLES):
        assert uploaded.tensor(number)[: len(table)].tolist() == table.tolist()
        assert uploaded.address(number) % 16 == 0
    assert uploaded.address(1) - uploaded.address(0) == 8 * 4


def test_memory_is_used_again_when_the_gpu_has_read_it(slots: list[Slot]) -> None:
    first = staging.upload(TABLES, GPU, 0)
    staging.upload(TABLES, GPU, 0).release()  # within the first batch
    first.release()
    staging.upload(TABLES, GPU, 0).release()
    assert len(slots) == 3
    slots[0].has_ended = True
    staging.upload(TABLES, GPU, 0).release()
    assert len(slots) == 3


def test_streams_and_sizes_have_memory_of_their_own(slots: list[Slot]) -> None:
    for tables, stream in ((TABLES, 0), (TABLES, 1), ([np.zeros(1000, np.int64)], 0)):
        staging.upload(tables, GPU, stream).release()
        slots[-1].has_ended = True
    assert [len(slot.array) for slot in slots] == [512, 512, 1024]


def test_the_host_waits_if_the_gpu_is_far_behind(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MOST_SLOTS", 2)
    for _ in range(5):
        staging.upload(TABLES, GPU, 0).release()
    assert len(slots) == 2
