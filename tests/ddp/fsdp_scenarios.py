"""What FSDP2 does with our hooks. Each runs on every worker of a launch, see worker.py."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from harness import METHODS, data, everybody_raises, net, net_loss, own_gradients, scenario, warned
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import horovod_quant.torch as hvq
from horovod_quant import kernels, simulator
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.reduce_scatter import reduce_scatter_of
from horovod_quant.schemes.base import Gradient, Workers


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def per_node() -> int:
    """Workers: two nodes, one of which would have more where their number is odd."""
    return size() // 2 if size() % 2 == 0 else 1


def both_dimensions() -> Any:
    return init_device_mesh("cpu", (size() // per_node(), per_node()), mesh_dim_names=("node", "worker"))


def node_mesh() -> Any:
    """Of the workers of this worker's node."""
    return both_dimensions()["worker"]


def whole_mesh() -> Any:
    return init_device_mesh("cpu", (size(),))


def sharded(model: torch.nn.Module, mesh: Any, **options: Any) -> torch.nn.Module:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def everyones_gradients(
    twin: torch.nn.Module, loss: Callable[..., torch.Tensor], step: int
) -> list[dict[str, Any]]:
    found = []
    for whose in range(size()):
        twin.zero_grad()
        loss(twin, step, whose).backward()
        found.append(own_gradients(twin))
    return found


