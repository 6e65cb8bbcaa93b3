"""Trains under elastic horovodrun until there are three workers, and some steps more. Run by test_tf_elastic.py.

horovodrun --min-np 2 ... python tf_elastic_worker.py LOG_FOLDER HOSTS_FILE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
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

STEPS_BEFORE, STEPS_AFTER = 4, 5


def check_step(compressor: Any) -> None:
    """Every result is the average of what all workers have now, as well as the method knows it."""
    records, compressor.records = compressor.records, []
    for name, raw, reduced in sorted(records, key=lambda record: record[0]):
        everyone = gather_objects((raw.reshape(-1), reduced.tobytes()))
        assert all(other == everyone[0][1] for _, other in everyone), f"{name} differs between ranks"
        scheme = compressor.policy.scheme_for(name, raw.size)
        gradients = [gradient for gradient, _ in everyone]
        assert_average(scheme, gradients, reduced, name, isinstance(compressor, hvq.BinSGDM))


class Training:
    """A model that one method trains."""

    def __init__(self, method: str) -> None:
        self.compressor, self.model = METHODS[method](), keras_model()
        self.optimizer, self.traces = optimizer_for(self.compressor), 0
        self.optimizer.build(self.model.trainable_variables)
        if isinstance(self.compressor, hvq.BinSGDM):
            self.compressor._welcome(self.optimizer)
        self.step = tf.function(self._step)

    def _step(self, x: Any, y: Any) -> None:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=self.compressor)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))


def state_of(trainings: list[Training]) -> Any:
    """All models as one. (In eager code TensorFlowState broadcasts when it is made, where a new worker is alone.)"""
    models = [variable for training in trainings for variable in training.model.variables]
    optimizers = [variable for training in trainings for variable in training.optimizer.variables]
    return hvd.elastic.TensorFlowKerasState(
        SimpleNamespace(built=True, variables=models),
        SimpleNamespace(variables=lambda: optimizers),
        step=0,
        steps_with_three=0,
    )


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    log = open(folder / f"{os.getpid()}.jsonl", "w")
    trainings = [Training(method) for method in METHODS]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.steps_with_three < STEPS_AFTER:
            for training in trainings:
                training.step(rank_data(8, 40, seed=state.step), rank_data(8, 30, seed=1000 + state.step))
                check_step(training.compressor)
            weights = [w for training in trainings for w in training.model.get_weights()]
            assert_same_on_all_ranks(weights, "weights")
            size = hvd.size()
            traces = [training.traces for training in trainings]
            log.write(json.dumps({"step": state.step, "size": size, "traces": traces}) + "\n")
            log.flush()
            state.step += 1
            state.steps_with_three += size == 3
            if state.step == STEPS_BEFORE and hvd.rank() == 0:
                hosts.write_text("localhost:3\n")
            state.commit()

    train(state_of(trainings))
    log.write(json.dumps({"finished": True}) + "\n")
    log.close()


if __name__ == "__main__":
    main()
