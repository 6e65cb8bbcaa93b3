"""Quantizers of the backend, which `horovod_quant.kernels.reference` defines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels import checks
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import (
    ROW,
    TILE,
    WHOLE_TENSOR,
    buckets,
    ceil_div,
    code_words,
    sum_words,
    tiles,
)
from horovod_quant.kernels.reference import check_operand, fraction_bits, uniform_levels
from horovod_quant.kernels.sums import inverse_count
from horovod_quant.kernels.triton import arrays, decoding, encoding, norms, one_bit, whole
from horovod_quant.kernels.triton.arguments import (
    KINDS,
    aligned,
    as_tensor,
    codes_of,
    float_entry,
    floats,
    key_entries,
    norms_of,
    result,
    typed,
)
from horovod_quant.kernels.triton.jobs import Job
from horovod_quant.kernels.triton.launching import MAX_ELEMENTS, Kernel, run, settle
from horovod_quant.kernels.triton.tiles import words_of_a_tile

# Work of a program of four warps.
_ROWS = 128  # rows of elements, to decode signs
_SUM_TILES = 4  # tiles of digits, one for each warp
_CODE_TILES = 4  # tiles of codes, one for each warp
_DECODED_TILES = 1  # in a program of one warp: the words of several workers need many registers
_BUCKETS_TO_ADD = 16
_LARGEST_BUCKET = MAX_ELEMENTS + 1  # for larger ones Triton's integers are too short
_LARGEST_NORM = 2**30  # elements of a bucket with a norm, for the same reason
_CHUNK = 1024  # elements of a bucket at a time, and ...
_ELEMENTS_TO_COMPARE = 4096  # ... of all buckets of a program
_TILES = 2  # tiles of single bits
_REGISTERS = 128  # registers of an encoder's thread: none is spilled, and four programs run concurrently

_bucket_maxima = Kernel(norms.bucket_maxima)
_bucket_sums = Kernel(norms.bucket_sums)
_encode_sum = Kernel(encoding.encode_sum, maxnreg=_REGISTERS)
_encode_codes = Kernel(encoding.encode_codes, maxnreg=_REGISTERS)
_decode_sum = Kernel(decoding.decode_sum)
_decode_codes = Kernel(decoding.decode_codes, num_warps=1)
_binarize = Kernel(one_bit.binarize)
_vote = Kernel(one_bit.vote)
_decode_signs = Kernel(one_bit.decode_signs)
_shorten = Kernel(whole.shorten)


# ---- norms -------------------------------------------------------------------------------------------------------


def bucket_maxima(x: torch.Tensor, bucket_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    x = floats(x, "x")
    checks.check_bucket_size(bucket_size)
    maxima = result(out, buckets(len(x), bucket_size), torch.float32, x.device)
    bucket_size = _norm_bucket_size(len(x), bucket_size)
    chunk = min(_CHUNK, 1 << (bucket_size - 1).bit_length())
    most = _ELEMENTS_TO_COMPARE // chunk
    job = Job(len(x), most * bucket_size, {"source": x, "target": maxima})
    run(_bucket_maxima, job, **_shape(x), BUCKET=bucket_size, CHUNK=chunk, BUCKETS=most)
    return maxima


def bucket_square_sums(x: torch.Tensor, bucket_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    return _sums(x, bucket_size, out, "square")


def bucket_sums(x: torch.Tensor, bucket_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    return _sums(x, bucket_size, out, "itself")


def bucket_magnitude_sums(x: torch.Tensor, bucket_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    return _sums(x, bucket_size, out, "magnitude")


def _sums(x: torch.Tensor, bucket_size: int, out: torch.Tensor | None, term: str) -> torch.Tensor:
    x = floats(x, "x")
    checks.check_bucket_size(bucket_size)
    sums = result(out, buckets(len(x), bucket_size), torch.float64, x.device)
    bucket_size = _norm_bucket_size(len(x), bucket_size)
    job = Job(len(x), _BUCKETS_TO_ADD * bucket_size, {"source": x, "target": sums})
    run(_bucket_sums, job, **_shape(x), BUCKET=bucket_size, BUCKETS=_BUCKETS_TO_ADD, TERM=term)
    return sums


def _norm_bucket_size(elements: int, bucket_size: int) -> int:
    """Return a bucket size with the same norms.

    It is not much larger than the number of elements. A program then does not loop over an empty rest. It is a power of
    two, because each size is compiled.
    """
    size = min(bucket_size, 1 << (max(elements, TILE) - 1).bit_length())
    if size > _LARGEST_NORM:
        raise ValueError(
            f"bucket_size={bucket_size}: on a GPU a bucket has at most {_LARGEST_NORM} elements, and a gradient has "
            f"{elements}; use a smaller bucket_size, or kernels='native'"
        )
    return size


def clip(x: torch.Tensor, most: float) -> torch.Tensor:
    """Scale ``x`` down to an L2 norm of at most ``most``.

    The result is always float32. In `horovod_quant.kernels.sums.clip` it is float32 only where it differs from ``x``.
    Here the host does not know whether it does, because it would have to wait.
    """
    x = floats(x, "x")
    sums = bucket_square_sums(x, TILE)
    if not len(sums):
        return x
    out = arrays.empty(len(x))
    norm = arrays.norms_of_square_sums(_in_a_tree(sums))
    entries = {"source": x, "norms": norm, "target": out, "factor": float_entry(most)}
    run(_shorten, Job(len(x), TILE, entries), KIND=KINDS[x.dtype], COUNT=TILE)
    return out


def _in_a_tree(sums: torch.Tensor) -> torch.Tensor:
    settle([sums])
    if not len(sums):
        return sums.new_zeros(1)
    while len(sums) > 1:
        half = ceil_div(len(sums), 2)
        upper = torch.nn.functional.pad(sums[half:], (0, 2 * half - len(sums)))
        sums = sums[:half] + upper
    return sums


# ---- arithmetic for schemes --------------------------------------------------------------------------------------
# By PyTorch, whose operations are rounded separately, and are not collected in a batch.


def tensor_maximum(x: torch.Tensor) -> torch.Tensor:
    if not len(floats(x, "x")):
        return torch.zeros(1, device=x.device)
    # Two stages, because a single program would process a bucket of all elements.
    return bucket_maxima(bucket_maxima(x, TILE), WHOLE_TENSOR)


def tensor_mean_magnitude(x: torch.Tensor) -> torch.Tensor:
    total = _to_24_bits(_in_a_tree(bucket_magnitude_sums(x, TILE)))
    return (total * inverse_count(len(x))).to(torch.float32)


def tensor_deviation(x: torch.Tensor) -> torch.Tensor:
    inverse = inverse_count(len(x))
    sums, square_sums = bucket_sums(x, TILE), bucket_square_sums(x, TILE)
    mean = _to_24_bits(_to_24_bits(_in_a_tree(sums)) * inverse)
    squares = _to_24_bits(_in_a_tree(square_sums))
    variance = squares * inverse - mean * mean
    deviation = torch.where(variance > 0, variance, 0.0).sqrt().to(torch.float32)
    return torch.where(squares < float("inf"), deviation, float("inf"))


def _to_24_bits(values: torch.Tensor) -> torch.Tensor:
    rounded = ((values.view(torch.int64) + (1 << 28)) >> 29 << 29).view(torch.float64)
    return torch.where(values.isfinite(), rounded, float("inf"))


def less(a: torch.Tensor, b: Any) -> torch.Tensor:
    return _values(a) < _operand(b, a)


def where(flags: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    flags = typed(flags, torch.bool, "flags")
    settle([flags])
    return torch.where(flags, _operand(a, flags), _operand(b, flags))


def minimum(a: torch.Tensor, b: Any) -> torch.Tensor:
    values, most = _values(a), _operand(b, a)
    return torch.where(most < values, most, values)


def next_powers_of_two(norms: Any) -> torch.Tensor:
    magnitudes = (_values(as_tensor(norms)).view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    return ((magnitudes + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _values(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as float32, after launching the batch's pending jobs."""
    x = floats(x, "x")
    settle([x])
    return x.to(torch.float32)


