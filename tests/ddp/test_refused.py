"""What DDP and FSDP2 refuse before they communicate."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import horovod_quant.torch as hvq


@pytest.mark.parametrize(
    ("setter", "inside", "message"),
    [
        (
            "set_all_reduce_hook",
            False,
            "fsdp: it needs PyTorch 2.7 or later, with FSDPModule.set_all_reduce_hook",
        ),
        ("set_custom_reduce_scatter", True, "fsdp: inside=True needs PyTorch 2.9 or later"),
    ],
)
def test_a_pytorch_without_the_hook(
    setter: str, inside: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, setter)
    with pytest.raises(ImportError) as raised:
        hvq.fsdp.register(torch.nn.Linear(2, 2), hvq.QSGD(), inside=inside)
    assert message in str(raised.value)
    with pytest.raises(ValueError, match="it has no FSDP module with gradients"):
        hvq.fsdp.register(torch.nn.Linear(2, 2), hvq.QSGD(), inside=not inside)


def test_a_sample_of_the_nmse() -> None:
    with pytest.raises(ValueError, match="fsdp: nmse_every=5 measures gradients of Horovod's optimizer"):
        hvq.fsdp.register(torch.nn.Linear(2, 2), hvq.QSGD(nmse_every=5))
