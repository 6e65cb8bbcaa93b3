"""Rotations of the backend, which `horovod_quant.kernels.rotation` defines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import torch

from horovod_quant.kernels.checks import check_range
from horovod_quant.kernels.keys import Key, RngKey
from horovod_quant.kernels.layout import TILE, code_words, tiles
from horovod_quant.kernels.rotation import check_scales, check_workers, rotated_elements
from horovod_quant.kernels.triton import restoring, rotation
from horovod_quant.kernels.triton.arguments import (
    KINDS,
    as_tensor,
    codes_of,
    float_entry,
    floats,
    result,
    typed,
)
from horovod_quant.kernels.triton.jobs import Entry, Job
from horovod_quant.kernels.triton.launching import INTERPRETED, Kernel, run

IN_REGISTERS = 4 if INTERPRETED else 1
"""Tiles of a program: one warp has a bucket in registers; the interpreter is faster with more."""

_ROUNDED = 16

_encode_rotated = Kernel(rotation.encode_rotated, num_warps=1)
_rotate = Kernel(rotation.rotate, num_warps=1)
_round_to_trellis = Kernel(rotation.round_to_trellis)
_add_rotated = Kernel(restoring.add_rotated, num_warps=1)


class KeyOfWord(NamedTuple):
    """Key of a step in a word on the device.

    The kernels of `rotation` compute it when needed. So the host does not wait for the device, and the key needs no
    launch.
    """

    state: int
    word: torch.Tensor
    worker: int


AnyKey = Union[Key, KeyOfWord]


def key_of_word(chain: RngKey, domain: str, word: torch.Tensor, worker: int = 0) -> KeyOfWord:
    """Return the key of a step word for this module's kernels.

    See `horovod_quant.kernels.arrays.key_of_word`.
    """
    word = typed(word, torch.int32, "word")
    if len(word) != 1:
        raise ValueError(f"word: {len(word)} words, where one has the step")
    return KeyOfWord(chain.state(domain), word, worker)


def encode_rotated(
    x: torch.Tensor,
    bits: int,
    key: AnyKey,
    start: int = 0,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    trellis: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_range("bits", bits, 1, 4)
    x = floats(x, "x")
    coordinates, count = rotated_elements(len(x)), tiles(len(x))
    words = result(out, code_words(coordinates, bits), torch.int32, x.device)
    scales = result(scales, count, torch.float32, x.device)
    if trellis:
        _encode_to_trellis(x, bits, key, start, words, scales)
        return words, scales
    entries = {"source": x, "target": words, "scale": scales, "start": start}
    run(
        _encode_rotated,
        Job(len(x), IN_REGISTERS * TILE, entries, ("target", "scale"), _entries_of(key)),
        KIND=KINDS[x.dtype],
        BITS=bits,
        TILES=IN_REGISTERS,
    )
    return words, scales


def _encode_to_trellis(
    x: torch.Tensor, bits: int, key: AnyKey, start: int, words: torch.Tensor, scales: torch.Tensor
) -> None:
    """Encode by two launches.

    The search for the best path reads the coordinates twice.
    """
    coordinates, count = rotated_elements(len(x)), tiles(len(x))
    z = torch.empty(coordinates, dtype=torch.float32, device=x.device)
    units = torch.empty(count, dtype=torch.float32, device=x.device)
    squares = torch.empty(count, dtype=torch.float64, device=x.device)
    entries = {"source": x, "target": z, "norms": units, "squares": squares, "start": start}
    run(
        _rotate,
        Job(len(x), IN_REGISTERS * TILE, entries, ("target", "norms", "squares"), _entries_of(key)),
        KIND=KINDS[x.dtype],
        TILES=IN_REGISTERS,
    )
    entries = {"source": z, "norms": units, "squares": squares, "target": words, "scale": scales}
    run(
        _round_to_trellis,
        Job(coordinates, _ROUNDED * TILE, entries, ("target", "scale")),
        BITS=bits,
        TILES=_ROUNDED,
    )


def decode_rotated(
    words: torch.Tensor,
    scales: Any,
    bits: int,
    key: AnyKey,
    factor: float,
    out: torch.Tensor,
    start: int = 0,
    trellis: bool = False,
) -> torch.Tensor:
    return add_rotated([words], [scales], bits, [key], factor, out, start, trellis)


def add_rotated(
    words: Sequence[torch.Tensor],
    scales: Sequence[Any],
    bits: int,
    keys: Sequence[AnyKey],
    factor: float,
    out: torch.Tensor,
    start: int = 0,
    trellis: bool = False,
) -> torch.Tensor:
    check_range("bits", bits, 1, 4)
    check_workers(words, scales, keys)
    out = floats(out, "out")
    pointers: list[Entry] = []
    for local_words, local_scales, local_key in zip(words, scales, keys):
        check_scales(len(local_scales), len(out))
        units = typed(as_tensor(local_scales, out.device), torch.float32, "scales")
        pointers += [codes_of(local_words, rotated_elements(len(out)), bits), units, *_entries_of(local_key)]
    entries = {"target": out, "start": start, "factor": float_entry(factor)}
    run(
        _add_rotated,
        Job(len(out), IN_REGISTERS * TILE, entries, pointers=pointers),
        KIND=KINDS[out.dtype],
        BITS=bits,
        TRELLIS=trellis,
        WORKERS=len(words),
        TILES=IN_REGISTERS,
    )
    return out


def _entries_of(key: AnyKey) -> list[Entry]:
    """Return a key's entries in a list of pointers: see `horovod_quant.kernels.triton.elements.signs_key`."""
    if isinstance(key, KeyOfWord):
        return [_as_int64(key.state), key.word, key.worker, 0, 0, 0]
    return [_as_int64(key.k0 | key.k1 << 32), 0, 0, key.shift, key.addend, key.flip]


def _as_int64(bits: int) -> int:
    return bits - (bits >> 63 << 64)
