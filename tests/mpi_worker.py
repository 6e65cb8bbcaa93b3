"""One rank of ``mpirun -np N python mpi_worker.py FILE``: runs every case; rank 0 pickles what all ranks got."""

from __future__ import annotations

import itertools
import pickle
import sys
from typing import Any, NamedTuple, get_args

import numpy as np
from helpers import SCHEMES, gaussian, owned_states

from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions.rotated_sum import SHARED
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.schemes.inside import Inside


class Case(NamedTuple):
    """An exchange, the same on all ranks but for their gradients."""

    scheme: Scheme
    lengths: tuple[int, ...] = (0, 1, 31, 33, 1024, 1025, 5000)
    custom_reduction: bool = False
    nodes: int = 0
    arguments: dict[str, Any] = {"seed": 5, "step": 3}
    cancel: bool = False
    """Whether all but one in 16 buckets cancel each other among the workers."""

    def local_size(self, size: int) -> int:
        """Workers of a node: all where they cannot be on as many nodes."""
        if not self.nodes:
            return 1
        return size if size % self.nodes else size // self.nodes


def cases() -> dict[str, Case]:
    found = {name: Case(scheme) for name, scheme in SCHEMES.items()}
    found["qsgd alltogether empty"] = Case(QSGD(4), (0,))
    found["qsgd 16 bits"] = Case(QSGD(16, bucket_size=32))
    found["nuqsgd 8 bits"] = Case(NUQSGD(8, bucket_size=32))
    found["global, named, summed"] = Case(
        GlobalQSGD(8), (700, 800), arguments={"names": ["b", "a"], "factor": 1.0, "seed": -1}
    )
    for name, scheme in SCHEMES.items():
        found[f"hierarchical {name}"] = Case(Hierarchical(scheme), nodes=2)
    for inside in get_args(Inside)[1:]:
        found[f"hierarchical, {inside} inside"] = Case(Hierarchical(GlobalQSGD(8), inside), nodes=2)
    found["rotated, some exchanged again"] = Case(SCHEMES["global-rotated"], (10 * SHARED, 100), cancel=True)
    for name in ("exponential-max", "exponential-l2"):
        found[f"{name}, reduced"] = Case(SCHEMES[name], custom_reduction=True)
    # Open MPI reduces messages of some size by other algorithms than small ones, with another bracketing.
    found["reduced, one element"] = Case(GlobalQSGD(8, levels="exponential"), (1,), True)
    found["reduced, 100 KB"] = Case(GlobalQSGD(4, levels="exponential"), (100_000,), True)
    found["reduced, 3 MB"] = Case(GlobalQSGD(4, levels="exponential"), (3_000_000,), True)
    return found


def gradients(case: Case, rank: int) -> list[np.ndarray]:
    """Rank 1 has a NaN and an infinity in tensors that are large enough for sound buckets besides."""
    own = [gaussian(100 * rank + i, length) for i, length in enumerate(case.lengths)]
    if case.cancel:
        own[0] = gaussian(0, case.lengths[0])
        own[0].reshape(-1, 16, TILE)[:, 1:] *= (-1) ** rank
    elif rank == 1:
        for g in own:
            if len(g) >= 5000:
                g[2] = np.nan
                g[-1] = -np.inf
    return own


def states(case: Case, rank: int, size: int) -> Any:
    if not isinstance(inner_of(case.scheme), BinSGDM):
        return None
    workers = Workers(rank, size, local_size=case.local_size(size))
    return owned_states(case.scheme, gradients(case, rank), workers)


def main(path: str) -> None:
    from mpi4py import MPI

    from horovod_quant import mpi

    rank = MPI.COMM_WORLD.Get_rank()
    results = {}
    for name, case in cases().items():
        own_states = states(case, rank, MPI.COMM_WORLD.Get_size())
        result = mpi.run(
            case.scheme,
            gradients(case, rank),
            states=own_states,
            custom_reduction=case.custom_reduction,
            kernels="numpy",
            local_size=case.local_size(MPI.COMM_WORLD.Get_size()) if case.nodes else None,
            **case.arguments,
        )
        results[name] = (result.decoded, result.merges, own_states, result.exchanged_again)

    class HostsOfAnyRanks(MPI.Intracomm):
        """Ranks of two hosts, of which the second has those in the middle."""

        def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
            return self.Split(0 if rank in (0, self.size - 1) else 1, key)

    if MPI.COMM_WORLD.Get_size() == 4:
        given = [gaussian(rank, 5000)]
        results["hosts of any ranks"] = mpi.run(
            Hierarchical(EDEN()), given, comm=HostsOfAnyRanks(MPI.COMM_WORLD)
        ).decoded
    results["refused"] = []
    for scheme, local_size in itertools.product((QSGD(), Hierarchical(QSGD())), (0, -2, 6)):
        try:
            mpi.run(scheme, [np.zeros(4)], local_size=local_size)
        except ValueError as error:
            results["refused"].append(str(error))
    gathered = MPI.COMM_WORLD.gather(results)
    if rank == 0:
        with open(path, "wb") as file:
            pickle.dump(gathered, file)


if __name__ == "__main__":
    main(sys.argv[1])
