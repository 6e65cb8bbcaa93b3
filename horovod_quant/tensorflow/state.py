"""Counters in TensorFlow variables, for graphs that run no Python."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context  # Horovod imports it, too

_Made = TypeVar("_Made")


@contextlib.contextmanager
def outside_of_functions() -> Iterator[None]:
    """Context for creating variables.

    Eager in TensorFlow 2, in the program's graph in TensorFlow 1. ``tf.init_scope`` mistakes a program without eager
    execution for an eager one if it has no explicit graph.
    """
    with tf.init_scope():
        is_elsewhere = tf.executing_eagerly() and context.default_execution_mode != context.EAGER_MODE
        if not is_elsewhere:
            yield
            return
    graph = tf.compat.v1.get_default_graph()
    while graph.building_function:
        graph = graph.outer_graph
    with graph.as_default(), tf.control_dependencies(None):
        yield


def owning_graph() -> Any:
    """Return the graph of new variables in TensorFlow 1.

    Returns None in TensorFlow 2.
    """
    with outside_of_functions():
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Ledger:
    """Count of a gradient's reductions, and the bytes of one.

    The variable is created outside any trace. It is in no collection, and counts from zero if it is not initialized, so
    that programs with TensorFlow 1 sessions need not know it.

    Args:
        first: number of the first reduction.

    Attributes:
        bytes_sent: bytes that one worker sends in one reduction.
        float32_bytes: bytes that float32 would have sent.
        variable: the count.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._taken = 0
        self.bytes_sent = self.float32_bytes = 0.0
        self.variable: tf.Variable
        self._saved: _SavedCount
        self._read: tf.Tensor | None
        outside_of_traces(self._make)

    def _make(self) -> None:
        self.variable = uncollected_variable(tf.zeros([], tf.int64), "horovod_quant_exchanges")
        self._saved = _SavedCount(self)
        # Created early: TensorFlow 1 graphs may be finalized.
        self._read = None if owning_graph() is None else self._value()

    def _value(self) -> tf.Tensor:
        if owning_graph() is None:
            return self.variable.read_value()
        zero = tf.zeros([], tf.int64)
        return tf.cond(self.variable.is_initialized(), self.variable.read_value, lambda: zero)

    def enter(self) -> tf.Tensor:
        """Count a reduction, and return its number, int64."""
        before = self._value()
        with tf.control_dependencies([self.variable.assign(before + 1)]):
            return before + self.first

    def next(self) -> int:
        """Return the number of the next reduction."""
        return self.first + self.exchanges()

    def save_with(self, owner: Any) -> None:
        """Save the count in a SavedModel with ``owner``.

        Functions that count could not be saved without it. It is not in checkpoints, since it is not restored.

        Args:
            owner: an optimizer, or the gradient's variable, which every such function needs as well.
        """
        counts = getattr(vars(owner).get("_trackable_children"), "counts", None)
        if counts is None:
            counts = _make_room(owner)
        counts.add(self._saved)

    def take(self) -> int:
        """Return the number of reductions since the last call."""
        before, self._taken = self._taken, self.exchanges()
        return self._taken - before

    def exchanges(self) -> int:
        """Return the number of reductions so far.

        Raises:
            RuntimeError: TensorFlow 1 graphs keep their variables in a session, and there is no default one.
        """
        if self._read is None:
            return int(self.variable.numpy())
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise RuntimeError("stats(): call it within `with session.as_default():`")
        return int(session.run(self._read))


_numbers = itertools.count()


class _SavedCount(tf.saved_model.experimental.TrackableResource):
    """A ledger's variable in SavedModels, which restore no variables attached to variables."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = weakref.ref(ledger)
        self._name = (
            f"horovod_quant_exchanges_{next(_numbers)}"  # unique, because each loading creates another
        )
        self._resource_handle = ledger.variable.handle

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=self._name)

    def _initialize(self) -> None:
        ledger = self._ledger()
        assert ledger is not None
        with tf.init_scope():
            count = ledger.exchanges()
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=tf.constant(count, tf.int64))


def _make_room(owner: Any) -> weakref.WeakSet[_SavedCount]:
    """Return the set of counts that SavedModels save with ``owner``."""
    counts: weakref.WeakSet[_SavedCount] = weakref.WeakSet()
    kind, alive = type(owner), weakref.ref(owner)

    def children(save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        found = dict(kind._trackable_children(alive(), save_type, **options))
        if save_type == "savedmodel":
            found.update((f"horovod_quant_exchanges_{i}", count) for i, count in enumerate(counts))
        return found

    children.counts = counts  # type: ignore[attr-defined]
    owner._trackable_children = children
    return counts


def uncollected_variable(value: tf.Tensor, name: str) -> tf.Variable:
    """Create a variable in no collection, unknown to TensorFlow 1 programs."""
    return tf.compat.v1.Variable(value, trainable=False, collections=[], use_resource=True, name=name)


def outside_of_traces(make: Callable[[], _Made]) -> _Made:
    """Call a function that creates variables outside any trace."""
    if owning_graph() is not None:
        with outside_of_functions():
            return make()
    # A function that is traced a second time forbids new variables in its thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
