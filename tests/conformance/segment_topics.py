"""Cases of the kernels for many segments in one call: the referee is the loop over the reference's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from conformance.suite import BFLOAT16, DTYPES, Draw, Out, Script, as_type, topic

from horovod_quant.kernels.formats import CodeFormat, RotatedFormat, SumFormat, Sums
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import ROW, TILE, buckets, ceil_div, code_words, split_points, tiles
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.kernels.segments import Batch, Rounder

FEW = (1, 2100, 0, 1025, 33)
MANY = (1, 31, 1024, 1025, 4096, 70, 3333, 0)
BUCKETS = ((4, 96), (2, 32), (4, 256), (4, 1024), (5, 4096), (4, 2**14), (4, 2**15), (8, 2**40))
RANKS = range(3)
BACKENDS = ("native", "triton")  # whose functions are more than the loop


def batch_of(draw: Draw, rank: int = 0, states: bool = False) -> Batch:
    """Segments of one or several types: some, one, none; sometimes so long that native encoders read them twice."""
    lengths = draw.cycle(FEW, FEW, MANY, (1500,), ()) if draw.number else FEW
    values = [draw.normal(length) for length in lengths]
    if draw.number % 4 == 2:
        long = draw.normal(40_001)
        long[20_000] = 1e30
        values += [long[:16_384], long, long.astype(np.float64), np.full(70, 3e38, np.float32)]
    if len(values) > 1:
        values[1][-1] = draw.pick(np.nan, np.inf, 1.0)
    if draw.number % 2:
        values = [as_type(x, DTYPES[i % 4]) if x.dtype == np.float32 else x for i, x in enumerate(values)]
    elements, count = tuple(map(len, values)), len(values)
    starts = [draw.pick(0, TILE, 3 * TILE, 2**35 * TILE) for _ in values]
    chains = [RngKey(3, f"w{i}") for i in range(count)]
    kept = []
    if states:
        scales = [(1 + np.abs(draw.rng.standard_normal(length))).astype(np.float32) for length in elements]
        kept = [((scale * draw.rng.uniform(-1, 1)).astype(np.float32), scale, 0.5 + 0.4 / (1 + i))
                for i, scale in enumerate(scales)]  # fmt: skip
    return Batch(elements, starts, chains, [5 + rank + i for i in range(count)], values, kept)


def outs_of(draw: Draw, elements: Sequence[int]) -> list[Out]:
    return [
        Out(length, np.float32 if draw.number % 2 == 0 else DTYPES[i % 4])
        for i, length in enumerate(elements)
    ]


@topic(32, (0, 7), BACKENDS)
def segments_of_codes(draw: Draw) -> Script:
    levels, norm = draw.cycle("uniform", "exponential"), ("max", "l2")[draw.number // 2 % 2]
    bits, bucket_size = BUCKETS[draw.number // 4 % len(BUCKETS)]
    payloads, size = [], draw.cycle(3, 0)
    batch = batch_of(draw)
    lengths = [buckets(count, bucket_size) + code_words(count, bits) for count in batch.elements]
    at = split_points(lengths)
    codec = CodeFormat(levels, bits, norm, bucket_size)
    for rank in RANKS:
        rounder = Rounder("worker", rank, size)
        payload = yield "segments.encode_codes", codec, batch, rounder, at
        payloads.append(payload)
    for sent in (payloads, payloads[:1]):
        outs = outs_of(draw, batch.elements)
        yield "segments.decode_codes", codec, sent, at, draw.factor(), outs


@topic(10, (0, 1), BACKENDS)
def segments_of_sums(draw: Draw) -> Script:
    bucket_size, width = draw.cycle((96, 4), (32, 4), (1024, 8), (2**40, 5), (4096, 2))
    levels = max(1, 2 ** (width - 1) // 3)
    batch, rounder = batch_of(draw), Rounder("worker", 1, 3)
    yield "segments.norms", "l2", bucket_size, batch
    norms = yield "segments.norms", "max", bucket_size, batch
    codec = SumFormat(width, levels, "max", bucket_size)
    words = yield "segments.encode_sums", codec, batch, rounder, norms
    everything = list(range(len(batch.elements)))
    for some in (everything, everything[3:0:-2], everything[:1]):
        outs = outs_of(draw, [batch.elements[i] for i in some])
        yield "segments.decode_sums", codec, Sums(words, norms, batch.elements), some, draw.factor(), outs


@topic(8, (1, 5), BACKENDS)
def segments_of_rotated_codes(draw: Draw) -> Script:
    bits, trellis = 1 + draw.number % 4, draw.number // 4 == 1
    batch = batch_of(draw)
    lengths = [min(n, 1) + code_words(rotated_elements(n), bits) + tiles(n) for n in batch.elements]
    at = split_points(lengths)
    codec, payloads = RotatedFormat(bits, trellis), []
    for rank in RANKS[:2]:
        payload = yield "segments.encode_rotated", codec, batch, Rounder("worker", rank), at
        payloads.append(payload)
    yield "composed.encode_rotated_again", codec, batch, Rounder("server"), at, payloads[1]
    for sent in (payloads, payloads[:1]):
        outs = outs_of(draw, batch.elements)
        yield "segments.decode_rotated", codec, batch, "worker", sent, at, draw.factor(), outs


@topic(6, (0, 1), BACKENDS)
def segments_of_bits(draw: Draw) -> Script:
    batch = batch_of(draw, states=True)
    for x in batch.values:
        if len(x) > 33 * TILE:
            x[33 * TILE + 5] = np.inf  # the flag is in a tensor's second word of flags
    at = split_points([ROW * tiles(n) + ceil_div(tiles(n), ROW) for n in batch.elements])
    payloads = []
    for rank in range(1, 2 + draw.number % 3):
        payload = yield "segments.binarize", batch, Rounder("worker", rank), at
        payloads.append(payload)
    voted = yield "segments.vote", [*payloads, payloads[0] ^ 1], batch, Rounder("server"), at
    yield "segments.decode_signs", voted, batch, at, draw.factor(), outs_of(draw, batch.elements)


@topic(4, (1,), BACKENDS)
def segments_as_other_types(draw: Draw) -> Script:
    batch = batch_of(draw)
    for dtype in ("float32", "float16"):
        yield "segments.convert", batch, dtype
    arrays = [x for x in batch.values if x.dtype == np.float32]
    outs = [Out(len(x), draw.pick(np.float32, BFLOAT16)) for x in arrays]
    yield "segments.scale", arrays, draw.factor(), outs
