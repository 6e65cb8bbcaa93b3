"""Global-QSGD: Practical Floatless Quantization for Distributed Learning with Theoretical Guarantees.

Xin, Canini, Richtarik, Horvath. 2023 (ECAI 2025). All workers share one scale, so that an ordinary allreduce can sum
their integers. With ``rotate=True`` it is the scale of the sum: `horovod_quant.schemes.rotated_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isqrt, sqrt
from typing import Any, Callable, Literal, get_args

import numpy as np

from horovod_quant.analysis.bounds import exponential_levels, rotated_sum_error, uniform_levels
from horovod_quant.analysis.rounding import gaussian_error
from horovod_quant.kernels.arrays import no_part
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import TILE, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.reference import per_element, store_float32
from horovod_quant.schemes import rotated_sum
from horovod_quant.schemes.base import (
    JOINT,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    CustomAllreduce,
    Decoded,
    Exchange,
    Extent,
    Gradient,
    Rounding,
    Scheme,
    Workers,
    checked,
    require_bool,
    require_bucket_size,
    require_choice,
    require_int,
    split_points,
    use_plain_ints,
    worker_key,
    worker_keys,
)
from horovod_quant.schemes.chunks import Chunks, Segment, chunks_of
from horovod_quant.schemes.registry import register

Norm = Literal["max", "l2"]
Levels = Literal["uniform", "exponential"]


@register
@dataclass(frozen=True)
class GlobalQSGD(Scheme):
    """Global-QSGD with standard (uniform) or exponential dithering.

    With ``rotate`` (not in the paper) all workers apply the same rotation to their gradients, which makes every
    coordinate of the *sum* look Gaussian. They round to multiples of a step for which the sum fits its field,
    according to an estimate of its norm, so any number of workers can take part. A bucket of 1,024 elements whose sum
    does not fit, less than one in a million, is detected and exchanged again, exactly; ``stats()`` counts them.

    Args:
        bits: width of an integer on the wire. Uniform levels: 2 to 16, wide enough for the sum of all workers'
            integers. Exponential levels: 2 to 8, a sign and a level index. With ``rotate``: 4 to 8.
        norm: norm of a bucket over all workers: ``"max"`` (largest magnitude) or ``"l2"`` (square root of the sum of
            all squares; for the same width about sqrt(n) times more levels, on a larger scale).
        levels: ``"uniform"`` or ``"exponential"``.
        bucket_size: number of elements that share a norm, a multiple of 32, by default 1,024. A norm below 2^-96 counts
            as 0. An element or norm outside float32's range turns the bucket into NaN. With ``rotate`` it is 16,384, of
            which each 1,024 are rotated together and have a norm of their own.
        rounding: ``"joint"`` or ``"independent"``, see `horovod_quant.schemes.QSGD`.
        rotate: whether to rotate and use the sum's scale. Needs uniform levels, allows no choice of ``norm``, and runs
            its kernels on the host.

    Raises:
        ValueError: an argument is out of range.
    """

    bits: int = 8
    norm: Norm = "max"
    levels: Levels = "uniform"
    bucket_size: int | None = None
    rounding: Rounding = JOINT
    rotate: bool = False

    presets = {
        "global-qsgd": {"norm": "max"},
        "global-qsgd-l2": {"norm": "l2"},
        "global-qsgd-exp": {"norm": "max", "levels": "exponential"},
        "global-qsgd-rotated": {"rotate": True},
    }
    compared = ("global-qsgd-8", "global-qsgd-4")
    unbiased = True

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("levels", self.levels, get_args(Levels))
        require_choice("rounding", self.rounding, get_args(Rounding))
        require_bool("rotate", self.rotate)
        if self.rotate:
            self._check_rotated()
        if self.bucket_size is None:
            object.__setattr__(self, "bucket_size", rotated_sum.SHARED if self.rotate else TILE)
        require_int("bits", self.bits, 2, 16 if self.levels == "uniform" else 8)
        require_bucket_size(self.bucket_size)
        use_plain_ints(self, "bits", "bucket_size")
        if self.levels == "exponential" and TILE % self._bucket and self._bucket % TILE:
            raise ValueError(
                f"bucket_size={self.bucket_size!r}: with levels='exponential' use a divisor or a multiple of {TILE}"
            )

    @property
    def _bucket(self) -> int:
        assert self.bucket_size is not None
        return self.bucket_size

    def _check_rotated(self) -> None:
        require_int("bits", self.bits, 4, 8)
        for name, usual in (("norm", "max"), ("levels", "uniform"), ("bucket_size", rotated_sum.SHARED)):
            if getattr(self, name) not in (usual, None):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: rotate=True works only with {name}={usual!r}; leave {name} out"
                )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        if self.rotate:
            return rotated_sum.COLLECTIVES
        scale = (
            Collective(Allreduce, "float32", "max")
            if self.norm == "max"
            else Collective(Allreduce, "float64", "sum")
        )
        if self.levels == "uniform":
            return (scale, Collective(Allreduce, "int32", "sum"))
        return (scale, Collective(Alltoall, "int32"), Collective(Allgather, "int32"))

    def levels_for(self, size: int) -> int:
        """Largest number s of uniform levels for which the sum of ``size`` integers fits ``bits`` bits; 0 if none does.

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

    def relative_error(self, workers: int, hosts: int) -> float:
        """It grows with the number of workers: the scale grows, and fewer levels are left."""
        if self.rotate:
            return sqrt(rotated_sum_error(self.bits, workers, self.rounding))
        uniform, levels = self.levels == "uniform", self.levels_left(workers, hosts)
        assert levels is not None
        grid = uniform_levels(levels) if uniform else exponential_levels(levels - 1)
        # With exponential levels the server of a chunk rounds the average once more.
        again = not uniform
        return gaussian_error(grid, self.norm, self._bucket * workers, self.rounding, workers, again)

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

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """1. one scale for all workers (an allreduce of norms); 2. rounding; 3. the sum of the integers."""
        if self.rotate:
            return (yield from rotated_sum.exchange(gradients, workers, kernels, self.bits, self.rounding))
        self.check_workers(workers.size)
        elements = tuple(gradient.elements for gradient in gradients)
        norm_at = _norm_offsets(elements, self._bucket)
        table = kernels.Table([each.held for each in gradients]) if hasattr(kernels, "Table") else None
        norms = yield from self._global_norms(gradients, norm_at, workers, kernels, table)
        if self.levels == "uniform":
            word_at = _word_offsets(elements, self.bits)
            return (yield from self._sum_uniform(gradients, norms, norm_at, word_at, workers, kernels, table))
        if workers.custom_reduction:
            return (yield from self._reduce_exponential(gradients, norms, norm_at, workers, kernels))
        return (yield from self._serve_exponential(gradients, norms, norm_at, workers, kernels))

    def _global_norms(
        self,
        gradients: Sequence[Gradient],
        norm_at: tuple[int, ...],
        workers: Workers,
        kernels: Any,
        table: Any,
    ):
        largest = self.norm == "max"
        compute = kernels.bucket_maxima if largest else kernels.bucket_square_sums
        dtype = np.dtype(np.float32 if largest else np.float64)
        if largest and table is not None:
            local = kernels.bucket_maxima_each(table, self._bucket)
        else:
            local = kernels.assemble(
                [
                    (norm_at[i + 1] - norm_at[i], dtype, partial(compute, gradient.values, self._bucket))
                    for i, gradient in enumerate(gradients)
                ]
            )
        request = Allreduce(local, "max" if largest else "sum", _parts(norm_at, dtype.itemsize))
        norms = yield from checked(request, workers)
        return norms if largest else kernels.norms_of_square_sums(norms)

    def _sum_uniform(
        self,
        gradients: Sequence[Gradient],
        norms: Any,
        norm_at: tuple[int, ...],
        word_at: tuple[int, ...],
        workers: Workers,
        kernels: Any,
        table: Any,
    ):
        levels = self.levels_for(workers.size)

        def encode(i: int, out: Any) -> np.ndarray:
            key = worker_key(gradients[i], workers, self.rounding)
            return kernels.encode_uniform_sum(
                gradients[i].values,
                norms[norm_at[i] : norm_at[i + 1]],
                self._bucket,
                levels,
                self.bits,
                key,
                gradients[i].start,
                out,
            )

        def encode_all(out: Any) -> np.ndarray:
            keys, starts = worker_keys(gradients, workers, self.rounding), [each.start for each in gradients]
            return kernels.encode_uniform_sum_each(
                table, norms, self._bucket, levels, self.bits, keys, starts, out
            )

        if table is not None:
            parts: list[Any] = [(word_at[-1], np.int32, encode_all)]
        else:
            parts = [
                (word_at[i + 1] - word_at[i], np.int32, partial(encode, i)) for i in range(len(gradients))
            ]
        words = kernels.assemble([*parts, (1, np.int32, _head_count)])

        words = yield from checked(Allreduce(words, "sum", _parts(word_at, 4)), workers)
        return self._opened_sums(norms, norm_at, words, word_at, workers, kernels, table)

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        """The norms, and the integers' sums with the head count, or the servers' codes.

        None if rotated: the exact sums of buckets that are exchanged again have no codes.
        """
        if self.rotate:
            return None
        norms = (sum(buckets(count, self._bucket) for count in elements), np.float32)
        if self.levels == "uniform":
            return [norms, (sum(sum_words(count, self.bits) for count in elements) + 1, np.int32)]
        return [norms, (32 * self.bits * sum(map(tiles, elements)), np.int32)]

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        norms, words = received
        elements = tuple(extent.elements for extent in extents)
        norm_at = _norm_offsets(elements, self._bucket)
        if self.levels == "uniform":
            word_at = _word_offsets(elements, self.bits)
            return self._opened_sums(norms, norm_at, words, word_at, workers, kernels, None)
        code_at = split_points([32 * self.bits * tiles(count) for count in elements])

        def write(i: int, factor: float, out: Any) -> Any:
            own, total = words[code_at[i] : code_at[i + 1]], factor * workers.size
            scales = norms[norm_at[i] : norm_at[i + 1]]
            return kernels.decode_exponential([own], [scales], self._bucket, self.bits, total, out)

        return Decoded(workers.size, write, received=received)

    def _opened_sums(
        self,
        norms: Any,
        norm_at: tuple[int, ...],
        words: Any,
        word_at: tuple[int, ...],
        workers: Workers,
        kernels: Any,
        table: Any,
    ) -> Decoded:
        """``table``: of the gradients, if there is one."""
        levels = self.levels_for(workers.size)

        def write(i: int, factor: float, out: Any) -> Any:
            own, scales = words[word_at[i] : word_at[i + 1]], norms[norm_at[i] : norm_at[i + 1]]
            return kernels.decode_uniform_sum(own, scales, self._bucket, levels, self.bits, factor, out)

        def write_all(factor: float, outs: Sequence[Any]) -> None:
            kernels.decode_uniform_sum_each(
                words[:-1], norms, self._bucket, levels, self.bits, factor, outs, table
            )

        at_once = write_all if hasattr(kernels, "Table") else None
        return Decoded(words[-1], write, write_all=at_once, received=[norms, words])

    def _serve_exponential(
        self,
        gradients: Sequence[Gradient],
        norms: Any,
        norm_at: tuple[int, ...],
        workers: Workers,
        kernels: Any,
    ):
        """Each worker averages one chunk of all workers' codes, rounds it again, and everybody gathers the chunks."""
        chunks = chunks_of((gradient.elements for gradient in gradients), workers.size)
        tile_words = 32 * self.bits
        splits = [chunks.tile_count(server) * tile_words for server in range(workers.size)]

        def encode(i: int, out: Any) -> np.ndarray:
            key = worker_key(gradients[i], workers, self.rounding)
            scale = norms[norm_at[i] : norm_at[i + 1]]
            return kernels.encode_exponential(
                gradients[i].values, scale, self._bucket, self.bits, key, gradients[i].start, out
            )

        sent = kernels.assemble(
            [
                part
                for i, gradient in enumerate(gradients)
                for part in self._whole_tiles(gradient.elements, partial(encode, i))
            ]
        )

        received = yield from checked(Alltoall(sent, splits, chunks.parts(4 * tile_words)), workers)

        served = self._served_chunk(chunks, gradients, received, workers, kernels)
        del sent, received  # before the gathered chunks come
        parts = [count / workers.size for count in chunks.parts(4 * tile_words)]
        gathered = kernels.concatenate((yield from checked(Allgather(served, parts, splits), workers)))
        return self.opened([norms, gathered], [each.extent for each in gradients], workers, kernels)

    def _whole_tiles(self, elements: int, encode: Callable[[Any], Any]) -> list:
        """Parts: the codes of ``elements`` elements, then zeros up to whole tiles."""
        used = code_words(elements, self.bits)
        unused = tiles(elements) * 32 * self.bits - used
        return [(used, np.int32, encode), (unused, np.int32, lambda out: np.zeros(unused, np.int32))]

    def _served_chunk(
        self,
        chunks: Chunks,
        gradients: Sequence[Gradient],
        received: list[np.ndarray],
        workers: Workers,
        kernels: Any,
    ) -> np.ndarray:
        """The average of all workers' codes for this worker's chunk, rounded to codes again."""
        tile_words = 32 * self.bits

        def average(piece: Segment, out: Any) -> np.ndarray:
            gradient = gradients[piece.gradient]
            own = slice(piece.tile * tile_words, (piece.tile + piece.tile_count) * tile_words)
            units = [np.ones(piece.tile_count, np.float32)] * workers.size
            total = kernels.decode_exponential(
                [words[own] for words in received], units, TILE, self.bits, 1.0,
                kernels.target(piece.stop - piece.start),
            )  # fmt: skip
            # Every worker would draw the same bits here, so the result does not depend on who serves what.
            key = gradient.keys.key("server", gradient.step)
            size = np.full(piece.tile_count, workers.size, np.float32)
            start = gradient.start + piece.start
            return kernels.encode_exponential(total, size, TILE, self.bits, key, start, out)

        parts = [
            part
            for piece in chunks.pieces(workers.rank, kernels.TILES_AT_A_TIME)
            for part in self._whole_tiles(piece.stop - piece.start, partial(average, piece))
        ]
        return kernels.assemble([*parts, no_part(np.int32)])

    def _reduce_exponential(
        self,
        gradients: Sequence[Gradient],
        norms: np.ndarray,
        norm_at: tuple[int, ...],
        workers: Workers,
        kernels: Any,
    ):
        """The sum by a reduction that re-rounds pairwise: for transports with reductions of one's own (MPI).

        n - 1 additions can raise the largest level by n - 1; the indices travel as int8 or int16, which has room.
        """
        highest = (1 << (self.bits - 1)) - 1 + workers.size - 1
        if highest > 32767:
            raise ValueError(f"{workers.size} workers are too many to reduce exponential levels pairwise")
        dtype = np.int8 if highest <= 127 else np.int16
        at = tuple(split_points([gradient.elements for gradient in gradients]))
        own_norms = [norms[norm_at[i] : norm_at[i + 1]] for i in range(len(gradients))]
        digits = np.empty(at[-1], dtype)
        for i, gradient in enumerate(gradients):
            key = worker_key(gradient, workers, self.rounding)
            digits[at[i] : at[i + 1]] = kernels.round_exponential(
                gradient.values, own_norms[i], self._bucket, self.bits, key
            )

        def combine(left: np.ndarray, right: np.ndarray, low: int, high: int) -> np.ndarray:
            result = np.empty_like(left)
            for i, gradient in enumerate(gradients):
                own = slice(at[i], at[i + 1])
                key: Key = gradient.keys.key(f"reduction {low}", gradient.step, high)
                left_digits, right_digits = left[own].astype(np.int32), right[own].astype(np.int32)
                result[own] = kernels.add_exponential(left_digits, right_digits, key)
            return result

        request = CustomAllreduce(digits, combine, _parts(at, digits.itemsize))
        total = yield from checked(request, workers)

        def write(i: int, factor: float, out: np.ndarray) -> np.ndarray:
            values = kernels.exponential_values(total[at[i] : at[i + 1]].astype(np.int32), self.bits)
            scales = kernels.decoding_scales(own_norms[i], 1, factor)
            return store_float32(values * per_element(scales, self._bucket, len(out)), out)

        return Decoded(workers.size, write)


def _head_count(out: Any) -> np.ndarray:
    return np.ones(1, np.int32)


# What follows from the gradients' sizes alone is computed in their first exchange.


@lru_cache(maxsize=256)
def _norm_offsets(elements: tuple[int, ...], bucket_size: int) -> tuple[int, ...]:
    return tuple(split_points([buckets(count, bucket_size) for count in elements]))


@lru_cache(maxsize=256)
def _word_offsets(elements: tuple[int, ...], bits: int) -> tuple[int, ...]:
    return tuple(split_points([sum_words(count, bits) for count in elements]))


@lru_cache(maxsize=256)
def _parts(offsets: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(item_bytes * (stop - start) for start, stop in zip(offsets, offsets[1:]))
