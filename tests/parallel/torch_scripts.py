"""Scripts in which workers do not all do the same in every step: scenarios of torch_scenarios.py."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import horovod.torch as hvd
import numpy as np
import torch
from oracle import Oracle
from torch_harness import (
    TorchOracle,
    assert_bits_equal,
    assert_ends_without_step,
    assert_same_on_all_ranks,
    base_optimizer,
    followed,
    gather_objects,
    impatient,
    message_of,
    net,
    net_loss,
    net_without_small_tensors,
    rank_data,
    train_and_compare,
    train_one_step_and_check,
)
from turns import taken

import horovod_quant.torch as hvq
from horovod_quant.torch import buckets
from horovod_quant.torch.buckets import Patience

DRAWS = int(os.environ.get("SCRIPT_DRAWS", "6"))
"""Of scripts, for each method."""


class Parts(torch.nn.Module):
    """Four layers that are compressed and one that is too small, used in whatever order and number."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(9)
        widths = [40] * (layers - 1) + [8]
        self.parts = torch.nn.ModuleList([torch.nn.Linear(40, width, bias=False) for width in widths])

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return sum(self.parts[i](x).pow(2).mean() * (i + 1) for i in used)


Batches = Sequence[Sequence[int]]
"""Which layers each backward pass of a worker reaches, in a step."""


class Step(NamedTuple):
    """What the workers do.

    Attributes:
        batches: of each worker.
        before, within, between, after: an operation of the script's own, before the first backward pass, after each,
            before ``synchronize``, and after the step: None, ``"named"`` or ``"unnamed"``.
        behind: the rank that comes late to its backward pass.
        late: the rank that comes late to ``between``.
    """

    batches: Sequence[Batches]
    before: str | None = None
    within: str | None = None
    between: str | None = None
    after: str | None = None
    behind: int | None = None
    late: int | None = None


def _operation(kind: str | None, name: str) -> None:
    if kind is not None:
        ones = torch.ones(1)
        total = hvd.allreduce(ones, op=hvd.Sum, name=name if kind == "named" else None)
        assert total.item() == hvd.size()


def perform(script: Sequence[Step], compressor: Any, passes: int = 1) -> None:
    """Runs a script under a DistributedOptimizer and checks all gradients; each bit, where they are compressed."""
    compressed = hasattr(compressor, "policy")
    model = Parts()
    names = dict(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()),
        model.named_parameters(),
        compression=compressor,
        backward_passes_per_step=passes,
    )
    oracle = Oracle(followed(compressor, optimizer)) if compressed else None
    for number, step in enumerate(script):
        # Every worker computes all workers' gradients: whatever is exchanged is what the script exchanges.
        everyone = [_gradients(model, number, own, rank) for rank, own in enumerate(step.batches)]
        optimizer.zero_grad()
        _operation(step.before, "before")
        if step.behind == hvd.rank():
            time.sleep(0.1)
        for batch, used in enumerate(step.batches[hvd.rank()]):
            _loss(model, number, batch, used, hvd.rank()).backward()
            _operation(step.within, "within")
        if step.late == hvd.rank():
            time.sleep(0.03)
        _operation(step.between, "between")
        optimizer.synchronize()
        for name, parameter in names.items():
            gradient = None if oracle is None else oracle.expected(everyone, name, 1.0 / hvd.size())
            if gradient is None:
                average = torch.from_numpy(sum(own[name] for own in everyone) / hvd.size())
                torch.testing.assert_close(parameter.grad, average)
            else:
                expected = torch.from_numpy(gradient).reshape(parameter.shape)
                assert_bits_equal(parameter.grad, expected, f"step {number}, {name}")
        with optimizer.skip_synchronize():
            optimizer.step()
        _operation(step.after, "after")
    assert_same_on_all_ranks(list(model.parameters()), "parameters")


def _loss(model: Parts, step: int, batch: int, used: Sequence[int], rank: int) -> torch.Tensor:
    return model(rank_data(10 * step + batch, 8, 40, rank=rank), used)


