"""Whether every worker has taken part in a step, told by a gradient that Horovod reduces anyway.

Workers that have called ``hvd.join()`` add nothing: Horovod adds zeros for them. So a gradient takes along a number, 1,
and its sum tells how many there are. That takes no operation more, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod_quant.torch.caller import OptimizerCall


def least_for_all(call: OptimizerCall) -> float:
    """What the sum is above if every worker is there, and below if one is not."""
    from horovod.torch.mpi_ops import Sum

    size = call.process_set.size()
    return (size if call.op == Sum else 1.0) * (1 - 0.5 / size)


def lengthened(sent: torch.Tensor) -> torch.Tensor:
    """What Horovod shall reduce instead of a gradient: flat, with a 1 behind it, in float32 at least: what Horovod
    multiplies by on the way need not fit into a narrower type.
    """
    flat = sent.detach().reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([flat, flat.new_ones(1)])


class Witness:
    """Of an optimizer's parameters the one whose gradient takes the number along.

    Attributes:
        name: of that parameter; None if there is none.
    """

    def __init__(self) -> None:
        self._known: frozenset[int] = frozenset()
        self._chosen: int | None = None
        self.name: str | None = None

    def choose(self, expected: Iterable[tuple[str, torch.Tensor]]) -> None:
        """To be called for each step: the parameters may be others than before, on all workers alike.

        A small one, of one dimension if there is such: gradients that Horovod gathers, because they are sparse, have
        two.

        Args:
            expected: names and parameters.
        """
        given = list(expected)
        known = frozenset(id(parameter) for _, parameter in given)
        if known != self._known:
            order = sorted((p.dim() > 1, p.numel(), name, id(p)) for name, p in given)
            self._known = known
            self.name, self._chosen = order[0][2:] if order else (None, None)

    def is_of(self, parameter: torch.Tensor) -> bool:
        return id(parameter) == self._chosen
