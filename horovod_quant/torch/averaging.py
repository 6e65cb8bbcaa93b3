"""Averaging of named gradients, for the hooks of DDP and FSDP2.

They use ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from horovod_quant.frontends import step_counts
from horovod_quant.frontends.stats import Repeated, Stats, TrafficCounter
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.agreement import different, disagreement, fingerprint_of, signs_of
from horovod_quant.reductions.requests import drive
from horovod_quant.schemes.base import ALL, Decoded, Exchange, Gradient, Request, Scheme
from horovod_quant.torch import memory as memories
from horovod_quant.torch.binsgdm import HookedParameter
from horovod_quant.torch.compressor import Compressor
from horovod_quant.torch.device import Copying
from horovod_quant.torch.memory import Destination, HostMemory, Memory
from horovod_quant.transports.torch_distributed import Groups, connect
from horovod_quant.transports.traffic import ring_allreduce_bytes, sent_bytes


class Member(NamedTuple):
    """A gradient, or a worker's shard of one.

    Attributes:
        name: its name in policies, and in the random key.
        elements: the number of elements of the whole parameter, also for a shard.
        suffix: a suffix of the name, in the random key alone.
        counted: the number of elements for counting float32 bytes, as a ring allreduce would send them; None for all.
        hooked: the parameter and its optimizer, for a compressor that has one of its own.
    """

    name: str
    elements: int
    suffix: str = ""
    counted: float | None = None
    hooked: HookedParameter | None = None


class _SchemeGroup:
    """Gradients of a bucket that one scheme reduces together.

    Args:
        scheme: the scheme for these workers.
        indices: the gradients' indices in the bucket.
        gradients: the scheme's inputs, whose values `take` sets.
        counted: the counter of each gradient's float32 bytes.
        hooked: the parameters, for a compressor with an optimizer of its own; else empty.
    """

    def __init__(
        self,
        scheme: Scheme,
        indices: list[int],
        gradients: list[Gradient],
        counted: list[Repeated],
        hooked: list[HookedParameter],
    ) -> None:
        self.scheme, self.indices, self.gradients, self.counted = scheme, indices, gradients, counted
        self.hooked = hooked
        self.names = tuple(each.name for each in counted)
        self.destinations: list[Destination] = []
        self._tensors: Sequence[torch.Tensor] | None = None

    def take(self, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
        """Set this group's values from all of the bucket's tensors."""
        if tensors is self._tensors:  # the same memory as before, as in most steps
            return
        self.destinations = []
        lasts = isinstance(memory, HostMemory)
        for index, gradient in zip(self.indices, self.gradients):
            tensor = tensors[index]
            gradient.buffer = values = memory.taken(tensor, None)
            self.destinations.append(memory.destination_of(tensor, values))
            lasts = lasts and self.destinations[-1].array is not None
        self._tensors = tensors if lasts else None


class Bucket(NamedTuple):
    """Gradients that are averaged together, by scheme.

    Created once, used in each step.

    Attributes:
        groups: the quantized gradients.
        rest: the indices of the other gradients.
        counted: the counters of the other gradients' bytes.
    """

    groups: list[_SchemeGroup]
    rest: list[int]
    counted: list[Repeated]


class Averager:
    """Averaging of gradients within a process group.

    It uses a compressor's scheme and policy.

    Args:
        compression: the compressor. Counting continues from its counts.
        group: PyTorch's process group; None for the default one.
        device: the gradients' device.
        shapes: the shapes of all gradients that may come, by name: compared between the workers.
        names: the names of all parameters, with or without gradients: each pattern has to match one of them.
        ranks: see `connect`.

    Attributes:
        groups: the workers, and what connects them.
        uncounted: names of gradients whose bytes are not in the statistics.

    Raises:
        ValueError: the arguments do not fit the number of workers or the gradients, or differ between workers.
    """

    def __init__(
        self,
        compression: Compressor,
        group: Any,
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]],
        names: Iterable[str],
        ranks: Sequence[int] | None = None,
    ) -> None:
        policy = compression.policy
        policy.check_names(names)
        self._policy, self._seed, self._arguments = policy, compression.seed, compression._arguments()
        self._kernels = compression._kernels
        self._has_nccl = _has_nccl(group)
        self._is_first = dist.get_rank(group) == 0
        self._memories: dict[torch.device, Memory] = {}
        self._traffic = TrafficCounter()
        self.uncounted: set[str] = set()
        self.resume(compression)
        # `memory` raises for impossible kernels.
        self._is_nccl = self.memory(device).takes_tensors and device.type == "cuda"
        backend = "nccl" if self._is_nccl else "gloo"
        # NCCL's collectives of Python objects use the current device.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.groups: Groups = connect(group, compression.hierarchical, backend, ranks)
        workers = self.groups.workers
        policy.check_workers(workers.size, workers.local_size)
        self._require_agreement(shapes, device if self._is_nccl else torch.device("cpu"))

    def stats(self) -> Stats:
        return self._traffic.stats()._replace(uncounted=tuple(sorted(self.uncounted)))

    def warn_if_it_sends_more(self, compression: Compressor, are_nodes: bool) -> None:
        """Warn of a scheme that sends more than float32, on one worker."""
        if self._is_first:
            compression._warn_if_it_sends_more(self.groups.workers.nodes, are_nodes)

    def resume(self, compression: Compressor) -> None:
        """Continue from the counts of a compressor."""
        self._steps, self._first_step = step_counts.read(compression.state_dict())

    def steps(self) -> dict[str, Any]:
        """Return the counts in the format of a compressor's ``state_dict()``."""
        return step_counts.saved(self._steps, self._first_step)

    def _require_agreement(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Raise ValueError if other workers have other arguments or gradients."""
        workers = self.groups.workers
        arguments = fingerprint_of(self._arguments)
        local = [*arguments, *signs_of(str(sorted(shapes.items())))]
        asked = torch.tensor(local, dtype=torch.int32, device=device)
        total = self.groups.connections[ALL].allreduce_(asked).tolist()
        if unequal := different(self._arguments, total[: len(arguments)], workers.size):
            raise ValueError(disagreement(self._arguments, unequal))
        if any(abs(value) != workers.size for value in total[len(arguments) :]):
            raise ValueError(
                "the parameters' names or shapes here are not those of all other workers; use the same model on all, "
                "and with FSDP2's group= the workers that hold the same shard"
            )

    def require_same(self, number: int) -> None:
        """Raise RuntimeError unless all workers average the module of this number now.

        Not over NCCL, where each module would wait for the GPU.
        """
        if self._is_nccl:
            return
        local = [number, -number]
        most = self.groups.connections[ALL].allreduce_(torch.tensor(local, dtype=torch.int32), "max")
        if most.tolist() != local:
            raise RuntimeError(
                "fsdp: the nodes average different modules at the same time; use the same FSDP modules on every node "
                "in each step"
            )

    # ---- buckets ---------------------------------------------------------------------------------------------

    def bucket(self, members: Sequence[Member]) -> Bucket:
        """Return these gradients grouped by the schemes that average them."""
        workers = self.groups.workers
        by_scheme: dict[Scheme | None, list[int]] = {}
        for index, member in enumerate(members):
            scheme = self._policy.scheme_for(member.name, member.elements)
            by_scheme.setdefault(scheme, []).append(index)
        rest = by_scheme.pop(None, [])
        groups = [
            _SchemeGroup(
                scheme.for_workers(workers),
                indices,
                [self._gradient(members[index]) for index in indices],
                [self._counter(members[index], is_compressed=True) for index in indices],
                [hooked for index in indices if (hooked := members[index].hooked) is not None],
            )
            for scheme, indices in by_scheme.items()
            if scheme is not None
        ]
        counted = [self._counter(members[index], is_compressed=False) for index in rest]
        return Bucket(groups, rest, counted)

    def _gradient(self, member: Member) -> Gradient:
        return Gradient(None, RngKey(self._seed, member.name + member.suffix))  # type: ignore[arg-type]

    def _counter(self, member: Member, is_compressed: bool) -> Repeated:
        elements = member.elements if member.counted is None else member.counted
        float32_bytes = ring_allreduce_bytes(4 * elements, self.groups.workers.size)
        return self._traffic.repeated(member.name, float32_bytes, 0.0 if is_compressed else float32_bytes)

    def count(self, bucket: Bucket) -> None:
        """Count one reduction of each gradient of a bucket.

        To be called before `average`, in the same order on all workers.
        """
        for group in bucket.groups:
            for gradient, hooked in zip(group.gradients, group.hooked):
                gradient.step = hooked.count()
            for gradient, each in zip(group.gradients, group.counted):
                each.times += 1
                if not group.hooked:
                    gradient.step = self._steps.get(each.name, self._first_step)
                    self._steps[each.name] = gradient.step + 1
        for each in bucket.counted:
            each.times += 1

    def memory(self, device: torch.device) -> Memory:
        """Return the memory in which gradients on a device are reduced."""
        if device not in self._memories:
            self._memories[device] = memories.choose(
                self._kernels, device, self._policy.schemes, lambda: self._has_nccl
            )
        return self._memories[device]

    # ---- averaging: waits for the other workers --------------------------------------------------------------

    def average(self, bucket: Bucket, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
        """Replace gradients by their averages over the workers.

        Args:
            bucket: the gradients' bucket.
            tensors: the gradients; the same list as before if their memory is the same.
            memory: the memory of their device.
        """
        for group in bucket.groups:
            self._exchange(group, tensors, memory)
        if bucket.rest:
            self._average_uncompressed([tensors[index] for index in bucket.rest])

    def _exchange(self, group: _SchemeGroup, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
        group.take(tensors, memory)
        workers = self.groups.workers
        if group.hooked:
            memory.catch_up()
        for gradient, hooked in zip(group.gradients, group.hooked):
            hooked.open(gradient, group.scheme, self.groups, memory)
        reduction = memory.begun(group.scheme, group.gradients, workers)
        # All contribute; `decoded.active` would have to be read from a GPU.
        self.reduce(reduction, group.names, memory, 1.0 / workers.size, group.destinations)
        for gradient, hooked, destination in zip(group.gradients, group.hooked, group.destinations):
            hooked.close(gradient, group.scheme, destination.destination)

    def reduce(
        self,
        reduction: Exchange,
        names: Sequence[str],
        memory: Memory,
        factor: float,
        destinations: Sequence[Destination],
    ) -> None:
        """Run a scheme's reduction, and decode its sums times ``factor``."""
        memory.catch_up()
        decoded = self.run(reduction, names, memory)
        with memory.working():
            memory.decode(decoded, range(len(destinations)), factor, destinations)
        memory.hand_over()

    def run(self, exchange: Exchange, names: Sequence[str], memory: Memory) -> Decoded:
        """Run a scheme's collectives, and count the bytes sent."""

        def answer(request: Any) -> Any:
            # A copy to the host is waited for by the request that follows it.
            return None if isinstance(request, Copying) else self._perform(request, names, memory)

        decoded: Decoded = drive(memory.resumed(exchange, False), answer)
        for name, buckets in zip(names, decoded.exchanged_again):
            self._traffic.count_again(name, buckets)
        return decoded

    def _perform(self, request: Request, names: Sequence[str], memory: Memory) -> Any:
        self._traffic.count_group(names, sent_bytes(request, self.groups.workers.size_of(request.group)))
        # NCCL orders a collective after the current stream, which has to be that of the kernels.
        with memory.working():
            return self.groups.perform(request)

    def _average_uncompressed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Average without compression, in float32 at least.

        A sum of float16 overflows early.
        """
        wide = torch.float64 if any(part.dtype is torch.float64 for part in tensors) else torch.float32
        flat = torch.cat([part.reshape(-1).to(wide) for part in tensors])
        total = self.sum(flat).div_(self.groups.workers.size)
        for part, average in zip(tensors, total.split([part.numel() for part in tensors])):
            part.copy_(average.view(part.shape))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all workers, without compression; may overwrite the tensor.

        Raises:
            ValueError: it is sparse, and NCCL would have to add it.
        """
        if self._is_nccl and tensor.is_sparse:
            raise ValueError(
                "ddp: NCCL adds no sparse gradients; set HOROVOD_QUANT_STAGING=1 on all workers, or construct the "
                "embedding with sparse=False"
            )
        movable = tensor if self._is_nccl else tensor.cpu()
        return self.groups.connections[ALL].allreduce_(movable).to(tensor.device)

    def alltoall(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """Return each worker's part for this one, without compression."""
        movable = tensor if self._is_nccl else tensor.cpu()
        pieces = self.groups.connections[ALL].alltoall(movable, splits)
        return [piece.to(tensor.device) for piece in pieces]


class HookState:
    """Common part of the states of DDP's and FSDP2's hooks.

    Attributes:
        compression: the compressor.
    """

    compression: Compressor
    _averager: Averager | None
    _seconds_waited: float | None = None

    def stats(self) -> Stats:
        """Return bytes sent and their float32 equivalent, per parameter and in total.

        ``seconds_waited`` is the time in FSDP2's hooks, which PyTorch waits for. With DDP it is None: PyTorch waits for
        the averages, after the last hook.
        """
        return self._attached().stats()._replace(seconds_waited=self._seconds_waited)

    def state_dict(self) -> dict[str, Any]:
        """Return how often each gradient has been reduced, by name, for checkpoints.

        A compressor under Horovod can load it, and the other way round: see the compressor's ``state_dict``.
        """
        return self.compression.state_dict() if self._averager is None else self._averager.steps()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: random bits continue as without the interruption.

        Raises:
            ValueError: ``state`` is something else.
        """
        self.compression.load_state_dict(state)
        if self._averager is not None:
            self._averager.resume(self.compression)

    def _attached(self) -> Averager:
        if self._averager is None:
            raise RuntimeError(_DETACHED)
        return self._averager


_DETACHED = (
    "ddp: this State is a copy, or was unpickled, and belongs to no model; call hvq.ddp.register(ddp_model, "
    "state.compression) for the new model"
)


def require_usable(compression: Any, where: str) -> None:
    """Raise ValueError unless a compressor works without Horovod.

    Args:
        compression: the user's argument.
        where: ``"ddp"`` or ``"fsdp"``.
    """
    from horovod_quant.torch.auto import Auto

    if isinstance(compression, Auto):
        raise ValueError(
            f"{where}: Auto() measures methods in steps of Horovod's optimizer; use one method here, such as "
            f"hvq.QSGD(), which horovod-quant advise can choose"
        )
    if not isinstance(compression, Compressor):
        raise ValueError(
            f"{where}: compression={compression!r} is no compressor; use one such as hvq.QSGD(bits=4)"
        )
    if compression.nmse_every:
        raise ValueError(
            f"{where}: nmse_every={compression.nmse_every} measures gradients of Horovod's optimizer; leave it out here"
        )
    if compression.own_optimizer is not None and where != "ddp":
        raise ValueError(
            f"{where}: {type(compression).__name__}() belongs to the optimizer hvq.optim.{compression.own_optimizer}, "
            f"which has no shards of parameters; use another method here, such as hvq.EDEN()"
        )
    if compression._process_set is not None:
        raise ValueError(
            f"{where}: process_set= is for training under Horovod; leave it out: the workers are those of the model's "
            f"process group"
        )


def _has_nccl(group: Any) -> bool:
    return dist.is_nccl_available() and "nccl" in str(dist.get_backend_config(group))
