"""What scenarios of DDP and FSDP2 share: models, data, and what the simulator predicts of each gradient."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq

sys.path.append(str(Path(__file__).resolve().parents[1] / "parallel"))

from oracle import Oracle  # noqa: E402

DEVICE = torch.device(os.environ.get("TORCH_DEVICE", "cpu"))
"""Of the models that are made here."""

Loss = Callable[[torch.nn.Module, int, int], torch.Tensor]
"""Of a model, in a step, on a rank's own data."""

F = TypeVar("F", bound=Callable[[], None])


def scenario(function: F) -> F:
    """Marks what `torchrun.scenarios_of` finds."""
    return function


METHODS: dict[str, Callable[..., hvq.Compressor]] = {
    "qsgd": hvq.QSGD,
    "qsgd-3-96": lambda **common: hvq.QSGD(bits=3, bucket_size=96, rounding="independent", **common),
    "qsgd-l2-alltoall": lambda **common: hvq.QSGD(bits=4, norm="l2", exchange="alltoall", **common),
    "qsgd-elias": lambda **common: hvq.QSGD(coding="elias", **common),
    "nuqsgd": hvq.NUQSGD,
    "nuqsgd-omega": lambda **common: hvq.NUQSGD(bits=8, coding="elias-omega", **common),
    "global-qsgd": hvq.GlobalQSGD,
    "global-qsgd-l2": lambda **common: hvq.GlobalQSGD(norm="l2", **common),
    "global-qsgd-exponential": lambda **common: hvq.GlobalQSGD(bits=4, levels="exponential", **common),
    "global-qsgd-rotated": lambda **common: hvq.GlobalQSGD(rotate=True, **common),
    "eden": hvq.EDEN,
    "eden-alltoall": lambda **common: hvq.EDEN(bits=2, server_bits=4, exchange="alltoall", **common),
}

DDPS_METHODS = {
    **METHODS,
    "binsgdm": hvq.BinSGDM,
    "binsgdm-averages": lambda **common: hvq.BinSGDM(server_bits=3, **common),
}


def optimizer_for(compression: Any, model: torch.nn.Module) -> Any:
    """BinSGDM's optimizer for its compressor, and None for others."""
    if isinstance(compression, hvq.BinSGDM):
        return hvq.optim.BinSGDM(model.parameters(), lr=1e-3)
    return None


def net(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 70), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(70, 30)).to(DEVICE, dtype)


def data(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


def net_loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return (model(data(step, rank, 8, 40).to(dtype)) - 0.5).pow(2).mean()


def own_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Flat, float32, in the order of the elements' indices; zeros for none."""
    return {
        name: (torch.zeros_like(each) if each.grad is None else each.grad)
        .detach()
        .to_dense()
        .float()
        .cpu()
        .numpy()
        .reshape(-1)
        .copy()
        for name, each in model.named_parameters()
        if each.requires_grad
    }


class Twin:
    """A model without DDP, on which every rank computes every rank's gradient.

    Args:
        model: of which it is a copy.
        compression: whose results are predicted.
        ranks: of the workers.
    """

    def __init__(self, model: torch.nn.Module, compression: Any, ranks: Sequence[int] | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.ranks = range(dist.get_world_size()) if ranks is None else ranks
        self.oracle = Oracle(compression)

    def expected(self, losses: Callable[[torch.nn.Module, int], Iterable[torch.Tensor]]) -> dict[str, Any]:
        """For each gradient the exact average, and the simulator's; None for what is not quantized.

        Args:
            losses: of a model on a rank, each with a backward pass of its own.
        """
        everyone: list[Mapping[str, np.ndarray]] = []
        for rank in self.ranks:
            self.model.zero_grad()
            for loss in losses(self.model, rank):
                loss.backward()
            everyone.append(own_gradients(self.model))
        factor = 1 / len(everyone)
        return {
            name: (
                np.mean([own[name] for own in everyone], axis=0, dtype=np.float64),
                self.oracle.expected(everyone, name, factor),
            )
            for name in everyone[0]
        }


def assert_gradients(model: torch.nn.Module, expected: Mapping[str, Any], what: str = "") -> None:
    """Bit for bit where they are quantized, and close to the average elsewhere."""
    quantized = 0
    for name, got in own_gradients(model).items():
        exact, predicted = expected[name]
        narrow = dict(model.named_parameters())[name].dtype
        if predicted is None:
            tolerance = max(1e-4, 2 * torch.finfo(narrow).eps)
            assert np.allclose(got, exact, rtol=tolerance, atol=1e-6), f"{what} {name}: {got} is not {exact}"
            continue
        as_stored = torch.from_numpy(predicted).to(narrow).float().numpy()
        assert got.tobytes() == as_stored.tobytes(), f"{what} {name}: {got[:5]} is not {as_stored[:5]}"
        quantized += 1
    assert quantized, what


def check_steps(
    compression: Any,
    model: torch.nn.Module | None = None,
    loss: Loss = net_loss,
    steps: int = 4,
    group: Any = None,
    wrap: Callable[[DistributedDataParallel], Any] = lambda ddp: ddp,
    **ddp_arguments: Any,
) -> hvq.ddp.State:
    """Trains a model under DDP, and compares every gradient with the simulator's."""
    model = net() if model is None else model
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    twin = Twin(model, compression, ranks)
    ddp = DistributedDataParallel(model, process_group=group, **ddp_arguments)
    state = hvq.ddp.register(ddp, compression, optimizer_for(compression, model))
    wrapped = wrap(ddp)
    for step in range(steps):
        expected = twin.expected(lambda each, rank: [loss(each, step, rank)])  # noqa: B023
        ddp.zero_grad()
        loss(wrapped, step, dist.get_rank()).backward()
        assert_gradients(model, expected, f"step {step}")
        with torch.no_grad():
            for own, other in zip(model.parameters(), twin.model.parameters()):
                if own.grad is not None:
                    own -= 0.1 * own.grad
                    other.copy_(own)
    return state


def everybody_raises(kind: type[BaseException], text: str, action: Callable[[], Any]) -> None:
    """All workers get the error."""
    with pytest.raises(kind) as raised:
        action()
    assert text in str(raised.value)


@contextlib.contextmanager
def warned(text: str, times: int = 1) -> Iterator[None]:
    """This worker gets a warning with the text, as often as said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(each.message) for each in caught]
    assert sum(text in each for each in messages) == times, messages
