"""What Horovod's own tests of Keras ask for, with Keras 3. Run by worker.py, along with keras_scenarios.py."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras_harness import BATCH, data_of, elastic_state_of, model_of
from keras_scenarios import SUBSET
from tf_harness import GlobalQSGD, assert_same_on_all_ranks, gather_objects, message_of, rank_data

import horovod_quant.keras as hvq


class Adding(keras.optimizers.Optimizer):
    """Adds gradients to variables, which then show what was averaged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=1.0, **options)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_add(variable, gradient)


class Derived(keras.optimizers.RMSprop):
    """An optimizer that Keras does not know."""


def _model(optimizer: Any, seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(2),
            layers.RepeatVector(3),
            layers.TimeDistributed(layers.Dense(3)),
        ]
    )
    model.compile(optimizer, loss="mse", metrics=["categorical_accuracy"])
    return model


def _batch() -> tuple[np.ndarray, np.ndarray]:
    return rank_data(BATCH, 3), rank_data(BATCH, 3, 3, seed=1)


def _assert_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """The models' weights and their optimizers' states; trained ones but for the order in which Horovod adds."""
    for kept, other in (
        (found.weights, expected.weights),
        (found.optimizer.variables, expected.optimizer.variables),
    ):
        assert len(kept) == len(other)
        for one, another in zip(kept, other):
            np.testing.assert_allclose(one.numpy(), another.numpy(), tolerance, tolerance, err_msg=one.path)


# ---- optimizers --------------------------------------------------------------------------------------------------


def accumulated_gradients_of_shared_and_local_variables() -> None:
    """Keras averages what it has accumulated, sparse gradients also, and counts updates; what is left over waits."""
    for no_effect in (True, False):
        _accumulate(steps=4, average_aggregated_gradients=no_effect, sparse_as_dense=True)


def _accumulate(steps: int, **distributed: Any) -> None:
    size, own = hvd.size(), hvd.rank() + 1.0
    optimizer = hvq.DistributedOptimizer(Adding(gradient_accumulation_steps=steps), **distributed)
    x = [keras.Variable([0.0]) for _ in range(4)]
    y = [keras.Variable([1.0, 2.0]) for _ in range(4)]
    for local in (*x[:2], *y[:2]):
        optimizer.register_local_var(local)
    optimizer.build([*x, *y])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = [one.value - own * tf.gather(other.value, [0]) for one, other in zip(x, y)]
        gradients = tape.gradient(loss, [*x, *y])
        assert isinstance(gradients[-1], tf.IndexedSlices)
        optimizer.apply(gradients, [*x, *y])

    for i in range(10):
        step()
        updates = (i + 1) // steps
        assert int(optimizer.iterations.numpy()) == updates
        for number, (one, other) in enumerate(zip(x, y)):
            expected = updates / size if number < 2 else updates
            slope = own if number < 2 else (size + 1) / 2
            np.testing.assert_allclose(one.numpy(), [expected], rtol=1e-5)
            np.testing.assert_allclose(other.numpy(), [1 - expected * slope, 2], rtol=1e-5)


def an_infinite_gradient_ends_with_its_accumulation() -> None:
    """Of one rank alone: the update after it is clean on all."""
    _accumulate_an_infinite_gradient(None, tolerance=1e-6)
    _accumulate_an_infinite_gradient(GlobalQSGD(bits=8), tolerance=0.1)


def _accumulate_an_infinite_gradient(compression: Any, tolerance: float) -> None:
    optimizer = hvq.DistributedOptimizer(Adding(gradient_accumulation_steps=2), compression=compression)
    variable = keras.Variable(np.zeros((40, 70), "f"))
    optimizer.build([variable])
    step = tf.function(lambda value: optimizer.apply([tf.fill(variable.shape, value)], [variable]))
    for value in (math.inf if hvd.rank() == 0 else 1.0, 1.0):
        step(tf.constant(value))
    assert not np.isfinite(variable.numpy()).any()
    variable.assign(np.zeros((40, 70), "f"))
    for _ in range(2):
        step(tf.constant(hvd.rank() + 1.0))
    np.testing.assert_allclose(variable.numpy(), (hvd.size() + 1) / 2, atol=tolerance)
    assert_same_on_all_ranks([variable], "variables")


