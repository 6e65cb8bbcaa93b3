"""What a worker does with what it receives: an error where a length is wrong, no crash where bits are.

One worker's exchange is recorded, and repeated with one of its answers damaged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import gaussian, in_turn, owned_states, same_bits

from horovod_quant import kernels
from horovod_quant.frontends.methods import families, parse
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Allgather, Gradient, Scheme, Workers, ragged_payload, split_gathered
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.transports import simulator
from horovod_quant.transports.pairwise_via_allreduce import pairwise_via_allreduce
from horovod_quant.transports.split_sums import split_sums

WORKERS = 4
LENGTHS = (3000, 33, 0, 1025)
ALTERATIONS = 60

REFUSAL = (
    "^an? (allreduce|allgather) returned [0-9]+ elements where [0-9]+ were expected$|"
    "^corrupt payload|^payloads came from [0-9]+ workers where [0-9]+ were expected$"
)


class Setting(NamedTuple):
    """A scheme and its transport."""

    scheme: Scheme
    local_size: int = 1
    custom_reduction: bool = False
    splits_sums: bool = False
    swaps: bool = False


def settings() -> Iterator[tuple[str, Setting]]:
    named = {family: parse(family.replace("BITS", "4")).scheme() for family in families()}
    schemes = {name: scheme for name, scheme in named.items() if scheme is not None}
    schemes["qsgd-elias"] = QSGD(4, coding="elias")
    schemes["nuqsgd-elias-omega"] = NUQSGD(4, coding="elias-omega")
    for name, scheme in schemes.items():
        yield name, Setting(scheme)
        yield f"{name}-hierarchical", Setting(Hierarchical(scheme), local_size=2)
    yield "global-qsgd-split-sums", Setting(GlobalQSGD(8), splits_sums=True)
    for name, scheme in (("qsgd", QSGD(4)), ("binsgdm", BinSGDM())):
        yield f"{name}-swaps", Setting(Hierarchical(scheme), local_size=2, swaps=True)
    for inside in ("float16", 8):
        yield f"qsgd-inside-{inside}", Setting(Hierarchical(QSGD(4), inside), local_size=2)
    yield "global-qsgd-exp-reduced", Setting(GlobalQSGD(4, levels="exponential"), custom_reduction=True)


SETTINGS = dict(settings())
each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
BACKENDS = ("numpy", "native")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class Worker:
    """One worker's exchange, step by step."""

    def __init__(self, setting: Setting, rank: int, backend: str) -> None:
        workers = Workers(rank, WORKERS, setting.custom_reduction, setting.local_size)
        scheme = setting.scheme.for_workers(workers)
        values = [gaussian(10 * rank + i, length) for i, length in enumerate(LENGTHS)]
        members = [
            Gradient(own, RngKey(0, str(i)), 0, state)
            for i, (own, state) in enumerate(zip(values, owned_states(scheme, values, workers)))
        ]
        self._exchange = scheme.begin(members, workers, kernels.get(backend))
        if setting.splits_sums:
            self._exchange = split_sums(self._exchange, WORKERS)
        if setting.swaps:
            self._exchange = pairwise_via_allreduce(self._exchange, workers)
        self._decoded: Any = None

    def send(self, answer: Any) -> Any:
        """The next request; None after the last answer."""
        try:
            return self._exchange.send(answer)
        except StopIteration as stop:
            self._decoded = stop.value
            return None

    def results(self) -> list[np.ndarray]:
        """The decoded gradients."""
        return [
            self._decoded.write(i, 1 / WORKERS, np.empty(length, np.float32))
            for i, length in enumerate(LENGTHS)
        ]


class Recording(NamedTuple):
    """The first worker's requests, their answers, and what came of them."""

    requests: list[Any]
    answers: list[Any]
    results: list[np.ndarray]


def recorded(setting: Setting, backend: str) -> Recording:
    everybody = [Worker(setting, rank, backend) for rank in range(WORKERS)]
    requests, answers = [], []
    current = [worker.send(None) for worker in everybody]
    while current[0] is not None:
        received = simulator._answers(current, setting.local_size, None)
        requests.append(current[0])
        answers.append(copied(received[0]))
        current = [worker.send(answer) for worker, answer in zip(everybody, received)]
    return Recording(requests, answers, everybody[0].results())


def copied(answer: Any) -> Any:
    return [piece.copy() for piece in answer] if isinstance(answer, list) else answer.copy()


