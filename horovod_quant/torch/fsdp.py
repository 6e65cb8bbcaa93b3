"""Quantized gradients for FSDP2 (``fully_shard``), without Horovod.

import horovod_quant.torch as hvq
state = hvq.fsdp.register(model, hvq.QSGD(bits=4))     # after fully_shard
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.reduce_scatter import ReduceScatter, reduce_scatter_of
from horovod_quant.schemes.base import Gradient, Scheme, require_bool
from horovod_quant.torch.averaging import Averager, Bucket, HookState, Member, require_usable
from horovod_quant.torch.compressor import Compressor
from horovod_quant.torch.driver import Guard
from horovod_quant.torch.parameter_names import named_parameters


class State(HookState):
    """State that the hooks of a model's FSDP modules share.

    Created by `register`.

    Attributes:
        compression: the compressor.
    """

    _averager: Averager
    _seconds_waited: float

    def __init__(self, compression: Compressor, averager: Averager) -> None:
        self.compression = compression
        self._averager = averager
        self._guard = Guard(averager.groups)
        self._seconds_waited = 0.0

    def _run(self, job: Any) -> None:
        self._guard.require_sound()
        begin = time.perf_counter()
        error = self._guard.run(job)
        self._seconds_waited += time.perf_counter() - begin
        if error is not None:
            raise error


def register(model: Any, compression: Compressor, group: Any = None, inside: bool = False) -> State:
    """Average a model's gradients with a compressor.

    To be called on all workers. Without ``inside`` PyTorch averages within each node (intra-node), exactly, and the
    compressor between nodes (inter-node): the mesh given to ``fully_shard`` has one dimension, the workers of a node,
    and the workers with the same shard average it. With ``inside`` the compressor replaces PyTorch's reduce-scatter
    among the workers of the mesh: gradients are rounded once, and each worker gets the average of its shard.

    Parameters without a gradient get zeros, on every worker, so that all shards have the same boundaries. All nodes run
    the same FSDP modules in each step.

    Args:
        model: the model, after ``fully_shard`` of it and its submodules.
        compression: a compressor, such as ``hvq.QSGD(bits=4)``, with the same arguments on all workers. Names are those
            of ``model.named_parameters()``; ``min_elements`` refers to whole parameters. Each parameter's shard has
            separate scales. With ``inside`` a `QSGD`, `NUQSGD` or `EDEN` without Elias coding.
        group: the process group of the workers with the same shard; by default those with the same rank in each mesh.
            Not with ``inside``.
        inside: whether to quantize within the mesh instead.

    Returns:
        The state: `State.stats` has the bytes sent, and `State.state_dict` belongs in checkpoints.

    Raises:
        ValueError: an argument is out of range, or does not fit the model, its mesh or the other workers' arguments.
        ImportError: this PyTorch is too old.
    """
    require_usable(compression, "fsdp")
    require_bool("inside", inside)
    _require_hook(inside)
    if compression.hierarchical:
        raise ValueError(
            "fsdp: hierarchical= is for DDP and Horovod; leave it out, the mesh given to fully_shard says which "
            "workers form a node"
        )
    units = _units(model)
    mesh = units[0].mesh
    if any(unit.mesh.ranks != mesh.ranks for unit in units):
        raise ValueError("fsdp: the model's FSDP modules have different meshes; use one mesh for all of them")
    where = "" if inside else f" shard {mesh.local_rank} of {len(mesh.ranks)}"
    shapes = {shard.name + where: shard.shape for unit in units for shard in unit.shards}
    device = units[0].group.device
    names = named_parameters(model)
    if inside:
        if group is not None:
            raise ValueError("fsdp: group= names workers between nodes; leave it out with inside=True")
        if len(mesh.ranks) == 1:
            raise ValueError("fsdp: inside=True needs a mesh of two workers or more; this one has 1")
        state = State(compression, Averager(compression, mesh.group, device, shapes, names))
    else:
        ranks = _counterparts(units) if group is None else None
        averager = Averager(compression, group, device, shapes, names, ranks)
        if averager.groups.workers.size == 1:
            raise ValueError(_ALONE)
        averager.warn_if_it_sends_more(compression, are_nodes=True)
        state = State(compression, averager)
    if device.type == "cuda":
        weakref.finalize(state, state._guard.close, device)
    for number, unit in enumerate(units):
        if hasattr(unit.module, "set_reduce_scatter_unused_params"):
            unit.module.set_reduce_scatter_unused_params(True, recurse=False)
        if inside:
            unit.module.set_custom_reduce_scatter(_IntraMesh(state, unit))
        else:
            unit.module.set_all_reduce_hook(_InterNode(state, unit, number))
    return state


_ALONE = (
    "fsdp: the mesh has all workers, and nothing is left to average between nodes; give fully_shard a mesh of the "
    "workers of each node, or use inside=True"
)


# ---- the sharded model -----------------------------------------------------------------------------------------------


class _Mesh(NamedTuple):
    ranks: list[int]
    local_rank: int
    group: Any


class _Shard(NamedTuple):
    """A parameter of an FSDP module.

    Attributes:
        name: its name.
        shape: its whole shape.
        padded: padded elements per worker.
        workers: the number of workers on its device mesh, which with tensor parallelism is larger than the module's.
    """

    name: str
    shape: tuple[int, ...]
    padded: int
    workers: int

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


class _Unit(NamedTuple):
    """An FSDP module, whose parameters have their gradients in one flat buffer.

    Attributes:
        module: the module.
        mesh: its mesh.
        group: PyTorch's ``FSDPParamGroup``.
        shards: the parameters that need gradients; none if all are frozen.
    """

    module: Any
    mesh: _Mesh
    group: Any
    shards: list[_Shard]

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Split a worker's flat buffer into shards.

        Raises:
            RuntimeError: it has another number of elements.
        """
        padded = [shard.padded for shard in self.shards]
        if sum(padded) != buffer.numel():
            raise RuntimeError(
                f"fsdp: got {buffer.numel()} gradient elements, but the parameters' shards have {sum(padded)}; "
                f"call register() again after freezing or unfreezing parameters, and give every parameter a gradient "
                f"in each step"
            )
        return list(buffer.split(padded))