def local_layers_keep_their_gradients() -> None:
    """Divided by the number of workers, where Horovod has PartialDistributedOptimizer."""
    for count in range(3):
        optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(1.0))
        model = _model(optimizer)
        local = [each.path for layer in model.layers[:count] for each in layer.trainable_variables]
        for each in model.trainable_variables:
            if each.path in local:
                optimizer.register_local_var(each)
        before = model.get_weights()
        x, y = _batch()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        everyone = gather_objects([each.numpy() for each in gradients])
        optimizer.apply(gradients, model.trainable_variables)
        for i, (variable, old) in enumerate(zip(model.trainable_variables, before)):
            if variable.path in local:
                expected = everyone[hvd.rank()][i] / hvd.size()
            else:
                expected = np.mean([each[i] for each in everyone], axis=0)
            np.testing.assert_allclose(old - variable.numpy(), expected, rtol=1e-3, atol=1e-5)


def workers_outside_a_process_set_are_alone() -> None:
    process_set = SUBSET[0]
    optimizer = hvq.DistributedOptimizer(Adding(), process_set=process_set)
    variable = keras.Variable([0.0])
    optimizer.apply([tf.constant([float(hvd.rank())])], [variable])
    expected = np.mean(process_set.ranks) if process_set.included() else hvd.rank()
    np.testing.assert_allclose(variable.numpy(), [expected], rtol=1e-6)
    model = _model(hvq.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=process_set), hvd.rank())
    before = model.get_weights()
    held: list[Any] = []
    callbacks = [
        hvq.callbacks.BroadcastGlobalVariablesCallback(process_set.ranks[-1]),
        hvq.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: held.extend(model.get_weights())),
    ]
    model.fit(*_batch(), verbose=0, callbacks=callbacks)
    everyone = gather_objects(before)
    for kept, found in zip(everyone[process_set.ranks[-1] if process_set.included() else hvd.rank()], held):
        assert np.array_equal(kept, found)


def optimizers_made_from_a_configuration() -> None:
    """Equal to the first, after they were distributed as it was."""
    first = hvq.DistributedOptimizer(keras.optimizers.Adam(0.01))
    configuration = first.get_config()
    trained = _model(first)
    trained.train_on_batch(*_batch())
    for made in (first.from_config(configuration), type(first).from_config(configuration)):
        assert made.get_config() == configuration
        model = _model(hvq.DistributedOptimizer(made))
        model.train_on_batch(*_batch())
        _assert_equal(model, trained, tolerance=1e-5)


# ---- models that are loaded --------------------------------------------------------------------------------------


