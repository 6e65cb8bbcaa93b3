"""The compressor that finds its method by itself: scenarios of torch_scenarios.py. Gradients are compared by bits."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from oracle import Oracle
from torch_harness import (
    assert_bits_equal,
    assert_same_on_all_ranks,
    followed,
    gather_objects,
    message_of,
    net,
    net_loss,
    net_without_small_tensors,
)
from torch_scripts import any_step, perform
from turns import taken

import horovod_quant.torch as hvq
from horovod_quant.autotune import trial
from horovod_quant.torch import buckets
from horovod_quant.torch.buckets import Patience

METHODS = ["qsgd-8", "global-qsgd-8", "eden-2"]

SHORT = {"ROUNDS": 2, "MEASURED": 1, "FIRST_WARM_UP": 1, "WARM_UP": 1}


def _short_trials() -> Any:
    return mock.patch.multiple(trial, **SHORT)


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What is written to the log meanwhile."""
    lines: list[str] = []
    log, handler = logging.getLogger("horovod_quant"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _steps_of_a_trial() -> int:
    """With the first step, and the one that decides."""
    return len(trial.timetable(1 + len(METHODS))) + 2


class _Training:
    """A model that an Auto trains; every step's gradients are those of the method whose turn it is."""

    def __init__(self, auto: Any, model: torch.nn.Module, prefix: str = "", **distributed: Any) -> None:
        self.auto, self.model, self.methods = auto, model, []
        self.names = {prefix + name: p for name, p in model.named_parameters()}
        self.passes = distributed.get("backward_passes_per_step", 1)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), self.names.items(), compression=auto, **distributed
        )
        self._oracle = Oracle(followed(auto, self.optimizer))

    def _gradients(self, number: int, rank: int) -> dict[str, Any]:
        """A worker's own."""
        twin = copy.deepcopy(self.model)
        twin.zero_grad()
        self._backward(twin, number, rank)
        return {name: p.grad.numpy() for name, p in zip(self.names, twin.parameters())}

    def _backward(self, model: torch.nn.Module, number: int, rank: int) -> None:
        for batch in range(self.passes):
            net_loss(model, number * self.passes + batch, rank).backward()

    def step(self, number: int, late: int | None = None) -> None:
        """Checks it; ``late``: the rank that is."""
        # Every worker computes all workers' gradients: whatever is exchanged is what is tried here.
        everyone = [self._gradients(number, rank) for rank in range(hvd.size())]
        self.optimizer.zero_grad()
        if late == hvd.rank():
            time.sleep(0.02)
        self._backward(self.model, number, hvd.rank())
        self.optimizer.synchronize()
        for name, parameter in self.names.items():
            expected = self._oracle.expected(everyone, name, 1.0 / hvd.size())
            if expected is None:
                average = torch.from_numpy(sum(own[name] for own in everyone) / hvd.size())
                torch.testing.assert_close(parameter.grad, average)
            else:
                exact = torch.from_numpy(expected).reshape(parameter.shape).to(parameter.dtype)
                assert_bits_equal(parameter.grad, exact, f"step {number}, {name}")
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        policy = self.auto.session_of(self.optimizer).policy
        self.methods.append("none" if policy is None else str(policy.scheme))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(len(self.methods))
        assert_same_on_all_ranks(list(self.model.parameters()), "parameters")


