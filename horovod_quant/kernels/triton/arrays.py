"""Functions on whole tensors: packing, copies and conversions.

`horovod_quant.kernels.arrays` and `horovod_quant.kernels.reference` define them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.arrays import Part
from horovod_quant.kernels.keys import ALL_ONES
from horovod_quant.kernels.layout import TILE, ceil_div
from horovod_quant.kernels.triton import one_bit, whole
from horovod_quant.kernels.triton.arguments import (
    KINDS,
    TYPES,
    as_tensor,
    current_device,
    float_entry,
    floats,
    result,
    typed,
)
from horovod_quant.kernels.triton.jobs import Job
from horovod_quant.kernels.triton.launching import Kernel, batch, run, run_call, settle

TILES_AT_A_TIME = 2**31
"""More tiles than any tensor has: loops over pieces are for a CPU's caches."""

_COUNT = 4096  # elements per program
_FLAG_WORDS = 16
_FLAGS_COUNT = 128

_copy_words = Kernel(whole.copy_words)
_any_bits = Kernel(whole.any_bits)
_write_word = Kernel(whole.write_word)
_convert = Kernel(whole.convert)
_mean = Kernel(whole.mean)
_pack_flags = Kernel(one_bit.pack_flags)
_write_nan_tiles = Kernel(one_bit.write_nan_tiles)


def pack(parts: Sequence[Part]) -> torch.Tensor:
    """Pack in a `batch`: a kernel computes all its parts at once."""
    types = {np.dtype(dtype) for _, dtype, _ in parts}
    dtype = types.pop() if len(types) == 1 else np.dtype(np.int32)
    array = torch.empty(sum(length for length, _, _ in parts), dtype=TYPES[dtype], device=current_device())
    position = 0
    with batch():
        for length, part_dtype, fill in parts:
            out = array[position : position + length].view(TYPES[np.dtype(part_dtype)])
            found = fill(out)
            if found is not out:
                copy(as_tensor(found), out)
            position += length
    return array


def concatenate(arrays: Sequence[Any]) -> torch.Tensor:
    tensors = [as_tensor(array) for array in arrays]
    settle(tensors)
    return torch.cat(tensors)


def view(array: torch.Tensor, dtype: Any) -> torch.Tensor:
    return array.view(TYPES[np.dtype(dtype)])


def empty(elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=torch.float32, device=current_device())


def step_word(number: int, out: torch.Tensor | None = None) -> torch.Tensor:
    found = result(out, 1, torch.int32, current_device() if out is None else out.device)
    run(_write_word, Job(1, 1, {"target": found, "number": number & ALL_ONES}))
    return found


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    flags = typed(flags, torch.bool, "flags")
    words = torch.empty(ceil_div(len(flags), 32), dtype=torch.int32, device=flags.device)
    run(
        _pack_flags,
        Job(len(flags), 32 * _FLAG_WORDS, {"source": flags, "target": words}),
        WORDS=_FLAG_WORDS,
    )
    return words


def any_bits(arrays: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write the bitwise or of int32 arrays."""
    arrays = [typed(array, torch.int32, "array") for array in arrays]
    job = Job(len(out), _FLAGS_COUNT, {"target": out}, pointers=arrays)
    run(_any_bits, job, WORKERS=len(arrays), COUNT=_FLAGS_COUNT)
    return out


def unpack_flags(words: torch.Tensor, count: int) -> torch.Tensor:
    words = typed(words, torch.int32, "words")
    if len(words) != ceil_div(count, 32):
        raise ValueError(f"words: {len(words)} words cannot hold {count} flags")
    settle([words])
    numbers = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> numbers) & 1).view(-1)[:count].to(torch.bool)


def with_nan_tiles(values: torch.Tensor, broken: torch.Tensor) -> torch.Tensor:
    values, broken = floats(values, "values"), typed(broken, torch.bool, "broken")
    job = Job(len(values), TILE, {"target": values, "broken": broken})
    run(_write_nan_tiles, job, KIND=KINDS[values.dtype])
    return values


def to_float32(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    x = floats(x, "x")
    return _converted(x, 1.0, result(out, len(x), torch.float32, x.device))


def to_float16(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    x = floats(x, "x")
    return _converted(x, 1.0, result(out, len(x), torch.float16, x.device))


def scale(pieces: Sequence[torch.Tensor], factor: float, out: torch.Tensor) -> torch.Tensor:
    if sum(map(len, pieces)) != len(out):
        raise ValueError(f"pieces of lengths {[len(piece) for piece in pieces]} for {len(out)} elements")
    low = 0
    for piece in pieces:
        _converted(floats(piece, "piece"), factor, floats(out, "out")[low : low + len(piece)])
        low += len(piece)
    return out


def mean(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    arrays = [typed(array, torch.float32, "array") for array in arrays]
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"arrays of lengths {[len(array) for array in arrays]}; they must be the same")
    total = torch.empty_like(arrays[0])
    entries = {"target": total, "factor": float_entry(1.0 / len(arrays))}
    run(_mean, Job(len(total), _COUNT, entries, pointers=arrays), WORKERS=len(arrays), COUNT=_COUNT)
    return total


def norms_of_square_sums(square_sums: torch.Tensor) -> torch.Tensor:
    """Compute square roots by PyTorch.

    Triton's are correctly rounded for float32 only.
    """
    square_sums = typed(square_sums, torch.float64, "square_sums")
    norms = torch.empty(len(square_sums), dtype=torch.float32, device=square_sums.device)
    run_call(lambda: norms.copy_(square_sums.sqrt()), square_sums.device)
    return norms


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    if source.dtype != out.dtype or len(source) != len(out):
        raise ValueError(f"a part is {source.dtype}[{len(source)}]; it must be {out.dtype}[{len(out)}]")
    words = len(out) * out.element_size() // 4
    run(_copy_words, Job(words, _COUNT, {"source": source, "target": out}), COUNT=_COUNT)


def _converted(x: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    job = Job(len(x), _COUNT, {"source": x, "target": out, "factor": float_entry(factor)})
    kinds = {"KIND": KINDS[x.dtype], "TARGET_KIND": KINDS[out.dtype]}
    run(_convert, job, **kinds, COUNT=_COUNT)
    return out