def _operand(values: Any, other: torch.Tensor) -> torch.Tensor:
    """Return an operand as a tensor: see `horovod_quant.kernels.reference.Operand`."""
    if not isinstance(values, (np.ndarray, torch.Tensor)):
        with np.errstate(over="ignore"):
            values = np.full(1, values, np.float32)
    check_operand(len(values), len(other))
    return _values(as_tensor(values, other.device))


# ---- uniform levels ----------------------------------------------------------------------------------------------


def encode_uniform_sum(
    x: torch.Tensor,
    norms: Any,
    bucket_size: int,
    levels: int,
    width: int,
    key: Key,
    start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    checks.check_range("levels", levels, 1, checks.MAX_LEVELS)
    checks.check_range("width", width, 1, 16)
    x = floats(x, "x")
    words = result(out, sum_words(len(x), width), torch.int32, x.device)
    run(
        _encode_sum,
        _encoding_job(
            x, norms, bucket_size, key, start, words, _SUM_TILES * words_of_a_tile(width) * (32 // width)
        ),
        KIND=KINDS[x.dtype],
        **_rounding(levels),
        BUCKET=min(bucket_size, _LARGEST_BUCKET),
        WIDTH=width,
        TILES=_SUM_TILES,
    )
    return words


def encode_uniform_codes(
    x: torch.Tensor,
    norms: Any,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    checks.check_range("bits", bits, 2, 16)
    rounding = dict(_rounding(uniform_levels(bits)), EXPONENTIAL=False)
    return _encoded_codes(x, norms, bucket_size, bits, key, start, out, rounding)


def encode_exponential(
    x: torch.Tensor,
    norms: Any,
    bucket_size: int,
    bits: int,
    key: Key,
    start: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    checks.check_range("bits", bits, 2, 8)
    rounding = {"LIMIT": 1.0, "FRACTION": 0, "EXPONENTIAL": True}
    return _encoded_codes(x, norms, bucket_size, bits, key, start, out, rounding)


def _encoded_codes(x, norms, bucket_size, bits, key, start, out, rounding):
    x = floats(x, "x")
    words = result(out, code_words(len(x), bits), torch.int32, x.device)
    run(
        _encode_codes,
        _encoding_job(x, norms, bucket_size, key, start, words, _CODE_TILES * 32),
        KIND=KINDS[x.dtype],
        **rounding,
        BUCKET=min(bucket_size, _LARGEST_BUCKET),
        BITS=bits,
        TILES=_CODE_TILES,
    )
    return words


def _encoding_job(x, norms, bucket_size, key, start, words, rows) -> Job:
    entries = {
        "source": x,
        "norms": norms_of(norms, len(x), bucket_size, x.device),
        "target": words,
        **key_entries(key, start),
    }
    return Job(len(x), rows * ROW, entries)


def _rounding(levels: int) -> dict[str, Any]:
    fraction = fraction_bits(levels)
    return {"LIMIT": float(levels << fraction), "FRACTION": fraction}


# ---- decoding ----------------------------------------------------------------------------------------------------


def decode_uniform_sum(
    words: torch.Tensor,
    norms: Any,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    out: torch.Tensor,
) -> torch.Tensor:
    checks.check_range("levels", levels, 1, checks.MAX_LEVELS)
    checks.check_range("width", width, 1, 16)
    out = floats(out, "out")
    checks.check_sum_words(len(words), len(out), width)
    entries = {
        "source": typed(words, torch.int32, "words"),
        "norms": norms_of(norms, len(out), bucket_size, out.device),
        "target": out,
        "factor": float_entry(factor),
    }
    run(
        _decode_sum,
        Job(len(out), _SUM_TILES * words_of_a_tile(width) * (32 // width) * ROW, entries),
        KIND=KINDS[out.dtype],
        BUCKET=min(bucket_size, _LARGEST_BUCKET),
        LEVELS=float(levels),
        WIDTH=width,
        BIAS=sum(1 << (width * field + width - 1) for field in range(32 // width)),
        TILES=_SUM_TILES,
    )
    return out


def decode_uniform_codes(
    words: Sequence[torch.Tensor],
    norms: Sequence[Any],
    bucket_size: int,
    bits: int,
    factor: float,
    out: torch.Tensor,
) -> torch.Tensor:
    checks.check_range("bits", bits, 2, 16)
    levels = float(uniform_levels(bits))
    return _decoded_codes(words, norms, bucket_size, bits, factor, out, EXPONENTIAL=False, LEVELS=levels)


def decode_exponential(
    words: Sequence[torch.Tensor],
    norms: Sequence[Any],
    bucket_size: int,
    bits: int,
    factor: float,
    out: torch.Tensor,
) -> torch.Tensor:
    checks.check_range("bits", bits, 2, 8)
    return _decoded_codes(words, norms, bucket_size, bits, factor, out, EXPONENTIAL=True, LEVELS=1.0)


def _decoded_codes(words, norms, bucket_size, bits, factor, out, **constants):
    out = floats(out, "out")
    checks.check_pairs(words, norms)
    # Norms that a scheme computes are one array for all workers.
    local_norms = {id(one): norms_of(one, len(out), bucket_size, out.device) for one in norms}
    pointers = [
        tensor
        for worker_words, worker_norms in zip(words, norms)
        for tensor in (codes_of(worker_words, len(out), bits), local_norms[id(worker_norms)])
    ]
    run(
        _decode_codes,
        Job(
            len(out), _DECODED_TILES * TILE, {"target": out, "factor": float_entry(factor)}, pointers=pointers
        ),
        KIND=KINDS[out.dtype],
        **constants,
        BUCKET=min(bucket_size, _LARGEST_BUCKET),
        BITS=bits,
        WORKERS=len(words),
        TILES=_DECODED_TILES,
    )
    return out


# ---- one bit -----------------------------------------------------------------------------------------------------


def binarize(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    scale: torch.Tensor,
    beta: float,
    key: Key,
    start: int = 0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, momentum, scale = floats(gradient, "gradient"), as_array(momentum), as_array(scale)
    count = len(gradient)
    words = result(out, ROW * tiles(count), torch.int32, gradient.device)
    broken = torch.empty(tiles(count), dtype=torch.bool, device=gradient.device)
    entries = {
        "source": gradient,
        "momentum": result(momentum, count, torch.float32, gradient.device),
        "scale": result(scale, count, torch.float32, gradient.device),
        "target": words,
        "broken": broken,
        "factor": float_entry(beta),
        "second_factor": float_entry(1.0 - beta),
        **key_entries(key, start),
    }
    run(
        _binarize,
        Job(count, _TILES * TILE, entries, ("momentum", "scale", "target", "broken")),
        KIND=KINDS[gradient.dtype],
        ALIGNED=aligned(gradient, momentum, scale),
        TILES=_TILES,
    )
    return words, broken


def vote(
    words: Sequence[torch.Tensor], key: Key, start: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    checks.check_votes(words)
    words = [typed(one, torch.int32, "words") for one in words]
    bits = result(out, len(words[0]), torch.int32, words[0].device)
    workers = len(words)
    run(
        _vote,
        Job(32 * len(bits), _CODE_TILES * TILE, {"target": bits, **key_entries(key, start)}, pointers=words),
        WORKERS=workers,
        FRACTION=min(24, 32 - workers.bit_length()),
        TILES=_CODE_TILES,
    )
    return bits


def decode_signs(
    words: torch.Tensor, magnitude: float, out: torch.Tensor, flags: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode bits to plus or minus the magnitude.

    Tiles with a flag in the words ``flags`` become NaN.
    """
    out = floats(out, "out")
    entries = {"source": codes_of(words, len(out), 1), "target": out, "factor": float_entry(magnitude)}
    if flags is not None:
        entries["broken"] = typed(flags, torch.int32, "flags")
        if len(flags) < ceil_div(tiles(len(out)), ROW):
            raise ValueError(f"flags: {len(flags)} words cannot hold those of {tiles(len(out))} tiles")
    run(
        _decode_signs,
        Job(len(out), _ROWS * ROW, entries),
        **_shape(out),
        ROWS=_ROWS,
        FLAGS=flags is not None,
    )
    return out


def _shape(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a kernel's compile-time constants.

    The gradient's type, and whether vector loads are possible.
    """
    return {"KIND": KINDS[tensor.dtype], "ALIGNED": aligned(tensor)}
