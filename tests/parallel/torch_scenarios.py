"""What a training script may do with Horovod, tried with every method. Run by worker.py."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import gc
import inspect
import io
import itertools
import os
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any, Callable
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
import torch.utils.checkpoint
from oracle import unlike_neighbours
from torch_harness import (
    DEVICE,
    METHODS,
    VARIANTS,
    TorchOracle,
    assert_averages,
    assert_bits_equal,
    assert_ends_without_step,
    assert_same_on_all_ranks,
    base_optimizer,
    gather_objects,
    gradients_of_all,
    groups_of,
    impatient,
    message_of,
    net,
    net_loss,
    net_without_small_tensors,
    rank_data,
    train_and_compare,
    train_one_step_and_check,
)
from turns import EVERY_CASE, taken

import horovod_quant.torch as hvq
from horovod_quant import simulator
from horovod_quant.frontends.arguments import MIN_ELEMENTS
from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions import agreement
from horovod_quant.schemes import BinSGDM, GlobalQSGD
from horovod_quant.schemes.base import BinaryState
from horovod_quant.transports.split_sums import is_faster

SUBSET: list[Any] = []

Poison = list[tuple[int, str, int, float]]
"""Which rank (-1: the last) has in the gradient of which parameter, at which element, something that is not finite."""

NAN, INF = float("nan"), float("inf")
POISONED: list[Poison] = [
    [(0, "0.weight", 1030, NAN), (0, "2.weight", 10, INF), (0, "4.bias", 7, -INF)],
    [(-1, "2.weight", 4190, NAN), (-1, "4.weight", 1500, -INF), (-1, "2.bias", 69, NAN)],
    [(0, "4.weight", 5, -INF), (-1, "4.weight", 2099, INF)],
]
"""Of a step each."""


def start() -> int:
    """Two process sets for every size tried here: the last rank, from 3 workers on with the first, and the others."""
    size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "0")))
    some = [0, size - 1] if size > 2 else [size - 1]
    SUBSET.extend((hvd.ProcessSet(some), hvd.ProcessSet([rank for rank in range(size) if rank not in some])))
    hvd.init(process_sets=SUBSET)
    torch.set_num_threads(1)
    return hvd.rank()


def clean() -> None:
    """Called after each scenario."""


def finish() -> None:
    """A rank that leaves early would end Horovod for all."""
    hvd.barrier()


def average(make: Any) -> None:
    train_and_compare(make(), steps=3)


def a_large_gradient(make: Any) -> None:
    """Under MPI, sums of so many integers are done by two alltoalls."""
    width = 1024 if _are_sums_split() else 256

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        return model(rank_data(step, 2, width)).pow(2).mean()

    torch.manual_seed(3)
    train_and_compare(make(), model=torch.nn.Linear(width, 1025), loss=loss, steps=2)


def _are_sums_split() -> bool:
    """Whether here sums of large gradients are done by two alltoalls, so that their size is the point."""
    return EVERY_CASE or (hvd.mpi_enabled() and is_faster(hvd.size(), 2**32))


def op_sum(make: Any) -> None:
    train_and_compare(make(), op=hvd.Sum, stock_factor=lambda: 1.0)


def predivide(make: Any) -> None:
    def factor() -> float:
        one = hvd.allreduce(
            torch.ones(1), op=hvd.Average, prescale_factor=1 / 1.7, postscale_factor=1.7, name="one"
        )
        return float(one[0]) / hvd.size()

    train_and_compare(make(), gradient_predivide_factor=1.7, stock_factor=factor)


def a_factor_that_changes(make: Any) -> None:
    """What has been decoded with the last step's factor is decoded again, if this step has another one."""
    used = [hvd.Average]

    def choose(optimizer: Any, step: int) -> None:
        optimizer.op = used[0] = hvd.Sum if step == 3 else hvd.Average

    train_and_compare(
        make(), steps=5, before=choose, stock_factor=lambda: 1.0 if used[0] is hvd.Sum else 1.0 / hvd.size()
    )


def backward_passes(make: Any) -> None:
    train_and_compare(make(), passes=2)


def num_groups(make: Any) -> None:
    train_and_compare(make(), num_groups=2)


def explicit_groups(make: Any) -> None:
    model = net()
    p = list(model.parameters())
    train_and_compare(make(), model=model, groups=[[p[0], p[3]], [p[2], p[1]]])


def groups_of_half_precision(make: Any) -> None:
    train_and_compare(make(), model=net(torch.float16), num_groups=2)


def process_set(make: Any) -> None:
    size = SUBSET[0].size() if SUBSET[0].included() else 1
    train_and_compare(make(), process_set=SUBSET[0], stock_factor=lambda: 1.0 / size)


def clipping(make: Any) -> None:
    train_and_compare(make(), clip=0.01)


def unnamed_parameters(make: Any) -> None:
    train_and_compare(make(), named=False)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(4)])

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        outputs = {i: self.parts[i](x) for i in order}
        return sum(outputs[i] * (i + 1) for i in sorted(outputs))


def unused_parameters(make: Any) -> None:
    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        used = [i for i in range(4) if i == 0 or i % hvd.size() == hvd.rank()]
        return model(rank_data(step, 8, 40), used).pow(2).mean()

    train_and_compare(make(), model=Branches(), loss=loss)


def hook_order_differs(make: Any) -> None:
    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        order = [0, 1, 2, 3] if hvd.rank() % 2 else [2, 0, 3, 1]
        return model(rank_data(step, 8, 40), order).pow(2).mean()

    train_and_compare(make(), model=Branches(), loss=loss, steps=3)


def unnamed_allreduce_before_step(make: Any) -> None:
    """With a slow rank, so that what depends on timing would show."""

    def between() -> None:
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.2)
        total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
        assert total.item() == hvd.size()

    train_and_compare(make(), between=between)


