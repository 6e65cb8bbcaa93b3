"""Whole exchanges of schemes: everything that the workers send, decode and keep has the reference's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conformance.cases import BFLOAT16, as_type
from conformance.suite import assert_all_same_bits
from helpers import SCHEMES, lockstep, owned_states
from literature import LITERATURE, load

from horovod_quant.kernels import reference
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import BinaryState, Scheme, Workers
from horovod_quant.transports import simulator

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


def assert_exchanges_conform(kernels: Any, name: str, place: Callable[[Any], Any], back: Callable) -> None:
    """Compare an exchange with the reference's.

    Args:
        kernels: the backend.
        name: of the exchange.
        place: makes the backend's arrays of numpy's.
        back: makes numpy's of the backend's.
    """
    expected = exchanged(name, reference, np.copy, np.copy)
    assert_all_same_bits(expected, exchanged(name, kernels, place, back), name)


def exchanged(
    name: str, kernels: Any, place: Callable, back: Callable, decoding: int | None = None
) -> list[np.ndarray]:
    """What the workers send, the first ``decoding`` of them decode, and all keep."""
    scheme, local_size, groups, states = setting_of(name)
    states = [[BinaryState(*map(place, state[:2]), state.beta) for state in own] for own in states]
    found = []

    def answer(requests: Sequence[Any]) -> list[Any]:
        sent = [back(request.array) for request in requests]
        found.extend(sent)
        requests = [request._replace(array=array) for request, array in zip(requests, sent)]
        with np.errstate(over="ignore"):
            answers = simulator._answers(requests, local_size, None)
        return [list(map(place, one)) if isinstance(one, list) else place(one) for one in answers]

    given, steps = [list(map(place, own)) for own in groups], range(3, 3 + len(groups))
    finished = lockstep(
        scheme, given, states, local_size=local_size, steps=steps, kernels=kernels, answer=answer
    )
    for own, decoded in zip(groups[:decoding], finished):
        targets = [place(np.zeros_like(array)) for array in own]
        with kernels.batch() if hasattr(kernels, "batch") else contextlib.nullcontext():
            decoded.decode(range(len(targets)), 1 / len(groups), targets)
        found += map(back, targets)
    return found + [back(array) for own in states for state in own for array in state[:2]]
