"""Global-QSGD: Practical Floatless Quantization for Distributed Learning with Theoretical Guarantees.

Xin, Canini, Richtarik, Horvath. 2023 (ECAI 2025). All workers share one scale, so that an ordinary allreduce can sum
their integers. With ``rotate=True`` it is the scale of the sum: `horovod_quant.reductions.rotated_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal, get_args

from horovod_quant.codecs.rotated_sum_steps import rotated_sum_nmse
from horovod_quant.codecs.rounding_error import gaussian_nmse, level_set
from horovod_quant.codecs.shared_scale import SharedScaleSums
from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions.base import Reduction
from horovod_quant.reductions.exponential import ExponentialReduction
from horovod_quant.reductions.integer_allreduce import IntegerAllreduce
from horovod_quant.reductions.rotated_sum import SHARED, RotatedSum
from horovod_quant.schemes.base import (
    CORRELATED,
    Exchange,
    Gradient,
    Rounding,
    Scheme,
    WithRounding,
    Workers,
    require_bool,
    require_choice,
    require_int,
    use_bucket_size,
    use_int,
)
from horovod_quant.schemes.registry import register

Norm = Literal["max", "l2"]
Levels = Literal["uniform", "exponential"]


@register
@dataclass(frozen=True)
class GlobalQSGD(WithRounding):
    """Global-QSGD with standard (uniform) or exponential dithering.

    With ``rotate`` (not in the paper) all workers apply the same rotation to their gradients, which makes every
    coordinate of the *sum* look Gaussian. They round to multiples of a step size for which the sum fits its field,
    according to an estimate of its norm, so the number of workers is not limited. A bucket of 1,024 elements whose sum
    does not fit, less than one in a million, is detected and resent exactly; ``stats()`` counts them.

    Args:
        bits: width of an integer on the wire. Uniform levels: 2 to 16, wide enough for the sum of all workers'
            integers. Exponential levels: 2 to 8, a sign and a level index. With ``rotate``: 4 to 8.
        norm: norm of a bucket over all workers: ``"max"`` (largest magnitude) or ``"l2"`` (square root of the sum of
            all squares; for the same width about sqrt(n) times more levels, on a larger scale).
        levels: ``"uniform"`` or ``"exponential"``.
        bucket_size: number of elements that share a norm, a multiple of 32, by default 1,024. A norm below 2^-96 counts
            as 0. An element or norm outside the range of float32 turns the bucket into NaN. With ``rotate`` it is
            16,384, of which each 1,024 are rotated together and have a separate norm.
        rounding: ``"correlated"`` or ``"independent"``, see `horovod_quant.schemes.QSGD`.
        rotate: whether to rotate and use the sum's scale. Needs uniform levels, allows no choice of ``norm``, and runs
            its kernels on the host.

    Raises:
        ValueError: an argument is out of range.
    """

    bits: int = 8
    norm: Norm = "max"
    levels: Levels = "uniform"
    bucket_size: int | None = None
    rounding: Rounding = CORRELATED
    rotate: bool = False

    presets = {"global-qsgd": {}}
    variants = ({"norm": "l2"}, {"levels": "exponential"}, {"rotate": True})
    compared = ("global-qsgd-8", "global-qsgd-4")
    unbiased = True

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("levels", self.levels, get_args(Levels))
        super().__post_init__()
        require_bool("rotate", self.rotate)
        if self.rotate:
            self._check_rotated()
        if self.bucket_size is None:
            object.__setattr__(self, "bucket_size", self._usual_bucket)
        use_int(self, "bits", 2, 16 if self.levels == "uniform" else 8)
        use_bucket_size(self)
        if self.levels == "exponential" and TILE % self._bucket and self._bucket % TILE:
            raise ValueError(
                f"bucket_size={self.bucket_size!r}: with levels='exponential' use a divisor or a multiple of {TILE}"
            )

    @property
    def _usual_bucket(self) -> int:
        return SHARED if self.rotate else TILE

    @property
    def _bucket(self) -> int:
        assert self.bucket_size is not None
        return self.bucket_size

    def _check_rotated(self) -> None:
        require_int("bits", self.bits, 4, 8)
        for name, usual in (("norm", "max"), ("levels", "uniform"), ("bucket_size", SHARED)):
            if getattr(self, name) not in (usual, None):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: rotate=True works only with {name}={usual!r}; leave {name} out"
                )

    def replaced(self, **arguments: Any) -> Scheme:
        if self.bucket_size == self._usual_bucket:
            arguments = {"bucket_size": None, **arguments}
        return super().replaced(**arguments)

    def reduction(self, workers: Workers) -> Reduction:
        if self.rotate:
            return RotatedSum(self.bits, self.rounding)
        if self.levels == "exponential":
            return ExponentialReduction(self.bits, self.norm, self._bucket, self.is_correlated)
        codec = SharedScaleSums(self.bits, self.levels_for(workers.size), self.norm, self._bucket)
        return IntegerAllreduce(codec, self.is_correlated)

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        self.check_workers(workers.size)
        return (yield from super().begin(gradients, workers, kernels))

    def levels_for(self, size: int) -> int:
        """Return the most levels whose sum over the workers fits.

        It is 0 if none does.

        A field holds sums up to ``M = 2^(bits-1) - 1``. Each integer is at most s, so ``s = M // n`` always fits;
        with the l2 norm Cauchy-Schwarz bounds the sum by ``s sqrt(n) + n`` as well.
        """
        largest_sum = (1 << (self.bits - 1)) - 1
        levels = largest_sum // size
        if self.norm == "l2" and largest_sum > size:
            levels = max(levels, isqrt((largest_sum - size) ** 2 // size))
        return min(levels, largest_sum)

    def host_requirement(self) -> str | None:
        return "rotate=True" if self.rotate else super().host_requirement()

    def levels_left(self, workers: int, hosts: int) -> int | None:
        if self.rotate:
            return None
        return self.levels_for(workers) if self.levels == "uniform" else (1 << (self.bits - 1)) - 1

    def expected_nmse(self, workers: int, hosts: int) -> float:
        """Return the nmse.

        It grows with the number of workers: the scale grows, and levels get fewer.
        """
        if self.rotate:
            return rotated_sum_nmse(self.bits, workers, self.rounding)
        levels = self.levels_left(workers, hosts)
        assert levels is not None
        grid = level_set(self.levels, levels)
        # With exponential levels the reducer of a shard rounds the average once more.
        again = self.levels == "exponential"
        return gaussian_nmse(grid, self.norm, self._bucket * workers, self.rounding, workers, again)

    def check_workers(self, size: int) -> None:
        if self.rotate or self.levels == "exponential" or self.levels_for(size) >= 1:
            return
        wide_enough = [bits for bits in range(2, 17) if GlobalQSGD(bits, self.norm).levels_for(size) >= 1]
        remedy = (
            f"{size} workers need bits >= {wide_enough[0]} with norm={self.norm!r}"
            if wide_enough
            else f"{size} workers are too many for levels='uniform'; use levels='exponential', or rotate=True"
        )
        raise ValueError(f"bits={self.bits!r}: the sum of {size} workers' integers does not fit; {remedy}")
