"""What schemes send and return, as digests: the referee of every change that must not change a bit.

    python tests/golden/exchanges.py    # writes exchanges.json anew, for a change that is meant to change bits

Each case spells out every argument, so that another default changes no digest. Payloads and results have a digest each:
a layout may change on the wire where the result does not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_quant import kernels as kernel_backends
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme, Workers
from horovod_quant.transports.simulator import _answers

FILE = Path(__file__).with_suffix(".json")

LENGTHS = (1, 31, 1024, 1025, 4100)
"""Elements of the tensors that share an exchange."""

STEPS = (0, 7)

DTYPES = ("float32", "float16", "bfloat16", "float64")


def _gathered(
    kind: Any, bits: int, norm: str, size: int, coding: str, exchange: str, rounding: str
) -> Scheme:
    more = {"server_bits": None} if kind is NUQSGD else {}
    return kind(
        bits=bits, norm=norm, bucket_size=size, coding=coding, exchange=exchange, rounding=rounding, **more
    )


def _global(bits: int, norm: str, levels: str, size: int, rounding: str, rotate: bool = False) -> Scheme:
    return GlobalQSGD(bits=bits, norm=norm, levels=levels, bucket_size=size, rounding=rounding, rotate=rotate)


def _eden(
    bits: int | None, server_bits: int | str, exchange: str, trellis: bool = False, error: float | None = None
) -> Scheme:
    return EDEN(bits=bits, server_bits=server_bits, exchange=exchange, nmse=error, trellis=trellis)


FLAT: dict[str, Scheme] = {
    "qsgd 4 max": _gathered(QSGD, 4, "max", 256, "fixed", "allgather", "correlated"),
    "qsgd 4 l2": _gathered(QSGD, 4, "l2", 1024, "fixed", "allgather", "correlated"),
    "qsgd 2 max": _gathered(QSGD, 2, "max", 1024, "fixed", "allgather", "correlated"),
    "qsgd 3 max 96 independent": _gathered(QSGD, 3, "max", 96, "fixed", "allgather", "independent"),
    "qsgd 8 max alltoall": _gathered(QSGD, 8, "max", 256, "fixed", "alltoall", "correlated"),
    "qsgd 5 l2 96 alltoall": _gathered(QSGD, 5, "l2", 96, "fixed", "alltoall", "correlated"),
    "qsgd 4 max auto": _gathered(QSGD, 4, "max", 256, "fixed", "auto", "correlated"),
    "qsgd 16 max": _gathered(QSGD, 16, "max", 256, "fixed", "allgather", "correlated"),
    "qsgd 4 l2 elias": _gathered(QSGD, 4, "l2", 1024, "elias", "allgather", "correlated"),
    "qsgd 7 max 96 elias-omega": _gathered(QSGD, 7, "max", 96, "elias-omega", "allgather", "independent"),
    "nuqsgd 4 l2": _gathered(NUQSGD, 4, "l2", 1024, "fixed", "allgather", "correlated"),
    "nuqsgd 4 max 96 independent": _gathered(NUQSGD, 4, "max", 96, "fixed", "allgather", "independent"),
    "nuqsgd 3 l2 alltoall": _gathered(NUQSGD, 3, "l2", 1024, "fixed", "alltoall", "correlated"),
    "nuqsgd 8 max elias": _gathered(NUQSGD, 8, "max", 256, "elias", "allgather", "correlated"),
    "global-qsgd 8 max": _global(8, "max", "uniform", 1024, "correlated"),
    "global-qsgd 8 l2": _global(8, "l2", "uniform", 1024, "correlated"),
    "global-qsgd 12 max 96 independent": _global(12, "max", "uniform", 96, "independent"),
    "global-qsgd 16 l2": _global(16, "l2", "uniform", 1024, "correlated"),
    "global-qsgd 4 exponential max": _global(4, "max", "exponential", 1024, "correlated"),
    "global-qsgd 5 exponential l2": _global(5, "l2", "exponential", 64, "independent"),
    "global-qsgd 8 rotated": _global(8, "max", "uniform", 16384, "correlated", rotate=True),
    "global-qsgd 4 rotated independent": _global(4, "max", "uniform", 16384, "independent", rotate=True),
    "eden 3 allgather": _eden(3, "auto", "allgather"),
    "eden 1 alltoall 1": _eden(1, 1, "alltoall"),
    "eden 2 alltoall 4": _eden(2, 4, "alltoall"),
    "eden 4 auto": _eden(4, "auto", "auto"),
    "eden error": _eden(None, "auto", "auto", error=0.1),
    "eden 2 trellis alltoall": _eden(2, 2, "alltoall", trellis=True),
    "eden 3 trellis allgather": _eden(3, "auto", "allgather", trellis=True),
    "binsgdm": BinSGDM(server_bits=1),
    "binsgdm 3": BinSGDM(server_bits=3),
    "binsgdm 8": BinSGDM(server_bits=8),
}

NESTED = (
    "qsgd 4 max", "qsgd 8 max alltoall", "qsgd 4 l2 elias", "nuqsgd 4 l2", "global-qsgd 12 max 96 independent",
    "global-qsgd 8 l2", "global-qsgd 4 exponential max", "global-qsgd 8 rotated", "eden 2 alltoall 4",
    "eden 2 trellis alltoall", "binsgdm", "binsgdm 3",
)  # fmt: skip
"""Of the flat ones those that are tried between nodes."""


class Case(NamedTuple):
    name: str
    scheme: Scheme
    workers: int
    local_size: int = 1
    dtype: str = "float32"
    custom_reduction: bool = False


def cases() -> Iterator[Case]:
    for name, scheme in FLAT.items():
        for workers in (1, 2, 3, 5):
            yield Case(f"{name}, {workers} workers", scheme, workers)
        for dtype in DTYPES[1:]:
            yield Case(f"{name}, 3 workers, {dtype}", scheme, 3, 1, dtype)
        if "exponential" in name:
            yield Case(f"{name}, 3 workers, custom reduction", scheme, 3, custom_reduction=True)
    for name, inside in itertools.product(NESTED, ("float32", "float16", 8)):
        scheme = Hierarchical(FLAT[name], inside=inside)
        for workers, local_size in ((1, 1), (2, 2), (4, 2), (6, 2), (6, 3)):
            shape = f"{workers} workers by {local_size}"
            yield Case(f"{name}, {shape}, inside {inside}", scheme, workers, local_size)


def _gradients(case: Case, rank: int, step: int) -> list[np.ndarray]:
    """A worker's: dense ones, one with a bucket of zeros, and one of few elements of very different sizes."""
    random = np.random.RandomState(1000 * step + rank)  # whose numbers are the same in every version of numpy
    tensors = [10.0 ** (place - 2) * random.standard_normal(length) for place, length in enumerate(LENGTHS)]
    tensors[2][random.random_sample(1024) < 0.97] = 0.0
    tensors[3] += 0.3 * np.random.RandomState(step).standard_normal(1025)  # what the workers have in common
    tensors[4][1024:2048] = 0.0
    tensors[4][3000] = 5e4
    if case.dtype == "bfloat16":
        return [(t.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for t in tensors]
    return [tensor.astype(case.dtype) for tensor in tensors]


class _Digest:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, *values: Any) -> None:
        for value in values:
            is_array = isinstance(value, np.ndarray)
            text = f"{value.dtype} {value.shape}" if is_array else repr(value)
            self._hash.update(text.encode() + (value.tobytes() if is_array else b""))

    def __str__(self) -> str:
        return self._hash.hexdigest()


