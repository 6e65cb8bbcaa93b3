"""What DDP does with our hook. Each runs on every worker of a launch, see worker.py."""

from __future__ import annotations

import contextlib
import copy
import datetime
import importlib.util
import io
import os
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    DDPS_METHODS,
    Twin,
    assert_gradients,
    check_steps,
    data,
    everybody_raises,
    net,
    net_loss,
    optimizer_for,
    own_gradients,
    scenario,
    warned,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq
from horovod_quant.transports.torch_distributed import Connection

SMALL_BUCKETS = {"bucket_cap_mb": 0.01}
"""Several for the models here, from the second pass on."""


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


@scenario
def every_method_has_the_simulators_bits() -> None:
    for make in DDPS_METHODS.values():
        check_steps(make(seed=3), steps=3, **SMALL_BUCKETS)


class WithoutPairs:
    """A process group of Gloo that refuses what this package has for Gloo alone."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        assert name not in ("send", "recv"), f"{name} is for Gloo"
        return getattr(self._group, name)


@scenario
def nccls_collectives_give_the_same_bits() -> None:
    """Over Gloo, which can perform them, too."""
    make = Connection.__init__

    def as_for_nccl(connection: Connection, *arguments: Any) -> None:
        make(connection, *arguments)
        connection._is_gloo, connection._group = False, WithoutPairs(connection._group)

    with mock.patch.object(Connection, "__init__", as_for_nccl):
        for method in DDPS_METHODS.values():
            check_steps(method(seed=3), steps=2, **SMALL_BUCKETS)


@scenario
def policy_chooses_by_the_models_names() -> None:
    common = {"exclude": "0.*", "overrides": {"4.*": {"bits": 8}}, "min_elements": 50}
    state = check_steps(hvq.QSGD(bits=4, **common))
    sent = state.stats().parameters
    assert sent["0.weight"].ratio == 1
    assert 6 < sent["2.weight"].ratio / (2 / size()) < 9
    assert 3 < sent["4.weight"].ratio / (2 / size()) < 4.5
    everybody_raises(
        ValueError, "'nowhere.*' matches no parameter",
        lambda: hvq.ddp.register(DistributedDataParallel(net()), hvq.QSGD(exclude="nowhere.*")),
    )  # fmt: skip


@scenario
def names_that_a_compressor_was_given_count() -> None:
    model = net()
    named = [(f"their.{name}", each) for name, each in model.named_parameters()]
    state = hvq.ddp.register(DistributedDataParallel(model), hvq.QSGD(named_parameters=named))
    assert set(state._averager.bucket([]).rest) == set()
    assert {name for _, name in state._names.values()} == {name for name, _ in named}


@scenario
def parameters_that_are_not_used_by_all() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second = torch.nn.Linear(40, 60), torch.nn.Linear(40, 60)
            self.never = torch.nn.Linear(40, 60)

        def forward(self, values: torch.Tensor, which: int = 0) -> torch.Tensor:
            return (self.first, self.second)[which](values)

    def loss(model: Any, step: int, whose: int) -> torch.Tensor:
        return model(data(step, whose, 8, 40), (step + whose) % 2).square().mean()

    for view in (False, True):
        check_steps(
            hvq.QSGD(),
            Branches(),
            loss,
            5,
            find_unused_parameters=True,
            gradient_as_bucket_view=view,
            **SMALL_BUCKETS,
        )
    check_steps(hvq.BinSGDM(), Branches(), loss, 5, find_unused_parameters=True, **SMALL_BUCKETS)


@scenario
def gradients_that_are_views_of_buckets() -> None:
    check_steps(hvq.EDEN(), gradient_as_bucket_view=True, **SMALL_BUCKETS)


@scenario
def a_static_graph() -> None:
    check_steps(hvq.GlobalQSGD(), static_graph=True, **SMALL_BUCKETS)


@scenario
def accumulation_without_synchronizing() -> None:
    model, compression = net(), hvq.QSGD()
    twin = Twin(model, compression)
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, compression)
    for step in range(3):
        micro = [10 * step, 10 * step + 1, 10 * step + 2]
        expected = twin.expected(lambda each, whose: [net_loss(each, at, whose) for at in micro])  # noqa: B023
        ddp.zero_grad()
        with ddp.no_sync():
            for at in micro[:-1]:
                net_loss(ddp, at, rank()).backward()
        net_loss(ddp, micro[-1], rank()).backward()
        assert_gradients(model, expected, f"step {step}")
    assert set(state.state_dict()["exchanges"].values()) == {3}


@scenario
def narrow_gradients() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for view in (False, True):
            check_steps(hvq.QSGD(), net(dtype), gradient_as_bucket_view=view, steps=3)
    check_steps(hvq.QSGD(), net(torch.float64), steps=2)


@scenario
def inside_pytorchs_wrapper_for_float16() -> None:
    model = net()
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.State(ddp, hvq.QSGD())
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hvq.ddp.hook))
    twin = Twin(model, state.compression)
    for step in range(3):
        exact = twin.expected(lambda each, whose: [net_loss(each, step, whose)])  # noqa: B023
        ddp.zero_grad()
        net_loss(ddp, step, rank()).backward()
        for name, got in own_gradients(model).items():
            wanted, predicted = exact[name]
            error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
            assert error < (0.01 if predicted is None else 0.3), (name, error)
    assert set(state.state_dict()["exchanges"]) == {"0.weight", "2.weight", "4.weight"}


@scenario
def compiled_modules() -> None:
    check_steps(hvq.QSGD(), wrap=lambda ddp: torch.compile(ddp, backend="eager"))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(6)
    widths = [40, 512, 512, 512, 30]
    plain = torch.nn.Sequential(*[torch.nn.Linear(*each) for each in zip(widths, widths[1:])])
    inner = torch.compile(copy.deepcopy(plain), backend=backend)
    compression = hvq.QSGD()
    twin = Twin(plain, compression)
    ddp = DistributedDataParallel(inner, bucket_cap_mb=1)
    hvq.ddp.register(ddp, compression)
    for step in range(2):
        expected = twin.expected(lambda each, whose: [net_loss(each, step, whose)])  # noqa: B023
        ddp.zero_grad()
        net_loss(ddp, step, rank()).backward()
        assert_gradients(inner._orig_mod, expected)
    assert len(graphs) > 1, "torch.compile has not split the graph by DDP's buckets"


@scenario
def sparse_embeddings_are_averaged() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 40, sparse=True), torch.nn.Linear(40, 60))

    def loss(each: torch.nn.Module, step: int, whose: int) -> torch.Tensor:
        return each(torch.tensor([step, whose + 1, 50])).square().sum()

    compression = hvq.QSGD()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, compression)
    for step in range(3):
        total = torch.zeros(100, 40)
        for whose in range(size()):
            twin.zero_grad()
            loss(twin, step, whose).backward()
            total += twin[0].weight.grad.to_dense()
        ddp.zero_grad()
        loss(ddp, step, rank()).backward()
        torch.testing.assert_close(model[0].weight.grad.to_dense(), total / size())
    found = state.stats()
    assert found.uncounted == ("0.weight",)
    assert set(found.parameters) == {"1.weight", "1.bias"}


@scenario
def sparse_embeddings_beside_parameters_that_are_not_used() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.words = torch.nn.Embedding(100, 40, sparse=True)
            self.first, self.second = torch.nn.Linear(40, 60), torch.nn.Linear(40, 60)

        def forward(self, rows: torch.Tensor, which: int) -> torch.Tensor:
            return (self.first, self.second)[which](self.words(rows))

    def loss(each: torch.nn.Module, step: int, whose: int) -> torch.Tensor:
        return each(torch.tensor([step, whose + 1, 50]), (step + whose) % 2).square().sum()

    check_steps(hvq.QSGD(exclude="words.*"), Both(), loss, find_unused_parameters=True, **SMALL_BUCKETS)


@scenario
def experts_that_only_one_worker_uses() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.common = torch.nn.Linear(40, 40)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(40, 60) for _ in range(size()))

        def forward(self, values: torch.Tensor, which: int) -> torch.Tensor:
            return self.experts[which](torch.tanh(self.common(values)))

    def loss(each: torch.nn.Module, step: int, whose: int) -> torch.Tensor:
        return each(data(step, whose, 8, 40), whose).square().mean()

    check_steps(hvq.EDEN(), Experts(), loss, find_unused_parameters=True, **SMALL_BUCKETS)


@scenario
def modules_of_one_worker_that_ddp_ignores() -> None:
    """Of other shapes and names on each worker."""
    torch.manual_seed(5)
    width = 40 + 8 * rank()
    model = torch.nn.ModuleDict({"common": torch.nn.Linear(40, 40)})
    model[f"expert{rank()}"] = torch.nn.Linear(40, width)
    ignored = [name for name, _ in model.named_parameters() if name.startswith("expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    model.forward = lambda values: model[f"expert{rank()}"](model["common"](values))
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    for step in range(2):
        ddp(data(step, rank(), 8, 40)).square().mean().backward()
    assert set(state.stats().parameters) == {"common.weight", "common.bias"}
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, model["common"].weight.grad.numpy().tobytes())
    assert len(set(everyone)) == 1


@scenario
def a_worker_that_skips_a_backward_pass() -> None:
    """The others wait for it as long as their process group allows."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    ddp = DistributedDataParallel(net(), process_group=group, **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    for step in range(2):
        net_loss(ddp, step, rank()).backward()
    loss = net_loss(ddp, 2, rank())
    if rank() < size() - 1:
        everybody_raises(RuntimeError, "Timed out waiting", loss.backward)
    dist.barrier()
    if rank() == size() - 1:
        everybody_raises(RuntimeError, "another worker has failed first, rank", loss.backward)
    everybody_raises(RuntimeError, "Timed out waiting", state._driver.guard.require_sound)


