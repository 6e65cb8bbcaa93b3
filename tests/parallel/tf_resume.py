"""A model that TensorFlow trains, saves and resumes. Used by resume_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_harness
from resume_data import method_of

import horovod_quant.tensorflow as hvq


def start() -> None:
    hvd.init(process_sets=hvq.hierarchical_process_sets())


class Training:
    """A model with the optimizer and the compressor of one method."""

    def __init__(self, name: str) -> None:
        method, options = method_of(name)
        self._model = tf_harness.keras_model()
        binary = method.class_name == "BinSGDM"
        self._optimizer: Any = (
            hvq.optim.BinSGDM(3e-3) if binary else tf.keras.optimizers.SGD(0.3, momentum=0.9)
        )
        self._optimizer.build(self._model.trainable_variables)
        if binary:
            options["optimizer"] = self._optimizer
        self._compression = method.compression(hvd, tf_harness, **options)
        self._step = tf.function(self._traced)

    def _traced(self, x: Any, y: Any) -> None:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self._model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=self._compression)
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    def step(self, x: np.ndarray, y: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """One step; returns this worker's own gradients and the reduced ones."""
        self._step(x, y)
        records, self._compression.records = self._compression.records, []
        return {name: raw for name, raw, _ in records}, {name: reduced for name, _, reduced in records}

    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(tf.reduce_mean((self._model(x) - y) ** 2))

    def state(self) -> dict[str, dict[str, Any]]:
        """All that must come through: "parameter", what the optimizer keeps, and "exchanges"."""
        found: dict[str, dict[str, Any]] = dict(self._compression.state_dict())
        found["parameter"] = {variable.name: variable.numpy() for variable in self._model.variables}
        found["optimizer"] = {str(i): kept.numpy() for i, kept in enumerate(self._optimizer.variables)}
        if isinstance(self._optimizer, hvq.optim.BinSGDM):
            for variable in self._model.trainable_variables:
                momentum, scale, _ = self._optimizer._state_of(variable)
                kept = {"momentum": momentum, "scale": scale, "step": self._optimizer.iterations}
                for kind, value in kept.items():
                    found.setdefault(kind, {})[variable.name] = value.numpy()
        return found

    def prepare_to_save(self) -> None:
        """Called by all workers."""
        if isinstance(self._optimizer, hvq.optim.BinSGDM):
            self._optimizer.gather_state()

    def _checkpoint(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model=self._model, optimizer=self._optimizer)

    def save(self, path: Path) -> None:
        self._checkpoint().write(str(path))
        path.with_suffix(".json").write_text(json.dumps(self._compression.state_dict()))

    def load(self, path: Path) -> None:
        self._checkpoint().read(str(path)).assert_consumed()
        self._compression.load_state_dict(json.loads(path.with_suffix(".json").read_text()))

    def broadcast(self) -> None:
        """Gives all workers what rank 0 has."""
        hvd.broadcast_variables(self._model.variables, root_rank=0)
        hvd.broadcast_variables(self._optimizer.variables, root_rank=0)
        compressor = hvd.broadcast_object(self._compression.state_dict(), root_rank=0)
        self._compression.load_state_dict(compressor)