def digests(case: Case, kernels: str) -> dict[str, str]:
    """Of all that every worker sends, and of what every worker decodes, in two steps.

    Args:
        kernels: name of the backend.
    """
    backend, payload, result = kernel_backends.get(kernels), _Digest(), _Digest()
    workers = [
        Workers(rank, case.workers, case.custom_reduction, case.local_size) for rank in range(case.workers)
    ]
    scheme = case.scheme.for_workers(workers[0])
    names = [f"tensor {place}" for place in range(len(LENGTHS))]
    has_state = isinstance(getattr(case.scheme, "inner", case.scheme), BinSGDM)
    states = [
        [_state(scheme, *each, worker) if has_state else None for each in zip(names, LENGTHS)]
        for worker in workers
    ]
    for step in STEPS:
        exchanges, inputs = [], [_gradients(case, worker.rank, step) for worker in workers]
        for worker, own, held in zip(workers, inputs, states):
            chains = [RngKey(11, name) for name in names]
            members = [Gradient(each, chain, step, state) for each, chain, state in zip(own, chains, held)]
            exchanges.append(scheme.begin(members, worker, backend))
        answers: list[Any] = [None] * case.workers
        finished: list[Any] = []
        while not finished:
            requests = []
            for exchange, answer in zip(exchanges, answers):
                try:
                    requests.append(exchange.send(answer))
                except StopIteration as stop:
                    finished.append(stop.value)
            for request in requests:
                payload.add(type(request).__name__, np.asarray(request.array))
            if not finished:
                answers = _answers(requests, case.local_size, None)
        for decoded, own in zip(finished, inputs):
            outs = [np.empty_like(each) for each in own]
            for place, out in enumerate(outs):
                decoded.write(place, 1.0 / int(decoded.active), out)
            result.add(int(decoded.active), *outs)
    for state in itertools.chain.from_iterable(states):
        result.add(*(() if state is None else (state.momentum, state.scale)))
    return {"payload": str(payload), "result": str(result)}


def _state(scheme: Scheme, name: str, elements: int, worker: Workers) -> BinaryState:
    start, stop = scheme.owned(name, elements, worker)
    return BinaryState(np.zeros(stop - start, np.float32), np.zeros(stop - start, np.float32), 0.85)


def main() -> None:
    found = {case.name: digests(case, "numpy") for case in cases()}
    lines = [f" {json.dumps(name)}: {json.dumps(both)}" for name, both in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{len(found)} cases\n")


if __name__ == "__main__":
    main()