@scenario
def models_of_subgroups_that_overlap() -> None:
    if size() < 3:
        group = dist.new_group([rank()], use_local_synchronization=True)
        check_steps(hvq.QSGD(seed=1), group=group)  # of one worker
        return
    everyone = [[0, 1], [1, 2]]
    groups = [dist.new_group(ranks) for ranks in everyone]
    for ranks, group in zip(everyone, groups):
        if rank() in ranks:
            check_steps(hvq.EDEN(), group=group)


@scenario
def two_models_at_once() -> None:
    first, second = net(seed=5), net(seed=6)
    compressions = hvq.QSGD(seed=1), hvq.EDEN(seed=2)
    twins = [Twin(model, each) for model, each in zip((first, second), compressions)]
    ddps = [DistributedDataParallel(model, **SMALL_BUCKETS) for model in (first, second)]
    for ddp, compression in zip(ddps, compressions):
        hvq.ddp.register(ddp, compression)
    for step in range(4):
        expected = [twin.expected(lambda each, whose: [net_loss(each, step, whose)]) for twin in twins]  # noqa: B023
        for ddp in ddps:
            ddp.zero_grad()
        losses = [net_loss(ddp, step, rank()) for ddp in ddps]
        if step % 2:
            sum(losses).backward()
        else:
            for loss in reversed(losses):
                loss.backward()
        for model, each in zip((first, second), expected):
            assert_gradients(model, each, f"step {step}")