def _poisoned_loss(model: torch.nn.Module, step: int, poison: Poison) -> torch.Tensor:
    """The loss, and on the ranks that ``poison`` names something whose gradient is not finite in one element."""
    loss, parameters = net_loss(model, step), dict(model.named_parameters())
    for rank, name, at, value in poison:
        if rank % hvd.size() == hvd.rank():
            loss = loss + parameters[name].view(-1)[at] * value
    return loss


def grad_scaler(make: Any) -> None:
    """Whatever is not finite, wherever it comes from: nobody moves, every scale is halved, the next step is clean."""
    compressor, model = make(), net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    overflows = [[place] for step in POISONED for place in step]
    for step, poison in enumerate([[], *overflows, []]):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(_poisoned_loss(model, step, poison)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
        assert moved is not bool(poison), f"{poison}"
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert scaler.get_scale() == 64.0 / 2 ** len(overflows)


def gradients_are_let_go(make: Any) -> None:
    """A script that drops its gradients has their memory back: nothing keeps them, and no cycle."""
    compressor, model = make(), net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    gc.disable()  # which would hide a cycle
    try:
        for step in range(4):
            net_loss(model, step).backward()
            kept = [weakref.ref(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            assert not any(reference() is not None for reference in kept), step
    finally:
        gc.enable()


def channels_last(make: Any) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 24, 3), torch.nn.Tanh(), torch.nn.Conv2d(24, 8, 3))
    model = model.to(memory_format=torch.channels_last)

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        images = rank_data(step, 2, 8, 8, 8).to(memory_format=torch.channels_last)
        return model(images).pow(2).mean()

    strides = [p.stride() for p in model.parameters()]
    trained = train_and_compare(make(), model=model, loss=loss)
    assert [p.stride() for p in trained.parameters()] == strides
    assert not all(p.is_contiguous() for p in trained.parameters())


def _embedding_model() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Embedding(50, 40, sparse=True), torch.nn.Linear(40, 40))


def _embedding_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    words = torch.randint(50, (16,), generator=torch.Generator().manual_seed(step * 10 + hvd.rank()))
    return model(words).pow(2).mean()


def sparse_gradients(make: Any) -> None:
    train_and_compare(make(), model=_embedding_model(), loss=_embedding_loss)


def sparse_as_dense(make: Any) -> None:
    train_and_compare(
        make(), model=_embedding_model(), loss=_embedding_loss, sparse_as_dense=True, dense=True
    )


def two_optimizers(make: Any) -> None:
    """As in a GAN: both backward passes before either step, once with a compressor each, once with one for both."""
    for shared in (False, True):
        first = make()
        compressors = [first, first if shared else make()]
        models = [net(seed=5), net(seed=6)]
        named = [
            [(f"{side}.{name}", p) for name, p in model.named_parameters()]
            for side, model in zip("ab", models)
        ]
        optimizers = [
            hvd.DistributedOptimizer(base_optimizer(c, m.parameters()), n, compression=c)
            for c, m, n in zip(compressors, models, named)
        ]
        oracles = [TorchOracle(compressor) for compressor in compressors]
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            raw = [
                dict(zip(dict(n), torch.autograd.grad(net_loss(m, step), list(m.parameters()))))
                for m, n in zip(models, named)
            ]
            expected = [
                oracle.expected(gradients, 1.0 / hvd.size()) for oracle, gradients in zip(oracles, raw)
            ]
            for model in models:
                net_loss(model, step).backward()
            for which in (0, 1) if step else (1, 0):
                optimizers[which].synchronize()
                for name, p in named[which]:
                    if expected[which][name] is not None:
                        assert_bits_equal(p.grad, expected[which][name], name)
                with optimizers[which].skip_synchronize():
                    optimizers[which].step()
                assert_same_on_all_ranks(list(models[which].parameters()), "parameters")


def two_optimizers_of_one_model(make: Any) -> None:
    """One for the first layer, one for the others, which share each backward pass: both are given the names of all; or
    their compressors are given names that are the same for both.
    """
    for own_names in (False, True):
        model = net(seed=5)
        parts = [model[:1], model[1:]]
        names = [dict(part.named_parameters() if own_names else model.named_parameters()) for part in parts]
        if own_names:
            names[1] = dict(zip(("0.bias", "0.weight"), model[2].parameters()))
            names[1].update((f"last.{name}", p) for name, p in model[4].named_parameters())
        compressors = [make(named_parameters=given.items() if own_names else None) for given in names]
        optimizers = [
            hvd.DistributedOptimizer(
                base_optimizer(compressor, part.parameters()),
                model.named_parameters(),
                compression=compressor,
            )
            for compressor, part in zip(compressors, parts)
        ]
        named = [
            {n: p for n, p in given.items() if any(p is o for o in part.parameters())}
            for given, part in zip(names, parts)
        ]
        oracles = [TorchOracle(compressor) for compressor in compressors]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            own = dict(
                zip(model.parameters(), torch.autograd.grad(net_loss(model, step), list(model.parameters())))
            )
            expected = [
                oracle.expected({name: own[p] for name, p in each.items()}, 1.0 / hvd.size())
                for oracle, each in zip(oracles, named)
            ]
            net_loss(model, step).backward()
            for optimizer, each, gradients in zip(optimizers, named, expected):
                optimizer.synchronize()
                for name, p in each.items():
                    if gradients[name] is not None:
                        assert_bits_equal(p.grad, gradients[name], f"step {step}, {name}")
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert_same_on_all_ranks(list(model.parameters()), "parameters")


