"""EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning.

Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher. ICML 2022; with one bit it is DRIVE (NeurIPS 2021).
A random rotation makes every bucket look Gaussian, so that one table of levels suits all gradients.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Any, get_args

from horovod_quant.codecs.rotated_codes import RotatedCodes
from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions.allgather import AllgatherReduce
from horovod_quant.reductions.base import Reduction
from horovod_quant.reductions.scatter_reduce import ScatterReduceAllgather
from horovod_quant.schemes import eden_widths
from horovod_quant.schemes.base import (
    ALLGATHER,
    AUTO,
    ExchangeKind,
    Scheme,
    Workers,
    renamed_arguments,
    require_bool,
    require_choice,
    use_int,
)
from horovod_quant.schemes.registry import register


@register
@dataclass(frozen=True)
class EDEN(Scheme):
    """EDEN: random rotation, ``2^bits`` Lloyd-Max levels, and a scale per 1,024 elements.

    1. Each worker rotates its buckets with separate random signs, rounds to the nearest level (Lloyd-Max for a
       Gaussian), and chooses the scale that makes the component along the bucket exact.
    2. An alltoall sends all workers' codes and scales of a shard to the rank that reduces the shard.
    3. The reducer decodes and averages them, and encodes the average with a different rotation: a worker's rotation
       would bias the result.
    4. An allgather distributes the reducers' codes and scales.

    With two workers there is an allgather after step 1 instead; each worker decodes and adds all workers' codes. The
    number of the step that selected the signs is sent with the codes, one word for each reducer's part of a
    gradient, so the workers' counts need not be equal.

    Rounding adds a constant fraction of the squared gradient, for any distribution: 0.57, 0.13, 0.036 or 0.0096
    for 1 to 4 bits. The noise spreads evenly over the bucket: a bucket of zeros stays zero, zeros among other elements
    do not.

    The mean over the rotations is not exactly the bucket. The largest bias found in a bucket of d elements, relative to
    its norm, is below 1.7, 1, 1 or 0.5 / sqrt(d) for 1 to 4 bits, where two to four elements of nearly equal magnitude,
    or one beside tiny ones, are most of the norm. d is 1,024, or the power of two from 32 on that a tensor's last
    bucket is padded to. A bucket of normally distributed elements has 0.3% with 1 bit and d = 32, and less otherwise.

    Args:
        bits: width of a code, 1 to 4; 3 unless ``nmse`` is given. A bucket whose largest magnitude is below 2^-96
            counts as 0. An element outside the range of float32 turns its bucket into NaN.
        server_bits: width of the reducers' codes. The nmse of the second rounding does not shrink with the number of
            workers. ``"auto"`` uses the fewest bits, at most 4, whose nmse is at most what remains of the workers' nmse
            after averaging: 4 with ``bits=3`` (``server_bits=3`` sends 14% less and has 1.6× the nmse); with ``bits=2``
            3 for up to 28 workers, then 4. An allgather has no second rounding.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an allgather for two workers, an alltoall for more.
        nmse: instead of ``bits``, the largest acceptable nmse of the average, for uncorrelated gradients; the bits and
            the reduction with the fewest bytes follow. At least 0.0096, with a trellis 0.0067; 2× with an alltoall.
        trellis: trellis-coded quantization (Marcellin and Fischer, 1990): 2× the levels for the same bits, and earlier
            codes select the half from which a code chooses. Rounding then adds 0.48, 0.10, 0.026 or 0.0067 of the
            squared gradient for 1 to 4 bits. Encoding takes 2.1× to 2.9× the time, with 4 bits 3.5× to 4×.

    Raises:
        ValueError: an argument is out of range, or ``nmse`` is combined with ``bits`` or ``server_bits``.
    """

    bits: int | None = None
    server_bits: int | str = AUTO
    exchange: ExchangeKind = AUTO
    nmse: float | None = None
    trellis: bool = False
    error: InitVar[Any] = None  # the former name of nmse

    presets = {"eden": {}}
    variants = ({"trellis": True},)
    compared = ("eden-3",)
    renamed = {"error": "nmse"}
    unbiased = True
    bucket_size = TILE

    def __post_init__(self, error: Any) -> None:
        if error is not None:
            for name, value in renamed_arguments(EDEN, {"error": error}).items():
                object.__setattr__(self, name, value)
        require_choice("exchange", self.exchange, get_args(ExchangeKind))
        require_bool("trellis", self.trellis)
        if self.server_bits != AUTO:
            eden_widths.require_width(self.server_bits)
            use_int(self, "server_bits", 1, eden_widths.MOST_BITS)
        if self.nmse is not None:
            eden_widths.require_nmse(self.nmse, self.bits, self.server_bits, self.exchange, self.trellis)
            return
        if self.bits is None:
            object.__setattr__(self, "bits", 3)
        use_int(self, "bits", 1, eden_widths.MOST_BITS)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickles, also those of version 0.1.0."""
        if "error" in state:
            state = {**state, "nmse": state["error"]}
            del state["error"]
        vars(self).update(state)

    def replaced(self, **arguments: Any) -> Scheme:
        """Return the scheme with other arguments; ``nmse`` replaces bits, and vice versa."""
        if arguments.get("nmse") is not None:
            arguments = {"bits": None, "server_bits": AUTO, **arguments}
        elif arguments.get("bits") is not None:
            arguments = {"nmse": None, **arguments}
        return super().replaced(**arguments)

    @property
    def extra_compute(self) -> bool:
        return self.trellis

    def reduction(self, workers: Workers) -> Reduction:
        bits, server_bits, exchange, trellis = self.widths(workers.size)
        # A rotation that all workers share would need one inverse rotation for the sum. But equal gradients would have
        # equal errors then, of which n× more is left; two workers would save a quarter of the kernels' time at most.
        codes = RotatedCodes(bits, trellis)
        if exchange == ALLGATHER:
            return AllgatherReduce(codes)
        return ScatterReduceAllgather(codes, RotatedCodes(server_bits, trellis))

    def for_workers(self, workers: Workers) -> Scheme:
        """Return the scheme with the choices for this number of workers."""
        return replace(self, nmse=None, **self.widths(workers.size)._asdict())

    def levels_left(self, workers: int, hosts: int) -> int | None:
        return None if self.bits is None else 1 << (self.bits - 1)

    def expected_nmse(self, workers: int, hosts: int) -> float:
        """Return the nmse; errors average out as gradients do."""
        return self.widths(workers).nmse()

    def widths(self, workers: int) -> eden_widths.Widths:
        """Return the bits and the reduction for N workers."""
        if self.nmse is not None:
            choices = eden_widths.possible(self.exchange, self.trellis)
            return eden_widths.fewest_bits(self.nmse, workers, choices)
        assert self.bits is not None
        return eden_widths.usual(self.bits, self.server_bits, self.exchange, self.trellis, workers)