def _require_hook(inside: bool) -> None:
    """Raise ImportError if this PyTorch lacks the hook."""
    import torch.distributed.fsdp

    what, version, setter = (
        ("inside=True", "2.9", "set_custom_reduce_scatter")
        if inside
        else ("it", "2.7", "set_all_reduce_hook")
    )
    if not hasattr(getattr(torch.distributed.fsdp, "FSDPModule", None), setter):
        raise ImportError(
            f"fsdp: {what} needs PyTorch {version} or later, with FSDPModule.{setter}; this is {torch.__version__}"
        )


def _units(model: Any) -> list[_Unit]:
    """Return the FSDP modules with parameters, those that need gradients first."""
    from torch.distributed.fsdp import FSDPModule

    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for module in modules:
        module.reshard()  # a forward pass alone leaves the root's parameters whole
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    found, frozen = [], []
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if len(groups) > 1:
            raise ValueError(
                "fsdp: an FSDP module has parameters on several meshes (shard_placement_fn), of which PyTorch's "
                "hooks report only one; use one mesh"
            )
        if groups[0] is not None:
            shards = _shards(groups[0], names)
            if shards:
                found.append(_Unit(module, _mesh(groups[0].mesh_info), groups[0], shards))
            else:
                frozen.append(module)
    if not found:
        raise ValueError(
            f"model={type(model).__name__}(...): it has no FSDP module with gradients; call "
            f"torch.distributed.fsdp.fully_shard(model, mesh=...) first"
        )
    # Without a hook a module that is unfrozen later would not be averaged. Its mesh may be another one until then.
    return found + [found[0]._replace(module=module, shards=[]) for module in frozen]


def _shards(group: Any, names: Mapping[int, str]) -> list[_Shard]:
    return [
        _Shard(
            names[id(each.sharded_param)],
            tuple(each.sharded_param.shape),
            each.padded_sharded_param_size.numel(),
            each.sharded_param.device_mesh.size(),
        )
        for each in group.fsdp_params
        if each.sharded_param.requires_grad
    ]


def _mesh(info: Any) -> _Mesh:
    if getattr(info, "replicate_mesh_dim", None) is not None:
        raise ValueError(
            "fsdp: on a mesh with two dimensions PyTorch averages between nodes before it calls a hook, so nothing "
            "would be saved; give fully_shard a mesh of one dimension, of the workers of each node"
        )
    group = info.shard_process_group
    return _Mesh(dist.get_process_group_ranks(group), dist.get_rank(group), group)


def _counterparts(units: Sequence[_Unit]) -> list[int]:
    """Return the ranks of the workers with the same shard.

    They are in the order of their meshes.
    """
    mesh = units[0].mesh
    for shard in (shard for unit in units for shard in unit.shards):
        if shard.workers > len(mesh.ranks):
            raise ValueError(
                f"fsdp: {shard.name} is divided among {shard.workers} workers, and the mesh given to fully_shard has "
                f"{len(mesh.ranks)}, as with tensor parallelism; give group=, the process group of the workers that "
                f"hold the same shard"
            )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(mesh.ranks))
    meshes = sorted(set(everyone))
    if len({len(ranks) for ranks in meshes}) != 1:
        raise ValueError(
            f"fsdp: the meshes {list(map(list, meshes))} differ in size, so no two workers hold the same shard; use "
            f"the same number of workers on each node"
        )
    if sorted(rank for ranks in meshes for rank in ranks) != list(range(len(everyone))):
        raise ValueError(
            f"fsdp: the meshes {list(map(list, meshes))} do not divide all workers into nodes; give group=, the "
            f"process group of the workers that hold the same shard"
        )
    return [ranks[mesh.local_rank] for ranks in meshes]