class _WithCopy(torch.nn.Module):
    """A model, with frozen copies of it as its first and last submodules on the first worker."""

    def __init__(self) -> None:
        super().__init__()
        if hvd.rank() == 0:
            self.average = net(seed=3).requires_grad_(False)
        self.net = net()
        if hvd.rank() == 0:
            self.teacher = net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def a_frozen_copy_on_one_worker(make: Any) -> None:
    """As of a moving average or a teacher: its names come first and last, and no gradient of it is ever reduced."""
    train_and_compare(make(), model=_WithCopy(), steps=4)


def compiled_functions(make: Any) -> None:
    """``torch.compile`` of a model, of a function with the backward pass in it, of the whole step, of methods of the
    optimizer: each gradient is the average; a compiled direct call does what it does when it is not compiled.
    """
    for case in taken("model", "pass", "whole step", "optimizer.step", "synchronize", "compiled autograd"):
        torch.compiler.reset()
        with mock.patch.object(torch._dynamo.config, "compiled_autograd", case == "compiled autograd"):
            _train_compiled(make(), case)

    if make is METHODS["binsgdm"]:  # which needs its optimizer
        return
    compressor, alike = make(), make()
    function = _compiled(lambda x: hvd.allreduce(2 * x, name="direct", compression=compressor))
    for step in range(3):
        x = rank_data(step, 2000)
        expected = hvd.allreduce(2 * x, name="direct", compression=alike)
        assert_bits_equal(function(x), expected, f"compiled, step {step}")


_compiled = functools.partial(torch.compile, backend="eager")


def _train_compiled(compressor: Any, case: str) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    forward = _compiled(model) if case == "model" else model
    update = optimizer.step
    if case == "optimizer.step":  # which numpy's functions would fail in with any backend but the simplest
        update = torch.compile(update, backend="aot_eager")
    synchronize = torch.compile(optimizer.synchronize, backend="aot_eager")

    def backward(number: int) -> None:
        (forward(rank_data(number, 8, 40)) - 0.5).pow(2).mean().backward()

    if case in ("pass", "compiled autograd"):
        backward = _compiled(backward)

    def step(number: int) -> None:
        optimizer.zero_grad()
        backward(number)
        if case == "synchronize":
            synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            update()

    whole = _compiled(step) if case == "whole step" else step
    for number in range(4):
        gradients = gradients_of_all(model, number)
        whole(number)
        assert_averages(compressor, model, gradients, f"{case}, step {number}")
        assert_same_on_all_ranks(list(model.parameters()), f"{case}, step {number}: parameters")


def one_compressor_for_two_models(make: Any) -> None:
    """Their parameters have the same names, and other shapes: each gets the average of its own gradients."""
    compressor = make()
    models = [net(), torch.nn.Sequential(torch.nn.Linear(40, 90), torch.nn.Tanh(), torch.nn.Linear(90, 30))]
    optimizers = [
        hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        for model in models
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            train_one_step_and_check(compressor, model, optimizer, step)


def threads(make: Any) -> None:
    """Two threads train a model each at the same time, with compressors of their own."""

    def train(number: int, model: torch.nn.Module) -> None:
        compressor = make()
        named = [(f"{number}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), named, compression=compressor
        )
        for step in range(4):
            train_one_step_and_check(compressor, model, optimizer, step, f"{number}.")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, number, net(seed=number)) for number in (1, 2)]:
            done.result()


