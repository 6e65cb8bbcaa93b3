"""Whole exchanges of schemes: everything that the workers send, decode and keep has the reference's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conformance.cases import BFLOAT16, as_type
from conformance.suite import assert_all_same_bits
from helpers import SCHEMES, sent_by, used_states
from literature import LITERATURE, load

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme, Workers
from horovod_quant.transports import simulator

MEAN_SIGNS = load(Path(__file__).parents[1] / "newcomer" / "mean_signs.py").MeanSigns(96)
FLAT = {
    name: scheme for name, scheme in {**SCHEMES, **LITERATURE}.items() if scheme.host_requirement() is None
}
EXCHANGES: dict[str, tuple[Scheme, int, int]] = {
    **{name: (scheme, 3, 1) for name, scheme in {**FLAT, "mean-signs": MEAN_SIGNS}.items()},
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
    scheme, size, local_size = EXCHANGES[name]
    groups = gradients_of(size)
    expected = exchanged(scheme, groups, reference, np.copy, np.copy, local_size)
    assert_all_same_bits(expected, exchanged(scheme, groups, kernels, place, back, local_size), name)


def exchanged(
    scheme: Scheme,
    groups: Sequence[Sequence[np.ndarray]],
    kernels: Any,
    place: Callable,
    back: Callable,
    local_size: int,
) -> list[np.ndarray]:
    """What the workers send, decode and keep."""
    workers = [Workers(rank, len(groups), local_size=local_size) for rank in range(len(groups))]
    scheme = scheme.for_workers(workers[0])
    states, exchanges, found = [], [], []
    for rank, one in enumerate(groups):
        members = []
        for i, (array, state) in enumerate(zip(one, used_states(one))):
            low, high = scheme.owned(str(i), len(array), workers[rank])
            state = BinaryState(place(state.momentum[low:high]), place(state.scale[low:high]), state.beta)
            states += state[:2]
            members.append(Gradient(place(array), RngKey(0, str(i)), 3 + rank, state))
        exchanges.append(scheme.begin(members, workers[rank], kernels))
    answers: list[Any] = [None] * len(groups)
    while True:
        requests, finished = sent_by(exchanges, answers)
        if finished:
            break
        sent = [back(request.array) for request in requests]
        found += sent
        requests = [request._replace(array=array) for request, array in zip(requests, sent)]
        with np.errstate(over="ignore"):
            answers = simulator._answers(requests, local_size, None)
        answers = [
            [place(part) for part in answer] if isinstance(answer, list) else place(answer)
            for answer in answers
        ]
    for one, decoded in zip(groups, finished):
        targets = [place(np.zeros_like(array)) for array in one]
        with kernels.batch() if hasattr(kernels, "batch") else contextlib.nullcontext():
            decoded.decode(range(len(targets)), 1 / len(groups), targets)
        found += [back(target) for target in targets]
    return found + [back(state) for state in states]
