"""What torch_scenarios.py tries, with hierarchical exchanges. Run by worker.py; see test_hierarchical_exchange.py."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from torch_harness import (
    METHODS,
    VARIANTS,
    assert_bits_equal,
    assert_same_on_all_ranks,
    base_optimizer,
    gather_objects,
    message_of,
    net,
    net_loss,
    net_without_small_tensors,
    rank_data,
    train_and_compare,
)
from torch_scenarios import clean, finish  # noqa: F401 (part of a module of scenarios)

import horovod_quant.torch as hvq
from horovod_quant.autotune import trial

HIERARCHICAL: Any = {"True": True}.get(os.environ["HIERARCHICAL"]) or int(os.environ["HIERARCHICAL"])
"""What the compressors are told."""

MAKERS = {
    name: functools.partial(make, hierarchical=HIERARCHICAL) for name, make in {**METHODS, **VARIANTS}.items()
}


def start() -> int:
    static = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1"
    hvd.init(
        process_sets=hvq.hierarchical_process_sets(None if HIERARCHICAL is True else HIERARCHICAL)
        if static
        else []
    )
    torch.set_num_threads(1)
    return hvd.rank()


def a_tensor_smaller_than_the_node() -> None:
    """Not every worker owns a part of it."""
    for method, make in METHODS.items():
        if method != "binsgdm":
            torch.manual_seed(3)
            model = torch.nn.Linear(10, 30, bias=False)
            compressor = make(hierarchical=HIERARCHICAL, min_elements=0)
            train_and_compare(compressor, model=model, loss=_small_loss, steps=2)


def what_travels_inside() -> None:
    for inside in ("float16", 8):
        for make in METHODS.values():
            train_and_compare(make(hierarchical=HIERARCHICAL, inside=inside), steps=2)


def auto_between_nodes() -> None:
    """A whole trial of it; every method that it tries is hierarchical."""
    auto, model = hvq.Auto(methods=["qsgd-4"], hierarchical=HIERARCHICAL), net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=auto
    )
    with mock.patch.multiple(trial, ROUNDS=1, MEASURED=1):
        for step in range(len(trial.timetable(2)) + 3):
            optimizer.zero_grad()
            net_loss(model, step).backward()
            optimizer.step()
            assert_same_on_all_ranks(list(model.parameters()), "parameters")
    tried = [each.method for each in auto.report().measurements] if hvd.size() > 1 else []
    assert tried == ["none", "qsgd-4"][: 2 * (hvd.size() > 1)]


def _small_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    return model(rank_data(step, 3, 10)).pow(2).mean()


def nodes_of_one_worker() -> None:
    for make in METHODS.values():
        train_and_compare(make(hierarchical=1), steps=2)


def nodes_that_do_not_fit() -> None:
    said = message_of(lambda: hvq.GlobalQSGD(hierarchical=hvd.size() + 1), ValueError)
    assert f"{hvd.size()} workers cannot form nodes of {hvd.size() + 1}" in said


def a_process_set() -> None:
    said = message_of(lambda: hvq.QSGD(hierarchical=True, process_set=hvd.global_process_set), ValueError)
    assert "remove process_set= from" in said
    process_set = hvd.ProcessSet([0])
    process_set.process_set_id = 1
    compressor = hvq.QSGD(hierarchical=HIERARCHICAL)
    call = functools.partial(hvd.allreduce, torch.ones(2000), name="set", compression=compressor)
    assert "remove process_set= from" in message_of(lambda: call(process_set=process_set), ValueError)


def a_worker_that_joins(make: Any, steps: int = 2) -> None:
    """Its node's groups cannot do without it: an error on all others, before anything hangs."""
    local_size = hvd.local_size() if HIERARCHICAL is True else HIERARCHICAL
    if local_size == 1 or hvd.size() == 1:
        return
    compressor, model = make(), net()
    # Names of its own: what the workers had started when they noticed is not finished.
    named = [
        (f"{type(compressor).__name__}.{name}", parameter) for name, parameter in model.named_parameters()
    ]
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), named, compression=compressor
    )

    def train(step: int) -> None:
        optimizer.zero_grad()
        net_loss(model, step).backward()
        optimizer.step()

    for step in range(steps):
        train(step)
    if hvd.rank() != hvd.size() - 1:
        assert "hvd.join()" in message_of(lambda: train(2), RuntimeError)
    hvd.join()