def forked_processes(make: Any) -> None:
    """As a DataLoader with workers forks them, in the middle of training."""
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(8, 8))
    compressor, model = make(), net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(
            data, batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for step, (batch,) in enumerate(loader):
            assert batch.shape == (4, 8)
            train_one_step_and_check(compressor, model, optimizer, 2 * epoch + step)


def empty_parameters(make: Any) -> None:
    model = net()
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    model.register_parameter("flat", torch.nn.Parameter(torch.zeros(0, 7)))

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        return net_loss(model, step) + model.empty.sum() + model.flat.sum()

    train_and_compare(make(min_elements=0), model=model, loss=loss, steps=3)


def dtypes(make: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        train_and_compare(make(), model=net(dtype))


def overrides_and_excluded(make: Any) -> None:
    other = {"bits": 2 if isinstance(make(), hvq.EDEN) else 5}
    changed = {} if isinstance(make(), hvq.BinSGDM) else {"2.*": other}
    compressor = make(exclude=["4.weight"], overrides=changed, seed=7, min_elements=100)
    train_and_compare(compressor)
    parameters = compressor.stats().parameters
    assert parameters["4.weight"].ratio == 1.0
    assert parameters["0.weight"].ratio > 3 or hvd.size() > 2 or compressor.hierarchical


def nan_on_one_rank(make: Any) -> None:
    """What is not finite on one worker reaches all, in its bucket and nowhere else; the next step is clean."""
    compressor, model = make(), net()
    parameters, start = dict(model.named_parameters()), copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), parameters.items(), compression=compressor
    )
    oracle = TorchOracle(compressor)
    for step, poison in enumerate([*POISONED, []]):
        model.load_state_dict(start.state_dict())
        twin = copy.deepcopy(start)
        _poisoned_loss(twin, step, poison).backward()
        expected = oracle.expected({name: p.grad for name, p in twin.named_parameters()}, 1.0 / hvd.size())
        optimizer.zero_grad()
        _poisoned_loss(model, step, poison).backward()
        optimizer.synchronize()
        for name, p in parameters.items():
            if expected[name] is not None:
                assert_bits_equal(p.grad, expected[name], f"step {step}, {name}")
            scheme = compressor.policy.scheme_for(name, p.numel())
            unit = 1 if scheme is None else getattr(getattr(scheme, "inner", scheme), "bucket_size", TILE)
            broken = (~p.grad.reshape(-1).isfinite()).nonzero().reshape(-1) // unit
            assert set(broken.tolist()) == {at // unit for _, other, at, _ in poison if other == name}, name
        with optimizer.skip_synchronize():
            optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def direct_calls(make: Any) -> None:
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        assert "needs the optimizer" in message_of(
            lambda: hvd.allreduce(torch.ones(2000), compression=compressor), ValueError
        )
        return
    oracle = TorchOracle(compressor)
    for _ in range(2):
        given = [rank_data(i, 40, 50) for i in range(3)]
        kept = [tensor.clone() for tensor in given]
        expected = oracle.expected({"direct": given[0]}, 1.0 / hvd.size())["direct"]
        assert_bits_equal(
            hvd.allreduce(given[0], name="direct", compression=compressor), expected, "allreduce"
        )
        expected = oracle.expected({"s.0": given[1], "s.1": given[2]}, 1.0)
        summed = hvd.grouped_allreduce(given[1:], name="s", op=hvd.Sum, compression=compressor)
        for i, tensor in enumerate(summed):
            assert_bits_equal(tensor, expected[f"s.{i}"], "grouped_allreduce")
        assert all(torch.equal(a, b) for a, b in zip(given, kept)), "inputs were changed"
    unnamed = hvd.allreduce(given[0], compression=compressor)
    assert_same_on_all_ranks([unnamed], "an unnamed allreduce")
    if SUBSET and SUBSET[0].included():
        own = torch.full((2000,), 1.0 + hvd.rank())
        mean = float(hvd.allreduce(own, compression=compressor, process_set=SUBSET[0]).mean())
        expected = 1.0 + sum(SUBSET[0].ranks) / SUBSET[0].size()
        assert abs(mean - expected) < 0.1 * expected
    expected = oracle.expected({"inferred": given[0]}, 1.0 / hvd.size())["inferred"]
    with torch.inference_mode():
        inferred = hvd.allreduce(given[0].clone(), name="inferred", compression=compressor)
    assert_bits_equal(inferred, expected, "in inference mode")
    for prescale, postscale, magnitude in ((2.0**-26, 1.0, 2e4), (1.0, 2.0**17, 1e-4), (2.0**-20, 1.5, 2e4)):
        # Neither the scales nor what they make of 1 are numbers of the gradients' type.
        own = [magnitude * rank_data(i, 2000).half() for i in range(2)]
        expected = oracle.expected({f"scaled.{i}": own[i] for i in range(2)}, prescale * postscale)
        scales = {"prescale_factor": prescale, "postscale_factor": postscale}
        scaled = hvd.grouped_allreduce(own, name="scaled", op=hvd.Sum, compression=compressor, **scales)
        for i, tensor in enumerate(scaled):
            assert_bits_equal(tensor, expected[f"scaled.{i}"], f"scaled by {scales}")
    small = hvd.allreduce(torch.full((3,), 2.0, dtype=torch.bfloat16), compression=compressor)
    assert small.dtype is torch.bfloat16
    assert small.tolist() == [2.0] * 3
    assert "detach" in message_of(
        lambda: hvd.allreduce(given[0].requires_grad_(), compression=compressor), ValueError
    )


def integers_pass_through(make: Any) -> None:
    """What comes out is what Horovod's own compressor gives, errors included: it reduces no booleans, for example."""
    compressor = make()
    for dtype in taken(torch.int32, torch.int64, torch.bool):
        for op in (hvd.Average, hvd.Sum, hvd.Max):
            ours, horovods = (
                _reduced_integers(dtype, op, each) for each in (compressor, hvd.Compression.fp16)
            )
            assert type(ours[0]) is type(horovods[0])
            if isinstance(horovods[0], str):
                assert ours == horovods
                continue
            for one, other in zip(ours, horovods):
                assert_bits_equal(one, other, f"{dtype}, op={op}")
    assert not compressor.stats().parameters


def _reduced_integers(dtype: torch.dtype, op: Any, compression: Any) -> list[Any]:
    """By one operation and by a group, of sizes around those that would be compressed; or the error's message."""
    given = [(9 * rank_data(i, length)).to(dtype) for i, length in enumerate((3, 17, 2000))]
    try:
        grouped = hvd.grouped_allreduce(given, name="integers", op=op, compression=compression)
        return [*grouped, hvd.allreduce(given[-1], op=op, compression=compression)]
    except ValueError as error:
        return [str(error)]


def integers_on_some_workers(make: Any) -> None:
    """Horovod's own error on every worker, at once; what comes after is right."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):  # which needs its optimizer
        return
    for name, length in taken((None, 2000), ("mixed", 2000), (None, 17), ("mixed", 3)):
        own = torch.ones(length, dtype=(torch.float32, torch.int32)[hvd.rank() % 2])
        message = message_of(
            lambda: hvd.allreduce(own, name=name, compression=compressor),  # noqa: B023
            hvd.HorovodInternalError,
        )
        assert "Mismatched data types" in message, message
        gather_objects(None, hvd.global_process_set)
        result = hvd.allreduce(torch.ones(2000), name=name, compression=make(seed=5))
        assert_same_on_all_ranks([result], "another compressor's, after the error")
    result = hvd.allreduce(torch.ones(2000), name="alike", compression=compressor)
    assert_same_on_all_ranks([result], "after the error")
    assert 0.5 < result.mean().item() < 1.5


def sums_that_leave_their_fields(make: Any) -> None:
    """They are found, exchanged again by all workers, and counted."""
    compressor = make()
    oracle = TorchOracle(compressor)
    for step in range(2):
        own = torch.from_numpy(unlike_neighbours(hvd.rank(), step))
        expected = oracle.expected({"w": own}, 1.0 / hvd.size())["w"]
        assert_bits_equal(hvd.allreduce(own, name="w", compression=compressor), expected, f"step {step}")
    again = compressor.stats().parameters["w"].exchanged_again
    assert again > 0
    assert gather_objects(again, hvd.global_process_set) == [again] * hvd.size()


def explicit_names(make: Any) -> None:
    model = net()
    compressor = make(named_parameters=[(f"mine.{name}", p) for name, p in model.named_parameters()])
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), compression=compressor
    )
    net_loss(model, 0).backward()
    optimizer.step()
    assert set(compressor.stats().parameters) == {f"mine.{name}" for name, _ in model.named_parameters()}
    assert_same_on_all_ranks(list(model.parameters()), "parameters")


def survives_pickling(make: Any) -> None:
    compressor = make(seed=3)
    train_and_compare(compressor, steps=1)
    train_and_compare(pickle.loads(pickle.dumps(compressor)), steps=1)


def another_default_device(make: Any) -> None:
    """``torch.set_default_device`` is for the script's tensors: on "meta" none of this package's own could be read."""

    def trained(device: str | None) -> torch.nn.Module:
        model, compressor = net_without_small_tensors(), make()
        if not isinstance(compressor, hvq.BinSGDM):
            compressor = make(nmse_every=2)
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = net_loss(model, step)
            torch.set_default_device(device)
            try:
                loss.backward()
                optimizer.step()
            finally:
                torch.set_default_device(None)
        return model

    for one, other in zip(trained("meta").parameters(), trained(None).parameters()):
        assert_bits_equal(one, other, "with another default device")


def bad_arguments(make: Any) -> None:
    """Every rank gets the same clear message before any collective, and goes on training afterwards."""

    def first_step(compressor: Any, optimizer: Any = None, **distributed: Any) -> str:
        model = net()
        optimizer = (optimizer or functools.partial(base_optimizer, compressor))(model.parameters())
        wrapped = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compressor, **distributed
        )
        return message_of(net_loss(model, 0).backward if wrapped else None)

    compressor = make()
    if hvd.size() & (hvd.size() - 1) == 0:
        assert "op=Adasum" in first_step(compressor, op=hvd.Adasum)
    arguments = {} if isinstance(compressor, hvq.BinSGDM) else {"bits": 4}
    message = first_step(make(overrides={"layer7.*": arguments}))
    assert "'layer7.*' matches no parameter" in message
    assert "0.weight" in message
    assert "exclude" in first_step(make(exclude="*.wait"))
    assert "use the same for both" in first_step(make(process_set=SUBSET[0]))
    if isinstance(compressor, hvq.BinSGDM):
        message = first_step(compressor, functools.partial(torch.optim.SGD, lr=0.1))
        assert "optimizer of the same name" in message
        assert "SGD" in message
        assert "beta=0.5" in first_step(hvq.BinSGDM(beta=0.5))
    else:
        assert "compression=hvq.BinSGDM()" in first_step(compressor, hvq.optim.BinSGDM)
        message = message_of(
            lambda: hvd.allreduce(torch.ones(2000, dtype=torch.complex64), compression=compressor), TypeError
        )
        assert "torch.complex64" in message
        assert "float32" in message
        message = message_of(lambda: hvd.allreduce(torch.ones(2000), op=hvd.Max, compression=compressor))
        assert "op=" in message
        assert "hvd.Average" in message
        message = message_of(lambda: hvd.reducescatter(torch.ones(2000), compression=compressor))
        assert "only allreduce" in message
    if isinstance(compressor, hvq.GlobalQSGD):
        message = message_of(lambda: hvq.GlobalQSGD(bits=2), ValueError)
        assert "2 workers need bits >= 3 with norm='max'" in message
    train_and_compare(make(), steps=1)


def workers_disagree(make: Any) -> None:
    """An argument that one rank has otherwise is named on every rank in the first step; the next model trains."""
    last = hvd.rank() == hvd.size() - 1
    for argument, value, usual in [
        ("seed", 1, 0),
        ("bucket_size", 512, 1024),
        ("bits", 4, 3),
        ("min_elements", 100000, 1024),
        ("exclude", "0.*", ()),
        ("group_bytes", 4096, 2**25),
        ("overlap", False, True),
    ]:
        if argument not in inspect.signature(type(make())).parameters:
            continue
        compressor = type(make())(**{argument: value if last else usual})
        model = net()
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        net_loss(model, 0).backward()
        message = message_of(optimizer.step, RuntimeError)
        if argument not in ("min_elements", "exclude"):  # there Horovod itself may be the first to notice
            assert f"has {argument}=" in message, message
            assert "same arguments" in message
        for handle, _ in optimizer._handles.values():
            try:
                hvd.synchronize(handle)
            except hvd.HorovodInternalError:
                assert argument in ("min_elements", "exclude")
    train_and_compare(make(), steps=1)


def another_wire_format(make: Any) -> None:
    """A rank whose release lays out payloads otherwise is noticed on every rank in the first step."""
    usual = agreement.WIRE_VERSION
    agreement.WIRE_VERSION = usual + (hvd.rank() == hvd.size() - 1)
    try:
        compressor, model = make(), net()
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        net_loss(model, 0).backward()
        message = message_of(optimizer.step, RuntimeError)
    finally:
        agreement.WIRE_VERSION = usual
    assert f"(wire format {usual + (hvd.rank() == hvd.size() - 1)}) here, but not on all" in message, message
    assert "install the same version of horovod_quant" in message
    for handle, _ in optimizer._handles.values():
        hvd.synchronize(handle)
    train_and_compare(make(), steps=1)


def binsgdm_state(make: Any) -> None:
    """The optimizer's state is broadcast without a step, saved and loaded; one worker needs no network."""
    if not isinstance(make(), hvq.BinSGDM):
        return
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(
        hvq.optim.BinSGDM(model.parameters(), lr=1e-3), model.named_parameters(), compression=make()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start))
    net_loss(model, 0).backward()
    optimizer.step()
    steps = [torch.unique((p - q).abs() / 1e-3).tolist() for p, q in zip(model.parameters(), start)]
    assert all(abs(size - 1) < 1e-2 for sizes in steps for size in sizes), "an element did not move by lr"
    saved = optimizer.state_dict()
    assert all(set(s) == {"step", "momentum", "scale"} and s["step"] == 1 for s in saved["state"].values())
    other = hvq.optim.BinSGDM(net().parameters())
    other.load_state_dict(saved)
    for p, q in zip(other.param_groups[0]["params"], model.parameters()):
        assert torch.equal(other.state[p]["momentum"], optimizer.state[q]["momentum"])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    momenta = [optimizer.state[p]["momentum"] for p in model.parameters()]
    assert_same_on_all_ranks(momenta, "broadcast momenta")


