"""What Triton launches need besides kernels: compiled kernels launched directly, and tables in memory used again."""

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
    from horovod_quant.kernels.triton import direct, segment_kernels, segments, staging

ALIGNED, CONSTANTS = (64, 128), {"WIDTH": 4, "KIND": "float32"}
GPU = torch.device("cuda", 0)


class Function:
    """A Triton kernel: notes launches that go its way, and compiles one for each set of constants."""

    arg_names = ("table", "owners", "KIND", "WIDTH")

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(first: Any, second: Any, **constants: Any) -> Any:
            self.found.append((grid, first, second, constants))
            run = lambda *arguments: self.found.append(arguments)  # noqa: E731
            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return launch


def launch(
    launcher: direct.Launcher, addresses: tuple[int, int] = ALIGNED, device: int = 0, **constants: Any
) -> None:
    launcher.launch(3, addresses, lambda: ("table", "owners"), {**CONSTANTS, **constants}, device, 77)


def test_the_second_launch_calls_the_compiled_kernel() -> None:
    function = Function()
    launcher = direct.Launcher(function, {"option": 1})
    for _ in range(3):
        launch(launcher)
    tritons = ((3,), "table", "owners", {**CONSTANTS, "option": 1})
    directly = (3, 1, 1, 77, "f", "m", None, None, None, *ALIGNED, "float32", 4)
    assert function.found == [tritons, directly, directly]


def test_other_devices_and_constants_are_compiled_on_their_own() -> None:
    function = Function()
    launcher = direct.Launcher(function, {})
    for device, width in ((0, 4), (1, 4), (1, 8), (0, 4)):
        launch(launcher, device=device, WIDTH=width)
    assert [len(found) for found in function.found] == [4, 4, 4, 13]


def test_what_is_not_as_expected_goes_tritons_way(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Function()
    launcher = direct.Launcher(function, {})
    launch(launcher, addresses=(8, 128))
    launch(launcher)
    launch(launcher, addresses=(64, 136))
    hooks = SimpleNamespace(calls=[print])
    monkeypatch.setattr(direct, "knobs", SimpleNamespace(runtime=SimpleNamespace(
        launch_enter_hook=hooks, launch_exit_hook=SimpleNamespace(calls=[])
    )))  # fmt: skip
    launch(launcher)
    assert [len(found) for found in function.found] == [4] * 4


def test_kernels_of_another_form_go_tritons_way() -> None:
    function = Function()
    function.arg_names = (*Function.arg_names, "more")
    launcher = direct.Launcher(function, {})
    for _ in range(2):
        launch(launcher)
    assert [len(found) for found in function.found] == [4, 4]


def test_a_launcher_that_takes_other_arguments_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    function, calls = Function(), []

    def refuse(*arguments: Any) -> None:
        calls.append(arguments)
        raise TypeError("other arguments")

    launcher = direct.Launcher(function, {})
    kernel = SimpleNamespace(run=refuse, function="f", packed_metadata="m")
    monkeypatch.setattr(launcher, "_prepared", lambda compiled, constants: (kernel, ()))
    for _ in range(3):
        launch(launcher)
    assert len(calls) == 1
    assert [len(found) for found in function.found] == [4, 4, 4]


class Slot:
    """Memory of a GPU whose work ends when the test says so."""

    made: list[Slot] = []

    def __init__(self, numbers: int, device: Any) -> None:
        self.array = np.zeros(numbers, np.int64)
        self.memory = torch.from_numpy(self.array)
        self.address = 4096 * (1 + len(self.made))
        self.is_taken, self.has_ended, self.uploads = False, True, 0
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
        self.uploads += 1

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
    assert [slot.uploads for slot in slots] == [1]
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
    assert [slot.uploads for slot in slots] == [2, 1, 1]


def test_streams_and_sizes_have_memory_of_their_own(slots: list[Slot]) -> None:
    for tables, stream in ((TABLES, 0), (TABLES, 1), ([np.zeros(1000, np.int64)], 0)):
        staging.upload(tables, GPU, stream).release()
        slots[-1].has_ended = True
    assert [len(slot.array) for slot in slots] == [512, 512, 1024]


def test_the_host_waits_if_the_gpu_is_far_behind(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MOST_SLOTS", 2)
    for _ in range(5):
        staging.upload(TABLES, GPU, 0).release()
    assert [slot.uploads for slot in slots] == [3, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="streams are numbers here")
def test_each_stream_uploads_what_its_kernels_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    uploads: list[Any] = []
    upload = staging.on_device
    monkeypatch.setattr(
        segment_kernels, "on_device", lambda array, device: uploads.append(array) or upload(array, device)
    )
    segment_kernels._flag_offsets.cache_clear()
    payload, counts = torch.zeros(33, dtype=torch.int32), []
    for stream in (1, 1, 2, 1):
        monkeypatch.setattr(segment_kernels, "stream_of", lambda device: stream)  # noqa: B023
        segments.decode_signs(payload, None, [0, 33], 1.0, [torch.empty(1024)])  # type: ignore[arg-type]
        counts.append(len(uploads))
    assert counts == [2, 2, 4, 4]
    segment_kernels._flag_offsets.cache_clear()