@scenario
def a_gradient_that_is_not_finite_on_one_rank() -> None:
    """The scaler of every rank has to skip the step."""
    for make in DDPS_METHODS.values():
        model, compression = net(), make()
        ddp = DistributedDataParallel(model)
        own = optimizer_for(compression, model)
        hvq.ddp.register(ddp, compression, own)
        optimizer = own or torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, bad in enumerate((None, float("nan"), float("inf"), None)):
            before = [each.detach().clone() for each in model.parameters()]
            optimizer.zero_grad()
            loss = net_loss(ddp, step, rank())
            if bad is not None and rank() == size() - 1:
                loss = loss * bad
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(*pair) for pair in zip(before, model.parameters()))
            assert moved == (bad is None), (make, step)
        assert scaler.get_scale() == 256.0


@scenario
def a_checkpoint_resumes_to_the_bit() -> None:
    def trained(steps: range, saved: Any) -> tuple[Any, Any]:
        model = net()
        ddp = DistributedDataParallel(model)
        state = hvq.ddp.register(ddp, hvq.QSGD(seed=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if saved is not None:
            loaded = torch.load(io.BytesIO(saved))  # with its default, which unpickles no classes
            model.load_state_dict(loaded["model"])
            state.load_state_dict(loaded["compression"])
        for step in steps:
            optimizer.zero_grad()
            net_loss(ddp, step, rank()).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "compression": state.state_dict()}, file)
        return file.getvalue(), own_gradients(model)

    half, _ = trained(range(3), None)
    _, resumed = trained(range(3, 6), half)
    _, whole = trained(range(6), None)
    afresh = trained(range(3), None)[1]
    for name, values in whole.items():
        if values.size >= 1024:
            assert values.tobytes() == resumed[name].tobytes() != afresh[name].tobytes(), name
    state = hvq.ddp.register(DistributedDataParallel(net()), hvq.QSGD())
    everybody_raises(
        ValueError, "use what a compressor's state_dict() returned", lambda: state.load_state_dict({})
    )


