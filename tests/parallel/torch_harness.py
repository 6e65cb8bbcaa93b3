"""Trains small models under Horovod and compares every gradient with the simulator, bit for bit."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any, Callable
from unittest import mock

import horovod.torch as hvd
import torch
from oracle import Oracle, assert_average
from scenario_table import makers
from turns import EVERY_CASE

import horovod_quant.torch as hvq
from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from horovod_quant.torch import buckets
from horovod_quant.torch.buckets import Patience

DEVICE = torch.device(os.environ.get("TORCH_DEVICE", "cpu"))
"""Of the models that are made here."""

Batch = Callable[[torch.nn.Module, int], torch.Tensor]
"""Gives the loss of a model in a step, with this rank's own data."""

METHODS: dict[str, Callable[..., hvq.Compressor]] = makers({name: getattr(hvq, name) for name in hvq.__all__})

VARIANTS: dict[str, Callable[..., hvq.Compressor]] = {
    "qsgdinf": lambda **common: hvq.QSGD(bits=3, norm="max", bucket_size=96, **common),
    "qsgd-elias": lambda **common: hvq.QSGD(bits=4, norm="l2", coding="elias", **common),
    "qsgd-alltoall": lambda **common: hvq.QSGD(bits=4, norm="l2", exchange="alltoall", **common),
    "nuqsgd-omega": lambda **common: hvq.NUQSGD(
        bits=8, coding="elias-omega", rounding="independent", **common
    ),
    "global-qsgd-l2": lambda **common: hvq.GlobalQSGD(bits=8, norm="l2", **common),
    "global-qsgd-16": lambda **common: hvq.GlobalQSGD(bits=16, rounding="independent", **common),
    "global-qsgd-exponential": lambda **common: hvq.GlobalQSGD(bits=4, levels="exponential", **common),
    "global-qsgd-rotated": lambda **common: hvq.GlobalQSGD(bits=8, rotate=True, **common),
    "eden-alltoall": lambda **common: hvq.EDEN(bits=2, server_bits=4, exchange="alltoall", **common),
    "eden-trellis": lambda **common: hvq.EDEN(bits=2, trellis=True, **common),
    "binsgdm-average": lambda **common: hvq.BinSGDM(server_bits=3, **common),
}


def net(dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 70), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(70, 30)).to(DEVICE, dtype)


def net_without_small_tensors() -> torch.nn.Module:
    """Horovod's own sums of small gradients need not have the same bits in another run."""
    torch.manual_seed(4)
    layers = [torch.nn.Linear(40, 60, bias=False), torch.nn.Tanh(), torch.nn.Linear(60, 30, bias=False)]
    return torch.nn.Sequential(*layers)


def rank_data(
    step: int, *shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None
) -> torch.Tensor:
    """A rank's own data, by default this one's."""
    generator = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def net_loss(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return (model(rank_data(step, 8, 40, dtype=dtype, rank=rank)) - 0.5).pow(2).mean()


def base_optimizer(compressor: Any, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    if isinstance(compressor, hvq.BinSGDM):
        return hvq.optim.BinSGDM(parameters, lr=1e-3, **options)
    return torch.optim.SGD(parameters, lr=0.1, **options)


def gather_objects(value: Any, process_set: Any) -> list[Any]:
    """Every rank's value. (``hvd.allgather_object`` knows no process sets.)"""
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    joined = io.BytesIO(hvd.allgather(payload, name="gather", process_set=process_set).numpy().tobytes())
    return [pickle.load(joined) for _ in range(process_set.size())]


def assert_same_on_all_ranks(tensors: Sequence[torch.Tensor], what: str, process_set: Any = None) -> None:
    mine = [tensor.detach().cpu().double().numpy().tobytes() for tensor in tensors]
    everyone = gather_objects(mine, process_set or hvd.global_process_set)
    assert all(other == everyone[0] for other in everyone), f"{what} differ between ranks"


class Followed:
    """An `hvq.Auto` as an `Oracle` takes a compressor: it has the policy of the optimizer's step under way."""

    hierarchical = False

    def __init__(self, auto: hvq.Auto, optimizer: Any) -> None:
        self._auto, self._optimizer, self.seed = auto, optimizer, auto.seed

    @property
    def policy(self) -> Any:
        return self._auto.session_of(self._optimizer).policy or self

    def scheme_for(self, name: str, elements: int) -> None:
        """As of a policy that leaves everything to Horovod."""


def followed(compressor: Any, optimizer: Any) -> Any:
    """What an `Oracle` takes for a compressor under an optimizer."""
    return Followed(compressor, optimizer) if isinstance(compressor, hvq.Auto) else compressor


class TorchOracle:
    """`Oracle` for tensors of one process set."""

    def __init__(
        self,
        compressor: hvq.Compressor,
        process_set: Any = None,
        beta: float = DEFAULT_BETA,
        clip_norm: float | None = None,
    ) -> None:
        self._oracle = Oracle(compressor, beta, clip_norm=clip_norm)
        self._process_set = process_set or hvd.global_process_set

    def expected(self, raw: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor | None]:
        """``factor`` times the sum of every gradient; None for gradients that Horovod reduces itself."""
        own = {name: gradient.detach().cpu().double().numpy() for name, gradient in raw.items()}
        everyone = gather_objects(own, self._process_set)
        expected: dict[str, torch.Tensor | None] = {}
        for name, like in raw.items():
            decoded = self._oracle.expected(everyone, name, factor)
            expected[name] = (
                None if decoded is None else torch.from_numpy(decoded).reshape(like.shape).to(like)
            )
        return expected


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} elements differ"


def train_and_compare(
    compressor: hvq.Compressor,
    *,
    model: torch.nn.Module | None = None,
    loss: Batch = net_loss,
    steps: int = 2,
    passes: int = 1,
    named: bool = True,
    clip: float | None = None,
    before: Callable[[Any, int], None] = lambda optimizer, step: None,
    between: Callable[[], None] = lambda: None,
    stock_factor: Callable[[], float] = lambda: 1.0 / hvd.size(),
    process_set: Any = None,
    dense: bool = False,
    **distributed: Any,
) -> torch.nn.Module:
    """Trains ``steps`` steps under ``hvd.DistributedOptimizer`` and checks gradients and parameters in each.

    Args:
        stock_factor: what Horovod multiplies the sum over workers by.
        passes: backward passes a step.
        before: called with the optimizer and a step's number before anything else happens in it.
        between: called between backward and synchronize.
        dense: compare sparse gradients in dense form.
        **distributed: arguments of DistributedOptimizer.
    """
    model = net() if model is None else model
    names = dict(model.named_parameters())
    optimizer = base_optimizer(compressor, model.parameters())
    if process_set is not None:
        distributed["process_set"] = process_set
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters() if named else None,
        compression=compressor,
        backward_passes_per_step=passes,
        **distributed,
    )
    if not named:
        assert isinstance(optimizer._parameter_names, dict)
        names = {optimizer._parameter_names[p]: p for p in model.parameters()}
    oracle = TorchOracle(compressor, process_set)
    member = process_set is None or process_set.included()
    for step in range(steps):
        before(optimizer, step)
        twin = copy.deepcopy(model)
        twin.zero_grad()
        for backward in range(passes):
            loss(twin, step * passes + backward).backward()
        twins = dict(zip(names, twin.parameters()))
        raw = {
            name: torch.zeros_like(p) if p.grad is None else (p.grad.to_dense() if dense else p.grad)
            for name, p in twins.items()
            if p.requires_grad and not (p.grad is not None and p.grad.is_sparse and not dense)
        }
        expected = oracle.expected(raw, stock_factor()) if member else {}

        optimizer.zero_grad()
        for backward in range(passes):
            loss(model, step * passes + backward).backward()
        between()
        optimizer.synchronize()
        for name, gradient in expected.items():
            if gradient is not None:
                actual = names[name].grad
                assert actual is not None
                assert_bits_equal(actual.to_dense() if dense else actual, gradient, f"step {step}, {name}")
        if member:
            received = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
            assert_same_on_all_ranks(received, "gradients", process_set)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        if member:
            trained = [p for p in model.parameters() if p.requires_grad]
            assert_same_on_all_ranks(trained, "parameters", process_set)
    return model


