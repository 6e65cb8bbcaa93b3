"""Which kernels gradients get, by what was asked for and where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import horovod_quant.torch as hvq
from horovod_quant import kernels
from horovod_quant.kernels import native, reference
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.kernels.segments import Batch
from horovod_quant.schemes import QSGD, Hierarchical
from horovod_quant.schemes.base import BinaryState
from horovod_quant.torch import memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_QUANT_KERNELS", raising=False)
    monkeypatch.delenv(memory.STAGING, raising=False)


def test_gradients_on_the_cpu_stay_with_the_hosts_kernels() -> None:
    assert memory.choose("auto", CPU).kernels is native
    assert memory.choose("numpy", CPU).kernels is reference


def test_kernels_asked_for_by_name_are_taken_for_gradients_on_a_gpu_too() -> None:
    assert memory.choose("numpy", torch.device("cuda", 0)).kernels is reference


def test_gradients_on_a_gpu_that_are_elias_coded_go_to_the_host() -> None:
    schemes = hvq.QSGD(coding="elias").policy.schemes
    assert memory.choose("auto", torch.device("cuda", 0), schemes).device == CPU


def test_gradients_on_a_gpu_go_to_the_host_for_schemes_that_ask_for_it() -> None:
    class Asking(QSGD):
        host_only = True

    for scheme in (Asking(), Hierarchical(Asking())):
        assert memory.choose("auto", torch.device("cuda", 0), [QSGD(), scheme]).device == CPU
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError,
        match="host_only=True: As.* then needs its arrays in host memory, where kernels='triton' cannot run",
    ):
        hvq.Compressor(Asking(), kernels="triton")


def test_without_triton_gradients_on_a_gpu_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod_quant.kernels.triton", None)
    monkeypatch.delattr(kernels, "triton", raising=False)
    memory._has_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="gradients on a GPU are quantized on the host"):
        assert memory.choose("auto", torch.device("cuda", 0)).device == CPU
    memory._has_triton.cache_clear()
    with pytest.raises(ImportError):
        hvq.QSGD(kernels="triton")


def test_triton_has_no_elias_coding() -> None:
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError,
        match="coding='elias': QSGD then needs its arrays in host memory, where kernels='triton' cannot run",
    ):
        hvq.QSGD(kernels="triton", coding="elias")


def test_no_such_kernels() -> None:
    usable = "'auto', 'native', 'numpy', or 'triton' for gradients on a GPU"
    with pytest.raises(ValueError, match=f"kernels='cuda': no such backend; use {usable}"):
        hvq.QSGD(kernels="cuda")


PROGRAM = """
import os
import torch
from horovod_quant.torch import binsgdm, memory
kernels = "auto" if "HOROVOD_QUANT_KERNELS" in os.environ else "triton"
found = memory.choose(kernels, torch.device(os.environ.get("DEVICE", "cpu")))
print(type(found).__name__, found.takes_tensors)
"""


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({"TRITON_INTERPRET": "1"}, "DeviceMemory True"),
        ({"TRITON_INTERPRET": "1", memory.STAGING: "1"}, "DeviceMemory False"),
        ({}, "ValueError: kernels='triton': the gradients are in host memory"),
        (
            {"TRITON_INTERPRET": "1", "DEVICE": "cuda:0"},
            "ValueError: TRITON_INTERPRET=1: Triton's interpreter cannot read gradients on a GPU",
        ),
        (
            {"HOROVOD_QUANT_KERNELS": "triton"},
            "ValueError: HOROVOD_QUANT_KERNELS=triton: the gradients are in host memory",
        ),
    ],
)
def test_tritons_kernels_by_name(variables: dict[str, str], printed: str) -> None:
    """On the CPU they need its interpreter, for which Triton looks when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert printed in done.stdout + done.stderr