@scenario
def counts_of_a_compressor_are_taken_over() -> None:
    """A checkpoint of Horovod's door is carried over so."""
    compression = hvq.QSGD()
    compression.load_state_dict({"exchanges": {"0.weight": 7}})
    state = hvq.ddp.register(DistributedDataParallel(net()), compression)
    assert state.state_dict() == {"exchanges": {"0.weight": 7}}


@scenario
def copies_and_pickles_of_models_work() -> None:
    model = net()
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, hvq.QSGD(bits=3))
    net_loss(ddp, 0, rank()).backward()
    for copied in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        hook, its_state = copied._comm_hooks[0]
        assert hook is hvq.ddp.hook
        assert its_state.state_dict() == state.state_dict()
        assert repr(its_state.compression) == repr(state.compression)
        everybody_raises(RuntimeError, "call hvq.ddp.register(ddp_model, state.compression)", its_state.stats)
        copied.zero_grad()
        hvq.ddp.register(copied, its_state.compression)
        net_loss(copied, 1, rank()).backward()
    ddp.zero_grad()
    net_loss(ddp, 1, rank()).backward()
    for name, values in own_gradients(model).items():
        assert values.tobytes() == own_gradients(copied.module)[name].tobytes() or values.size < 1024, name


@scenario
def copies_have_the_names_that_a_compressor_was_given() -> None:
    model = net()
    named = [(f"my.{name}", each) for name, each in model.named_parameters()]
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, hvq.QSGD(named_parameters=named, exclude="my.0.*"))
    net_loss(ddp, 0, rank()).backward()
    copies = [copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))]
    ddp.zero_grad()
    net_loss(ddp, 1, rank()).backward()
    for copied in copies:
        compression = copied._comm_hooks[0][1].compression
        copied.zero_grad()
        new = hvq.ddp.register(copied, compression)
        net_loss(copied, 1, rank()).backward()
        assert new.state_dict() == state.state_dict()
        for name, values in own_gradients(model).items():
            if values.size >= 1024 and not name.startswith("0."):
                assert values.tobytes() == own_gradients(copied.module)[name].tobytes(), name
    other = DistributedDataParallel(torch.nn.Linear(40, 60))
    detached = pickle.loads(pickle.dumps(state)).compression
    everybody_raises(ValueError, "this compressor is a copy", lambda: hvq.ddp.register(other, detached))


@scenario
def workers_that_run_out_of_data_join() -> None:
    model, compression = net(), hvq.QSGD()
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, compression)
    with ddp.join():
        for step in range(2 + rank()):
            net_loss(ddp, step, rank()).backward()
    assert set(state.state_dict()["exchanges"].values()) == {1 + size()}
    ddp = DistributedDataParallel(net())
    hvq.ddp.register(ddp, hvq.QSGD())

    def divided_otherwise() -> None:
        with ddp.join(divide_by_initial_world_size=False):
            net_loss(ddp, 0, rank()).backward()

    everybody_raises(
        Exception, "join(divide_by_initial_world_size=False) is not supported", divided_otherwise
    )


@scenario
def shared_weights_and_several_outputs() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.inner = torch.nn.Linear(40, 40)
            self.head, self.other = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
            self.head.weight = self.inner.weight

        def forward(self, values: torch.Tensor) -> Any:
            hidden = torch.tanh(self.inner(values))
            return self.head(hidden), {"other": self.other(hidden)}

    def loss(model: Any, step: int, whose: int) -> torch.Tensor:
        first, others = model(data(step, whose, 8, 40))
        return first.square().mean() + others["other"].abs().mean()

    check_steps(hvq.QSGD(), Tied(), loss, **SMALL_BUCKETS)


