"""TensorFlow's kernels as a backend of the suite: eager, in a function, and compiled by XLA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from conformance import suite
from conformance.suite import BFLOAT16, Out, assert_same_bits

from horovod_quant.kernels.keys import Key
from horovod_quant.schemes.base import Allgather, Allreduce
from horovod_quant.tensorflow import kernels
from horovod_quant.tensorflow.segments import FlatVariable
from horovod_quant.transports import simulator


def eagerly(function: Callable) -> Callable:
    return function


WAYS = {
    "eager": eagerly,
    "function": tf.function(autograph=False),
    "xla": tf.function(autograph=False, jit_compile=True),
}


class TensorFlow(suite.Backend):
    """The backend in one of its ways: a script's calls are one graph.

    Args:
        way: its name.
        has_numbers: True if keys and factors are numbers in the graph, False if they are known only when it runs.
    """

    array_type = tf.Tensor

    def __init__(self, way: str = "eager", has_numbers: bool = True) -> None:
        super().__init__(kernels, way)
        self._has_numbers = has_numbers

    def array(self, x: np.ndarray) -> Any:
        return tf.constant(x.view(tf.bfloat16.as_numpy_dtype) if x.dtype == BFLOAT16 else x)

    def out(self, out: Out) -> Any:
        return tf.TensorSpec([out.elements], tf.bfloat16 if out.dtype == BFLOAT16 else out.dtype)

    def state(self, x: np.ndarray) -> Any:
        return FlatVariable(tf.Variable(x))

    def step(self, number: int) -> Any:
        return tf.constant(number, tf.int64)

    def numpy(self, array: Any) -> np.ndarray:
        array = array.values() if isinstance(array, FlatVariable) else array
        return array.numpy().view(BFLOAT16) if array.dtype == tf.bfloat16 else array.numpy()

    def argument(self, kernel: str, value: Any) -> Any:
        if isinstance(value, Out) and not decodes(kernel):
            return None
        return super().argument(kernel, value)

    def run(self, cases: Sequence[suite.Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        # Momentum and scale, of another shape than the gradient's.
        states = [
            [tf.Variable(x.reshape(-1, 1)) for x in case.arguments[1:3]] if case.kernel == "binarize" else []
            for case in cases
        ]
        inputs: list[Any] = []
        for kernel, arguments, *_ in cases:
            suite.mapped(arguments, lambda value, kernel=kernel: inputs.extend(self._inputs(kernel, value)))

        def graph(*tensors: Any) -> list[Any]:
            given = iter(tensors)
            return [self._result(case, own, given) for case, own in zip(cases, states)]

        results = WAYS[self.how](graph)(*map(self.array, inputs))
        for case, own, result in zip(cases, states, results):
            for variable, expected in zip(own, case.after[1:3]):
                assert_same_bits(expected, variable.numpy().reshape(-1), "momentum or scale")
            yield self.read(result), []

    def _inputs(self, kernel: str, value: Any) -> list[Any]:
        """Return what a graph gets as tensors, so that no compiler folds it."""
        if isinstance(value, np.ndarray):
            return [value]
        if isinstance(value, Key) and not self._has_numbers:
            return [np.uint32(value.k0), np.uint32(value.k1)]
        if isinstance(value, float) and decodes(kernel) and not self._has_numbers:
            return [np.float32(value) if np.float32(value) == value else np.float64(value)]
        return []

    def _result(self, case: suite.Case, states: Sequence[Any], tensors: Iterator[Any]) -> Any:
        def argument(value: Any) -> Any:
            given = [next(tensors) for _ in self._inputs(case.kernel, value)]
            if isinstance(value, Key):
                return Key(*given, *value[len(given) :])
            return given[0] if given else self.argument(case.kernel, value)

        arguments = suite.mapped(case.arguments, argument)
        if states:
            arguments = (arguments[0], *states, *arguments[3:])
        return suite.function_of(kernels, case.kernel)(*arguments)

    def computed(self, function: Callable[[Any], Sequence[Any]], arrays: Any) -> list[np.ndarray]:
        return list(map(self.numpy, WAYS[self.how](function)(suite.mapped(arrays, self.array))))

    def answers(self, requests: Sequence[Any], local_size: int) -> list[Any]:
        found: list[Any] = [None] * len(requests)
        for ranks in simulator._members(requests[0].group, len(requests), local_size):
            for rank, answer in zip(ranks, performed([requests[rank] for rank in ranks])):
                found[rank] = answer
        return found


def decodes(kernel: str) -> bool:
    """True if a kernel takes the form of its result; the others write into no buffer."""
    return kernel.split(".")[-1].startswith(("decode", "add_rotated", "scale"))


def performed(requests: Sequence[Any]) -> list[Any]:
    """Return the answers to the requests of a group's workers, all of one kind."""
    first, arrays = requests[0], [request.array for request in requests]
    if isinstance(first, Allreduce):
        combine = tf.maximum if first.op == "max" else tf.add
        return [functools.reduce(combine, arrays)] * len(requests)
    if isinstance(first, Allgather):
        return [arrays] * len(requests)
    pieces = [tf.split(request.array, request.splits) for request in requests]
    return [list(received) for received in zip(*pieces)]