def binsgdm_steps_that_are_left_out(make: Any) -> None:
    """What an exchange has left in a gradient moves its parameter once: in the next step, or not at all."""
    lr, model = 1e-3, net_without_small_tensors()
    used, branch = model[0].weight, model[2].weight
    optimizer = hvd.DistributedOptimizer(
        hvq.optim.BinSGDM(model.parameters(), lr=lr), model.named_parameters(), compression=make()
    )

    def backward(step: int, to_branch: bool = True) -> None:
        hidden = model[:2](rank_data(step, 8, 40))
        (model[2](hidden) if to_branch else hidden).pow(2).mean().backward()

    def step() -> list[float]:
        """The largest move of each parameter, by lr."""
        before = [used.detach().clone(), branch.detach().clone()]
        with optimizer.skip_synchronize():
            optimizer.step()
        return [round(float((p.detach() - q).abs().max()) / lr, 2) for p, q in zip((used, branch), before)]

    keeps_tensors = functools.partial(model.zero_grad, set_to_none=False)
    for number, zero in enumerate((optimizer.zero_grad, model.zero_grad, keeps_tensors)):
        zero()
        backward(4 * number, to_branch=False)
        optimizer.synchronize()  # and no step, as where a gradient is not finite
        zero()
        backward(4 * number + 1)
        optimizer.synchronize()
        assert step() == [1.0, 1.0]
        zero()
        backward(4 * number + 2)
        optimizer.synchronize()
        zero()
        backward(4 * number + 3, to_branch=False)
        optimizer.synchronize()
        assert step() == [1.0, 0.0]
    optimizer.zero_grad()
    backward(12)
    optimizer.synchronize()
    optimizer.load_state_dict(optimizer.state_dict())
    momentum = optimizer.state[used]["momentum"].clone()
    assert step() == [1.0, 1.0]
    assert torch.equal(momentum, optimizer.state[used]["momentum"]), "bits were taken for a gradient"
    optimizer.zero_grad()
    backward(13)
    optimizer.synchronize()
    assert "skip_synchronize" in message_of(optimizer.step, RuntimeError)
    assert step() == [1.0, 1.0]
    optimizer.zero_grad()
    backward(14)
    optimizer.step()
    assert_same_on_all_ranks([used, branch], "parameters")


