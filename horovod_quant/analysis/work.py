"""What one worker does in an exchange: kernel calls and requests, as the scheme itself makes them.

A scheme is run with kernels that compute nothing, on arrays without memory, so that the requests of a large model's
exchange among hundreds of workers are there in milliseconds. No formula of a scheme is repeated here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.kernels.layout import ROW, buckets, ceil_div, tiles
from horovod_quant.schemes.base import Allgather, Alltoall, BinaryState, Gradient, Request, Scheme, Workers
from horovod_quant.schemes.hierarchical import Hierarchical

NORMS, ENCODE, DECODE = "norms", "encode", "decode"

KERNELS = {
    "bucket_maxima": NORMS,
    "bucket_square_sums": NORMS,
    "encode_uniform_sum": ENCODE,
    "encode_uniform_codes": ENCODE,
    "encode_exponential": ENCODE,
    "binarize": ENCODE,
    "vote": ENCODE,
    "to_float32": ENCODE,
    "mean": ENCODE,
    "decode_uniform_sum": DECODE,
    "decode_uniform_codes": DECODE,
    "decode_exponential": DECODE,
    "decode_signs": DECODE,
    "scale": DECODE,
}
"""The kernels whose work grows with the number of elements, by what they are for."""

_ZEROS = bytes(8)

_SIGNATURES = {name: inspect.signature(getattr(reference, name)) for name in KERNELS}


class Call(NamedTuple):
    """A kernel's work: ``elements`` of the gradient, and the number of workers' arrays that it reads for each."""

    kernel: str
    bits: int
    elements: int
    arrays: int = 1


class Work(NamedTuple):
    """What one worker does for a group of gradients.

    Attributes:
        stages: for each collective, the kernel calls before it and the request itself.
        decode: the kernel calls after the last collective.
    """

    stages: list[tuple[list[Call], Request]]
    decode: list[Call]

    @property
    def calls(self) -> list[Call]:
        return [call for calls, _ in self.stages for call in calls] + self.decode


def describe_call(kernel: str, arguments: tuple, named: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
    """A kernel's call by its arguments, and the arguments by name."""
    given = _SIGNATURES[kernel].bind(*arguments, **named).arguments
    read = given.get("words", given.get("arrays"))
    arrays = len(read) if isinstance(read, (list, tuple)) else 1
    if kernel == "vote":
        elements = ROW * len(given["words"][0])
    elif kernel == "mean":
        elements = len(given["arrays"][0])
    else:
        source = given.get("x", given.get("gradient"))
        elements = len(given["out"] if source is None else source)
    return Call(kernel, given.get("bits", given.get("width", 0)), elements, arrays), given


def resolved(scheme: Scheme, workers: Workers) -> Scheme:
    """What these workers run.

    Raises:
        ValueError: the scheme's arguments cannot serve them.
    """
    scheme = scheme.for_workers(workers)
    scheme.check_workers(workers.size)
    return scheme


def work_of(scheme: Scheme, lengths: Sequence[int], size: int, local_size: int = 1) -> Work:
    """What a worker does to exchange a group of gradients.

    Args:
        scheme: with ``coding="elias"`` the bytes depend on the values: the work of ``coding="fixed"`` is returned,
            whose bytes are never exceeded by more than 8 a gradient and worker.
        lengths: elements of each gradient of the group.
        size: number of workers.
        local_size: of a host, for a hierarchical exchange.

    Raises:
        ValueError: the scheme's arguments cannot serve so many workers.
    """
    workers = Workers(0, size, local_size=local_size)
    scheme = resolved(_fixed(scheme), workers)
    recorder = _Recorder()
    empty = [_ghost(length) for length in lengths]
    gradients = []
    for i, array in enumerate(empty):
        start, stop = scheme.owned(str(i), len(array), workers)
        own = array[start:stop]
        gradients.append(Gradient(array, KeyChain(0, str(i)), 0, BinaryState(own, own, 0.9)))
    exchange = scheme.begin(gradients, workers, recorder.kernels)
    stages = []
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as stop:
            decoded = stop.value
            break
        stages.append((recorder.taken(), request))
        answer = _answer(request, workers.size_of(request.group))
    for i, array in enumerate(empty):
        decoded.write(i, 1.0, array)
    return Work(stages, recorder.taken())


cached_work_of = functools.lru_cache(maxsize=4096)(work_of)
"""`work_of`, for lengths in a tuple."""


def _fixed(scheme: Scheme) -> Scheme:
    if isinstance(scheme, Hierarchical):
        return Hierarchical(_fixed(scheme.inner))
    if getattr(scheme, "coding", "fixed") != "fixed":
        return dataclasses.replace(scheme, coding="fixed")  # type: ignore[type-var]
    return scheme


def _answer(request: Request, size: int) -> Any:
    if isinstance(request, Allgather):
        lengths = [len(request.array)] * size if request.lengths is None else request.lengths
        return [_ghost(length, request.array.dtype) for length in lengths]
    if isinstance(request, Alltoall):
        return [_ghost(request.splits[0], request.array.dtype)] * size
    return request.array


def _ghost(length: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of any length that takes no memory; writing to it is an error."""
    return np.ndarray((length,), dtype, _ZEROS, 0, (0,))


class _Recorder:
    """A backend whose kernels note that they have been called."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self.kernels = SimpleNamespace(
            TILES_AT_A_TIME=reference.TILES_AT_A_TIME,
            assemble=_assemble,
            concatenate=lambda arrays: _ghost(sum(map(len, arrays)), arrays[0].dtype),
            view=lambda array, dtype: _ghost(len(array), dtype),
            target=_ghost,
            pack_flags=lambda flags: _ghost(ceil_div(len(flags), 32), np.int32),
            unpack_flags=lambda words, count: _ghost(count, np.bool_),
            with_nan_tiles=lambda values, broken: values,
            norms_of_square_sums=lambda sums: _ghost(len(sums)),
            **{name: self._noting(name) for name in KERNELS},
        )

    def taken(self) -> list[Call]:
        """The calls since the last time, those alike as one."""
        totals: dict[tuple[str, int, int], int] = {}
        for kernel, bits, elements, arrays in self._calls:
            totals[kernel, bits, arrays] = totals.get((kernel, bits, arrays), 0) + elements
        self._calls = []
        return [Call(kernel, bits, elements, arrays) for (kernel, bits, arrays), elements in totals.items()]

    def _noting(self, name: str) -> Callable:
        def note(*arguments: Any, **named: Any) -> Any:
            call, given = describe_call(name, arguments, named)
            self._calls.append(call)
            if name == "binarize":
                return _ghost(ROW * tiles(call.elements), np.int32), _ghost(tiles(call.elements), np.bool_)
            if name == "mean":
                return _ghost(call.elements)
            if given.get("out") is None:  # only norms are computed without a place for them
                return _ghost(buckets(call.elements, given["bucket_size"]))
            return given["out"]

        return note


def _assemble(parts: Sequence[tuple[int, Any, Callable]]) -> np.ndarray:
    for length, dtype, fill in parts:
        fill(_ghost(length, dtype))
    types = {np.dtype(dtype) for _, dtype, _ in parts}
    dtype = types.pop() if len(types) == 1 else np.dtype(np.int32)
    return _ghost(sum(length for length, _, _ in parts), dtype)
