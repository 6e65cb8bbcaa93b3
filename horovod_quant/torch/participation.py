"""Participation probe: shows whether every worker participated in a step.

Horovod adds zeros for workers that have called ``hvd.join()``. So one gradient of the step carries an additional 1, and
the sum of these is the active worker count. This needs no additional operation, and no worker waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horovod_quant.torch.caller import OptimizerCall


def probe_bound(call: OptimizerCall) -> float:
    """Return the bound of the probe's sum for full participation.

    The sum exceeds it only if every worker participates.
    """
    from horovod.torch.mpi_ops import Sum

    size = call.process_set.size()
    return (size if call.op == Sum else 1.0) * (1 - 0.5 / size)


def with_probe(sent: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of a gradient, followed by the probe.

    The probe is a 1. In float32 at least, since the factors by which Horovod multiplies may not fit into a narrower
    type.
    """
    flat = sent.detach().reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.cat([flat, flat.new_ones(1)])


class ParticipationProbe:
    """Choice of the parameter whose gradient carries the participation probe.

    Attributes:
        name: the parameter's name; None if there is none.
    """

    def __init__(self) -> None:
        self._known: frozenset[int] = frozenset()
        self._chosen: int | None = None
        self.name: str | None = None

    def choose(self, expected: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Choose a small parameter, of one dimension if there is one.

        To be called for each step, since the parameters may change, on all workers alike. Sparse gradients, which
        Horovod gathers, have two dimensions.

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