def binsgdm_moves_by_averages(make: Any) -> None:
    """Every element by the average of the workers' bits, whatever scales it: a sum, clipping, a loss scale."""
    fractions: set[float] = set()
    for op, clip, scale in (
        (hvd.Average, None, 1.0),
        (hvd.Sum, None, 1.0),
        (hvd.Average, 0.01, 1.0),
        (hvd.Average, None, 64.0),
    ):
        model, compressor = net(), make()
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()),
            model.named_parameters(),
            compression=compressor,
            op=op,
        )
        oracle, parameters = TorchOracle(compressor), dict(model.named_parameters())
        for step in range(2):
            optimizer.zero_grad()
            twin = copy.deepcopy(model)
            (scale * net_loss(twin, step)).backward()
            raw: Any = {name: p.grad for name, p in twin.named_parameters()}
            averages = oracle.expected(raw, 1.0 / hvd.size())
            (scale * net_loss(model, step)).backward()
            optimizer.synchronize()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p in model.parameters():
                p.grad.div_(scale)
            before = {name: p.detach().clone() for name, p in parameters.items()}
            with optimizer.skip_synchronize():
                optimizer.step()
            for name, average in averages.items():
                if average is not None:
                    moved = before[name] - parameters[name].detach()
                    assert torch.allclose(moved, 1e-3 * average, rtol=1e-4, atol=1e-7), (
                        f"{op}, {clip}, {scale}"
                    )
                    fractions |= set(torch.unique(average.abs()).tolist())
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert len(fractions) > 1, "no bits differ"


def resuming_gives_the_same_bits(make: Any) -> None:
    """Stopped after two steps, saved and loaded: the parameters are those of a run without an interruption."""

    def start() -> tuple[torch.nn.Module, Any, Any]:
        model, compressor = net_without_small_tensors(), make(seed=5)
        optimizer = base_optimizer(compressor, model.parameters())
        return (
            model,
            compressor,
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor),
        )

    def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()

    model, compressor, optimizer = start()
    train(model, optimizer, range(2))
    if isinstance(compressor, hvq.BinSGDM):
        optimizer.gather_state()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, compressor, optimizer)], file)
    train(model, optimizer, range(2, 4))

    resumed = start()
    file.seek(0)
    for part, state in zip(resumed, torch.load(file, weights_only=False)):
        part.load_state_dict(state)
    train(resumed[0], resumed[2], range(2, 4))
    for p, q in zip(model.parameters(), resumed[0].parameters()):
        assert_bits_equal(q.detach(), p.detach(), "a parameter after resuming")
    assert compressor.state_dict() == resumed[1].state_dict()


