"""Kernel calls and requests of one worker, from the scheme's code.

A scheme runs with kernels that compute nothing, on arrays without memory, so that a reduction of a large model's
gradients among hundreds of workers takes milliseconds. No formula of a scheme is repeated here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import ROW, buckets, ceil_div, code_words, sum_words, tiles
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.reductions.requests import map_requests
from horovod_quant.schemes.base import Allgather, Alltoall, BinaryState, Gradient, Request, Scheme, Workers

WITH_TRELLIS = "_trellis"
"""Suffix of a call's name where the kernel uses a trellis."""

_PREFIXES = ("bucket_", "tensor_", "encode_", "decode_", "rotated_samples", "rotated_sum_checks")
_OTHERS = "vote binarize add_rotated mean scale less where minimum to_float16 to_float32"

KERNELS = {name for name in vars(reference) if name.startswith(_PREFIXES)}
KERNELS |= set(_OTHERS.split())
"""Kernels whose work grows with the elements."""


def _result(kernel: str, elements: int, given: dict[str, Any]) -> tuple[int, Any]:
    """Return the length and dtype of a kernel's result without ``out``."""
    if kernel.startswith("bucket_"):
        dtype = np.float32 if kernel == "bucket_maxima" else np.float64
        return buckets(elements, given["bucket_size"]), dtype
    if kernel.startswith("tensor_"):
        return 1, np.float32
    if kernel.startswith("encode_"):
        length = rotated_elements(elements) if "rotated" in kernel else elements
        is_sum = "width" in given
        return sum_words(length, given["width"]) if is_sum else code_words(length, given["bits"]), np.int32
    if kernel == "rotated_samples":
        return tiles(elements) * given["samples"], np.float32
    if kernel == "rotated_sum_checks":
        return tiles(elements), np.int32
    if kernel == "vote":
        return elements // ROW, np.int32
    return elements, {"less": np.bool_, "to_float16": np.float16}.get(kernel, np.float32)


_SECOND = {"encode_rotated": np.float32, "encode_rotated_sum": np.int32}
"""Dtypes of kernels' second results, one number per tile."""

_ZEROS = bytes(8)

_SIGNATURES = {name: inspect.signature(getattr(reference, name)) for name in KERNELS}


class Call(NamedTuple):
    """Work of a kernel call.

    Attributes:
        elements: gradient elements.
        arrays: number of workers' arrays read for each element.
    """

    kernel: str
    bits: int
    elements: int
    arrays: int = 1


class Work(NamedTuple):
    """Kernel calls and requests of one worker for a group.

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
    """Return a kernel's `Call`, and arguments by name if in `KERNELS`."""
    if kernel not in KERNELS:
        sizes = [each.size for each in (*arguments, *named.values()) if isinstance(each, np.ndarray)]
        return Call(kernel, 0, max(sizes, default=0)), {}
    given = _SIGNATURES[kernel].bind(*arguments, **named).arguments
    read = given.get("words", given.get("arrays"))
    arrays = len(read) if isinstance(read, (list, tuple)) else 1
    if kernel == "vote":
        elements = ROW * len(given["words"][0])
    elif kernel == "mean":
        elements = len(given["arrays"][0])
    elif kernel == "rotated_sum_checks":
        elements = given["elements"]
    else:
        source = next(given[name] for name in ("x", "gradient", "flags", "a", "out") if name in given)
        elements = len(source)
    if given.get("trellis"):
        kernel += WITH_TRELLIS
    return Call(kernel, given.get("bits", given.get("width", 0)), elements, arrays), given


def resolved(scheme: Scheme, workers: Workers) -> Scheme:
    """Return the scheme with its arguments for these workers.

    Raises:
        ValueError: the scheme's arguments do not support them.
    """
    scheme = scheme.for_workers(workers)
    scheme.check_workers(workers.size)
    return scheme


@functools.lru_cache(maxsize=4096)
def work_of(scheme: Scheme, lengths: tuple[int, ...], size: int, local_size: int = 1) -> Work:
    """Return the work of one worker in the reduction of a group.

    Args:
        scheme: if its bytes depend on the values, `Scheme.fixed_length_proxy` replaces it.
        lengths: elements of each gradient of the group.
        size: number of workers.
        local_size: number of workers per host, for a hierarchical reduction.

    Raises:
        ValueError: the scheme's arguments do not support this number of workers.
    """
    workers = Workers(0, size, local_size=local_size)
    scheme = resolved(scheme.fixed_length_proxy(), workers)
    recorder = _Recorder()
    empty = [_ghost(length) for length in lengths]
    requests = run_alone(scheme, empty, workers, recorder.kernels, lambda array: array, _resized)
    stages = [(recorder.taken(), request) for request in requests]
    return Work(stages, recorder.taken())