def loaded_models_have_distributed_optimizers() -> None:
    """Of the class and in the state in which they were saved; a file without the state is refused."""
    given: Iterator[tuple[Any, dict[str, Any]]] = iter(
        [
            (keras.optimizers.RMSprop, {}),
            (Derived, {"custom_optimizers": [Derived]}),
            (Derived, {"custom_objects": {"Derived": Derived}}),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, options in given:
            model = _model(hvq.DistributedOptimizer(kind(1e-3)))
            model.train_on_batch(*_batch())
            model.save(Path(folder) / "model.keras")
            loaded = hvq.load_model(Path(folder) / "model.keras", **options)
            assert isinstance(loaded.optimizer, kind)
            assert type(loaded.optimizer).__name__ == kind.__name__
            _assert_equal(loaded, model)
            for each in (loaded, model):
                each.train_on_batch(*_batch())
            _assert_equal(loaded, model, tolerance=1e-5)
            assert_same_on_all_ranks(loaded.get_weights(), "weights")
        model.compile(hvq.DistributedOptimizer(keras.optimizers.RMSprop()), keras.losses.MeanSquaredError())
        model.save(Path(folder) / "model.h5")
        told = message_of(lambda: hvq.load_model(Path(folder) / "model.h5"), ValueError)
        assert "save the model to a .keras file" in told, told


def a_fit_without_epochs_broadcasts_what_one_rank_has_loaded() -> None:
    """To ranks whose optimizers have no state yet."""
    x, y = _batch()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        while True:
            yield x, y, rank_data(BATCH, 3, seed=2) ** 2

    for accumulated in (None, 2):

        def begun(seed: int, accumulated: Any = accumulated) -> Any:
            sgd = keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=accumulated)
            return _model(hvq.DistributedOptimizer(sgd), seed)

        saved = begun(seed=1)
        for _ in range(2):
            saved.train_on_batch(x, y)
        if hvd.rank() == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved.save(Path(folder) / "model.keras")
                model = hvq.load_model(Path(folder) / "model.keras")
        else:
            model = begun(seed=1 + hvd.rank())
        assert model.optimizer.built is (hvd.rank() == 0)
        callbacks = [hvq.callbacks.BroadcastGlobalVariablesCallback(0)]
        options = {"steps_per_epoch": 4, "callbacks": callbacks, "verbose": 0}
        model.fit(batches(), epochs=0, initial_epoch=1, **options)
        _assert_equal(model, saved)
        model.fit(batches(), epochs=1, **options)
        assert_same_on_all_ranks([*model.weights, *model.optimizer.variables], "weights")


# ---- callbacks ---------------------------------------------------------------------------------------------------


def a_warm_up_and_schedules_over_twenty_epochs() -> None:
    """One follows another; metrics are the averages of the workers'."""
    initial = 0.1 * hvd.size()
    model = _model(hvq.DistributedOptimizer(keras.optimizers.Adam()))
    own: list[float] = []
    schedule = hvq.callbacks.LearningRateScheduleCallback
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(logs["loss"])),
        hvq.callbacks.BroadcastGlobalVariablesCallback(0),
        hvq.callbacks.MetricAverageCallback(),
        hvq.callbacks.LearningRateWarmupCallback(initial, warmup_epochs=5),
        schedule(initial, 1e-1, start_epoch=5, end_epoch=10),
        schedule(initial, 1e-2, start_epoch=10, end_epoch=15),
        schedule(initial, lambda epoch: epoch, start_epoch=15, end_epoch=20),
    ]
    x, y = rank_data(10, 3), rank_data(10, 3, 3, seed=1)
    history = model.fit(x, y, batch_size=2, epochs=20, verbose=0, callbacks=callbacks).history
    rates = [initial / hvd.size() * ((epoch + 1) * (hvd.size() - 1) / 5 + 1) for epoch in range(5)]
    rates += [initial * factor**power for factor in (1e-1, 1e-2) for power in range(5)]
    rates += [initial * epoch for epoch in range(15, 20)]
    np.testing.assert_allclose(history["lr"], rates, rtol=1e-5)
    np.testing.assert_allclose(history["loss"], np.mean(gather_objects(own), axis=0), rtol=1e-5)
    assert len({str(each) for each in gather_objects(history)}) == 1


def frozen_layers_are_broadcast_and_local_ones_are_not() -> None:
    """With the optimizer that Keras chooses, which has nothing to train."""
    root = hvd.size() - 1
    constant = keras.initializers.Constant(float(hvd.rank()))
    options = {"kernel_initializer": constant, "bias_initializer": constant, "trainable": False}
    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3, **options) for _ in range(4))])
    model.compile(loss="mse")
    local = list(model.layers[0].variables)
    callbacks = [hvq.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=local)]
    model.fit(rank_data(1, 3), rank_data(1, 3), verbose=0, callbacks=callbacks)
    for number, layer in enumerate(model.layers):
        for variable in layer.variables:
            assert (variable.numpy() == (root if number else hvd.rank())).all(), variable.path


# ---- elastic training --------------------------------------------------------------------------------------------


def elastic_states_are_synchronized_restored_and_committed() -> None:
    """Horovod's, of the variables of TensorFlow; it cannot read those of Keras 3."""
    keras.utils.clear_session()  # Horovod names broadcasts by the variables, whose layers Keras counts
    model, other = (model_of(seed) for seed in (1 + hvd.rank(), 8))
    model.compile(
        hvq.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=GlobalQSGD(bits=8)), "mse"
    )
    message_of(lambda: hvd.elastic.TensorFlowKerasState(model, batch=0), TypeError)
    state = elastic_state_of(model, batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    state.sync()
    expected = gather_objects(model_of(1).get_weights())[0]

    def check(weights: Any, batch: int, updates: int) -> None:
        for kept, found in zip(weights, model.get_weights()):
            assert np.array_equal(kept, found)
        assert (state.batch, state.epoch) == (batch, batch - 10)
        assert int(model.optimizer.iterations.numpy()) == updates
        assert_same_on_all_ranks(
            [*model.weights, *model.optimizer.variables], "weights and optimizer's state"
        )

    check(expected, 20, 0)
    model.train_on_batch(*data_of(1))
    state.batch, state.epoch = 21, 11
    state.restore()
    check(expected, 20, 0)
    model.train_on_batch(*data_of(1))
    model.set_weights(other.get_weights())
    state.batch, state.epoch = 21, 11
    state.commit()
    model.train_on_batch(*data_of(1))
    state.restore()
    check(other.get_weights(), 21, 1)
