"""Trains under elastic horovodrun while workers come, are killed, and are let go. Run by test_elastic.py.

horovodrun --min-np 2 ... python tf_elastic_worker.py LOG_FOLDER HOSTS_FILE
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from elastic_job import PHASES, Kept, Log, assert_levels, count_step, exchanges_of, fatal_method
from oracle import assert_average
from tf_harness import (
    METHODS,
    assert_same_on_all_ranks,
    gather_objects,
    keras_model,
    optimizer_for,
    rank_data,
)

import horovod_quant.tensorflow as hvq

PATIENCE = 60
"""Seconds that a worker waits for its own exchange to be under way before it dies."""


class Training:
    """A model that one method trains."""

    def __init__(self, method: str, log: Log) -> None:
        self.method, self._log = method, log
        self.compressor, self.model = METHODS[method](), keras_model()
        self.optimizer, self.traces = optimizer_for(self.compressor), 0
        self.optimizer.build(self.model.trainable_variables)
        if self.binary:
            self.compressor._welcome(self.optimizer)
        self._step = tf.function(self._traced)
        self._doomed, self._sent = False, 0.0

    @property
    def binary(self) -> bool:
        return isinstance(self.compressor, hvq.BinSGDM)

    def step(self, number: int, doomed: bool) -> None:
        """One step and its check. ``doomed``: this worker shall not come back from it."""
        self._doomed, self._sent = doomed, self._bytes_sent()
        self._step(rank_data(8, 40, seed=number), rank_data(8, 30, seed=1000 + number))
        self._check()

    def _traced(self, x: Any, y: Any) -> None:
        self.traces += 1
        first, second = self.model.layers
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((second(self._observed(first(x))) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))

    def _observed(self, hidden: tf.Tensor) -> tf.Tensor:
        """``hidden``; in the backward pass its gradient comes by `_between_layers`."""

        @tf.custom_gradient
        def observed(hidden: tf.Tensor) -> Any:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                passed = tf.numpy_function(self._between_layers, [gradient], tf.float32, stateful=False)
                return tf.ensure_shape(passed, gradient.shape)

            return tf.identity(hidden), backward

        return observed(hidden)

    def _between_layers(self, gradient: np.ndarray) -> np.ndarray:
        """The second layer's gradients are known here, and are being exchanged; the first layer's are still to come."""
        if self._doomed:
            end = time.monotonic() + PATIENCE
            while self._bytes_sent() == self._sent:
                if (
                    time.monotonic() > end
                ):  # not an AssertionError: Horovod would take it for the end of training
                    raise ValueError("no exchange is under way during the backward pass")
                time.sleep(1e-3)
            self._log.die(self.method)
        return gradient

    def _bytes_sent(self) -> float:
        return self.compressor.stats().total.bytes_sent

    def _check(self) -> None:
        """Every result is the average of what all workers have now, as well as the method knows it."""
        records, self.compressor.records = self.compressor.records, []
        everyone = gather_objects({name: (raw.reshape(-1), reduced) for name, raw, reduced in records})
        for name in (variable.name for variable in self.model.trainable_variables):
            gradients = [own[name][0] for own in everyone]
            reduced = everyone[0][name][1]
            assert all(np.array_equal(own[name][1], reduced) for own in everyone), (
                f"{name} differs between ranks"
            )
            scheme = self.compressor.policy.scheme_for(name, reduced.size)
            assert_average(scheme, gradients, reduced, name, self.binary)
            if scheme is not None and isinstance(self.compressor, hvq.GlobalQSGD):
                assert_levels(scheme, gradients, reduced.reshape(-1), name)


def state_of(trainings: list[Training]) -> Any:
    """All models as one. (In eager code TensorFlowState broadcasts when it is made, where a new worker is alone.)"""
    models = [variable for training in trainings for variable in training.model.variables]
    optimizers = [variable for training in trainings for variable in training.optimizer.variables]
    return hvd.elastic.TensorFlowKerasState(
        SimpleNamespace(built=True, variables=models),
        SimpleNamespace(variables=lambda: optimizers),
        step=0,
        phase=0,
        steps_in_phase=0,
    )


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    log = Log(folder)
    trainings = [Training(method, log) for method in METHODS]
    (binary,) = (training.optimizer for training in trainings if training.binary)
    kept = Kept()

    def binary_state() -> Iterator[np.ndarray]:
        return (variable.numpy() for variable in binary.variables)

    @hvd.elastic.run
    def train(state: Any) -> None:
        if state.step:
            Kept.assert_survived(gather_objects(kept.now(binary_state())))
        while state.phase < len(PHASES):
            fatal = fatal_method(state.phase)
            for training in trainings:
                training.step(state.step, doomed=training.method == fatal)
            weights = [w for training in trainings for w in training.model.get_weights()]
            assert_same_on_all_ranks(weights, "weights")
            count_step(state, hvd.size(), hvd.rank(), hosts)
            updates = int(binary.iterations)
            assert updates == state.step, f"BinSGDM counts {updates} updates after {state.step} steps"
            traces = [training.traces for training in trainings]
            exchanges = exchanges_of(training.compressor for training in trainings)
            log.write(step=state.step, size=hvd.size(), phase=state.phase, exchanges=exchanges, traces=traces)
            kept.note(binary_state())
            state.commit()

    train(state_of(trainings))
    log.write(finished=True)


if __name__ == "__main__":
    main()