FLOATS = {
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_for_many_gradients_get_the_place_of_each(dtype: torch.dtype) -> None:
    host = memory.choose("native", CPU)
    gradient = torch.arange(6, dtype=dtype).reshape(2, 3)
    taken = host.taken(gradient, None)
    assert type(taken) is BufferView
    assert (taken.address, taken.dtype, taken.shape) == (gradient.data_ptr(), FLOATS[dtype], (6,))
    array = taken.array()
    assert (address(array), array.dtype, array.shape) == (taken.address, taken.dtype, taken.shape)
    assert taken.array() is array, "made once"
    later = gradient + 1
    assert host.taken(later, taken) is taken
    assert address(taken.array()) == taken.address == later.data_ptr()


def test_what_its_memory_does_not_show_as_it_is_becomes_an_array_at_once() -> None:
    host = memory.choose("native", CPU)
    values = torch.arange(8.0)
    before = host.taken(values, None)
    turned, sparse, none = values.reshape(2, 4).T, values[::2], values[:0]
    crooked = torch.frombuffer(bytearray(b"0" + values.numpy().tobytes()), dtype=torch.float32, offset=1)
    for gradient in (turned, sparse, none, crooked):
        taken = host.taken(gradient, before)
        assert type(taken) is np.ndarray
        assert (taken == gradient.numpy().reshape(-1)).all()
    with pytest.raises(
        RuntimeError, match="negative bit"
    ):  # PyTorch itself refuses: its memory holds the negatives
        host.taken(torch._neg_view(values), before)
    assert type(memory.choose("numpy", CPU).taken(values, None)) is np.ndarray


def test_a_part_of_a_place_is_a_place() -> None:
    values = torch.arange(8.0)
    taken = memory.choose("native", CPU).taken(values, None)
    assert taken[0:8] is taken
    part = taken[2:5]
    assert (part.address, part.array().tolist()) == (values.data_ptr() + 8, [2.0, 3.0, 4.0])
    assert (address(part.array()), part.shape, part.nbytes) == (part.address, (3,), 12)
    assert as_array(part) is part.array()
    assert as_array(taken) is taken.array()
    with pytest.raises(ValueError, match="a BufferView has consecutive elements"):
        taken[::2]


def test_a_state_is_seen_where_it_is() -> None:
    call = SimpleNamespace(parameter=None, optimizer=SimpleNamespace())
    open_state = hvq.BinSGDM()._opener(call, memory.choose("native", CPU))
    momentum, scale = torch.zeros(4), torch.ones(4)

    def seen(
        momentum: torch.Tensor = momentum, scale: torch.Tensor = scale, beta: float = 0.5
    ) -> BinaryState:
        call.optimizer.stored_state = lambda *_: BinaryState(momentum, scale, beta)
        return open_state(0, 4, None)[0]

    def numbers(state: BinaryState) -> tuple[list[float], list[float], float]:
        return as_array(state.momentum).tolist(), as_array(state.scale).tolist(), state.beta

    first = seen()
    as_array(first.momentum)[1] = 5.0
    as_array(first.scale)[2] = 6.0
    assert seen() is first
    assert (momentum.tolist(), scale.tolist()) == ([0, 5, 0, 0], [1, 1, 6, 1])
    assert seen(beta=0.25).beta == 0.25
    for tensor in (momentum, scale):
        seen()
        tensor.data = torch.full((4,), 2.0)  # elsewhere, in the same tensor
        assert numbers(seen()) == (momentum.tolist(), scale.tolist(), 0.5)
    assert numbers(seen(momentum=torch.full((4,), 3.0))) == ([3.0] * 4, [2.0] * 4, 0.5)
    assert numbers(seen(scale=torch.full((4,), 4.0))) == ([2.0] * 4, [4.0] * 4, 0.5)


def test_a_place_keeps_the_memory_that_a_tensor_loses() -> None:
    host = memory.choose("native", CPU)
    gradient = torch.full(
        (1 << 22,), 3.0
    )  # 16 MiB, which are given back to the system as soon as nobody has them
    taken = host.taken(gradient, None)
    gradient.data = torch.zeros(1 << 22)
    batch = Batch((1 << 22,), [0], [], values=[taken])
    assert native.segments.norms("max", 1 << 22, batch).tolist() == [3.0]
    del batch
    taken.release()