def replayed(setting: Setting, backend: str, answers: list[Any]) -> list[np.ndarray]:
    """The first worker's results with these answers."""
    worker = Worker(setting, 0, backend)
    worker.send(None)
    with np.errstate(all="ignore"):
        for answer in answers:
            worker.send(copied(answer))
        return worker.results()


# ---- wrong lengths


def shorter(array: np.ndarray, by: int) -> np.ndarray:
    return array[: len(array) - by].copy()


def longer(array: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(by, array.dtype)])


def resized(array: np.ndarray, *changes: int) -> Iterator[tuple[str, np.ndarray]]:
    """The array by so many elements, and by all, shorter and longer."""
    for by in sorted({*changes, len(array)} - {0}):
        yield f"longer by {by}", longer(array, by)
        if by <= len(array):
            yield f"shorter by {by}", shorter(array, by)


def misfits(request: Any, answer: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Answers of wrong lengths, and how a transport gets them, which may refuse them itself."""
    if not isinstance(answer, list):
        for what, array in resized(answer, 1, 32):
            yield what, lambda array=array: array
        return
    yield "no pieces", list
    yield "a piece less", lambda: answer[:-1]
    yield "a piece more", lambda: [*answer, answer[0]]
    for place, piece in enumerate(answer):
        for what, array in resized(piece, 1, 32):
            yield f"piece {place} {what}", lambda place=place, array=array: replaced(answer, place, array)
    if isinstance(request, Allgather) and len(whole := joined(request, answer)):
        for what, array in resized(whole, 1, 8, 32, len(answer[0])):
            yield f"all {what}", lambda array=array: split_gathered(array, request)


def replaced(pieces: list[Any], place: int, other: Any) -> list[Any]:
    return [*pieces[:place], other, *pieces[place + 1 :]]


def joined(request: Allgather, pieces: list[np.ndarray]) -> np.ndarray:
    """What Horovod's allgather returns."""
    if request.ragged:
        pieces = [ragged_payload(piece) for piece in pieces]
    return np.concatenate(pieces)


def message_of(action: Callable[[], Any]) -> str:
    """The message of the ValueError that an action raises."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "accepted"


@each_setting
@each_backend
def test_an_answer_of_a_wrong_length_is_refused(setting: Setting, backend: str) -> None:
    requests, answers, _ = recorded(setting, backend)
    for stage, (request, answer) in enumerate(zip(requests, answers)):
        tried = 0
        for what, make in misfits(request, answer):
            message = message_of(
                lambda make=make, stage=stage: replayed(setting, backend, replaced(answers, stage, make()))
            )
            assert re.match(REFUSAL, message), f"stage {stage}, {what}: {message}"
            tried += 1
        assert tried >= 2


# ---- altered bits


def altered(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Some bits flipped, or a stretch of noise."""
    array = array.copy()
    memory = array.view(np.uint8)
    low, high = np.sort(rng.integers(0, len(memory) + 1, 2))
    if rng.random() < 0.5:
        memory[low:high] = rng.integers(0, 256, high - low)
    else:
        at = rng.integers(0, len(memory), rng.integers(1, 4))
        memory[at] ^= (1 << rng.integers(0, 8, len(at))).astype(np.uint8)
    return array


@pytest.mark.parametrize(("backend", "name"), in_turn(BACKENDS, [[name] for name in SETTINGS]))
def test_altered_bits_are_decoded_to_something_or_refused(backend: str, name: str) -> None:
    setting = SETTINGS[name]
    requests, answers, results = recorded(setting, backend)
    assert all(map(same_bits, replayed(setting, backend, answers), results))
    rng = np.random.default_rng(0)
    refused = changed = 0
    for _ in range(ALTERATIONS):
        stage = int(rng.integers(len(requests)))
        answer = answers[stage]
        if isinstance(answer, list):
            place = int(rng.choice([i for i, piece in enumerate(answer) if len(piece)]))
            answer = replaced(answer, place, altered(rng, answer[place]))
        else:
            answer = altered(rng, answer)
        try:
            found = replayed(setting, backend, replaced(answers, stage, answer))
        except CorruptPayloadError:
            refused += 1
        except ValueError as error:
            # The others would exchange the damaged buckets again, and answer so.
            if not getattr(inner_of(setting.scheme), "rotate", False) or not re.match(REFUSAL, str(error)):
                raise
        else:
            changed += not all(map(same_bits, found, results))
    assert changed > 0
    is_coded = any(isinstance(request, Allgather) and request.ragged for request in requests)
    assert (refused > 0) == is_coded