def binsgdm_groups_schedules_and_clipping(make: Any) -> None:
    """Parameter groups with arguments of their own, a scheduler, decoupled weight decay, clipping before binarizing."""
    if not isinstance(make(), hvq.BinSGDM):
        return
    model = net()
    slow = {"lr": 1e-2, "beta": 0.9, "weight_decay": 0.5, "clip_norm": 1e-3}
    groups = [
        {"params": list(model[0].parameters()), **slow},
        {"params": [*model[2].parameters(), *model[4].parameters()], "weight_decay": 0.1},
    ]
    optimizer = hvd.DistributedOptimizer(
        hvq.optim.BinSGDM(groups, lr=1e-3, clip_norm=100.0), model.named_parameters(), compression=make()
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    names = {p: name for name, p in model.named_parameters()}
    oracles = [
        TorchOracle(make(), beta=group["beta"], clip_norm=group["clip_norm"])
        for group in optimizer.param_groups
    ]
    clipped = 0
    for step in range(4):
        optimizer.zero_grad()
        twin = copy.deepcopy(model)
        net_loss(twin, step).backward()
        raw: Any = {name: p.grad for name, p in twin.named_parameters()}
        net_loss(model, step).backward()
        optimizer.synchronize()
        before = {p: p.detach().clone() for p in model.parameters()}
        for group, oracle in zip(optimizer.param_groups, oracles):
            own = {names[p]: raw[names[p]] for p in group["params"]}
            clipped += sum(float(gradient.norm()) > group["clip_norm"] for gradient in own.values())
            expected = oracle.expected(own, 1.0 / hvd.size())
            for p in group["params"]:
                bits = expected[names[p]]
                if bits is not None:
                    assert_bits_equal(p.grad, bits, f"step {step}, {names[p]}")
        with optimizer.skip_synchronize():
            optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                moved = (p - before[p] * (1 - group["lr"] * group["weight_decay"])).abs()
                assert torch.allclose(moved, torch.full_like(p, group["lr"]), rtol=1e-3)
        scheduler.step()
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert clipped, "nothing was clipped"
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 4, 1e-3 / 4]


class Many(torch.nn.Module):
    """Eight layers whose gradients come in whatever order a worker adds them up; some may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(40, 40, bias=False) for _ in range(8)])

    def forward(self, x: torch.Tensor, order: list[int], slow: bool = False) -> torch.Tensor:
        terms = []
        for i in order:
            term = self.parts[i](x) * (i + 1)
            if slow:
                term.register_hook(lambda gradient: time.sleep(0.005))
            terms.append((i, term))
        return sum(term for _, term in sorted(terms, key=lambda item: item[0]))


def _shuffled(step: int, rank: int) -> list[int]:
    return torch.randperm(8, generator=torch.Generator().manual_seed(100 * step + rank)).tolist()


def _unnamed_sum() -> None:
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == hvd.size()


def _named_sum() -> None:
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="named").item() == hvd.size()


def _later(call: Callable[[], None]) -> Callable[[], None]:
    """Does nothing the first time: in the first step it is found out what else starts operations."""
    calls = itertools.count()
    return lambda: None if next(calls) == 0 else call()


def overlap_with_a_slow_rank(make: Any) -> None:
    """The agreed order everywhere, many groups, one rank far behind, an unnamed operation in between."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        return (
            model(rank_data(step, 8, 40), list(range(8)), slow=hvd.rank() == step % hvd.size()).pow(2).mean()
        )

    for between in (_unnamed_sum, _later(_unnamed_sum)):
        train_and_compare(make(group_bytes=1), model=Many(), loss=loss, steps=4, between=between)


def overlap_with_operations_in_the_backward_pass(make: Any) -> None:
    """Unnamed ones, on workers of which one is far behind."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        x = rank_data(step, 8, 40).requires_grad_()
        x.register_hook(lambda gradient: _unnamed_sum())
        middle = model.parts[4](x)
        middle.register_hook(lambda gradient: _unnamed_sum())
        slow = hvd.rank() == step % hvd.size()
        return (model(x, [0, 1, 2, 3], slow=slow) + model(middle, [5, 6, 7], slow=slow)).pow(2).mean()

    train_and_compare(make(group_bytes=1), model=Many(), loss=loss, steps=4)


def overlap_follows_up(make: Any) -> None:
    """In the middle of a backward pass the groups that are complete get to their end, in the first step as well: here
    every worker sleeps in a hook until all of its own have, and an unnamed operation of the script's shows it.
    """
    compressor, model = make(group_bytes=1), Many()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    ended: list[int] = []

    def sleep(_: torch.Tensor) -> None:
        assert_ends_without_step(optimizer)
        ended.append(len(groups_of(optimizer)))
        _unnamed_sum()

    for step in range(3):
        parts = [part(rank_data(step, 8, 40)) * (i + 1) for i, part in enumerate(model.parts)]
        parts[2].register_hook(sleep)
        optimizer.zero_grad()
        sum(parts).pow(2).mean().backward()
        optimizer.step()
    assert len(ended) == 3
    assert all(0 < count < 8 for count in ended), ended


def overlap_with_any_order(make: Any) -> None:
    """Another order on every rank and in every step, a slow rank, an unnamed operation in between."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        order = list(range(8)) if step == 0 else _shuffled(step, hvd.rank())
        return model(rank_data(step, 8, 40), order, slow=hvd.rank() == step % hvd.size()).pow(2).mean()

    for between in taken(_unnamed_sum, _later(_unnamed_sum)):
        train_and_compare(make(group_bytes=1), model=Many(), loss=loss, steps=6, between=between)


@impatient
def overlap_with_parts_left_out(make: Any) -> None:
    """After steps that use everything, ranks leave out different parts; a named operation in between."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        order = _shuffled(step, hvd.rank())[: 8 if step < 2 else 3]
        return model(rank_data(step, 8, 40), order).pow(2).mean()

    for between in taken(_named_sum, _later(_named_sum)):
        train_and_compare(make(group_bytes=1), model=Many(), loss=loss, steps=6, between=between)


def overlap_is_real(make: Any) -> None:
    """All of a step's exchanges end without a call of ``step()``, in the first step as well."""
    compressor, model = make(group_bytes=1), Many()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    for step in range(3):
        optimizer.zero_grad()
        model(rank_data(step, 8, 40), list(range(8))).pow(2).mean().backward()
        assert len(groups_of(optimizer)) == 8
        assert_ends_without_step(optimizer)
        optimizer.step()