def shards_of(values: np.ndarray, shape: Sequence[int], count: int) -> list[np.ndarray]:
    """As FSDP cuts a parameter: rows, padded with zeros, one after another."""
    rows = -(-shape[0] // count)
    padded = np.zeros((rows * count, values.size // shape[0]), np.float32)
    padded[: shape[0]] = values.reshape(shape[0], -1)
    return [part.reshape(-1) for part in padded.reshape(count, -1)]


def assert_shards(model: Any, expected: Mapping[str, tuple[np.ndarray, bool]], what: str) -> None:
    for name, parameter in model.named_parameters():
        got = parameter.grad.to_local().numpy().reshape(-1)
        wanted, to_the_bit = expected[name]
        wanted = wanted[: got.size]
        if to_the_bit:
            assert got.tobytes() == wanted.tobytes(), f"{what} {name}: {got[:5]} is not {wanted[:5]}"
        else:
            assert np.allclose(got, wanted, rtol=1e-4, atol=1e-6), (
                f"{what} {name}: {got[:5]} is not {wanted[:5]}"
            )


def between(compression: Any, everyone: Sequence[Mapping[str, Any]], twin: Any, step: int) -> dict[str, Any]:
    """What each worker has to get for its shards, by the simulator, from the nodes' exact averages."""
    workers = per_node()
    nodes = size() // workers
    found = {}
    for name, parameter in twin.named_parameters():
        place = rank() % workers
        of_nodes = []
        for node in range(nodes):
            members = [everyone[node * workers + i][name] for i in range(workers)]
            mean = np.sum(members, axis=0, dtype=np.float32) / np.float32(workers)
            of_nodes.append(shards_of(mean, parameter.shape, workers)[place])
        scheme = compression.policy.scheme_for(name, parameter.numel())
        if scheme is None:
            found[name] = np.mean(of_nodes, axis=0), False
        else:
            names = [f"{name} shard {place}"]
            found[name] = simulator.run(scheme, of_nodes, names=names, step=step).decoded[0][0], True
    return found


def inside(compression: Any, everyone: Sequence[Mapping[str, Any]], twin: Any, step: int) -> dict[str, Any]:
    """The same for a quantized reduce-scatter, by all workers' generators in this process."""
    found = {}
    for name, parameter in twin.named_parameters():
        parts = [shards_of(own[name], parameter.shape, size()) for own in everyone]
        scheme = compression.policy.scheme_for(name, parameter.numel())
        if scheme is None:
            found[name] = np.mean([own[rank()] for own in parts], axis=0), False
            continue
        generators, requests = [], []
        for whose in range(size()):
            gradients = [
                Gradient(part, RngKey(0, f"{name} shard {place}"), step)
                for place, part in enumerate(parts[whose])
            ]
            workers = Workers(whose, size())
            reduction = reduce_scatter_of(scheme.for_workers(workers).reduction(workers))
            assert reduction is not None
            generators.append(reduction(gradients, workers, kernels.get("numpy")))
            requests.append(next(generators[-1]))
        width = requests[0].splits[0]
        answer = [request.array[width * rank() : width * (rank() + 1)] for request in requests]
        try:
            generators[rank()].send(answer)
        except StopIteration as stop:
            found[name] = stop.value.write(0, 1 / size(), np.empty(parts[0][0].size, np.float32)), True
    return found


def check(
    compression: Any, mesh: Any, predict: Callable[..., dict[str, Any]], steps: int = 3, **options: Any
) -> tuple[Any, hvq.fsdp.State]:
    model = net()
    twin = copy.deepcopy(model)
    model = sharded(model, mesh)
    state = hvq.fsdp.register(model, compression, **options)
    for step in range(steps):
        expected = predict(compression, everyones_gradients(twin, net_loss, step), twin, step)
        model.zero_grad()
        net_loss(model, step, rank()).backward()
        assert_shards(model, expected, f"step {step}")
    return model, state


@scenario
def between_nodes_every_method_has_the_simulators_bits() -> None:
    for make in METHODS.values():
        check(make(), node_mesh(), between, 2)


@scenario
def inside_a_mesh_gradients_are_rounded_once() -> None:
    for name in ("qsgd", "qsgd-3-96", "qsgd-l2-alltoall", "nuqsgd", "eden", "eden-alltoall"):
        check(METHODS[name](), whole_mesh(), inside, 2, inside=True)


@scenario
def policy_chooses_by_the_models_names() -> None:
    common = {"exclude": "0.*", "overrides": {"4.*": {"bits": 8}}, "min_elements": 50}
    _, state = check(hvq.QSGD(bits=4, **common), node_mesh(), between)
    sent = state.stats().parameters
    assert sent["0.weight"].ratio == 1
    assert sent["2.weight"].ratio > 1.5 * sent["4.weight"].ratio > 1.5
    _, state = check(hvq.QSGD(bits=4, **common), whole_mesh(), inside, inside=True)
    sent = state.stats().parameters
    assert 3 < sent["4.weight"].ratio < 5 < sent["2.weight"].ratio < 8


@scenario
def a_group_may_be_given() -> None:
    if per_node() == 1:
        check(hvq.EDEN(), node_mesh(), between, group=dist.group.WORLD)
        return
    groups = [dist.new_group(list(range(place, size(), per_node()))) for place in range(per_node())]
    check(hvq.EDEN(), node_mesh(), between, group=groups[rank() % per_node()])


@scenario
def narrow_gradients_and_accumulation() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for mesh, options in ((node_mesh(), {}), (whole_mesh(), {"inside": True})):
        model = net()
        twin = copy.deepcopy(model)
        model = sharded(model, mesh, mp_policy=policy)
        state = hvq.fsdp.register(model, hvq.QSGD(bits=8), **options)
        model.set_requires_gradient_sync(False)
        net_loss(model, 0, rank()).backward()
        model.set_requires_gradient_sync(True)
        net_loss(model, 1, rank()).backward()
        assert set(state.state_dict()["exchanges"].values()) == {1}
        total = np.zeros(twin[0].weight.numel())
        for step in range(2):
            total += np.mean([own["0.weight"] for own in everyones_gradients(twin, net_loss, step)], axis=0)
        got = model[0].weight.grad.full_tensor().float().numpy().reshape(-1)
        assert np.linalg.norm(got - total) < 0.05 * np.linalg.norm(total)


@scenario
def parameters_that_are_not_used() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second = torch.nn.Linear(40, 60), torch.nn.Linear(40, 60)

        def forward(self, values: torch.Tensor, which: int) -> torch.Tensor:
            return (self.first, self.second)[which](values)

    for mesh, options in ((node_mesh(), {}), (whole_mesh(), {"inside": True})):
        model = fully_shard(Branches(), mesh=mesh)
        hvq.fsdp.register(model, hvq.QSGD(), **options)
        for step in range(2):
            model.zero_grad()
            model(data(step, rank(), 8, 40), (step + rank()) % 2).square().mean().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad.full_tensor().abs().max() > 0, name


@scenario
def modules_that_not_all_nodes_run_end_all_workers() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(40, 60) for _ in range(2))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.experts[rank() // per_node() % 2](values)

    model, mesh = Experts(), node_mesh()
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    hvq.fsdp.register(fully_shard(model, mesh=mesh), hvq.QSGD())
    loss = model(data(0, rank(), 8, 40)).square().mean()
    everybody_raises(RuntimeError, "the nodes average different modules at the same time", loss.backward)


@scenario
def register_after_a_validation() -> None:
    model = sharded(net(), node_mesh())
    with torch.no_grad():
        model(data(0, rank(), 8, 40))
    hvq.fsdp.register(model, hvq.QSGD())
    net_loss(model, 0, rank()).backward()


@scenario
def training_goes_on_after_a_checkpoint() -> None:
    def trained(steps: range, saved: Any, mesh: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
        model = sharded(net(), mesh)
        state = hvq.fsdp.register(model, hvq.QSGD(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if saved is not None:
            model.load_state_dict(saved[0])
            state.load_state_dict(saved[1])
        for step in steps:
            optimizer.zero_grad()
            net_loss(model, step, rank()).backward()
            optimizer.step()
        found = {name: each.clone() for name, each in model.state_dict().items()}
        return (found, state.state_dict()), [each.grad.to_local() for each in model.parameters()]

    for mesh, options in ((node_mesh(), {}), (whole_mesh(), {"inside": True})):
        half, _ = trained(range(2), None, mesh, options)
        _, resumed = trained(range(2, 4), half, mesh, options)
        _, whole = trained(range(4), None, mesh, options)
        assert all(torch.equal(*pair) for pair in zip(resumed, whole) if pair[0].numel() > 100)


@scenario
def an_error_ends_everybody() -> None:
    if per_node() > 1:
        return  # others of the node wait for this worker in PyTorch's own collectives, until its process ends
    model = sharded(net(), node_mesh())
    state = hvq.fsdp.register(model, hvq.QSGD())
    if rank() == size() - 1:
        state._averager._exchange = mock.Mock(side_effect=ZeroDivisionError("planted"))
    everybody_raises(Exception, "planted", lambda: net_loss(model, 0, rank()).backward())
    first = f"rank {size() - 1}: ZeroDivisionError: planted"
    everybody_raises(RuntimeError, first, state._guard.require_sound)


@scenario
def time_in_hooks_is_counted() -> None:
    model = fully_shard(net(), mesh=whole_mesh())
    state = hvq.fsdp.register(model, hvq.QSGD(), inside=True)
    loss = net_loss(model, 0, rank())
    if rank() == size() - 1:
        time.sleep(0.5)
    loss.backward()
    assert state.stats().seconds_waited > (0.4 if rank() < size() - 1 else 0)


@scenario
def a_method_that_sends_more_than_float32() -> None:
    mesh = init_device_mesh("cpu", (size(), 1), mesh_dim_names=("node", "worker"))["worker"]
    compression = hvq.QSGD(16, exchange="allgather")
    warns = int(rank() == 0 and size() > 3)
    with warned(f"times the bytes of float32 among {size()} nodes", warns):
        hvq.fsdp.register(sharded(net(), mesh), compression)
    with warned("times the bytes of float32", 0):
        hvq.fsdp.register(sharded(net(), whole_mesh()), hvq.QSGD(16, exchange="allgather"), inside=True)


@scenario
def a_parameter_frozen_on_one_worker_ends_all_workers() -> None:
    meshes = [(whole_mesh(), {"inside": True})]
    if per_node() == 1:  # otherwise the workers of a node wait in PyTorch's reduce-scatter
        meshes.append((node_mesh(), {}))
    for mesh, options in meshes:
        model = fully_shard(net(), mesh=mesh)
        state = hvq.fsdp.register(model, hvq.QSGD(), **options)
        if rank() == size() - 1:
            model[2].weight.requires_grad_(False)
        text = "gradient elements, but the parameters' shards have"
        everybody_raises(RuntimeError, text, lambda: net_loss(model, 0, rank()).backward())  # noqa: B023
        everybody_raises(RuntimeError, f"rank {size() - 1}: RuntimeError: fsdp: ", state._guard.require_sound)


@scenario
def layers_unfrozen_after_register() -> None:
    for mesh, options, predict in ((node_mesh(), {}, between), (whole_mesh(), {"inside": True}, inside)):
        model = net()
        twin = copy.deepcopy(model)
        model[4].requires_grad_(False)
        model = sharded(model, mesh)
        compression = hvq.QSGD()
        state = hvq.fsdp.register(model, compression, **options)
        net_loss(model, 0, rank()).backward()
        model[4].requires_grad_(True)
        again = hvq.fsdp.register(model, compression, **options)
        again.load_state_dict(state.state_dict())
        everyone = everyones_gradients(twin, net_loss, 1)
        expected = predict(compression, everyone, twin, 1)
        first = predict(compression, everyone, twin, 0)
        expected.update({name: each for name, each in first.items() if name.startswith("4.")})
        model.zero_grad()
        net_loss(model, 1, rank()).backward()
        assert_shards(model, expected, "registered again")

        model = net()
        model[4].requires_grad_(False)
        model = sharded(model, mesh)
        state = hvq.fsdp.register(model, hvq.QSGD(), **options)
        model[4].requires_grad_(True)
        text = "call register() again after freezing or unfreezing parameters"
        everybody_raises(RuntimeError, text, lambda: net_loss(model, 0, rank()).backward())  # noqa: B023


@scenario
def frozen_modules_may_have_another_mesh() -> None:
    model = net()
    model[0].requires_grad_(False)
    fully_shard(model[0], mesh=both_dimensions())
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=node_mesh())
    hvq.fsdp.register(model, hvq.QSGD())
    net_loss(model, 0, rank()).backward()


@scenario
def a_divide_factor_counts_as_with_pytorchs_own_average() -> None:
    whole = both_dimensions()
    gradients = []
    for mesh in (whole, whole["worker"]):
        model = sharded(net(), mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)
                module.set_force_sum_reduction_for_comms(per_node() > 1)  # Gloo has no PREMUL_SUM
        if mesh is not whole:
            hvq.fsdp.register(model, hvq.QSGD(bits=8))
        net_loss(model, 0, rank()).backward()
        gradients.append([each.grad.full_tensor() for each in model.parameters()])
    for exact, got in zip(*gradients):
        assert (got - exact).norm() < 0.05 * exact.norm(), f"{got.norm()} is not {exact.norm()}"


@scenario
def tensor_parallel_parameters_need_the_group() -> None:
    parts = 2 if size() % 2 == 0 else size()
    nodes = size() // parts
    twin = net()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parallel(mesh: Any) -> torch.nn.Module:
        return sharded(parallelize_module(net(), mesh["tensor"], plan), mesh["data"])

    flat = init_device_mesh("cpu", (nodes, parts), mesh_dim_names=("data", "tensor"))
    text = "as with tensor parallelism"
    everybody_raises(ValueError, text, lambda: hvq.fsdp.register(parallel(flat), hvq.QSGD()))
    if nodes == 1:
        return
    deep = init_device_mesh("cpu", (nodes, 1, parts), mesh_dim_names=("node", "data", "tensor"))
    for mesh, options in ((flat, {"inside": True}), (deep, {"group": deep["node"].get_group()})):
        model = parallel(mesh)
        hvq.fsdp.register(model, hvq.QSGD(bits=8), **options)
        net_loss(model, 0, rank() // parts).backward()
        everyone = everyones_gradients(twin, net_loss, 0)[:nodes]
        for name, parameter in model.named_parameters():
            exact = np.mean([own[name] for own in everyone], axis=0)
            got = parameter.grad.full_tensor().numpy().reshape(-1)
            assert np.linalg.norm(got - exact) < 0.05 * np.linalg.norm(exact), name


@scenario
def what_is_refused() -> None:
    def refused(text: str, model: Any, compression: Any = None, **options: Any) -> None:
        chosen = hvq.QSGD() if compression is None else compression
        everybody_raises(ValueError, text, lambda: hvq.fsdp.register(model, chosen, **options))

    refused("it has no FSDP module with gradients", net())
    refused("nothing is left to average between nodes", sharded(net(), whole_mesh()))
    flat = sharded(net(), whole_mesh())
    refused("hierarchical= is for DDP and Horovod", flat, hvq.QSGD(hierarchical=2))
    refused("Auto() measures methods in steps of Horovod's optimizer", flat, hvq.Auto())
    refused("belongs to the optimizer hvq.optim.BinSGDM", flat, hvq.BinSGDM())
    refused("inside=3: use True or False", flat, inside=3)
    refused("group= names workers between nodes", flat, group=dist.group.WORLD, inside=True)
    refused("QSGD, NUQSGD or EDEN without Elias coding", flat, hvq.GlobalQSGD(), inside=True)
    refused("QSGD, NUQSGD or EDEN without Elias coding", flat, hvq.QSGD(coding="elias"), inside=True)
    if per_node() > 1:
        other_shards = "with FSDP2's group= the workers that hold the same shard"
        refused(other_shards, sharded(net(), node_mesh()), group=dist.group.WORLD)
    two = both_dimensions()
    refused("on a mesh with two dimensions PyTorch averages between nodes", fully_shard(net(), mesh=two))
    other = ShardPlacementResult(None, FSDPMeshInfo(mesh=node_mesh(), shard_mesh_dim=0))
    several = fully_shard(
        net(), mesh=whole_mesh(), shard_placement_fn=lambda each: other if each.dim() == 1 else None
    )
    refused("has parameters on several meshes (shard_placement_fn)", several)
    if per_node() == 1:
        refused("needs a mesh of two workers or more", fully_shard(net(), mesh=node_mesh()), inside=True)
    model = fully_shard(net(), mesh=whole_mesh())
    hvq.fsdp.register(model, hvq.QSGD(), inside=True)
    model.set_gradient_divide_factor(2.5)
    everybody_raises(
        ValueError, "set_gradient_divide_factor()", lambda: net_loss(model, 0, rank()).backward()
    )


@scenario
def three_bits_are_a_ninth_of_float32() -> None:
    torch.manual_seed(3)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))  # noqa: E731
    for mesh, options in ((node_mesh(), {}), (whole_mesh(), {"inside": True})):
        model = sharded(make(), mesh)
        state = hvq.fsdp.register(model, hvq.EDEN(bits=3, server_bits=3), **options)
        model(data(0, rank(), 8, 512)).square().mean().backward()
        traffic = state.stats().total
        assert 0 < traffic.bytes_sent < 0.11 * traffic.float32_bytes