def _gradients(model: Parts, step: int, batches: Batches, rank: int) -> dict[str, np.ndarray]:
    """A worker's own, in the end."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for batch, used in enumerate(batches):
        _loss(twin, step, batch, used, rank).backward()
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
        for name, p in twin.named_parameters()
    }


ALL = (0, 1, 2, 3, 4)
FULL: Batches = (ALL,)
NONE: Batches = ()


def _everywhere(batches: Batches) -> list[Batches]:
    return [batches] * hvd.size()


def _but(rank: int, other: Batches, batches: Batches = FULL) -> list[Batches]:
    """One worker does something else."""
    return [other if each == rank % hvd.size() else batches for each in range(hvd.size())]


@impatient
def a_worker_skips_its_backward_pass(make: Any) -> None:
    """Its loss is not finite, or its batch is empty; all agree by a sum whether to step. Any rank, any step."""
    for rank in taken(0, -1):
        script = [Step(_everywhere(FULL), between="named") for _ in range(5)]
        script[2] = Step(_but(rank, NONE), between="named")
        perform(script, make())
        script[0] = Step(_but(rank, NONE), between="named", after="unnamed")
        perform(script, make(group_bytes=1))


@impatient
def a_worker_has_a_batch_less(make: Any) -> None:
    """Of the two whose gradients add up, in an epoch's last step."""
    last = Step(_but(-1, (ALL,), (ALL, ALL)), between="named")
    whole = Step(_everywhere((ALL, ALL)), within="unnamed", between="unnamed")
    perform([whole, whole, last, whole], make(), passes=2)


def operations_after_giving_up(make: Any) -> None:
    """Who has waited in vain at the end of its pass has launched fewer collectives than who comes late; operations
    without a name meet all the same.
    """
    for group_bytes in taken(1, 2**20):
        script = [
            Step(_everywhere(FULL), between="unnamed", after="unnamed", behind=(step % (hvd.size() + 1)))
            for step in range(5)
        ]
        with mock.patch.object(buckets, "PATIENCE", Patience(0.01)):
            perform(script, make(group_bytes=group_bytes))