def overlap_switched_off(make: Any) -> None:
    train_and_compare(make(overlap=False, group_bytes=1), steps=3, between=_unnamed_sum)


def several_backward_passes_in_a_step(make: Any) -> None:
    """Two losses that reach different parameters."""
    compressor, model = make(group_bytes=1), Many()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    for step in range(3):
        optimizer.zero_grad()
        for half in ([0, 1, 2, 3], [4, 5, 6, 7]):
            model(rank_data(step, 8, 40), half).pow(2).mean().backward()
        optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()), "parameters")


def checkpointed_layers(make: Any) -> None:
    """Reentrant checkpointing runs a backward pass inside the backward pass."""

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        x = rank_data(step, 8, 40).requires_grad_()
        for layer in model:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x.pow(2).mean()

    train_and_compare(make(group_bytes=1), loss=loss, steps=3)


def a_model_that_changes(make: Any) -> None:
    """Parameters are frozen after two steps, and thawed again."""
    compressor, model = make(group_bytes=1), net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    frozen = model[2].weight
    for step in range(6):
        optimizer.zero_grad()
        if step == 2:
            frozen.requires_grad_(False)
            optimizer._requires_update.discard(frozen)
        if step == 4:
            frozen.requires_grad_(True)
        kept = frozen.detach().clone()
        net_loss(model, step).backward()
        _named_sum()
        optimizer.step()
        assert torch.equal(frozen, kept) == (step in (2, 3)), f"step {step}"
        assert_same_on_all_ranks(list(model.parameters()), "parameters")


def workers_that_join(make: Any, outputs: int = 0) -> None:
    """Those whose data is at an end add nothing; the average is over all, as Horovod's own. Both ends may go first."""
    size = hvd.size()
    outputs = outputs or (17500 if _are_sums_split() else 2500)
    for own_steps in ([2 + rank for rank in range(size)], [1 + size - rank for rank in range(size)]):
        compressor = make()
        torch.manual_seed(5)
        layers = [torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, outputs)]
        model = torch.nn.Sequential(*layers).to(DEVICE)
        parameters = dict(model.named_parameters())
        hvd.broadcast_parameters(parameters, root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), parameters.items(), compression=compressor
        )
        states: dict[Any, BinaryState] = {}
        counts = [count for count in (p.numel() for p in parameters.values()) if count >= MIN_ELEMENTS]
        for step in range(own_steps[hvd.rank()]):
            present = [rank for rank in range(size) if step < own_steps[rank]]
            twin = copy.deepcopy(model)
            gradients = {
                rank: torch.autograd.grad(net_loss(twin, step, rank), list(twin.parameters()))
                for rank in present
            }
            optimizer.zero_grad()
            net_loss(model, step, hvd.rank()).backward()
            optimizer.synchronize()
            for index, (name, parameter) in enumerate(parameters.items()):
                everyone = {rank: own[index].cpu().numpy().reshape(-1) for rank, own in gradients.items()}
                expected = _average_of_present(compressor, name, everyone, step, states, counts)
                if expected is not None:
                    expected = torch.from_numpy(expected).reshape(parameter.shape).to(DEVICE)
                    assert_bits_equal(parameter.grad, expected, f"step {step}, {name}")
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd.join()


def _average_of_present(
    compressor: hvq.Compressor,
    name: str,
    everyone: dict[int, Any],
    step: int,
    states: dict[Any, BinaryState],
    counts: Sequence[int],
) -> Any:
    """The sum over those who are there, over the number of all; None if Horovod reduces the gradient itself."""
    elements, size = len(everyone[hvd.rank()]), hvd.size()
    scheme = compressor.policy.scheme_for(name, elements)
    if scheme is None:
        return None
    for rank in everyone:
        zeros = np.zeros((2, elements), np.float32)
        states.setdefault((name, rank), BinaryState(zeros[0], zeros[1], DEFAULT_BETA))
    arrays = list(everyone.values())
    uniform = isinstance(scheme, GlobalQSGD) and scheme.levels == "uniform"
    split = hvd.mpi_enabled() and is_faster(size, sum(4 * count for count in counts))
    if uniform and not split:  # nobody needs to know who is there
        arrays = [everyone.get(rank, np.zeros(elements, np.float32)) for rank in range(size)]
    own_states = [[states[name, rank]] for rank in everyone] if isinstance(scheme, BinSGDM) else None
    return simulator.run(
        scheme, arrays, seed=compressor.seed, names=[name], step=step, factor=1 / size, states=own_states
    ).decoded[0][0]


def training_goes_on_after_joining(make: Any) -> None:
    """Everybody has joined, each after other steps: from then on the workers' counts of exchanges differ."""
    compressor, model = make(), net()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    for own_steps in (1 + hvd.rank(), 1 + 2 * (hvd.size() - 1 - hvd.rank())):
        for step in range(own_steps):
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        if isinstance(compressor, hvq.BinSGDM):  # by whose momentum small gradients move
            hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        counts = gather_objects(compressor.state_dict(), hvd.global_process_set)
        # BinSGDM counts in its optimizer's state.
        assert isinstance(compressor, hvq.BinSGDM) or len(set(map(str, counts))) == hvd.size(), counts
        for step in range(10, 13):
            train_one_step_and_check(compressor, model, optimizer, step)
            assert_same_on_all_ranks([p.grad for p in model.parameters()], "gradients")


MAKERS = {**METHODS, **VARIANTS}