def run_alone(
    scheme: Scheme,
    values: Sequence[np.ndarray],
    workers: Workers,
    kernels: Any,
    zeros: Callable[[np.ndarray], np.ndarray],
    resize: Callable[[np.ndarray, int], np.ndarray],
) -> Iterator[Request]:
    """Run one worker of equal gradients, and yield its requests.

    Args:
        scheme: the resolved scheme.
        values: this worker's gradients.
        workers: the workers.
        kernels: the backend.
        zeros: returns an array like the given one, for states and results.
        resize: returns an array like the given one, with another length.
    """
    gradients = []
    for i, array in enumerate(values):
        start, stop = scheme.owned(str(i), len(array), workers)
        state = BinaryState(zeros(array[start:stop]), zeros(array[start:stop]), 0.9)
        gradients.append(Gradient(array, RngKey(0, str(i)), 0, state))

    def answer(request: Any) -> Generator[Request, Any, Any]:
        yield request
        others, array = workers.size_of(request.group), request.array
        if isinstance(request, Allgather):
            resized = None if request.lengths is None else [resize(array, n) for n in request.lengths]
            return resized or [array] * others
        if isinstance(request, Alltoall):
            return [array[: request.splits[0]]] * others
        return array

    decoded = yield from map_requests(scheme.begin(gradients, workers, kernels), answer)
    for i, array in enumerate(values):
        decoded.write(i, 1.0, zeros(array))


def _ghost(length: int, dtype: Any = np.float32) -> np.ndarray:
    """Return a read-only array of any length that takes no memory."""
    return np.ndarray((length,), dtype, _ZEROS, 0, (0,))


def _resized(array: np.ndarray, length: int) -> np.ndarray:
    return _ghost(length, array.dtype)


class _Recorder:
    """Backend that records kernel calls.

    Unknown kernels return the reference's results for zeros.
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self.kernels = Watched(reference, self._noting)

    def taken(self) -> list[Call]:
        """Return and clear the recorded calls, equal ones merged."""
        totals: dict[tuple[str, int, int], int] = {}
        for kernel, bits, elements, arrays in self._calls:
            totals[kernel, bits, arrays] = totals.get((kernel, bits, arrays), 0) + elements
        self._calls = []
        return [Call(kernel, bits, elements, arrays) for (kernel, bits, arrays), elements in totals.items()]

    def _noting(self, name: str, kernel: Callable) -> Callable:
        if name in UNTIMED:
            return UNTIMED[name]

        def note(*arguments: Any, **named: Any) -> Any:
            call, given = describe_call(name, arguments, named)
            if call.elements or name in KERNELS:
                self._calls.append(call)
            if name == "binarize":
                return _ghost(ROW * tiles(call.elements), np.int32), _ghost(tiles(call.elements), np.bool_)
            if name not in KERNELS:
                return kernel(*arguments, **named)
            out = given.get("out")
            if out is None:
                out = _ghost(*_result(name, call.elements, given))
            return (out, _ghost(tiles(call.elements), _SECOND[name])) if name in _SECOND else out

        return note


class Watched:
    """Backend that wraps every kernel of another one.

    Args:
        backend: the wrapped backend.
        watch: called with the name of a function of the backend and the function, returns its replacement.
    """

    def __init__(self, backend: Any, watch: Callable[[str, Callable], Callable]) -> None:
        self._backend, self._watch = backend, watch

    def __getattr__(self, name: str) -> Any:
        if name == "segments":
            raise AttributeError(name)  # a call for many segments would hide the single ones
        found = getattr(self._backend, name)
        if inspect.isfunction(found):
            found = self._watch(name, found)
        setattr(self, name, found)
        return found


def _pack(parts: Sequence[tuple[int, Any, Callable]]) -> np.ndarray:
    for length, dtype, fill in parts:
        fill(_ghost(length, dtype))
    types = {np.dtype(dtype) for _, dtype, _ in parts}
    dtype = types.pop() if len(types) == 1 else np.dtype(np.int32)
    return _ghost(sum(length for length, _, _ in parts), dtype)


UNTIMED: dict[str, Callable] = {
    "pack": _pack,
    "concatenate": lambda arrays: _ghost(sum(map(len, arrays)), arrays[0].dtype),
    "view": lambda array, dtype: _ghost(len(array), dtype),
    "empty": _ghost,
    "step_word": lambda number, out=None: _ghost(1, np.int32),
    "key_of_word": lambda chain, stage, word, worker=0: chain.key(stage, 0, worker),
    "pack_flags": lambda flags: _ghost(ceil_div(len(flags), 32), np.int32),
    "unpack_flags": lambda words, count: _ghost(count, np.bool_),
    "with_nan_tiles": lambda values, broken: values,
    "norms_of_square_sums": lambda sums: _ghost(len(sums)),
}
"""Functions counted as no work: they only move the results of kernels."""