def train_one_step_and_check(
    compressor: hvq.Compressor, model: torch.nn.Module, optimizer: Any, step: int, prefix: str = ""
) -> None:
    """The gradients are the average of what all workers have, as well as the method knows it. For where an `Oracle`
    cannot tell the number of an exchange, or threads must not mix up their gathers: each worker computes everything.

    Args:
        prefix: of the parameters' names.
    """
    gradients = gradients_of_all(model, step)
    optimizer.zero_grad()
    net_loss(model, step).backward()
    optimizer.synchronize()
    assert_averages(compressor, model, gradients, f"step {step}", prefix)
    with optimizer.skip_synchronize():
        optimizer.step()


def gradients_of_all(model: torch.nn.Module, step: int) -> list[Sequence[torch.Tensor]]:
    """Every worker's own, for each parameter."""
    parameters = list(model.parameters())
    return [torch.autograd.grad(net_loss(model, step, rank), parameters) for rank in range(hvd.size())]


def assert_averages(
    compressor: hvq.Compressor,
    model: torch.nn.Module,
    gradients: Sequence[Sequence[torch.Tensor]],
    what: str,
    prefix: str = "",
) -> None:
    """The model has the average of the workers' gradients, as well as the method knows it."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        everyone = [own[index].cpu().numpy().reshape(-1) for own in gradients]
        scheme = compressor.policy.scheme_for(prefix + name, parameter.numel())
        binary = isinstance(compressor, hvq.BinSGDM)
        assert_average(scheme, everyone, parameter.grad.cpu().numpy(), f"{what}, {name}", binary)


def impatient(scenario: Callable[[Any], None]) -> Callable[[Any], None]:
    """By default a backward pass waits a tenth of its usual second for stages that another worker may never launch; for
    scenarios in which it never does.
    """

    @functools.wraps(scenario)
    def run(make: Any) -> None:
        with mock.patch.object(buckets, "PATIENCE", Patience() if EVERY_CASE else Patience(0.1)):
            scenario(make)

    return run


def message_of(action: Callable[[], Any], kind: type = Exception) -> str:
    """The message of the error that ``action`` must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def assert_ends_without_step(optimizer: Any) -> None:
    """All exchanges of a backward pass end while no worker does anything but sleep: each has launched all of them."""
    limit = time.monotonic() + 60.0
    while under_way := [group for group in groups_of(optimizer) if not group.has_result]:
        assert time.monotonic() < limit, f"{[group.names for group in under_way]} have not ended"
        time.sleep(1e-3)
    hvd.barrier()


def groups_of(optimizer: Any) -> list[Any]:
    """Of the step under way, those that have been handed to the progress thread."""
    return [
        group
        for each in optimizer._horovod_quant_buckets.values()
        if each._step is not None
        for group in each._step.groups.values()
    ]