@scenario
def layers_frozen_between_constructions() -> None:
    model = net()
    check_steps(hvq.QSGD(exclude="0.bias"), model, steps=2)
    model.zero_grad()
    model[0].requires_grad_(False)
    state = check_steps(hvq.QSGD(exclude="0.bias"), model, steps=2)
    assert set(state.state_dict()["exchanges"]) == {"2.weight", "4.weight"}
    ddp = DistributedDataParallel(net(), find_unused_parameters=True)
    ddp.module[0].requires_grad_(False)
    hvq.ddp.register(ddp, hvq.QSGD())
    net_loss(ddp, 0, rank()).backward()
    assert all(own_gradients(ddp.module)[name].any() for name in ("2.weight", "4.weight"))


@scenario
def two_forward_passes_with_batch_norm() -> None:
    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 40))

    def loss(each: Any, step: int, whose: int) -> torch.Tensor:
        return (
            each(data(step, whose, 8, 40)).square().mean()
            + each(data(step + 1, whose, 8, 40)).square().mean()
        )

    check_steps(hvq.QSGD(), model, loss, broadcast_buffers=False)


@scenario
def empty_batches() -> None:
    def loss(model: Any, step: int, whose: int) -> torch.Tensor:
        rows = 0 if whose == step % size() else 8
        return model(data(step, whose, 8, 40)[:rows]).sum()

    check_steps(hvq.QSGD(), loss=loss)


@scenario
def layouts_that_are_not_contiguous() -> None:
    torch.manual_seed(9)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10))
    model = model.to(memory_format=torch.channels_last)

    def loss(each: Any, step: int, whose: int) -> torch.Tensor:
        return each(data(step, whose, 2, 8, 8, 8).to(memory_format=torch.channels_last)).square().mean()

    for view in (False, True):
        check_steps(hvq.EDEN(), copy.deepcopy(model), loss, steps=3, gradient_as_bucket_view=view)


