"""Reductions with kernels on numpy arrays: the graph calls Python between collectives.

A scheme's generator starts whenever the graph runs, with the current rank, number of workers and shapes: elastic
training and dynamic shapes need no new trace. The calls are stateless for TensorFlow, because it would run stateful
ones sequentially. Gradients and results are not copied: numpy reads the memory of the tensors, and the tensors take
over the memory of arrays.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_quant.frontends.binsgdm import clipped
from horovod_quant.frontends.stats import TrafficCounter
from horovod_quant.kernels.arrays import aligned_empty
from horovod_quant.kernels.floating_point import ieee_arithmetic
from horovod_quant.schemes.base import (
    Allgather,
    Alltoall,
    BinaryState,
    Collective,
    Decoded,
    Exchange,
    Gradient,
    Workers,
    split_gathered,
)
from horovod_quant.tensorflow.collectives import Scope, is_elastic, perform, worker_count
from horovod_quant.tensorflow.groups import Member
from horovod_quant.tensorflow.reused_memory import ReusedMemory
from horovod_quant.transports.pairwise_via_allreduce import collectives_of_pairwise, pairwise_via_allreduce
from horovod_quant.transports.traffic import ring_allreduce_bytes, sent_bytes

_RUNS_KEPT = 64
"""Maximum number of simultaneous runs: equal models of a graph share one function of Horovod."""

_RUNS_KEPT_ELASTIC = 4
"""The same under elastic training, where each failed run keeps its gradients in memory."""


class _Run:
    """One reduction in progress."""

    def __init__(
        self, exchange: Exchange, shapes: Sequence[tuple[int, ...]], states: Sequence[np.ndarray]
    ) -> None:
        self.exchange = exchange
        self.shapes = shapes
        self.states = states
        self.request: Any = None
        self.decoded: Decoded | None = None
        self.undecoded = len(shapes)
        self.lock = threading.Lock()


class CallbackExchange:
    """Reduction of a group of gradients at one point of a graph.

    Args:
        members: the gradients.
        kernels: backend of the kernels.
        scope: scope of its collectives.
        enter: called with a gradient's name, elements and workers when a reduction starts; returns its step.
        traffic: counts the bytes that this worker sends for each gradient.
        memory: allocator of new states.
    """

    def __init__(
        self,
        members: Sequence[Member],
        kernels: Any,
        scope: Scope,
        enter: Callable[[str, int, int], int],
        traffic: TrafficCounter,
        memory: ReusedMemory,
    ) -> None:
        import horovod.tensorflow as hvd

        self._members = list(members)
        self._kernels = kernels
        self._scope = scope
        self._enter = enter
        self._traffic = traffic
        self._memory = memory
        # With Gloo. This is fixed in the graph, but under elastic training the number of workers is not.
        self._swaps = not (hvd.mpi_enabled() or is_elastic())
        self._tokens = itertools.count()
        # A failed run, for example after a worker died, leaves its entry, which later runs remove.
        self._runs: OrderedDict[int, _Run] = OrderedDict()

    def build(self) -> Callable[[int, tf.Tensor], tf.Tensor]:
        """Create the operations.

        Returns a function from a member's position and control tensor to its result.
        """
        workers = self._scope.workers()
        # Under elastic training the graphs must agree, though workers may have built them for different numbers.
        self._scheme = self._members[0].scheme.for_workers(Workers(0, 1) if is_elastic() else workers)
        collectives = self._scheme.collectives
        if self._swaps:
            collectives = collectives_of_pairwise(collectives, workers)
        inputs = [member.tensor for member in self._members]
        states = [member.state for member in self._members if member.state is not None]
        for state in states:
            inputs += [state.momentum.read_value(), state.scale.read_value()]
        inputs += [member.step for member in self._members if member.step is not None]
        inputs.append(worker_count(self._scope.process_set))  # not constant, so that the call is not folded
        new_states = [tf.float32] * (2 * len(states))
        token, array, splits = self._call(self._start, inputs, [tf.int64, *_sent_types(collectives[0])])
        answer = perform(collectives, 0, array, splits, self._scope)
        for stage, collective in enumerate(collectives[1:], 1):
            is_last = stage == len(collectives) - 1
            types = [*_sent_types(collective), *(new_states if is_last else ())]
            resume = self._resume_last if is_last else self._resume
            array, splits, *updated = self._call(resume, [token, answer], types)
            # By the last call every scheme has changed its state.
            updates = [
                variable.assign(tf.reshape(value, variable.shape))
                for state, *values in zip(states, updated[::2], updated[1::2])
                for variable, value in zip((state.momentum, state.scale), values)
            ]
            with tf.control_dependencies(updates):
                answer = perform(collectives, stage, array, splits, self._scope)

        def result(position: int, control_tensor: tf.Tensor) -> tf.Tensor:
            tensor = self._members[position].tensor
            decode = partial(self._decode, position)
            (decoded,) = self._call(decode, [token, answer, control_tensor], [tensor.dtype])
            decoded.set_shape(tensor.shape)
            return decoded

        return result

    def _call(self, function: Callable, inputs: list, types: list[tf.DType]) -> list[tf.Tensor]:
        def with_ieee_arithmetic(*arrays: np.ndarray) -> Any:
            with ieee_arithmetic():
                try:
                    return function(*arrays)
                except RuntimeError as error:
                    # Horovod's elastic training does not recover from TensorFlow's UnknownError.
                    raise ValueError(str(error)) from error

        outputs = tf.numpy_function(with_ieee_arithmetic, inputs, types, stateful=False)
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    # ---- when the graph runs ---------------------------------------------------------------------------------

    def _start(self, *arrays: np.ndarray) -> list[np.ndarray]:
        count = len(self._members)
        remaining = iter(arrays[count:])
        workers = self._scope.workers()
        gradients, new_states, states = [], [], []
        for member in self._members:
            new = [] if member.state is None else [next(remaining), next(remaining)]
            states.append([self._state_copy(member.name, i, old) for i, old in enumerate(new)])
            new_states += states[-1]
        for member, array, new in zip(self._members, arrays, states):
            state = None if member.state is None else BinaryState(new[0], new[1], member.state.beta)
            number = self._enter(member.name, array.size, workers.size)
            step = number if member.step is None else int(next(remaining))
            values = flat_array(array)
            if member.state is not None:
                values = clipped(self._kernels, values, member.state.clip_norm)
            gradients.append(Gradient(values, member.chain, step, state))
        exchange = self._scheme.begin(gradients, workers, self._kernels)
        if self._swaps:
            exchange = pairwise_via_allreduce(exchange, workers)
        run = _Run(exchange, [array.shape for array in arrays[:count]], new_states)
        sent = self._advance(run, None)
        token = next(self._tokens)
        self._runs[token] = run
        while len(self._runs) > (_RUNS_KEPT_ELASTIC if is_elastic() else _RUNS_KEPT):
            self._runs.popitem(last=False)
        return [np.array(token), *sent]

    def _state_copy(self, name: str, number: int, array: np.ndarray) -> np.ndarray:
        copy = self._memory.take((name, number), array.size)
        copy[...] = array.reshape(-1)
        return copy

    def _resume(self, token: np.int64, answer: np.ndarray) -> list[np.ndarray]:
        run = self._runs[int(token)]
        return self._advance(run, _answer(run.request, answer))

    def _resume_last(self, token: np.int64, answer: np.ndarray) -> list[np.ndarray]:
        """Return the last collective's array and splits, and the changed states."""
        return [*self._resume(token, answer), *self._runs[int(token)].states]

    def _advance(self, run: _Run, answer: Any) -> list[np.ndarray]:
        run.request = run.exchange.send(answer)
        size = self._scope.workers().size_of(run.request.group)
        for member, sent in zip(self._members, sent_bytes(run.request, size)):
            self._traffic.count(member.name, sent)
        splits = run.request.splits if isinstance(run.request, Alltoall) else ()
        return [run.request.array, np.array(splits, np.int32)]

    def _decode(
        self, position: int, token: np.int64, answer: np.ndarray, control_tensor: np.ndarray
    ) -> np.ndarray:
        run, member = self._runs[int(token)], self._members[position]
        with run.lock:
            if run.decoded is None:
                run.decoded = _finish(run, answer)
                for each, buckets in zip(self._members, run.decoded.exchanged_again):
                    self._traffic.count_again(each.name, buckets)
            run.undecoded -= 1
            if not run.undecoded:
                del self._runs[int(token)]
        control_bytes = ring_allreduce_bytes(control_tensor.nbytes, self._scope.process_set.size())
        self._traffic.count(member.name, control_bytes)
        factor = member.factor(control_tensor.tolist()) / float(run.decoded.active)
        shape, dtype = run.shapes[position], member.tensor.dtype.as_numpy_dtype
        out = aligned_empty(int(np.prod(shape)), dtype)
        run.decoded.write(position, factor, flat_array(out))
        return out.reshape(shape)


def _sent_types(collective: Collective) -> list[tf.DType]:
    """Return the types of a collective's array and of an alltoall's splits."""
    return [tf.as_dtype(collective.dtype), tf.int32]


def flat_array(array: np.ndarray) -> np.ndarray:
    """Return a flat view of an array.

    Bfloat16 as uint16, which kernels expect.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint16) if flat.dtype == tf.bfloat16.as_numpy_dtype else flat


def _answer(request: Any, array: np.ndarray) -> Any:
    if isinstance(request, Allgather):
        return split_gathered(array, request)
    if isinstance(request, Alltoall):
        workers = len(request.splits)
        if len(array) % workers:
            raise ValueError(f"an alltoall among {workers} workers returned {len(array)} elements")
        return np.split(array, workers)
    return array


def _finish(run: _Run, answer: np.ndarray) -> Decoded:
    try:
        run.exchange.send(_answer(run.request, answer))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a scheme launched more collectives than it declares")
