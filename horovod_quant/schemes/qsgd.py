"""QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017. Each worker quantizes with its own norms, an allgather
distributes norms and codes, and every worker decodes and adds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, get_args

import numpy as np

from horovod_quant.codecs.elias import EliasCodes
from horovod_quant.codecs.levels import uniform_levels
from horovod_quant.codecs.norms_and_codes import NormsAndCodes
from horovod_quant.codecs.rounding_error import gaussian_error
from horovod_quant.reductions.allgather import AllgatherReduce, RaggedAllgatherReduce
from horovod_quant.reductions.base import Reduction
from horovod_quant.reductions.scatter_reduce import ScatterReduceAllgather
from horovod_quant.schemes.base import (
    CORRELATED,
    Rounding,
    Scheme,
    WithRounding,
    Workers,
    require_bucket_size,
    require_choice,
    require_int,
    use_plain_ints,
)
from horovod_quant.schemes.registry import register

Norm = Literal["l2", "max"]
Coding = Literal["fixed", "elias", "elias-omega"]
Route = Literal["allgather", "alltoall", "auto"]
ALLGATHER: Final = "allgather"
ALLTOALL: Final = "alltoall"
AUTO: Final = "auto"
_ELIAS = {"elias": "gamma", "elias-omega": "omega"}

MOST_GATHERED = 4
"""The most workers for which an allgather moves at most twice the bytes of an alltoall and an allgather of chunks.

By the alpha-beta model: ``(n - 1) P`` against ``2 (n - 1) / n P`` for payloads of P bytes.
"""


@dataclass(frozen=True)
class GatheredScheme(WithRounding):
    """What QSGD and NUQSGD have in common: everything except the levels.

    1. Each worker computes the norms of its own buckets.
    2. It rounds stochastically to the levels and packs the codes. With ``rounding="correlated"`` the random bits make
       the workers' errors partly cancel, although each worker's own distribution stays the same.
    3. One allgather distributes a payload of norms and codes.
    4. Each worker decodes every worker's codes with that worker's norms, and adds them in rank order.

    With ``exchange="alltoall"``, which ``"auto"`` chooses from 5 workers on, steps 3 and 4 are:

    3. An alltoall sends all workers' norms and codes of a shard to the rank that reduces the shard.
    4. The reducer decodes and averages them, and rounds the average in the same way; an allgather distributes the
       reducers' norms and codes.

    This is unbiased as well, but the second rounding adds an error that does not shrink with the number of workers.
    """

    bits: int = 4
    norm: Norm = "l2"
    bucket_size: int = 1024
    coding: Coding = "fixed"
    exchange: Route = AUTO
    rounding: Rounding = CORRELATED

    unbiased = True
    levels: ClassVar[str]

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("coding", self.coding, get_args(Coding))
        require_choice("exchange", self.exchange, get_args(Route))
        super().__post_init__()
        require_bucket_size(self.bucket_size)
        use_plain_ints(self, "bits", "bucket_size")
        if self.exchange == ALLTOALL and self.coding != "fixed":
            raise ValueError(
                f"coding={self.coding!r}: an alltoall needs pieces of known length; use coding='fixed' or an allgather"
            )

    def for_workers(self, workers: Workers) -> Scheme:
        """With ``exchange="auto"``: an alltoall where an allgather would move more than twice the bytes."""
        if self.exchange != AUTO:
            return self
        few = workers.size <= MOST_GATHERED or self.coding != "fixed"
        return replace(self, exchange=ALLGATHER if few else ALLTOALL)

    def fixed_length_proxy(self) -> Scheme:
        """With ``coding="elias"``: codes of fixed width; Elias codes exceed their bytes by at most 8 per stream."""
        return replace(self, coding="fixed")

    def host_requirement(self) -> str | None:
        return super().host_requirement() if self.coding == "fixed" else f"coding={self.coding!r}"

    def levels_left(self, workers: int, hosts: int) -> int:
        return (1 << (self.bits - 1)) - 1

    def expected_nmse(self, workers: int, hosts: int) -> float:
        """Of the exchange that so many workers run; the same for any even number of workers with the same exchange."""
        resolved = self.for_workers(Workers(0, workers))
        assert isinstance(resolved, GatheredScheme)
        nmse = gaussian_error(self.grid(), self.norm, self.bucket_size, self.rounding, workers) ** 2
        # A reducer rounds an average that has the workers' errors in it.
        return nmse + (resolved.reducer_nmse() * (1 + nmse) if resolved.exchange == ALLTOALL else 0.0)

    def reducer_nmse(self) -> float:
        """What the rounding of an average adds, relative to the average's own square."""
        return gaussian_error(self.grid(), self.norm, self.bucket_size, "independent", 1) ** 2

    def gather_codec(self) -> NormsAndCodes:
        """The codec of what the reducers of an alltoall send."""
        return NormsAndCodes(self.levels, self.bits, self.norm, self.bucket_size)

    def grid(self) -> np.ndarray:
        """The levels, from 0 to 1."""
        raise TypeError(f"{type(self).__name__} defines no levels")

    def reduction(self, workers: Workers) -> Reduction:
        codec = NormsAndCodes(self.levels, self.bits, self.norm, self.bucket_size)
        if self.coding != "fixed":
            return RaggedAllgatherReduce(EliasCodes(codec, _ELIAS[self.coding]), self.is_correlated)
        resolved = self.for_workers(workers)
        assert isinstance(resolved, GatheredScheme)
        if resolved.exchange == ALLTOALL:
            return ScatterReduceAllgather(codec, resolved.gather_codec(), self.is_correlated)
        return AllgatherReduce(codec, self.is_correlated)


@register
@dataclass(frozen=True)
class QSGD(GatheredScheme):
    """QSGDinf (``norm="max"``) and the paper's QSGD (``norm="l2"``) with ``2^(bits-1) - 1`` uniform levels.

    The defaults are what docs/results.md recommends.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"max"`` or ``"l2"``, computed per bucket and worker. The l2 norm needs 8 bits: 4 give too few levels.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside float32's range turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an alltoall for more than 4 workers, where an
            allgather would send more than twice the bytes; with Elias coding an allgather.
        rounding: how the workers round their gradients. ``"correlated"``: their random numbers sum to a constant.
            Where gradients differ, half of the sum's error remains (more where most elements are smaller than the
            distance between levels); where an even number n of gradients are equal, 1 / n of it. ``"independent"``:
            each worker draws its own numbers, as in the paper.

    Raises:
        ValueError: an argument is out of range.
    """

    norm: Norm = "max"
    bucket_size: int = 256

    presets = {"qsgd": {}}
    variants = ({"norm": "l2"}, {"exchange": ALLTOALL})
    compared = ("qsgd-4",)
    levels = "uniform"

    def __post_init__(self) -> None:
        require_int("bits", self.bits, 2, 16)
        super().__post_init__()

    def grid(self):
        return uniform_levels((1 << (self.bits - 1)) - 1)
