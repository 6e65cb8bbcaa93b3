"""Whole exchanges of schemes: everything that the workers send, decode and keep has the reference's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conformance.suite import BFLOAT16, Backend, Out, as_type, assert_all_same_bits
from helpers import SCHEMES, lockstep, owned_states
from literature import LITERATURE, load

from horovod_quant.kernels import reference
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import BinaryState, Scheme, Workers

MEAN_SIGNS = load(Path(__file__).parents[1] / "newcomer" / "mean_signs.py").MeanSigns(96)
FLAT: dict[str, Scheme] = {**SCHEMES, **LITERATURE, "mean-signs": MEAN_SIGNS}
EXCHANGES: dict[str, tuple[Scheme, int, int]] = {
    **{name: (scheme, 3, 1) for name, scheme in FLAT.items()},
    **{
        f"hierarchical-{name}": (Hierarchical(FLAT[name]), 4, 2)
        for name in (
            "qsgd", "nuqsgd-inf-alltoall", "global-max", "global-l2", "exponential-max", "eden-alltoall",
            "binsgdm", "binsgdm-average", "terngrad", "natural",
        )
    },
    "inside-float16": (Hierarchical(FLAT["global-max"], "float16"), 4, 2),
    "inside-8": (Hierarchical(FLAT["eden"], 8), 4, 2),
    "one-node": (Hierarchical(FLAT["binsgdm"]), 2, 2),
}  # fmt: skip
"""Scheme, workers, workers of a node."""

ON_DEVICES = [name for name, (scheme, _, _) in EXCHANGES.items() if scheme.host_requirement() is None]
"""Those without Elias coding, which takes numpy's arrays."""


def setting_of(name: str) -> tuple[Scheme, int, list[list[np.ndarray]], list[list[BinaryState]]]:
    """The scheme, the workers of a node, and each worker's gradients and states."""
    scheme, size, local_size = EXCHANGES[name]
    workers = [Workers(rank, size, local_size=local_size) for rank in range(size)]
    scheme, groups = scheme.for_workers(workers[0]), gradients_of(size)
    return scheme, local_size, groups, [owned_states(scheme, *each) for each in zip(groups, workers)]


def gradients_of(size: int) -> list[list[np.ndarray]]:
    """Of several types, one empty; some elements of a worker's are zero, one of another's is not finite."""
    kinds = [(1500, np.float32), (70, np.float16), (0, np.float32), (1025, BFLOAT16)]
    rng = np.random.default_rng(7)
    groups = [
        [as_type(rng.standard_normal(count).astype(np.float32), dtype) for count, dtype in kinds]
        for _ in range(size)
    ]
    groups[0][0][:200] = 0
    groups[-1][3][-1] = BFLOAT16(0x7FC0)
    return groups


def assert_exchanges_conform(backend: Backend, name: str, decoding: int | None = None) -> None:
    """Compare an exchange of several workers with the reference's; the first ``decoding`` of them decode."""
    expected = exchanged(Backend(reference), name, decoding)
    assert_all_same_bits(expected, exchanged(backend, name, decoding), f"{name}, {backend.how}")


def exchanged(backend: Backend, name: str, decoding: int | None = None) -> list[np.ndarray]:
    """Return what the workers send, the first ``decoding`` of them decode, and all keep."""
    scheme, local_size, groups, states = setting_of(name)
    kept = [[BinaryState(*map(backend.state, state[:2]), state.beta) for state in own] for own in states]
    steps = [backend.step(3 + rank) for rank in range(len(groups))]
    results = [Out(len(array), array.dtype) for array in groups[0]]

    def exchange(groups: Sequence[Sequence[Any]]) -> list[Any]:
        found: list[Any] = []

        def answer(requests: Sequence[Any]) -> list[Any]:
            found.extend(request.array for request in requests)
            return backend.answers(requests, local_size)

        finished = lockstep(
            scheme, groups, kept, local_size=local_size, steps=steps, kernels=backend.kernels, answer=answer
        )
        for decoded in finished[:decoding]:
            outs = [backend.out(out) for out in results]
            with getattr(backend.kernels, "batch", contextlib.nullcontext)():
                found += decoded.decode(range(len(outs)), 1 / len(groups), outs)
        return found

    found = backend.computed(exchange, groups)
    return found + [backend.numpy(array) for own in kept for state in own for array in state[:2]]