# ---- hooks -----------------------------------------------------------------------------------------------------------


class _InterNode:
    """Hook that averages the flat buffer of a module's shards between nodes.

    With ``set_gradient_divide_factor()`` it adds, as PyTorch does between nodes: the factor is for all workers.
    """

    def __init__(self, state: State, unit: _Unit, number: int) -> None:
        self._state, self._unit, self._number = state, unit, number
        suffix = f" shard {unit.mesh.local_rank}"
        members = [Member(shard.name, shard.elements, suffix, shard.padded) for shard in unit.shards]
        self._bucket: Bucket = state._averager.bucket(members)

    def __call__(self, buffer: torch.Tensor) -> None:
        if buffer.is_cuda:  # PyTorch goes on reading it on this stream, after its last reference
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        self._state._run(lambda: self._average(buffer))

    def _average(self, buffer: torch.Tensor) -> None:
        averager = self._state._averager
        shards = self._unit.split(buffer)
        averager.require_same(self._number)
        averager.count(self._bucket)
        averager.average(self._bucket, shards, averager.memory(buffer.device))
        if getattr(self._unit.group, "gradient_divide_factor", None) is not None:
            buffer.mul_(averager.groups.workers.size)


class _IntraMesh:
    """Quantized replacement of PyTorch's reduce-scatter among the workers of a mesh."""

    def __init__(self, state: State, unit: _Unit) -> None:
        self._state, self._unit = state, unit
        averager = state._averager
        size = averager.groups.workers.size
        # A reduce-scatter sends half the bytes of a ring allreduce of all shards.
        members = [Member(each.name, each.elements, "", each.padded * size / 2) for each in unit.shards]
        self._bucket = averager.bucket(members)
        seed = state.compression.seed
        self._reductions = [_reduction(group.scheme, averager) for group in self._bucket.groups]
        self._gradients = [
            [
                Gradient(None, RngKey(seed, f"{unit.shards[index].name} shard {rank}"))  # type: ignore[arg-type]
                for rank in range(size)
                for index in group.indices
            ]
            for group in self._bucket.groups
        ]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for the inputs and outputs."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor``, the shards of all ranks, into ``output_tensor``, the local shards."""
        self._state._run(lambda: self._reduce(output_tensor, input_tensor, op))

    def _reduce(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Any) -> None:
        averager = self._state._averager
        workers = averager.groups.workers
        if op == dist.ReduceOp.AVG:
            factor = 1.0 / workers.size
        elif op == dist.ReduceOp.SUM:
            factor = 1.0
        else:
            raise ValueError(
                "fsdp: inside=True averages or adds; set_gradient_divide_factor() asks for another operation; leave "
                "it out"
            )
        parts = [self._unit.split(chunk) for chunk in input_tensor.chunk(workers.size)]
        outs = self._unit.split(output_tensor)
        averager.count(self._bucket)
        memory = averager.memory(outs[0].device)
        for group, reduction, gradients in zip(self._bucket.groups, self._reductions, self._gradients):
            taken = [part[index] for part in parts for index in group.indices]
            steps = [each.step for each in group.gradients] * workers.size
            for gradient, tensor, step in zip(gradients, taken, steps):
                gradient.buffer, gradient.step = memory.taken(tensor, None), step
            chosen = [outs[index] for index in group.indices]
            destinations = [memory.destination_of(out, memory.taken(out, None)) for out in chosen]
            running = reduction(gradients, workers, memory.kernels)
            averager.reduce(running, group.names, memory, factor, destinations)
        if self._bucket.rest:
            self._reduce_uncompressed(parts, outs, factor)

    def _reduce_uncompressed(
        self, parts: Sequence[Sequence[torch.Tensor]], outs: Sequence[torch.Tensor], factor: float
    ) -> None:
        """Reduce the other gradients without compression, in float32 at least."""
        averager, rest = self._state._averager, self._bucket.rest
        wide = torch.promote_types(outs[0].dtype, torch.float32)
        flat = torch.cat([part[index].to(wide) for part in parts for index in rest])
        count = flat.numel() // len(parts)
        pieces = averager.alltoall(flat, [count] * len(parts))
        total = torch.stack(pieces).sum(0).mul_(factor)
        for index, part in zip(rest, total.split([outs[index].numel() for index in rest])):
            outs[index].copy_(part)


def _reduction(scheme: Scheme, averager: Averager) -> ReduceScatter:
    workers = averager.groups.workers
    try:
        found = reduce_scatter_of(scheme.reduction(workers))
    except TypeError:  # the scheme defines begin() alone
        found = None
    if found is None:
        raise ValueError(
            f"fsdp: inside=True needs payloads of known length that a worker can add up, which {scheme} does not "
            f"provide; use QSGD, NUQSGD or EDEN without Elias coding"
        )
    return found