@scenario
def collectives_of_the_script_in_the_backward_pass() -> None:
    """They are launched by another thread than ours, in another order on each worker."""
    model = net()

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(1000))
            return grad

    layers = [each for layer in model for each in (layer, torch.nn.Module())]
    for each in layers[1::2]:
        each.forward = Counts.apply
    whole = torch.nn.Sequential(*layers)
    ddp = DistributedDataParallel(whole, find_unused_parameters=True, **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    for step in range(20):
        net_loss(ddp, step, rank()).backward()
    assert set(state.state_dict()["exchanges"].values()) == {20}


@scenario
def an_error_beside_the_backward_pass_ends_everybody() -> None:
    model = net()
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    net_loss(ddp, 0, rank()).backward()
    if rank() == size() - 1:
        long = "planted" + 2000 * "."  # longer than what other workers receive
        state._averager._exchange = mock.Mock(side_effect=ZeroDivisionError(long))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: planted") as raised:
        net_loss(ddp, 1, rank()).backward()
    assert ("another worker has failed first" in str(raised.value)) == (rank() != size() - 1)
    first = f"rank {size() - 1}: ZeroDivisionError: planted"
    everybody_raises(RuntimeError, first, lambda: net_loss(ddp, 2, rank()).backward())
    everybody_raises(RuntimeError, first, state._driver.guard.require_sound)
    check_steps(hvq.QSGD(), steps=1)  # a new model works


@scenario
def an_error_before_the_thread_ends_all_workers() -> None:
    ddp = DistributedDataParallel(net(), **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    if rank() == size() - 1:
        state._names.clear()
    text = f"rank {size() - 1}: RuntimeError: ddp: a gradient of shape"
    everybody_raises(
        RuntimeError,
        "belongs to no parameter that the model had",
        lambda: net_loss(ddp, 0, rank()).backward(),
    )
    everybody_raises(RuntimeError, text, lambda: net_loss(ddp, 1, rank()).backward())


@scenario
def a_thread_that_ends_leaves_no_worker_waiting() -> None:
    ddp = DistributedDataParallel(net(), **SMALL_BUCKETS)
    hvq.ddp.register(ddp, hvq.QSGD())
    net_loss(ddp, 0, rank()).backward()
    with contextlib.ExitStack() as patches:
        if rank() == size() - 1:
            patches.enter_context(mock.patch("torch.cuda.stream", side_effect=MemoryError("planted")))
        for step in (1, 2):
            everybody_raises(
                RuntimeError,
                "MemoryError: planted",
                lambda: net_loss(ddp, step, rank()).backward(),  # noqa: B023
            )
    ddp = DistributedDataParallel(net(), **SMALL_BUCKETS)
    state = hvq.ddp.register(ddp, hvq.QSGD())
    state._driver._jobs.put(None)
    text = "the thread that averages gradients has ended"
    everybody_raises(RuntimeError, text, lambda: net_loss(ddp, 0, rank()).backward())
    everybody_raises(RuntimeError, text, state._driver.guard.require_sound)


@scenario
def arguments_that_differ_between_workers() -> None:
    bits = 8 if rank() == 0 else 4
    everybody_raises(
        ValueError, "here, but not on all other workers",
        lambda: hvq.ddp.register(DistributedDataParallel(net()), hvq.QSGD(bits=bits)),
    )  # fmt: skip
    nodes = size() if rank() == 0 else False
    everybody_raises(
        ValueError, f"hierarchical={nodes} here, but not on all other workers",
        lambda: hvq.ddp.register(DistributedDataParallel(net()), hvq.QSGD(hierarchical=nodes)),
    )  # fmt: skip
    model = net()
    given = [(f"{name}{'' if rank() else '?'}", each) for name, each in model.named_parameters()]
    everybody_raises(
        ValueError, "the parameters' names or shapes here are not those of all other workers",
        lambda: hvq.ddp.register(DistributedDataParallel(model), hvq.QSGD(named_parameters=given)),
    )  # fmt: skip


@scenario
def a_switch_that_differs_between_workers() -> None:
    def switched(value: str) -> hvq.QSGD:
        with mock.patch.dict("os.environ", HOROVOD_QUANT_DISABLE=value):
            return hvq.QSGD()

    ddp, own = DistributedDataParallel(net()), "1" if rank() == size() - 1 else "0"
    text = "here, but not on all other workers"
    everybody_raises(ValueError, text, lambda: hvq.ddp.register(ddp, switched(own)))
    state = hvq.ddp.register(ddp, switched("1"))
    net_loss(ddp, 0, rank()).backward()
    assert state.stats().total.ratio == 1


@scenario
def what_is_refused() -> None:
    def refused(text: str, compression: Any, **arguments: Any) -> None:
        ddp = DistributedDataParallel(net(), **arguments)
        everybody_raises(ValueError, text, lambda: hvq.ddp.register(ddp, compression))

    refused("Auto() measures methods in steps of Horovod's optimizer", hvq.Auto())
    refused(
        "but was used with no optimizer; give hvd.DistributedOptimizer, or hvq.ddp.register", hvq.BinSGDM()
    )
    ddp, part = DistributedDataParallel(net()), hvq.optim.BinSGDM(net().parameters())
    text = "ddp: 0.weight is not among the optimizer's parameters"
    everybody_raises(ValueError, text, lambda: hvq.ddp.register(ddp, hvq.BinSGDM(), part))
    text = "ddp: optimizer=BinSGDM(...) is for compression=hvq.BinSGDM(); leave it out"
    everybody_raises(ValueError, text, lambda: hvq.ddp.register(ddp, hvq.QSGD(), part))
    views = DistributedDataParallel(net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    own = hvq.optim.BinSGDM(views.parameters())
    text = "a parameter that no worker uses gets bits as its gradient"
    everybody_raises(ValueError, text, lambda: hvq.ddp.register(views, hvq.BinSGDM(), own))
    refused("is no compressor", "qsgd")
    refused("nmse_every=5 measures gradients of Horovod's optimizer", hvq.EDEN(nmse_every=5))
    refused("process_set= is for training under Horovod", hvq.QSGD(process_set=mock.Mock(process_set_id=3)))
    refused(
        "workers cannot form nodes of 7",
        hvq.QSGD(hierarchical=7),
    )
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") != "1":
        refused("kernels='triton': the gradients are in host memory", hvq.QSGD(kernels="triton"))
    everybody_raises(ValueError, "ddp_model=Sequential(...)", lambda: hvq.ddp.register(net(), hvq.QSGD()))
    wide = torch.nn.Linear(40, 60, dtype=torch.complex64)
    everybody_raises(
        TypeError, "a gradient of dtype torch.complex64 cannot be quantized",
        lambda: hvq.ddp.register(DistributedDataParallel(wide), hvq.QSGD()),
    )  # fmt: skip
    from torch.nn.parallel.distributed import _MixedPrecision

    mixed = _MixedPrecision(param_dtype=torch.float16)
    refused("registers another hook", hvq.QSGD(), mixed_precision=mixed)
    ddp = DistributedDataParallel(net())
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    text = "an optimizer that steps in the backward pass registers another hook"
    everybody_raises(ValueError, text, lambda: hvq.ddp.register(ddp, hvq.QSGD()))
    ddp = DistributedDataParallel(net())
    hvq.ddp.register(ddp, hvq.QSGD())
    everybody_raises(RuntimeError, "", lambda: hvq.ddp.register(ddp, hvq.QSGD()))
    state = hvq.ddp.register(DistributedDataParallel(net()), hvq.QSGD())
    everybody_raises(TypeError, "python_reducer", lambda: hvq.ddp.hook(state, (torch.zeros(3),)))


@scenario
def a_method_that_sends_more_than_float32() -> None:
    compression = hvq.QSGD(16, exchange="allgather")
    at_rank_0_of_4 = int(rank() == 0 and size() > 3)
    with warned(f"times the bytes of float32 among {size()} workers", at_rank_0_of_4):
        for _ in range(2):
            hvq.ddp.register(DistributedDataParallel(net()), compression)


@scenario
def a_model_of_which_nothing_is_compressed() -> None:
    with warned("compresses nothing"):
        hvq.ddp.register(DistributedDataParallel(torch.nn.Linear(4, 4)), hvq.QSGD())
    ddp = DistributedDataParallel(net())
    state = hvq.ddp.register(ddp, hvq.QSGD(min_elements=10**6))
    net_loss(ddp, 0, rank()).backward()
    assert state.stats().total.ratio == 1


@scenario
def complex_parameters_that_are_excluded() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.wide = torch.nn.Parameter(torch.randn(40, 3, dtype=torch.complex64).t())
            self.plain = torch.nn.Linear(40, 60)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.plain(values) + (values[:, None] * self.wide).abs().sum()

    model = Both()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    hvq.ddp.register(ddp, hvq.QSGD(exclude="wide", named_parameters=model.named_parameters()))
    ddp(data(0, rank(), 8, 40)).sum().backward()
    total = torch.zeros(3, 40, dtype=torch.complex64)
    for whose in range(size()):
        twin.zero_grad()
        twin(data(0, whose, 8, 40)).sum().backward()
        total += twin.wide.grad
    torch.testing.assert_close(model.wide.grad, total / size())


@scenario
def nodes_average_first() -> None:
    if size() < 4:
        check_steps(hvq.QSGD(hierarchical=size()), steps=2)  # one node: nothing is quantized
        check_steps(hvq.QSGD(hierarchical=1), steps=2)
        return
    for make in DDPS_METHODS.values():
        check_steps(make(hierarchical=2), steps=2, **SMALL_BUCKETS)
    check_steps(hvq.QSGD(hierarchical=2, inside=8), steps=2)
    check_steps(hvq.QSGD(hierarchical=2, inside="float16"), steps=2)


@scenario
def binsgdm_moves_every_element_by_its_rate() -> None:
    """By as much as an optimizer that gets the simulator's bits; all workers stay equal."""
    for make in (hvq.BinSGDM, lambda: hvq.BinSGDM(server_bits=3), lambda: hvq.BinSGDM(hierarchical=2)):
        if size() % 2 and make().hierarchical:
            continue
        for arguments in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            model, compression = net(), make()
            twin = Twin(model, compression)
            ddp = DistributedDataParallel(model, **arguments, **SMALL_BUCKETS)
            optimizer = hvq.optim.BinSGDM(model.parameters(), lr=0.01, weight_decay=0.1)
            hvq.ddp.register(ddp, compression, optimizer)
            for step in range(4):
                optimizer.zero_grad()
                expected = twin.expected(lambda each, whose: [net_loss(each, step, whose)])  # noqa: B023
                net_loss(ddp, step, rank()).backward()
                assert_gradients(model, expected, f"step {step}")
                with torch.no_grad():
                    for name, each in twin.model.named_parameters():
                        bits = expected[name][1]
                        if bits is not None:
                            each.mul_(1 - 0.01 * 0.1).sub_(0.01 * torch.from_numpy(bits).view_as(each))
                optimizer.step()
                for name, each in twin.model.named_parameters():
                    own = dict(model.named_parameters())[name].detach()
                    if expected[name][1] is None:  # a small one, for which the optimizer draws bits itself
                        each.data.copy_(own)
                    assert torch.allclose(own, each, rtol=0, atol=1e-6), (name, step)
            optimizer.gather_state()
            _assert_equal_everywhere([each.detach() for each in model.parameters()])
            sizes = {each["momentum"].numel() for each in optimizer.state_dict()["state"].values()}
            assert sizes == {each.numel() for each in model.parameters()}


def _assert_equal_everywhere(tensors: list[torch.Tensor]) -> None:
    own = torch.cat([each.reshape(-1) for each in tensors])
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)


@scenario
def binsgdms_state_spread_over_a_node_is_gathered() -> None:
    """As it would be on workers that each store all of it, since a node's workers have equal gradients here."""
    if size() % 2:
        return
    found = []
    for hierarchical in (False, 2):
        model = net()
        ddp = DistributedDataParallel(model)
        optimizer = hvq.optim.BinSGDM(model.parameters(), lr=0.01, clip_norm=0.5)
        hvq.ddp.register(ddp, hvq.BinSGDM(hierarchical=hierarchical), optimizer)
        for step in range(3):
            ddp.zero_grad()
            net_loss(ddp, step, rank() // 2).backward()
        if hierarchical:
            everybody_raises(RuntimeError, "call the optimizer's gather_state()", optimizer.state_dict)
        optimizer.gather_state()
        found.append(optimizer.state_dict()["state"])
    for number, state in found[0].items():
        assert state["step"] == found[1][number]["step"]
        for name in ("momentum", "scale"):
            assert torch.allclose(state[name], found[1][number][name], rtol=1e-5, atol=1e-7), (number, name)


@scenario
def a_second_pass_over_binsgdms_bits() -> None:
    """It would add a gradient to bits."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = hvq.optim.BinSGDM(model.parameters(), lr=0.01)
    hvq.ddp.register(ddp, hvq.BinSGDM(), optimizer)
    for step in range(2):
        with ddp.no_sync():
            net_loss(ddp, step, rank()).backward()
        net_loss(ddp, step + 5, rank()).backward()
        assert set(own_gradients(model)["2.weight"]) <= {-1.0, 1.0}
        if step:
            optimizer.step()
        optimizer.zero_grad()
    net_loss(ddp, 7, rank()).backward()
    everybody_raises(
        RuntimeError, "use ddp_model.no_sync() for all backward passes of a step but the last",
        lambda: net_loss(ddp, 8, rank()).backward(),
    )  # fmt: skip


@scenario
def hosts_are_nodes() -> None:
    """All workers here share one, so nothing is quantized."""
    model = net()
    twin = Twin(model, hvq.QSGD())
    ddp = DistributedDataParallel(model)
    hvq.ddp.register(ddp, hvq.QSGD(hierarchical=True))
    expected = twin.expected(lambda each, whose: [net_loss(each, 0, whose)])
    net_loss(ddp, 0, rank()).backward()
    for name, got in own_gradients(model).items():
        assert np.allclose(got, expected[name][0], rtol=1e-4, atol=1e-6), name


@scenario
def three_bits_are_a_ninth_of_float32() -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    ddp = DistributedDataParallel(model)
    state = hvq.ddp.register(ddp, hvq.EDEN(bits=3, server_bits=3))
    for step in range(3):
        ddp(data(step, rank(), 8, 512)).square().mean().backward()
    traffic = state.stats().total
    assert traffic.bytes_sent < 0.11 * traffic.float32_bytes
    assert (
        traffic.float32_bytes
        == 3 * sum(4 * each.numel() for each in model.parameters()) * 2 * (size() - 1) / size()
    )
