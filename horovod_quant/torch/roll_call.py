"""Who takes part in a step, and whether all have the same arguments.

Workers that have called ``hvd.join()``, because their data is at an end, do not take part. Horovod adds zeros for them
to sums and maxima. In an allgather or alltoall their absence crashes it, or makes the others wait for ever: whoever
wants one has to know before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_quant.reductions.agreement import different, disagreement, signature
from horovod_quant.torch.waiting import wait


class RollCall:
    """Launches the sum that tells it.

    Args:
        process_set: Horovod's workers, present or not.
        label: of the collective's name, the same on every worker.
        arguments: of this worker's compressor, as `horovod_quant.reductions.agreement` compares them.

    Attributes:
        handle: Horovod's.
    """

    def __init__(self, process_set: Any, label: str, arguments: Mapping[str, str]) -> None:
        import horovod.torch as hvd

        self._size = process_set.size()
        self._arguments = arguments
        places = [int(rank == process_set.rank()) for rank in range(self._size)]
        sent = torch.tensor([*places, *signature(arguments)], dtype=torch.int32, device="cpu")
        name = f"horovod_quant.{label}.present"
        self.handle = hvd.allreduce_async_(sent, name=name, op=hvd.Sum, process_set=process_set)
        self._ranks: Sequence[int] | None = None

    def has_answer(self) -> bool:
        """Whether `ranks` need not wait."""
        import horovod.torch as hvd

        return self._ranks is not None or hvd.poll(self.handle)

    def ranks(self) -> Sequence[int]:
        """The ranks of those that are there, in order; waits for the answer.

        Raises:
            RuntimeError: their arguments are not the same.
        """
        if self._ranks is None:
            import horovod.torch as hvd

            wait(self.handle)
            total = hvd.synchronize(self.handle).tolist()
            self._ranks = [rank for rank, there in enumerate(total[: self._size]) if there]
            unequal = different(self._arguments, total[self._size :], len(self._ranks))
            if unequal:
                raise RuntimeError(disagreement(self._arguments, unequal))
        return self._ranks
