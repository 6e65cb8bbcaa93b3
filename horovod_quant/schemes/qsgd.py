"""QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017. Each worker quantizes with local norms, an allgather distributes
norms and codes, and every worker decodes and adds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from horovod_quant.codecs.elias import EliasCodes
from horovod_quant.codecs.norms_and_codes import NormsAndCodes
from horovod_quant.reductions.allgather import AllgatherReduce, RaggedAllgatherReduce
from horovod_quant.reductions.base import Reduction
from horovod_quant.reductions.scatter_reduce import ScatterReduceAllgather
from horovod_quant.schemes.base import (
    ALLGATHER,
    ALLTOALL,
    AUTO,
    CORRELATED,
    ExchangeKind,
    Rounding,
    WithRounding,
    Workers,
    require_choice,
    use_bucket_size,
    use_int,
)
from horovod_quant.schemes.registry import register

Norm = Literal["l2", "max"]
Coding = Literal["fixed", "elias", "elias-omega"]
_ELIAS = {"elias": "gamma", "elias-omega": "omega"}

MOST_GATHERED = 4
"""Most workers for which an allgather sends at most 2× an alltoall.

By the alpha-beta model: ``(n - 1) P`` against ``2 (n - 1) / n P``, its allgather included, for payloads of P bytes.
"""


@register
@dataclass(frozen=True)
class QSGD(WithRounding):
    """QSGDinf (``norm="max"``) and the paper's QSGD (``norm="l2"``), with uniform levels.

    1. Each worker computes the norms of its buckets.
    2. It rounds stochastically to the levels and packs the codes. With ``rounding="correlated"`` the random bits make
       the workers' errors partly cancel, although each worker's distribution stays the same.
    3. One allgather distributes a payload of norms and codes.
    4. Each worker decodes every worker's codes with that worker's norms, and adds them in rank order.

    With ``exchange="alltoall"``, which ``"auto"`` chooses from 5 workers on, steps 3 and 4 are:

    3. An alltoall sends all workers' norms and codes of a shard to the rank that reduces the shard.
    4. The reducer decodes and averages them, and rounds the average in the same way; an allgather distributes the
       reducers' norms and codes.

    This is unbiased as well, but the second rounding adds an nmse that does not shrink with the number of workers.
    The defaults are what docs/results.md recommends.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"max"`` or ``"l2"``, computed per bucket and worker. The l2 norm needs 8 bits: 4 give too few levels.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside the range of float32 turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an alltoall for more than 4 workers, where an
            allgather would send more than 2× the bytes; with Elias coding an allgather.
        rounding: how the workers round their gradients. ``"correlated"``: their random numbers sum to a constant.
            Where gradients differ, half of the nmse remains (more where most elements are smaller than the
            distance between levels); where an even number n of gradients are equal, 1 / n of it. ``"independent"``:
            the workers' numbers are independent, as in the paper.

    Raises:
        ValueError: an argument is out of range.
    """

    bits: int = 4
    norm: Norm = "max"
    bucket_size: int = 256
    coding: Coding = "fixed"
    exchange: ExchangeKind = AUTO
    rounding: Rounding = CORRELATED

    presets = {"qsgd": {}}
    variants = ({"norm": "l2"}, {"exchange": ALLTOALL})
    compared = ("qsgd-4",)
    unbiased = True
    levels: ClassVar[str] = "uniform"
    most_bits: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        use_int(self, "bits", 2, self.most_bits)
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("coding", self.coding, get_args(Coding))
        require_choice("exchange", self.exchange, get_args(ExchangeKind))
        use_bucket_size(self)
        if self.exchange == ALLTOALL and self.coding != "fixed":
            raise ValueError(
                f"coding={self.coding!r}: an alltoall needs pieces of known length; use coding='fixed' or an allgather"
            )

    def exchange_of(self, workers: int) -> ExchangeKind:
        """Return ``"allgather"`` or ``"alltoall"`` for N workers."""
        if self.exchange != AUTO:
            return self.exchange
        return ALLGATHER if workers <= MOST_GATHERED or self.coding != "fixed" else ALLTOALL

    def for_workers(self, workers: Workers) -> QSGD:
        return self if self.exchange != AUTO else replace(self, exchange=self.exchange_of(workers.size))

    def reduction(self, workers: Workers) -> Reduction:
        codec, resolved = self.codec(), self.for_workers(workers)
        if self.coding != "fixed":
            return RaggedAllgatherReduce(EliasCodes(codec, _ELIAS[self.coding]), self.is_correlated)
        if resolved.exchange == ALLTOALL:
            return ScatterReduceAllgather(codec, resolved.gather_codec(), self.is_correlated)
        return AllgatherReduce(codec, self.is_correlated)

    def codec(self) -> NormsAndCodes:
        return NormsAndCodes(self.levels, self.bits, self.norm, self.bucket_size)

    def gather_codec(self) -> NormsAndCodes:
        """Return the codec of the reducers of an alltoall."""
        return self.codec()

    def fixed_length_proxy(self) -> QSGD:
        """Return the scheme with codes of fixed width."""
        # Elias codes exceed their bytes by at most 8 per stream.
        return replace(self, coding="fixed")

    def host_requirement(self) -> str | None:
        return super().host_requirement() if self.coding == "fixed" else f"coding={self.coding!r}"

    def levels_left(self, workers: int, hosts: int) -> int:
        return (1 << (self.bits - 1)) - 1

    def expected_nmse(self, workers: int, hosts: int) -> float:
        """Return the expected nmse of the average.

        It is the same for all even numbers of workers with the same reduction.
        """
        resolved = self.for_workers(Workers(0, workers))
        nmse = self.codec().nmse(workers, self.rounding)
        if resolved.exchange != ALLTOALL:
            return nmse
        return nmse + resolved.gather_codec().nmse() * (1 + nmse)  # the average has the workers' errors in it