def auto_tries_all_and_all_choose_alike() -> None:
    """Whole trials, among workers of which another is late in each step; with accumulation, groups, small models."""
    for model, options in (
        (net(), {}),
        (net_without_small_tensors(), {"backward_passes_per_step": 2}),
        (net(torch.float64), {"num_groups": 2}),
    ):
        auto = hvq.Auto(methods=METHODS)
        training = _Training(auto, model, **options)
        assert str(auto.report()) == "tuning: not begun"
        with _short_trials(), _logged() as lines:
            count = _steps_of_a_trial()
            for step in range(count):
                training.step(step, late=step % (hvd.size() + 1))
                if 0 < step < count - 1:
                    steps = len(trial.timetable(1 + len(METHODS)))
                    assert str(auto.report()) == f"tuning: step {step} of {steps}"
        report = auto.report()
        assert str(report).startswith(f"chose {report.method}: "), report
        if hvd.rank() == 0:
            assert lines[0] == f"horovod_quant: Auto: tuning: step 0 of {report.steps}"
            assert lines[-1] == f"horovod_quant: Auto {report}"
        else:
            assert not lines
        assert [each.method for each in report.measurements] == ["none", *METHODS]
        assert all(0 < each.exchange < each.whole for each in report.measurements), report
        assert len(set(training.methods)) == 4
        training.steps(3)
        assert len(set(training.methods[count:])) == 1
        assert len(set(map(str, gather_objects((report, training.methods), hvd.global_process_set)))) == 1
        choice = {"method": report.method, "workers": hvd.size()}
        assert list(auto.state_dict()["choices"].values()) == [choice]


def auto_is_horovod_itself_where_nothing_pays() -> None:
    """Once none is chosen, and in the steps before, no operation is started but Horovod's own; and no bit is other."""
    auto, model, plain = hvq.Auto(methods=METHODS), net(), net()
    auto.load_state_dict(_state(min(dict(model.named_parameters())), "none"))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(each.parameters(), lr=0.05), each.named_parameters(), compression=compression
        )
        for each, compression in ((model, auto), (plain, hvd.Compression.none))
    ]
    for step in range(4):
        for each, optimizer in zip((model, plain), optimizers):
            optimizer.zero_grad()
            before = hvd.allreduce_async(torch.ones(1), name="before")
            net_loss(each, step).backward()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), "unnamed, by its number"
            pointers = [p.grad.data_ptr() for p in each.parameters()]
            optimizer.synchronize()
            after = hvd.allreduce_async(torch.ones(1), name="after")
            own = 2 if step == 0 and each is model else 0  # arguments, and what each knows
            assert after - before - 2 == 6 + own, f"step {step}"
            if step:
                assert pointers == [p.grad.data_ptr() for p in each.parameters()]
            hvd.synchronize(before)
            hvd.synchronize(after)
            with optimizer.skip_synchronize():
                optimizer.step()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p, q)
    assert auto.report() == trial.Report("none", (), hvd.size())
    elements = sum(p.numel() for p in model.parameters())
    traffic = auto.stats().total
    assert traffic.bytes_sent == traffic.float32_bytes > 4 * elements * (hvd.size() - 1) / hvd.size()

    counting = hvq.Auto(methods=METHODS[:1], again_after=10**6)  # whose steps go on to count
    counting.load_state_dict(_state(min(dict(net().named_parameters())), "none"))
    training = _Training(counting, net())
    training.steps(2)
    before = counting.stats().total.bytes_sent
    training.steps(3)
    assert counting.stats().total.bytes_sent == before * 5 / 2


def _state(label: str, method: str, workers: int = 0) -> dict[str, Any]:
    choice = {"method": method, "workers": workers or hvd.size()}
    return {"exchanges": {}, "version": 2, "choices": {label: choice}}


def auto_knows_a_choice_from_one_worker() -> None:
    """As where rank 0 alone has loaded a checkpoint; not one of another number of workers, or two different ones."""
    label = min(dict(net().named_parameters()))
    last = hvd.rank() == hvd.size() - 1
    for states, expected in (
        ([_state(label, "eden-2"), None], "eden-2"),
        ([None, _state(label, "global-qsgd-8")], "global-qsgd-8"),
        ([_state(label, "eden-2"), _state(label, "none")], None),
        ([_state(label, "eden-2", hvd.size() + 1)] * 2, None),
        ([_state(label, "qsgd-3")] * 2, None),
    ):
        auto = hvq.Auto(methods=METHODS)
        if states[last] is not None:
            auto.load_state_dict(states[last])
        training = _Training(auto, net())
        training.steps(3)
        report = auto.report()
        assert report.method == expected
        assert report.measurements == ()
        others = set(training.methods[1:])
        assert (others == {"none"}) == (expected is None), others
    other = _Training(auto, net(), "other.")  # of the same compressor
    other.steps(1)
    assert auto.report(other.optimizer).method is None
    torch.manual_seed(0)
    wider = torch.nn.Sequential(torch.nn.Linear(40, 90), *[torch.nn.Tanh()] * 3, torch.nn.Linear(90, 30))
    of_other_sizes = _Training(auto, wider)
    of_other_sizes.steps(1)
    assert auto.session_of(of_other_sizes.optimizer).label == label
    assert auto.report(of_other_sizes.optimizer).method is None
    resumed = hvq.Auto(methods=METHODS)
    resumed.load_state_dict(auto.state_dict())
    assert resumed.state_dict() == auto.state_dict()


