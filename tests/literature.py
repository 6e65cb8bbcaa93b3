"""Schemes of the literature, written with the kernels' interface alone: what has to run on every backend.

Each has one number a tensor, and none is part of the package.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from horovod_quant.kernels.layout import WHOLE_TENSOR, ceil_div, code_words
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import (
    Allgather,
    Collective,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    split_points,
    validated,
)

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@dataclass(frozen=True)
class OneNumber(Scheme):
    """A scheme that gathers a float32 number and some words of each tensor."""

    bucket_size = WHOLE_TENSOR

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Allgather, "int32"),)

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        counts = [self.words(gradient.elements) for gradient in gradients]
        numbers: list[Any] = []

        def number(gradient: Gradient, out: Any) -> Any:
            numbers.append(self.number(gradient.values, kernels))
            return numbers[-1]

        def encode(i: int, out: Any) -> Any:
            key = gradients[i].keys.key("worker", gradients[i].step, workers.rank)
            return self.encode(gradients[i], numbers[i], key, kernels, out)

        parts = [(1, np.float32, partial(number, gradient)) for gradient in gradients]
        parts += [(count, np.int32, partial(encode, i)) for i, count in enumerate(counts)]
        request = Allgather(kernels.pack(parts), [4 * (1 + count) for count in counts])
        payloads = yield from validated(request, workers)
        at = split_points([len(gradients), *counts])

        def write(i: int, factor: float, out: Any) -> Any:
            own_words = [payload[at[i + 1] : at[i + 2]] for payload in payloads]
            own_numbers = [kernels.view(payload[i : i + 1], np.float32) for payload in payloads]
            return self.decode(own_words, own_numbers, gradients[i].elements, factor, kernels, out)

        return Decoded(len(payloads), write)

    def words(self, elements: int) -> int:
        raise NotImplementedError

    def number(self, x: Any, kernels: Any) -> Any:
        raise NotImplementedError

    def encode(self, gradient: Gradient, number: Any, key: Any, kernels: Any, out: Any) -> Any:
        raise NotImplementedError

    def decode(self, words: list, numbers: list, elements: int, factor: float, kernels: Any, out: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class ScaledSign(OneNumber):
    """Signs, times the mean magnitude of the tensor.

    Karimireddy, Rebjock, Stich, Jaggi. Error Feedback Fixes SignSGD. ICML 2019: what EF-SignSGD sends.
    """

    def words(self, elements):
        return ceil_div(elements, 32)

    def number(self, x, kernels):
        return kernels.tensor_mean_magnitude(x)

    def encode(self, gradient, number, key, kernels, out):
        return kernels.pack_flags(kernels.less(gradient.values, 0.0))

    def decode(self, words, numbers, elements, factor, kernels, out):
        values = []
        for own, magnitude in zip(words, numbers):
            minus = kernels.scale([magnitude], -1.0, kernels.empty(1))
            values.append(kernels.where(kernels.unpack_flags(own, elements), minus, magnitude))
        return kernels.scale([kernels.mean(values)], factor * len(values), out)


@dataclass(frozen=True)
class Natural(OneNumber):
    """The powers of two around an element, at random and without bias; the sign and 7 bits of the exponent.

    Horvath, Ho, Horvath, Sahu, Canini, Richtarik. Natural Compression for Distributed Deep Learning. 2019.
    """

    def words(self, elements):
        return code_words(elements, 8)

    def number(self, x, kernels):
        return kernels.next_powers_of_two(kernels.tensor_maximum(x))

    def encode(self, gradient, number, key, kernels, out):
        start = gradient.start
        return kernels.encode_exponential(gradient.values, number, WHOLE_TENSOR, 8, key, start, out)

    def decode(self, words, numbers, elements, factor, kernels, out):
        return kernels.decode_exponential(words, numbers, WHOLE_TENSOR, 8, factor, out)


def load(file: Path) -> Any:
    """The module in a file."""
    if file.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        # Left as it was, so that tests which go through the registry do not depend on who has imported this.
        with mock.patch.dict(registry._registered):
            spec.loader.exec_module(module)
    return sys.modules[file.stem]


TernGrad: Any = load(EXAMPLES / "terngrad.py").TernGrad

LITERATURE: dict[str, Scheme] = {
    "terngrad": TernGrad(),
    "terngrad-unclipped": TernGrad(clip=None),
    "scaled-sign": ScaledSign(),
    "natural": Natural(),
}