def any_script(make: Any) -> None:
    """Scripts drawn at random; every fourth with Horovod alone first: where that does not hang, nor does this."""
    slow = hvd.size() > 2 and not hvd.mpi_enabled()
    for draw in range(DRAWS // 8 if slow else DRAWS):
        choose = random.Random(f"script {draw}")
        passes = choose.choice([1, 1, 2])
        script = [any_step(choose, passes, first=number == 0) for number in range(5)]
        if draw % 4 == 0:
            perform(script, hvd.Compression.none, passes)
        patience = Patience(choose.choice([0.0, 0.01, 0.1]))
        with mock.patch.object(buckets, "PATIENCE", patience):
            perform(script, make(group_bytes=choose.choice([1, 15000, 2**20])), passes)


def any_step(choose: random.Random, passes: int, first: bool) -> Step:
    usual = choose.random() < 0.5
    everyone = [_any_batches(choose, passes, usual) for _ in range(hvd.size())]
    # The gradients that have gone to Horovod before ``synchronize``.
    counts = {sum(sum(i in used for used in own) == passes for i in ALL) for own in everyone}
    anything = [None, "named", "unnamed"]
    alike = len(counts) == 1
    return Step(
        everyone,
        before=choose.choice(anything),
        between=choose.choice(anything if alike else [None, "named"]),
        after=choose.choice(anything),
        behind=choose.choice([None, None, None, choose.randrange(hvd.size())]),
        late=choose.choice([None, None, None, choose.randrange(hvd.size())]),
    )


def _any_batches(choose: random.Random, passes: int, usual: bool) -> Batches:
    """Every layer once a pass, or less of it; in one pass or in several."""
    order = choose.sample(ALL, len(ALL))
    kind = "full" if usual else choose.choice(["full", "skip", "part", "twice"])
    if kind == "skip":
        return NONE
    if kind == "part":
        order = order[: choose.randrange(1, len(ALL))]
    if passes == 2:
        return [order] * (choose.randrange(3) if kind != "full" else 2)
    if kind == "twice":
        cut = choose.randrange(1, len(ALL))
        return [order[:cut], order[cut:]]
    return [order]


@impatient
def a_worker_does_not_reach_the_second_optimizer(make: Any) -> None:
    """A backward pass for two optimizers, of which a batch of one worker has nothing for the second; either may be
    first in the alphabet.
    """
    for prefix in taken("a", "z"):
        trunk, head = net(seed=5), torch.nn.Linear(30, 40)
        optimizers = [
            _distributed(make(group_bytes=1), model, f"{name}.")
            for name, model in ((prefix, trunk), ("m", head))
        ]
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            middle = trunk(rank_data(step, 8, 40))
            loss = middle.pow(2).mean()
            if step in (0, 3) and hvd.rank() == hvd.size() - 1:
                pass
            else:
                loss = loss + head(middle).pow(2).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            _operation("unnamed", "")
        assert_same_on_all_ranks([*trunk.parameters(), *head.parameters()], "parameters")


def first_together_after_training_apart(make: Any) -> None:
    """Two models whose losses are added up after some steps, on every worker in another order."""
    models = [net(seed=5), net(seed=6)]
    optimizers = [_distributed(make(), model, f"{i}.") for i, model in enumerate(models)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()
    for step in range(3, 6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = models if hvd.rank() % 2 else models[::-1]
        sum(net_loss(model, step) for model in order).backward()
        for optimizer in optimizers:
            optimizer.step()
        _operation("unnamed", "")
    assert_same_on_all_ranks([p for model in models for p in model.parameters()], "parameters")


def _distributed(compressor: Any, model: torch.nn.Module, prefix: str = "") -> Any:
    return hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()),
        [(prefix + name, p) for name, p in model.named_parameters()],
        compression=compressor,
    )


class _HandsOn:
    """A user's compressor that does nothing but hand on to another."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compress(self, tensor: torch.Tensor) -> Any:
        return self._inner.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return self._inner.decompress(tensor, ctx)


def a_compressor_that_hands_on(make: Any) -> None:
    """With names and without; gradients in another order on every worker, and layers that none uses."""
    for named in (False, True):
        model = Parts(9)
        inner = make(**({"named_parameters": model.named_parameters()} if named else {}))
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(inner, model.parameters()), model.named_parameters(), compression=_HandsOn(inner)
        )
        clutter = [object() for _ in range(1000 * hvd.rank())]  # for another order of Horovod's sets
        for step in range(4):
            optimizer.zero_grad()
            used = [0, 1, 2, 3] if hvd.rank() == 0 else [2, 0, 3, 1]
            model(rank_data(step, 8, 40), used).backward()
            optimizer.step()
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
        assert inner.stats().total.bytes_sent > 0
        del clutter


def unnamed_tensors_of_other_shapes(make: Any) -> None:
    """All workers are told, at once; also where only the shapes differ, and not what is exchanged."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):  # which needs its optimizer
        return
    tensor = torch.randn(2000 + 3000 * hvd.rank())
    message = message_of(lambda: hvd.allreduce(tensor, compression=compressor))
    assert "unnamed" in message or "shape" in message, message
    tensor = torch.randn(2000).reshape([(40, 50), (50, 40)][hvd.rank() % 2])
    message = message_of(lambda: hvd.allreduce(tensor, compression=compressor))
    assert "unnamed: the workers did not send the same gradient" in message, message


def goes_on_after_tensors_that_differ(make: Any) -> None:
    """Of an exchange that was given up nothing is left over that a later one of the same name could meet."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):  # which needs its optimizer
        return
    for i in range(12):
        own = rank_data(i, 2000 + 3000 * hvd.rank())
        alike = [rank_data(i, 3000), rank_data(i + 1, 40, 50)]
        message_of(lambda: hvd.allreduce(own, compression=compressor), RuntimeError)  # noqa: B023
        message_of(
            lambda: hvd.grouped_allreduce([alike[0], own], name="some", compression=compressor),  # noqa: B023
            RuntimeError,
        )
        averages = [hvd.allreduce(alike[0], compression=compressor)]
        averages += hvd.grouped_allreduce(alike, name="some", compression=compressor)
        assert_same_on_all_ranks(averages, f"averages after {i + 1} errors")


def frozen_layers(make: Any) -> None:
    """Those that are frozen for some steps do not move then; others do, and they move again."""
    model, plain = net(), net()
    optimizer = _distributed(make(), model)
    steps = [None, None, False, None, True, None]
    for step, change in enumerate(steps):
        if change is not None:
            model[2].requires_grad_(change)
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        net_loss(model, step).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            is_frozen = name.startswith("2.") and step in (2, 3)
            moved = not torch.equal(p, dict(before.named_parameters())[name])
            assert moved != is_frozen, f"step {step}, {name}"
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
    del plain


def one_tensor_twice_in_a_group(make: Any) -> None:
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    tensor, other = rank_data(0, 2000), rank_data(1, 2000)
    expected = TorchOracle(compressor).expected(
        {"g.0": tensor, "g.1": other, "g.2": tensor}, 1.0 / hvd.size()
    )
    reduced = hvd.grouped_allreduce([tensor, other, tensor], name="g", compression=compressor)
    for i, gradient in enumerate(reduced):
        assert_bits_equal(gradient, expected[f"g.{i}"], f"g.{i}")


def copies_keep_their_names(make: Any) -> None:
    """A deep copy and an unpickled one exclude the same parameters, by the names that the first was given."""
    model = net()
    named = [(f"mine.{name}", p) for name, p in model.named_parameters()]
    original = make(named_parameters=named, exclude="mine.2.*")
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        fresh = net()
        optimizer = _distributed(copied, fresh)
        net_loss(fresh, 0).backward()
        optimizer.step()
        sent = {name: traffic.ratio for name, traffic in copied.stats().parameters.items()}
        assert set(sent) == {name for name, _ in named}
        assert sent["mine.2.weight"] == 1.0 < sent["mine.0.weight"], sent
        other = torch.nn.Sequential(torch.nn.Linear(50, 60))
        again = functools.partial(_one_step, pickle.loads(pickle.dumps(original)), other)
        message = message_of(again, ValueError)
        assert "named_parameters" in message


def _one_step(compressor: Any, model: torch.nn.Module) -> None:
    optimizer = _distributed(compressor, model)
    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()


def a_first_step_without_a_pass(make: Any) -> None:
    """On one worker, or a first step that reaches only part: exchanges overlap with later ones all the same."""
    for first in (NONE, ((0, 1),)):
        model = Parts()
        optimizer = _distributed(make(group_bytes=1), model)
        for step in range(4):
            batches = first if step == 0 and hvd.rank() == 0 else FULL
            optimizer.zero_grad()
            for used in batches:
                _loss(model, step, 0, used, hvd.rank()).backward()
            if step:
                assert_ends_without_step(optimizer)
            optimizer.step()


@impatient
def an_operation_on_either_side_of_the_step(make: Any) -> None:
    """One worker waits for a named operation before ``step()``, the others after it, from the first step or a later one
    on: Horovod alone has launched everything by then.
    """
    for first in taken(0, 3):
        model = net()
        optimizer = _distributed(make(), model)
        for step in range(first + 3):
            optimizer.zero_grad()
            if step >= first and hvd.rank() == 1:
                time.sleep(0.2)
            net_loss(model, step).backward()
            early = hvd.rank() == 0 and step >= first
            if early:
                _operation("named", "either side")
            optimizer.step()
            if not early:
                _operation("named", "either side")
        assert_same_on_all_ranks(list(model.parameters()), "parameters")


@impatient
def optimizers_in_another_order(make: Any) -> None:
    """Two share a backward pass, and every second worker steps them in the other order, from the first step or a later
    one on.
    """
    for first in taken(0, 3):
        models = [net(seed=5), torch.nn.Linear(30, 60)]
        optimizers = [_distributed(make(), model, f"{i}.") for i, model in enumerate(models)]
        for step in range(first + 3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            models[1](models[0](rank_data(step, 8, 40))).pow(2).mean().backward()
            if hvd.rank() == 1:
                time.sleep(0.1)
            for optimizer in optimizers if step < first or hvd.rank() % 2 else optimizers[::-1]:
                optimizer.step()
        assert_same_on_all_ranks([p for model in models for p in model.parameters()], "parameters")


def parameters_in_another_order(make: Any) -> None:
    """As of a list that a script makes from a set: the first step tells, and groups are the same all the same."""
    model = net()
    named = list(model.named_parameters())
    if hvd.rank() % 2:
        named.reverse()
    compressor = make(group_bytes=15000)
    if isinstance(compressor, hvq.BinSGDM):  # whose optimizer tells small parameters apart by their order
        return
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, [p for _, p in named]), named, compression=compressor
    )
    for step in range(3):
        train_one_step_and_check(compressor, model, optimizer, step)
    assert_same_on_all_ranks(list(model.parameters()), "parameters")


def unnamed_beside_a_process_set(make: Any) -> None:
    """Some workers train in a process set; after each of their steps all exchange something without a name."""
    import torch_scenarios

    process_set = torch_scenarios.SUBSET[0]
    model, compressor = net(), make()
    if process_set.included():
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()),
            model.named_parameters(),
            compression=compressor,
            process_set=process_set,
        )
    for step in range(4):
        if process_set.included():
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()
        _operation("unnamed", "")


@impatient
def process_sets_train_different_models(make: Any) -> None:
    """Two process sets have the same number of parameters, in other sizes or other groups, and one worker is late once.
    After each step all workers average something without a name.
    """
    import torch_scenarios

    first, second = torch_scenarios.SUBSET
    process_set = first if first.included() else second
    usual, small = (
        net(),
        torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in ((40, 9), (9, 9), (9, 30)))),
    )
    for model, group_bytes in ((usual, 32 << 20), (small, 32 << 20), (usual, 4096)):
        own = copy.deepcopy(usual if process_set is first else model)
        compressor = make(
            process_set=process_set, group_bytes=32 << 20 if process_set is first else group_bytes
        )
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, own.parameters()),
            [(f"{process_set.ranks[0]}.{name}", each) for name, each in own.named_parameters()],
            compression=compressor,
            process_set=process_set,
        )
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 and hvd.rank() == hvd.size() - 1:
                time.sleep(0.2)
            net_loss(own, step).backward()
            optimizer.step()
            _operation("unnamed", "")
        assert_same_on_all_ranks(list(own.parameters()), "parameters", process_set)


def shapes_that_differ(make: Any) -> None:
    """An error on every rank in the middle of exchanges; nothing of them meets those of the next model."""
    last = hvd.rank() == hvd.size() - 1
    for delays in ((0.0, 0.0), (0.05, 0.0), (0.0, 0.05)):
        model = net_without_small_tensors()
        if last:
            model[2] = torch.nn.Linear(60, 31, bias=False)
        compressor = make(group_bytes=4096)
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        time.sleep(delays[last])
        net_loss(model, 0).backward()
        time.sleep(delays[not last])
        message = message_of(optimizer.step, RuntimeError)
        assert "did not send the same gradient" in message, message
        train_and_compare(make(group_bytes=4096), model=net_without_small_tensors())
    gather_objects(None, hvd.global_process_set)


def fresh_names(make: Any) -> None:
    """A script that makes up a name for each tensor: what is kept for one is not kept for ever."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    tensor, most = rank_data(0, 1024), 20
    with mock.patch.object(buckets, "REMEMBERED_NAMES", most):
        for i in range(most + 5):
            hvd.allreduce(tensor, name=f"fresh.{i}", compression=compressor)
            hvd.grouped_allreduce([tensor, tensor[:9]], name=f"group.{i}", compression=compressor)
    kept = (compressor._direct._buckets, compressor._steps, compressor._chains)
    assert [len(each) for each in kept] == [most] * 3
    stats = compressor.stats()
    assert len(stats.parameters) == 1 + most + most // 2  # with each group's small tensor
    assert stats.parameters["(other names)"].bytes_sent > 0
    average = hvd.allreduce(tensor, name="plain")
    again = hvd.allreduce(tensor, name="fresh.0", compression=compressor)
    assert np.isfinite(again.numpy()).all()
    assert torch.dot(again, average) > 0


def more_names_than_are_remembered(make: Any) -> None:
    """Each step's random bits are new, also after the names' counts were forgotten, or saved and loaded."""
    compressor = make()
    if isinstance(compressor, hvq.BinSGDM):
        return
    tensor = rank_data(0, 1024)

    def step(compressor: Any) -> list[torch.Tensor]:
        names = [f"layer.{i}" for i in range(7)]
        single = [hvd.allreduce(tensor, name=name, compression=compressor) for name in names]
        return [*single, *hvd.grouped_allreduce([tensor, tensor], name="two", compression=compressor)]

    with mock.patch.object(buckets, "REMEMBERED_NAMES", 5):
        before = [step(compressor) for _ in range(3)]
        resumed = make()
        resumed.load_state_dict(compressor.state_dict())
        after = step(resumed)
    seen: set[bytes] = set()
    for tensors in [*before, after]:
        seen.update(each.numpy().tobytes() for each in tensors)
    assert len(seen) == 4 * 9, "a tensor was rounded as in an earlier step"
    assert_same_on_all_ranks(after, "after resuming")


@impatient
def it_says_what_it_waits_for(make: Any) -> None:
    """Where a worker is far behind, another says after a while for which gradient it waits, and goes on."""
    import logging

    from horovod_quant.transports.progress import PROGRESS

    heard: list[str] = []
    log, usual = logging.getLogger("horovod_quant"), PROGRESS.long
    PROGRESS.long = 0.3
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(hvd.broadcast_object(own_folder))

        def note(record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            (folder / str(hvd.rank())).touch()
            raise RuntimeError("as a script's handler may")

        handler = logging.Handler()
        handler.emit = note
        log.addHandler(handler)
        try:
            model = net()
            optimizer = _distributed(make(), model, "{layer}.")
            for step in range(2):
                optimizer.zero_grad()
                limit = time.monotonic() + 60.0
                while (
                    step == 1 and hvd.rank() == 1 and not (folder / "0").exists() and time.monotonic() < limit
                ):
                    time.sleep(0.05)
                net_loss(model, step).backward()
                _operation("named", "between")
                optimizer.step()
        finally:
            log.removeHandler(handler)
            PROGRESS.long = usual
        hvd.barrier()
    if hvd.rank() == 0:
        assert any("{layer}." in message and "step()" in message for message in heard), heard
        # Not only of this optimizer's step(): what another worker does before its own may wait for ever.
        assert all("a Horovod operation, named or not" in message for message in heard), heard