def auto_where_horovod_waits_for_no_gradient() -> None:
    """Scripts empty Horovod's set of the gradients that a step waits for; steps count nevertheless."""
    auto = hvq.Auto(methods=METHODS)
    training = _Training(auto, net())
    training.optimizer._requires_update = set()
    with _short_trials():
        training.steps(_steps_of_a_trial())
    assert auto.report().method is not None


def auto_in_any_script() -> None:
    """Workers skip backward passes, or run part of one, or two, in the middle of trials, with operations in between."""
    with _short_trials():
        for draw in taken(0, 1, 2):
            choose = random.Random(f"auto {draw}")
            passes = choose.choice([1, 2])
            script = [
                any_step(choose, passes, first=number == 0) for number in range(_steps_of_a_trial() + 2)
            ]
            with mock.patch.object(buckets, "PATIENCE", Patience(0.01)):
                auto = hvq.Auto(methods=METHODS, group_bytes=choose.choice([1, 2**20]))
                perform(script, auto, passes)
            assert auto.report().method is not None


def auto_with_values_that_are_not_finite() -> None:
    """In a gradient that tells who is there, among others; the trial goes on, and so does a scaler of losses."""
    auto, model = hvq.Auto(methods=METHODS), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=auto
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    with _short_trials():
        for step in range(_steps_of_a_trial()):
            broken = step % 3 == 1
            optimizer.zero_grad()
            loss = net_loss(model, step)
            if broken and hvd.rank() == step % hvd.size():
                loss = loss * float("nan" if step % 2 else "inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            assert any(bool((~p.grad.isfinite()).any()) for p in model.parameters()) == broken, step
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert auto.report().method is not None
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def auto_while_the_model_changes() -> None:
    """The parameter whose gradient tells who is there is frozen in the middle of a trial, and thawed."""
    auto, model = hvq.Auto(methods=METHODS), net()
    training = _Training(auto, model)
    witness = model[4].bias
    with _short_trials():
        for step in range(_steps_of_a_trial()):
            if step == 3:
                witness.requires_grad_(False)
                training.optimizer._requires_update.discard(witness)
                del training.names["4.bias"]
            if step == 7:
                witness.requires_grad_(True)
            optimizer = training.optimizer
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()
            assert_same_on_all_ranks(list(model.parameters()), "parameters")
    assert auto.report().method is not None


def auto_with_a_frozen_copy_on_one_worker() -> None:
    """It has names that come first, and gradients large enough to be compressed; the others' choice is the same."""
    for trained, steps in ((net(), _steps_of_a_trial()), (torch.nn.Linear(40, 2), 3)):
        model = torch.nn.ModuleDict({"trained": trained})
        if hvd.rank() == 0:
            model["copy"] = net(seed=3).requires_grad_(False)
        auto = hvq.Auto(methods=METHODS, named_parameters=model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=auto
        )
        with _short_trials():
            for step in range(steps):
                optimizer.zero_grad()
                net_loss(trained, step).backward()
                optimizer.step()
        assert_same_on_all_ranks(list(trained.parameters()), "parameters")
        methods = gather_objects(auto.report().method, hvd.global_process_set)
        assert len(set(methods)) == 1, methods
        assert steps > 3 or methods[0] == "none", methods


def auto_with_two_optimizers_again_and_again() -> None:
    """Each has a trial of its own, in a backward pass that they share, and another one after some steps."""
    auto = hvq.Auto(methods=METHODS[:1], again_after=3)
    models = [net(seed=5), net_without_small_tensors()]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            [(f"{side}.{name}", p) for name, p in model.named_parameters()],
            compression=auto,
        )
        for side, model in zip("ab", models)
    ]
    decided = []
    with _short_trials():
        length = len(trial.timetable(2)) + 1
        for step in range(1 + 2 * (length + 3) + length):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(net_loss(model, step) for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
            decided.append([id(auto.report(optimizer).measurements) for optimizer in optimizers])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    for own in zip(*decided):
        changes = [step for step, (one, other) in enumerate(zip(own, own[1:]), 1) if one != other]
        assert changes == [length, 2 * length + 3, 3 * length + 6], changes
    assert_same_on_all_ranks([p for model in models for p in model.parameters()], "parameters")
    assert len(auto.state_dict()["choices"]) == 2


def auto_says_what_is_wrong() -> None:
    tensor = torch.ones(2000)
    message = message_of(lambda: hvd.allreduce(tensor, name="x", compression=hvq.Auto()), ValueError)
    assert "x: compression=Auto(...) measures the steps of an hvd.DistributedOptimizer" in message
    assert hvd.allreduce(tensor.int(), op=hvd.Sum, compression=hvq.Auto()).tolist() == [hvd.size()] * 2000

    def first_step(auto: Any, optimizer: Any = torch.optim.SGD) -> tuple[Any, Any]:
        model = net()
        wrapped = hvd.DistributedOptimizer(
            optimizer(model.parameters(), lr=0.1), model.named_parameters(), compression=auto
        )
        return wrapped, net_loss(model, 0)

    _, loss = first_step(hvq.Auto(), hvq.optim.BinSGDM)
    assert "compression=hvq.BinSGDM()" in message_of(loss.backward, ValueError)
    _, loss = first_step(hvq.Auto(exclude="*.wait"))
    assert "matches no parameter" in message_of(loss.backward, ValueError)
    last = hvd.rank() == hvd.size() - 1
    for argument, values in (
        ("max_nmse", (0.04, 0.09)),
        ("methods", (["eden-3"], ["eden-2"])),
        ("seed", (0, 1)),
    ):
        optimizer, loss = first_step(hvq.Auto(**{argument: values[last]}))
        loss.backward()
        message = message_of(optimizer.step, RuntimeError)
        assert f"Auto has {argument}=" in message, message
        assert "same arguments" in message
        for handle, _ in optimizer._handles.values():
            with contextlib.suppress(ValueError):  # those that have been synchronized
                hvd.synchronize(handle)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training = _Training(hvq.Auto(min_elements=10**6), net())
        training.steps(2)
    assert "compresses nothing" in str(warned[0].message)
    assert training.auto.report().method == "none"


def auto_among_workers_that_join() -> None:
    """Workers' data is at an end after different numbers of steps, from the first step on; what they miss counts for
    nobody, so that turns and the choice are the same ones when all are there again.
    """
    size, rank = hvd.size(), hvd.rank()
    auto, model = hvq.Auto(methods=METHODS, again_after=4), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=auto
    )
    own_steps = ([0, 3, 2], [2, 5, 3], [4, 2, 6], [9, 7, 8], [3, 3, 2], [12, 14, 15])
    with _short_trials():
        number = 0
        for epoch in own_steps:
            for _ in range(epoch[rank % 3]):
                optimizer.zero_grad()
                net_loss(model, number).backward()
                optimizer.step()
                number += 1
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            phases = gather_objects(_phase(auto, optimizer), hvd.global_process_set)
            assert len(set(map(str, phases))) == 1, phases
    assert auto.report().method is not None
    counts = gather_objects(auto.state_dict()["exchanges"], hvd.global_process_set)
    assert len(set(map(str, counts))) > 1 or size == 1


def _phase(auto: Any, optimizer: Any) -> Any:
    session = auto.session_of(optimizer)
    if session is None:  # that has not been in any step
        return "opening", None, 0
    return session._phase, session._trial.current if session._phase == "trial" else None, session._counted
