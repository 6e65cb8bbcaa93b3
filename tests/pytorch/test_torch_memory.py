"""Which kernels gradients get, by what was asked for and where they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import horovod_quant.torch as hvq
from horovod_quant import kernels
from horovod_quant.kernels import native, reference
from horovod_quant.schemes import QSGD, Hierarchical
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
import torch
from horovod_quant.torch import memory
found = memory.choose("triton", torch.device("cpu"))
print(type(found).__name__, found.takes_tensors)
"""


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({"TRITON_INTERPRET": "1"}, "DeviceMemory True"),
        ({"TRITON_INTERPRET": "1", memory.STAGING: "1"}, "DeviceMemory False"),
        ({}, "ValueError: kernels='triton': the gradients are in host memory"),
    ],
)
def test_tritons_kernels_by_name(variables: dict[str, str], printed: str) -> None:
    """On the CPU they need its interpreter, for which Triton looks when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert printed in done.stdout + done.stderr