def a_worker_that_joins_before_the_first_step() -> None:
    """As above, before any worker has looked for the nodes."""
    if hvd.mpi_enabled():
        return  # MPI cannot be initialized twice
    hvd.shutdown()
    start()
    a_worker_that_joins(functools.partial(hvq.QSGD, hierarchical=HIERARCHICAL), steps=0)


def too_few_bits_for_the_nodes() -> None:
    """It is the nodes that must fit, not the workers: 3 bits are too few for the sum of 4."""
    train_and_compare(hvq.GlobalQSGD(bits=3, hierarchical=HIERARCHICAL), model=net())


def _trained(optimizer: Any, model: torch.nn.Module, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net_loss(model, step).backward()
        optimizer.step()


def _with_binsgdm(model: torch.nn.Module, hierarchical: Any) -> Any:
    optimizer = hvq.optim.BinSGDM(model.parameters(), lr=1e-3, weight_decay=0.1)
    compressor = hvq.BinSGDM(hierarchical=hierarchical)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor)


def the_state_of_binsgdm_is_shared_out() -> None:
    local_size = hvd.local_size() if HIERARCHICAL is True else HIERARCHICAL
    model = net()
    optimizer = _with_binsgdm(model, HIERARCHICAL)
    _trained(optimizer, model, range(2))
    large = [p for p in model.parameters() if p.numel() >= 1024]
    kept = gather_objects([optimizer.state[p]["momentum"].numel() for p in large], hvd.global_process_set)
    nodes = [kept[first : first + local_size] for first in range(0, hvd.size(), local_size)]
    for node in nodes:
        assert [sum(counts) for counts in zip(*node)] == [p.numel() for p in large], (
            "each element is kept once"
        )
    assert "gather_state()" in message_of(optimizer.state_dict, RuntimeError)
    assert "gather_state()" in message_of(lambda: copy.deepcopy(optimizer), RuntimeError)


def the_state_of_a_small_tensor_is_gathered() -> None:
    """One worker of a node keeps all of it, the others nothing."""
    torch.manual_seed(5)
    model = torch.nn.Linear(5, 4, bias=False)
    optimizer = hvd.DistributedOptimizer(
        hvq.optim.BinSGDM(model.parameters(), lr=1e-3),
        model.named_parameters(),
        compression=hvq.BinSGDM(hierarchical=HIERARCHICAL, min_elements=0),
    )
    for step in range(2):
        optimizer.zero_grad()
        model(rank_data(step, 3, 5)).pow(2).mean().backward()
        optimizer.step()
    assert "gather_state()" in message_of(optimizer.state_dict, RuntimeError)
    optimizer.gather_state()
    momenta = [optimizer.state[model.weight]["momentum"]]
    assert momenta[0].shape == model.weight.shape
    assert momenta[0].abs().min() > 0
    assert_same_on_all_ranks([model.weight], "parameters")


def the_state_of_binsgdm_is_gathered_saved_and_loaded() -> None:
    model = net_without_small_tensors()
    optimizer = _with_binsgdm(model, HIERARCHICAL)
    _trained(optimizer, model, range(2))
    optimizer.gather_state()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    _trained(optimizer, model, range(2, 4))

    other = net_without_small_tensors()
    resumed = _with_binsgdm(other, HIERARCHICAL)
    resumed.load_state_dict(saved)
    other.load_state_dict(weights)
    _trained(resumed, other, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters()):
        assert_bits_equal(q, p.detach(), "a parameter after loading")
    optimizer.gather_state()
    resumed.gather_state()
    for p, q in zip(model.parameters(), other.parameters()):
        for name in ("momentum", "scale"):
            assert_bits_equal(resumed.state[q][name], optimizer.state[p][name], name)

    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    momenta = [resumed.state[p]["momentum"] for p in other.parameters()]
    assert_same_on_all_ranks(momenta, "broadcast momenta")
    for hierarchical in (1, False):  # other nodes, as with another number of workers
        model = net_without_small_tensors()
        optimizer = _with_binsgdm(model, hierarchical)
        optimizer.load_state_dict(resumed.state_dict())
        _trained(optimizer, model, range(2))
        assert_same_on_all_ranks(list(model.parameters()), "parameters")
