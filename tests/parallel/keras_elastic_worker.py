"""Trains with ``model.fit`` while workers come, are killed, and are let go. Run by test_keras.py.

horovodrun --min-np 2 ... python keras_elastic_worker.py LOG_FOLDER HOSTS_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from elastic_job import PHASES, Kept, Log, assert_levels, count_step, fatal_method
from horovod.tensorflow.keras import elastic
from keras_harness import BATCH, data_of, elastic_state_of, model_of
from oracle import assert_average
from tf_harness import GlobalQSGD, assert_same_on_all_ranks, gather_objects

import horovod_quant.keras as hvq


class Job(keras.callbacks.Callback):
    """Checks every batch before it is committed; ends this worker where the job's phases say so."""

    def __init__(self, state: Any, compressor: Any, log: Log, hosts: Path) -> None:
        super().__init__()
        self.kept = Kept()
        self._state, self._compressor, self._log, self._hosts = state, compressor, log, hosts
        self._batches = 0

    def optimizer_state(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.model.optimizer.variables]

    def on_train_begin(self, logs: Any = None) -> None:
        self._compressor.records = []  # of a step that failed
        if self._state.step:
            Kept.assert_survived(gather_objects(self.kept.now(self.optimizer_state())))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        method = fatal_method(self._state.phase)
        if method:
            self._log.die(method)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state = self._state
        self._check_averages()
        assert_same_on_all_ranks(self.model.get_weights(), "weights")
        count_step(state, hvd.size(), hvd.rank(), self._hosts)
        assert int(self.model.optimizer.iterations.numpy()) == state.step
        self._batches += 1
        self._log.write(step=state.step, size=hvd.size(), phase=state.phase, exchanges=self._batches)
        self.kept.note(self.optimizer_state())
        self.model.stop_training = state.phase == len(PHASES)

    def _check_averages(self) -> None:
        """Of the workers that there are now."""
        records, self._compressor.records = self._compressor.records, []
        everyone = gather_objects({name: (raw.reshape(-1), reduced) for name, raw, reduced in records})
        assert everyone[0]
        for name, (_, reduced) in everyone[0].items():
            gradients = [own[name][0] for own in everyone]
            assert all(np.array_equal(own[name][1], reduced) for own in everyone), name
            scheme = self._compressor.policy.scheme_for(name, reduced.size)
            assert_average(scheme, gradients, reduced, name, is_binsgdm=False)
            if scheme is not None:
                assert_levels(scheme, gradients, reduced.reshape(-1), name)


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    compressor, model = GlobalQSGD(bits=8), model_of()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(hvq.DistributedOptimizer(optimizer, compression=compressor), loss="mse")
    state = elastic_state_of(model, step=0, phase=0, steps_in_phase=0, epoch=0)
    log = Log(folder)
    job = Job(state, compressor, log, hosts)

    @hvd.elastic.run
    def train(state: Any) -> None:
        if state.phase < len(PHASES):
            callbacks = [
                hvq.callbacks.MetricAverageCallback(),
                job,
                elastic.UpdateEpochStateCallback(state),
                elastic.CommitStateCallback(state),
            ]
            model.fit(*data_of(2), batch_size=BATCH, epochs=1000, verbose=0, callbacks=callbacks)

    train(state)
    assert state.epoch > 0
    log.write(finished=True)


if __name__ == "__main__":
    main()
