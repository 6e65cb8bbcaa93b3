"""EDEN's code widths and reduction.

They depend on the number of workers and the accepted nmse.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from horovod_quant.codecs.rotated_codes import eden_nmse, eden_variance_factor
from horovod_quant.schemes.base import ALLGATHER, ALLTOALL, AUTO, ExchangeKind

MOST_BITS = 4

MOST_GATHERED = 2
"""Most workers for which ``exchange="auto"`` is an allgather.

Its nmse is half of that of an alltoall of the same width, for which an alltoall needs half a bit more each way (a bit
is worth a factor of 3.7). An allgather sends ``(n - 1) b`` bits an element, that alltoall ``(n - 1) / n (2 b + 1)``:
fewer with 3 workers, but for one bit, and more with 2. The kernels' time agrees: an element takes 1.1 ns to encode and
0.75 to decode (AVX-512, one thread), so an allgather of 2 takes 2.6 and an alltoall 3.1; of 3 both take about 3.2, and
of 4 the allgather 4.1 and the alltoall 2.9.
"""

IN_COMMON = 0.1
"""Assumed share of a gradient's energy common to all workers, for ``server_bits="auto"``.

4 workers' gradients of a character model had this share in the middle of a training, and 16 workers' a fifth of it. A
larger share makes the workers' errors count less, relative to those of the reducer.
"""


class Widths(NamedTuple):
    """Bits and reduction for some number of workers."""

    bits: int
    server_bits: int
    exchange: ExchangeKind
    trellis: bool = False

    def bits_sent(self, workers: int) -> int:
        """Return bits sent per element and worker, times ``n / (n-1)``."""
        return workers * self.bits if self.exchange == ALLGATHER else self.bits + self.server_bits

    def nmse(self, ratio: float = 1.0) -> float:
        """Return the nmse, see `horovod_quant.codecs.rotated_codes.eden_nmse`."""
        server_bits = None if self.exchange == ALLGATHER else self.server_bits
        return eden_nmse(self.bits, server_bits, ratio, self.trellis)


def usual(bits: int, server_bits: int | str, exchange: ExchangeKind, trellis: bool, workers: int) -> Widths:
    """Return the widths and the reduction for N workers, with ``"auto"`` resolved."""
    if exchange == AUTO:
        exchange = ALLGATHER if workers <= MOST_GATHERED else ALLTOALL
    if isinstance(server_bits, str):
        server_bits = balanced(bits, workers, trellis)
    return Widths(bits, server_bits, exchange, trellis)


def possible(exchange: ExchangeKind, trellis: bool) -> list[Widths]:
    """Return the choices for a given nmse."""
    every = range(1, MOST_BITS + 1)
    gathered = [Widths(bits, bits, ALLGATHER, trellis) for bits in every]
    scattered = [Widths(bits, server_bits, ALLTOALL, trellis) for bits in every for server_bits in every]
    return [widths for widths in gathered + scattered if exchange in (AUTO, widths.exchange)]


def require_nmse(
    nmse: Any, bits: int | None, server_bits: int | str, exchange: ExchangeKind, trellis: bool
) -> None:
    """Raise ValueError if the nmse is unreachable, or bits are given."""
    for name, value, default in (("bits", bits, None), ("server_bits", server_bits, AUTO)):
        if value != default:
            raise ValueError(f"nmse={nmse!r} chooses the bits; leave out either {name}={value!r} or nmse")
    if isinstance(nmse, bool) or not isinstance(nmse, (int, float)) or not 0 < nmse < math.inf:
        raise ValueError(f"nmse={nmse!r}: use a positive number, for example 0.1")
    least = min(widths.nmse() for widths in possible(exchange, trellis))
    if nmse < least:
        raise ValueError(
            f"nmse={nmse!r}: exchange={exchange!r} has at least {least:.6f}"
            + ("; an allgather has half of that" if exchange == ALLTOALL else "")
            + ("" if trellis else "; trellis=True has 30% less")
        )


def require_width(server_bits: Any) -> None:
    """Raise ValueError for a text other than ``"auto"``."""
    if isinstance(server_bits, str):
        raise ValueError(f"server_bits={server_bits!r}: use 'auto', or an integer from 1 to {MOST_BITS}")


def fewest_bits(nmse: float, workers: int, choices: list[Widths]) -> Widths:
    """Return the choice with the fewest bytes among those within an nmse."""
    ratio = _usual_ratio(workers)
    fitting = [widths for widths in choices if widths.nmse() <= nmse]
    return min(fitting, key=lambda widths: (widths.bits_sent(workers), widths.nmse(ratio)))


def balanced(bits: int, workers: int, trellis: bool = False, share: float = 1.0) -> int:
    """Return the reducer bits that add at most this share of nmse."""
    left = share * _usual_ratio(workers) * eden_variance_factor(bits, trellis)
    fitting = (more for more in range(bits, MOST_BITS) if eden_variance_factor(more, trellis) <= left)
    return next(fitting, MOST_BITS)


def _usual_ratio(workers: int) -> float:
    """Return the assumed ratio of energies, see `horovod_quant.codecs.rotated_codes.eden_nmse`."""
    return 1 / (1 + (workers - 1) * IN_COMMON)
