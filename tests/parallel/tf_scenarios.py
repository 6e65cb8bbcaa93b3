"""What a training script may do with Horovod and TensorFlow, tried with every method. Run by worker.py."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable

import horovod.keras as plain_keras_hvd
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as keras_hvd
import numpy as np
import tensorflow as tf
from oracle import Oracle, assert_average
from tf_harness import (
    IN_TENSORFLOW,
    METHODS,
    VARIANTS,
    BinSGDM,
    GlobalQSGD,
    Make,
    TwoLayers,
    assert_bits_equal,
    assert_same_on_all_ranks,
    batches,
    check_records,
    gather_objects,
    keras_model,
    message_of,
    optimizer_for,
    rank_data,
)
from turns import taken

import horovod_quant.tensorflow as hvq
from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from horovod_quant.kernels.layout import TILE
from horovod_quant.tensorflow import cached_subgraph

SUBSET: list[Any] = []

KERNELS = {"first/kernel:0", "second/kernel:0"}

Poison = list[tuple[int, str, int, float]]
"""Which rank (-1: the last) has in the gradient of which variable, at which element, something that is not finite."""

POISONED: list[Poison] = [
    [
        (0, "first/kernel:0", 1030, np.nan),
        (0, "first/kernel:0", 10, np.inf),
        (0, "first/bias:0", 7, -np.inf),
    ],
    [(-1, "second/kernel:0", 1030, np.nan), (-1, "second/kernel:0", 2090, -np.inf)],
    [
        (0, "first/kernel:0", 2799, -np.inf),
        (-1, "second/kernel:0", 5, np.inf),
        (-1, "first/bias:0", 0, np.nan),
    ],
]
"""Of a step each."""


def exchanged_kernels(process_set: Any) -> set[str]:
    """Horovod in TensorFlow leaves a process set of one alone: it does not even ask for compression."""
    return set() if process_set is not None and process_set.size() == 1 else KERNELS


def start() -> int:
    """Two process sets fit every size tried here: one of the last rank alone, one of the first and the last."""
    size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "0")))
    SUBSET.append(hvd.ProcessSet([0, size - 1] if size > 2 else [size - 1]))
    hvd.init(process_sets=SUBSET)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    gc.freeze()
    return hvd.rank()


def clean() -> None:
    """Called after each scenario: drops the functions that Horovod keeps for ever, of which a run makes thousands."""
    for cell in hvd._make_cached_allreduce_grads_fn.__closure__:
        if isinstance(cell.cell_contents, dict):
            cell.cell_contents.clear()
    tf.keras.backend.clear_session()
    gc.collect()
    gc.freeze()  # what TensorFlow never lets go: later collections need not look at it


def finish() -> None:
    """A rank that leaves early would end Horovod for all."""
    gather_objects(None)


# ---- Keras -------------------------------------------------------------------------------------------------------


def fit(
    compressor: Any,
    *,
    legacy: bool = False,
    module: Any = keras_hvd,
    eager: bool = False,
    model: Any = None,
    steps: int = 3,
    exchanges: int | None = None,
    check: bool = True,
    factor: float | None = None,
    step: Callable[[int], int] = int,
    process_set: Any = None,
    **distributed: Any,
) -> Any:
    """Trains with ``model.fit`` and checks every gradient and the weights."""
    model = keras_model() if model is None else model
    if process_set is not None:
        distributed["process_set"] = process_set
    optimizer = module.DistributedOptimizer(
        optimizer_for(compressor, legacy), compression=compressor, **distributed
    )
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
    x, y = rank_data(8 * steps, 40), rank_data(8 * steps, 30, seed=1)
    reported: dict[str, float] = {}
    reader = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: reported.update(logs))
    callbacks = [hvq.MetricsCallback(compressor), reader]
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    metrics = compressor.stats().metrics()
    assert {name: reported[name] for name in metrics} == metrics
    member = process_set is None or process_set.included()
    if check and member:
        quantized = check_records(
            compressor, exchanges or steps, factor=factor, process_set=process_set, step=step
        )
        assert quantized == exchanged_kernels(process_set)
    if member:
        assert_same_on_all_ranks(model.get_weights(), "weights", process_set)
    return model


def keras_fit(make: Make) -> None:
    fit(make())


def keras_legacy_optimizer(make: Make) -> None:
    fit(make(), legacy=True)


def keras_run_eagerly(make: Make) -> None:
    fit(make(), eager=True)


def keras_legacy_run_eagerly(make: Make) -> None:
    fit(make(), eager=True, legacy=True)


def keras_module_of_its_own(make: Make) -> None:
    for legacy in taken(False, True):
        fit(make(), module=plain_keras_hvd, legacy=legacy)


def keras_optimizer_from_horovod_tensorflow(make: Make) -> None:
    fit(make(), module=hvd)


def keras_sum(make: Make) -> None:
    fit(make(), op=hvd.Sum, factor=1.0, steps=2)


def gradients_one_by_one_are_told() -> None:
    """Once, on the first worker, unless Horovod is given groups, or there are few."""
    for groups, count in ((None, 5), (2, 5), (None, 3)):
        variables = [tf.Variable(tf.ones([64, 64]), name=f"many_{i}") for i in range(count)]
        compressor = hvq.GlobalQSGD()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
                tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
                tape.gradient(loss, variables)
        told = [str(each.message) for each in caught if "one by one" in str(each.message)]
        expected = hvd.rank() == 0 and groups is None and count == 5
        assert len(told) == expected, told
        expected_words = ("5 gradients", "groups=4", "for Keras 2 the one of horovod.tensorflow.keras")
        assert not told or all(words in told[0] for words in expected_words)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # which ends no worker: the others would wait for it
        variables = [tf.Variable(tf.ones([64, 64]), name=f"many_{i}") for i in range(5)]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
        tape = hvd.DistributedGradientTape(tape, compression=hvq.GlobalQSGD())
        for gradient in tape.gradient(loss, variables):
            np.testing.assert_allclose(gradient, 2.0, rtol=0.2)


def keras_groups(make: Make) -> None:
    for own in taken(False, True):
        model = keras_model()
        kernels = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
        fit(
            make(**({"group_bytes": 20000} if own else {})),
            model=model,
            groups=[kernels] if own else 2,
            legacy=own,
            steps=2,
        )


def keras_backward_passes(make: Make) -> None:
    """An optimizer counts every pass: exchange k happens in its iteration 2k + 1."""
    binary = isinstance(make(), hvq.BinSGDM)
    for average, legacy in taken((False, False), (False, True), (True, False), (True, True)):
        fit(
            make(),
            legacy=legacy,
            steps=4,
            exchanges=2,
            step=(lambda k: 2 * k + 1) if binary else int,
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )


def keras_equal_models_in_one_step(make: Make) -> None:
    """They share a function of Horovod, which runs for all of them at once."""
    compressor, gradients = make(), [rank_data(40, 50, seed=i) for i in range(12)]
    weights = [tf.Variable(tf.zeros([40, 50]), name="weights") for _ in gradients]
    optimizers = [
        keras_hvd.DistributedOptimizer(optimizer_for(compressor), compression=compressor) for _ in weights
    ]
    for optimizer, own in zip(optimizers, weights):
        optimizer.build([own])

    @tf.function
    def step() -> None:
        for optimizer, own, gradient in zip(optimizers, weights, gradients):
            optimizer.minimize(lambda own=own, gradient=gradient: tf.reduce_sum(own * gradient), [own])

    step()
    scheme = compressor.policy.scheme_for("weights:0", 40 * 50)
    for own, everyone in zip(weights, zip(*gather_objects(gradients))):
        flat = [each.reshape(-1) for each in everyone]
        assert_average(scheme, flat, own.numpy() / -0.1, "weights", is_binsgdm=False)
    assert_same_on_all_ranks(weights, "weights")


def keras_process_set(make: Make) -> None:
    if SUBSET[0].included():
        fit(make(), process_set=SUBSET[0], steps=2)


class Poisons:
    """Terms of a model's loss whose gradients are not finite in some elements, and zero in all others.

    They are variables, so that what a step is poisoned with needs no trace of its own.
    """

    def __init__(self, model: Any) -> None:
        self._variables = model.trainable_variables
        self._terms = [tf.Variable(tf.zeros(variable.shape)) for variable in self._variables]

    def put(self, poison: Poison) -> None:
        """Takes effect in the next step, on the ranks that ``poison`` names."""
        for variable, term in zip(self._variables, self._terms):
            values = np.zeros(variable.shape, np.float32)
            for rank, name, at, value in poison:
                if name == variable.name and rank % hvd.size() == hvd.rank():
                    values.flat[at] = value
            term.assign(values)

    def loss(self) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(v * term) for v, term in zip(self._variables, self._terms)])


def keras_mixed_precision(make: Make) -> None:
    """Whatever is not finite, wherever it comes from: nobody moves, every scale is halved, the next step is clean."""
    overflows = [[place] for step in POISONED for place in step]
    for legacy in taken(False, True):
        policy = tf.keras.mixed_precision.Policy("mixed_float16")
        model, compressor = keras_model(policy), make()
        poisons = Poisons(model)
        model.add_loss(poisons.loss)
        optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor, legacy), compression=compressor)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=256.0, dynamic_growth_steps=1000
        )
        model.compile(optimizer=optimizer, loss="mse")
        for step, poison in enumerate([[], *overflows, []]):
            x, y = rank_data(8, 40, seed=step), rank_data(8, 30, seed=step + 9)
            poisons.put(poison)
            before = model.get_weights()
            model.train_on_batch(x, y)
            moved = any(not np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
            assert moved is not bool(poison), f"{poison}"
            assert all(np.isfinite(weights).all() for weights in model.get_weights())
            assert_same_on_all_ranks(model.get_weights(), "weights")
        assert float(optimizer.loss_scale) == 256.0 / 2 ** len(overflows)


def keras_loads_models(make: Make) -> None:
    """A model and its optimizer survive a file, and go on training with a compressor that is given then."""
    binary = isinstance(make(), hvq.BinSGDM)
    for legacy, ending in taken((False, "saved_model"), (True, "saved_model"), (False, "h5"), (True, "h5")):
        model = fit(make(), legacy=legacy)
        kept = [np.array(variable) for variable in model.optimizer.variables()]
        compressor = make()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model.{ending}"
            model.save(path, **({} if ending == "h5" else {"save_format": "tf"}))
            loaded = keras_hvd.load_model(
                str(path),
                custom_optimizers=[hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM] if binary else None,
                compression=compressor,
                legacy_opts=legacy,
            )
            if ending != "h5":
                hvq.optim.restore_from_saved_model(loaded, path)
        assert isinstance(loaded.optimizer, type(optimizer_for(make(), legacy)))
        found = [np.array(variable) for variable in loaded.optimizer.variables()]
        assert len(found) == len(kept)
        assert all(np.array_equal(a, b) for a, b in zip(found, kept)), f"{ending}: the state was lost"
        assert not binary or any(np.abs(a).max() > 0 for a in found if a.ndim > 1)
        loaded.fit(*next(batches(1)), verbose=0)
        assert {name for name, _, _ in compressor.records} >= KERNELS
        assert_same_on_all_ranks(loaded.get_weights(), "weights")


def checkpoints_are_restored(make: Make) -> None:
    """A checkpoint holds the optimizer's state and nothing of the compressor's."""
    for legacy in taken(False, True):
        model = fit(make(), legacy=legacy, steps=1)
        saved = [np.array(variable) for variable in model.optimizer.variables()]
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(f"{folder}/checkpoint")
            assert not [name for name, _ in tf.train.list_variables(path) if "horovod_quant" in name]
            model, compressor = keras_model(), make()
            optimizer = keras_hvd.DistributedOptimizer(
                optimizer_for(compressor, legacy), compression=compressor
            )
            model.compile(optimizer=optimizer, loss="mse")
            if legacy:
                optimizer._create_all_weights(model.trainable_variables)
            else:
                optimizer.build(model.trainable_variables)
            tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path).assert_consumed()
        for kept, restored in zip(saved, optimizer.variables()):
            assert np.array_equal(kept, np.array(restored))


def saved_models_train_on(make: Make) -> None:
    """Functions with kernels in the graph, that a tape was used in, go on where they were when they were saved."""
    model = keras_model()
    compressor, optimizer = make_for_tape(make, model, kernels="tensorflow")
    module, (first, second) = tf.Module(), batches(2)
    module.optimizer, module.weights = optimizer, model.trainable_variables
    module.step = tf.function(
        tape_step(compressor, model, optimizer),
        input_signature=[tf.TensorSpec([None, 40]), tf.TensorSpec([None, 30])],
    )
    module.step(*first)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
    for each in (module, loaded):
        each.step(*second)
    for kept, own in zip(loaded.weights, module.weights):
        assert_bits_equal(kept.numpy(), own.numpy(), own.name)


# ---- tapes -------------------------------------------------------------------------------------------------------


def tape_step(compressor: Any, model: Any, optimizer: Any, generic: bool = False, **distributed: Any) -> Any:
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - tf.cast(y, model.layers[0].compute_dtype)) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, **distributed)
        gradients = tape.gradient(loss, model.trainable_variables, use_generic_names=generic)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def make_for_tape(make: Make, model: Any, **arguments: Any) -> tuple[Any, Any]:
    """A compressor and its optimizer."""
    optimizer = optimizer_for(make())
    optimizer.build(model.trainable_variables)
    if isinstance(optimizer, hvq.optim.BinSGDM):
        arguments["optimizer"] = optimizer
    return make(**arguments), optimizer


def train_with_tape(
    make: Make,
    *,
    eager: bool = False,
    dtype: str = "float32",
    factor: float | None = None,
    arguments: dict | None = None,
    process_set: Any = None,
    **distributed: Any,
) -> Any:
    model = keras_model(dtype)
    compressor, optimizer = make_for_tape(make, model, **(arguments or {}))
    if process_set is not None:
        distributed["process_set"] = process_set
    step = tape_step(compressor, model, optimizer, **distributed)
    step = step if eager else tf.function(step)
    for x, y in batches(2, dtype=np.float64 if dtype == "float64" else np.float32):
        step(x, y)
    quantized = check_records(compressor, 2, factor=factor, process_set=process_set)
    assert quantized == exchanged_kernels(process_set)
    assert_same_on_all_ranks(model.get_weights(), "weights", process_set)
    return compressor


def tape_in_a_function(make: Make) -> None:
    train_with_tape(make)


def tape_eager(make: Make) -> None:
    train_with_tape(make, eager=True)


def tape_generic_names(make: Make) -> None:
    """The variables' own names may then differ between workers; policies and statistics speak of these."""
    for groups in taken(None, 2):
        model = TwoLayers("float32", f"rank_{hvd.rank()}/")
        compressor, optimizer = make_for_tape(make, model)
        step = tf.function(tape_step(compressor, model, optimizer, generic=True, groups=groups))
        for x, y in batches(2):
            step(x, y)
        quantized = {"grad_0", "grad_2"} if groups is None else {"grad_0.0", "grad_1.0"}
        assert check_records(compressor, 2) == quantized
        assert_same_on_all_ranks(model.get_weights(), "weights")
        assert compressor.stats().parameters.keys() == {each.name for each in model.trainable_variables}


def tape_sum(make: Make) -> None:
    train_with_tape(make, op=hvd.Sum, factor=1.0)


def tape_predivide(make: Make) -> None:
    one = hvd.allreduce(tf.ones(1), prescale_factor=1 / 1.7, postscale_factor=1.7, name="one")
    train_with_tape(make, gradient_predivide_factor=1.7, factor=float(one[0]) / hvd.size())


def tape_groups(make: Make) -> None:
    for options in taken({"groups": 1}, {"num_groups": 2, "arguments": {"group_bytes": 1}}):
        train_with_tape(make, **options)


def measured_nmse(make: Make) -> None:
    """What `stats` states is the error of the exchanges, in the steps that are measured; results are as ever."""
    for eager, options in taken((False, {}), (True, {}), (False, {"op": hvd.Sum}), (False, {"groups": 1})):
        model = keras_model()
        compressor, optimizer = make_for_tape(make, model, nmse_every=2, nmse_share=1.0)
        step = tape_step(compressor, model, optimizer, **options)
        step = step if eager else tf.function(step)
        for number, (x, y) in enumerate(batches(4)):
            step(x, y)
            assert (compressor.stats().nmse is None) == (number == 0)
        workers = gather_objects(list(compressor.records))
        factor = hvd.size() if options.get("op") == hvd.Sum else 1
        error = square = 0.0
        for name in KERNELS:
            own = [[each for each in records if each[0] == name] for records in workers]
            for place in (1, 3):
                exact = np.mean([records[place][1].astype(np.float64) for records in own], axis=0)
                found = own[0][place][2].astype(np.float64) / factor
                error += float(np.sum((found - exact) ** 2))
                square += float(np.sum(exact**2))
        measured = compressor.stats().nmse
        assert abs(measured / (error / square) - 1) < 1e-3, (measured, error / square)
        assert compressor.stats().metrics()["horovod_quant/nmse"] == measured
        factor = 1.0 if options.get("op") == hvd.Sum else None
        assert check_records(compressor, 4, factor=factor) == KERNELS


def tape_process_set(make: Make) -> None:
    if SUBSET[0].included():
        train_with_tape(make, process_set=SUBSET[0])


def tape_dtypes(make: Make) -> None:
    for dtype, groups in taken(("float16", None), ("bfloat16", None), ("float64", None), ("float16", 1)):
        train_with_tape(make, dtype=dtype, groups=groups)


def overrides_and_excluded(make: Make) -> None:
    binary = isinstance(make(), hvq.BinSGDM)
    other = {"bits": 2} if isinstance(make(), hvq.EDEN) else {"bucket_size": 64}
    changed = {"first/*": {} if binary else other}
    arguments = {"exclude": ["second/kernel:0"], "overrides": changed, "seed": 7, "min_elements": 65}
    model = keras_model()
    compressor, optimizer = make_for_tape(make, model, **arguments)
    step = tf.function(tape_step(compressor, model, optimizer))
    for x, y in batches(2):
        step(x, y)
    assert check_records(compressor, 2) == {"first/kernel:0", "first/bias:0"}
    parameters = compressor.stats().parameters
    assert parameters["second/kernel:0"].ratio == 1.0
    assert parameters["first/kernel:0"].ratio > 3 or hvd.size() > 2


def names_of_ones_own(make: Make) -> None:
    model = keras_model()
    named = [(f"mine.{i}", variable) for i, variable in enumerate(model.trainable_variables)]
    compressor, optimizer = make_for_tape(make, model, named_parameters=named, exclude="mine.0")
    step = tf.function(tape_step(compressor, model, optimizer))
    step(*next(batches(1)))
    assert check_records(compressor, 1) == {"mine.2"}


def local_and_unused_variables(make: Make) -> None:
    """Gradients that stay on their worker, and gradients that do not exist."""
    model = keras_model()
    compressor, optimizer = make_for_tape(make, model)
    unused = tf.Variable(tf.zeros([50, 50]), name="unused")
    variables = [model.trainable_variables[0], unused, *model.trainable_variables[1:]]

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.PartialDistributedGradientTape(
            tape, compression=compressor, local_layers=[model.get_layer("second")]
        )
        return [0.0 if g is None else g for g in tape.gradient(loss, variables)]

    for x, y in batches(2):
        gradients = step(x, y)
    assert float(gradients[1]) == 0.0
    # Nobody updates here: an optimizer stays in its iteration 0.
    number = (lambda k: 0) if isinstance(compressor, hvq.BinSGDM) else int
    assert check_records(compressor, 2, step=number) == {"first/kernel:0"}


def one_gradient_for_two_variables(make: Make) -> None:
    """TensorFlow gives one tensor as the gradient of both terms of a sum; each variable is treated as its own."""

    def train(groups: Any = None, eager: bool = False, **arguments: Any) -> None:
        a, b = (tf.Variable(tf.zeros([40, 30]), name=name) for name in "ab")
        optimizer = optimizer_for(make())
        optimizer.build([a, b])
        if isinstance(optimizer, hvq.optim.BinSGDM):
            arguments["optimizer"] = optimizer
        compressor = make(**arguments)
        groups = {"in turn": [[b], [a]]}.get(groups, groups)

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ (a + b + 1.0)) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
            optimizer.apply_gradients(zip(tape.gradient(loss, [a, b]), [a, b]))

        step = step if eager else tf.function(step)
        for x, _ in batches(2):
            step(x)
        check_both(compressor)

    def check_both(compressor: Any) -> None:
        named = {name for name, _, _ in compressor.records}
        sent = compressor.stats().parameters
        assert check_records(compressor, 2) == (named - {"b:0"} if compressor.policy.exclude else named)
        assert named == sent.keys() == {"a:0", "b:0"}
        assert all(traffic.bytes_sent > 0 for traffic in sent.values())

    excluding = {"exclude": "b:0"}
    for groups, eager, arguments in taken(
        (None, False, {}),
        (None, False, excluding),
        (1, False, excluding),
        (None, True, excluding),
        ("in turn", False, excluding),
    ):
        train(groups, eager, **arguments)
    for legacy in taken(True, False):
        a, b = (tf.Variable(tf.zeros([40, 30]), name=name) for name in "ab")
        compressor = make(exclude="b:0")
        optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor, legacy), compression=compressor)
        if not legacy:
            optimizer.build([a, b])
        for x, _ in batches(2):
            optimizer.minimize(lambda: tf.reduce_mean((x @ (a + b + 1.0)) ** 2), [a, b])  # noqa: B023
        check_both(compressor)


def watched_tensors(make: Make) -> None:
    """The gradient of an input, too."""
    weights = tf.Variable(tf.ones([40, 30]), name="weights")
    optimizer = optimizer_for(make())
    optimizer.build([weights])
    is_binary = isinstance(optimizer, hvq.optim.BinSGDM)
    compressor = make(**({"optimizer": optimizer} if is_binary else {}))

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((x @ weights) ** 2)
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, [weights, x])

    for function, name in ((gradients, "watched"), (tf.function(gradients), "x:0")):
        x = tf.constant(rank_data(30, 40))
        if is_binary:
            message = message_of(lambda: function(x), ValueError)  # noqa: B023
            assert f"{name} is not one of this optimizer's variables" in message
            continue
        function(x)
        assert {recorded for recorded, _, _ in compressor.records} == {"weights:0", name}
        compressor.records.clear()
        assert compressor.stats().parameters[name].ratio > 3 or hvd.size() > 2


class Delegating:
    """A compressor of a user's own, that halves gradients and leaves the rest to another."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compress(self, tensor: Any) -> Any:
        return [each for each in [self._inner.compress(tensor * 0.5)]][0]  # noqa: C416, RUF015

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return self._inner.decompress(tensor, ctx)


def a_compressor_that_delegates(make: Make) -> None:
    for groups in taken(None, 1):
        model = keras_model()
        compressor, optimizer = make_for_tape(make, model)
        step = tf.function(tape_step(Delegating(compressor), model, optimizer, groups=groups))
        for x, y in batches(2):
            step(x, y)
        assert check_records(compressor, 2) == KERNELS
        assert_same_on_all_ranks(model.get_weights(), "weights")


def embedding_in_fit(make: Make) -> None:
    """BinSGDM moves every element that some worker's batch has reached, where gradients are sparse, too, and of any
    shape that the workers gathered.
    """
    compressor = make()
    if not isinstance(compressor, hvq.BinSGDM):
        return
    for legacy in taken(False, True):
        tf.keras.utils.set_random_seed(3)
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [layers.Input((7,)), layers.Embedding(60, 48), layers.GlobalAveragePooling1D(), layers.Dense(40)]
        )
        before, compressor = model.get_weights(), make()
        optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor, legacy), compression=compressor)
        model.compile(optimizer=optimizer, loss="mse")
        words = [np.random.default_rng(rank).integers(0, 60, (8, 7)) for rank in range(hvd.size())]
        model.fit(words[hvd.rank()], rank_data(8, 40), batch_size=8, verbose=0)
        table, *others = (np.abs(new - old) for old, new in zip(before, model.get_weights()))
        reached = np.isin(np.arange(60), words)
        assert not table[~reached].any()
        for moved in (table[reached], *others):
            np.testing.assert_allclose(moved, 1e-3, rtol=1e-2)
        assert_same_on_all_ranks(model.get_weights(), "weights")


def sparse_gradients(make: Make) -> None:
    """Horovod gathers IndexedSlices itself, unless it makes them dense; then they are quantized."""
    for dense in (False, True):
        gradient, compressor = _gradient_of_a_table(make, dense)
        assert isinstance(gradient, tf.IndexedSlices) is not dense
        if dense:
            assert check_records(compressor, 1) == {"table:0"}
        else:
            assert compressor.records == []
            assert gradient.indices.shape[0] == 3 * hvd.size()


def _gradient_of_a_table(make: Make, dense: bool) -> tuple[Any, Any]:
    tf.keras.utils.set_random_seed(2)
    table = tf.Variable(tf.random.normal([100, 30]), name="table")
    optimizer = optimizer_for(make())
    optimizer.build([table])
    compressor = make(**({"optimizer": optimizer} if isinstance(optimizer, hvq.optim.BinSGDM) else {}))

    @tf.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compressor, sparse_as_dense=dense)
        return tape.gradient(loss, [table])[0]

    return step(tf.constant([hvd.rank(), 7, 50 + hvd.rank()])), compressor


# ---- TensorFlow 1 ------------------------------------------------------------------------------------------------


def graph_and_session(make: Make) -> None:
    """TensorFlow 1's optimizers, in a graph and a session."""
    if isinstance(make(), hvq.BinSGDM):
        assert "optimizer of the same name" in message_of(lambda: _train_in_a_session(make()), ValueError)
        return
    for passes, groups in taken((1, None), (2, None), (1, 1)):
        compressor = make()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weights, sent = _train_in_a_session(compressor, session, passes, groups)
        assert set(sent) == {"weights:0", "bias:0"}
        assert sent["weights:0"].bytes_sent > 0
        assert check_records(compressor, 2) == {"weights:0"}
        assert_same_on_all_ranks([weights], "weights")


def _train_in_a_session(
    compressor: Any, session: Any = None, passes: int = 1, groups: int | None = None
) -> tuple[np.ndarray, dict]:
    optimizer = hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1),
        compression=compressor,
        backward_passes_per_step=passes,
        groups=groups,
    )
    tf.compat.v1.set_random_seed(3)
    inputs = tf.compat.v1.placeholder(tf.float32, [None, 40])
    weights = tf.compat.v1.get_variable("weights", [40, 60], use_resource=True)
    bias = tf.compat.v1.get_variable("bias", [60], use_resource=True)
    update = optimizer.minimize(tf.reduce_mean((inputs @ weights + bias - 0.5) ** 2))
    session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
    for step in range(2 * passes):
        session.run(update, {inputs: rank_data(8, 40, seed=step)})
    return session.run(weights), compressor.stats().parameters


# ---- whatever is reduced -------------------------------------------------------------------------------------------


def nan_on_one_rank(make: Make) -> None:
    """What is not finite on one worker reaches all, in its bucket and nowhere else; the next step is clean."""
    model = keras_model()
    poisons, variables = Poisons(model), model.trainable_variables
    compressor, optimizer = make_for_tape(make, model)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) + poisons.loss()
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    start, steps = model.get_weights(), [*POISONED, []]
    for (x, y), poison in zip(batches(len(steps)), steps):
        model.set_weights(start)
        poisons.put(poison)
        step(x, y)
        assert_same_on_all_ranks(model.get_weights(), "weights")
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    for variable in variables:
        scheme = compressor.policy.scheme_for(variable.name, variable.shape.num_elements())
        unit = 1 if scheme is None else getattr(getattr(scheme, "inner", scheme), "bucket_size", TILE)
        reduced = [reduced for name, _, reduced in compressor.records if name == variable.name]
        for result, poison in zip(reduced, steps):
            broken = np.flatnonzero(~np.isfinite(result)) // unit
            assert set(broken) == {at // unit for _, name, at, _ in poison if name == variable.name}, poison
    assert check_records(compressor, len(steps)) == KERNELS


def training_under_check_numerics(make: Make) -> None:
    """TensorFlow's own search for infinities and NaN finds none where gradients have none, and changes no bit."""
    needs_host = any(scheme.host_requirement() for scheme in make().policy.schemes)
    # What was traced without the search is not searched, and what was traced with it is searched for ever.
    cached_subgraph.graph_of.cache_clear()
    tf.debugging.enable_check_numerics()
    try:
        for kernels in ("native",) if needs_host else taken("native", "tensorflow"):
            train_with_tape(make, arguments={"kernels": kernels})
    finally:
        tf.debugging.disable_check_numerics()
        cached_subgraph.graph_of.cache_clear()


def constant_gradients(make: Make) -> None:
    """What is a constant for TensorFlow is not for the workers: their constants differ, and so do the steps' bits."""
    shapes = [(50, 40), (50,), (40, 50)]
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]  # all of one name
    optimizer = optimizer_for(make())
    optimizer.build(variables)
    compressor = make(**({"optimizer": optimizer} if isinstance(optimizer, hvq.optim.BinSGDM) else {}))
    coefficients = [tf.constant(rank_data(*shape)) for shape in shapes]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(c * v) for c, v in zip(coefficients, variables)])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    for _ in range(3):
        step()
    assert check_records(compressor, 3) == {"Variable:0", "Variable:0#2"}


@tf.custom_gradient
def _with_a_gradient_of_any_rank(x: tf.Tensor) -> Any:
    """``x``, whose gradient comes from Python, so that TensorFlow knows nothing of it before the graph runs."""
    return tf.identity(x), lambda gradient: tf.numpy_function(np.array, [gradient], gradient.dtype)


def gradients_of_unknown_rank(make: Make) -> None:
    def train(groups: int | None) -> None:
        shapes: list[tuple[int, ...]] = [(50, 40), (50,), (40, 50)]
        variables = [tf.Variable(tf.zeros(shape), name=f"v{i}") for i, shape in enumerate(shapes)]
        optimizer = optimizer_for(make())
        optimizer.build(variables)
        is_binary = isinstance(optimizer, hvq.optim.BinSGDM)
        compressor = make(**({"optimizer": optimizer} if is_binary else {}))
        if not is_binary:  # whose momentum has a variable's shape
            variables.append(tf.Variable(tf.zeros([60, 30]), shape=tf.TensorShape(None), name="any"))
        coefficients = [tf.constant(rank_data(*variable.numpy().shape)) for variable in variables]

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                terms = zip(coefficients, map(_with_a_gradient_of_any_rank, variables))
                loss = tf.add_n([tf.reduce_sum(c * v) for c, v in terms])
            tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients[: len(shapes)], variables))
            return gradients

        for _ in range(2):
            step()
        assert check_records(compressor, 2) == {"v0:0", "v2:0", *(() if is_binary else ("any:0",))}
        assert_same_on_all_ranks([variable.numpy() for variable in variables], "weights")

    for groups in taken(None, 1):
        train(groups)


def survives_pickling(make: Make) -> None:
    compressor = make(seed=3)
    fit(compressor, steps=1)
    copied = pickle.loads(pickle.dumps(compressor))
    assert copied.seed == 3
    fit(copied, steps=1)


def copies_keep_names(make: Make) -> None:
    model = keras_model()
    named = [(f"mine.{i}", variable) for i, variable in enumerate(model.trainable_variables)]
    compressor = make(named_parameters=named, exclude="mine.0")
    for copied in taken(copy.deepcopy(compressor), pickle.loads(pickle.dumps(copy.copy(compressor)))):
        fit(copied, model=keras_model(), steps=1, check=False)
        assert {name for name, _, _ in copied.records} == {name for name, _ in named}
        assert check_records(copied, 1) == {"mine.2"}
    variables = [tf.Variable(tf.zeros([50, 50])) for _ in range(2)]
    optimizer = optimizer_for(compressor)
    optimizer.build(variables)
    compressor = copy.deepcopy(make(named_parameters=zip("ab", variables)))
    if isinstance(compressor, hvq.BinSGDM):
        compressor._welcome(optimizer)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * 2.0 + variables[1])
        return hvd.DistributedGradientTape(tape, compression=compressor).gradient(loss, variables)

    assert "cannot tell them apart" in message_of(step, ValueError)


def two_models(make: Make) -> None:
    """One compressor serves two models, except BinSGDM's, which knows its optimizer's momentum."""
    compressor = make()
    first, second = keras_model(), keras_model()
    optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor), compression=compressor)
    if isinstance(compressor, hvq.BinSGDM):
        again = optimizer_for(compressor)
        message = message_of(
            lambda: keras_hvd.DistributedOptimizer(again, compression=compressor), ValueError
        )
        assert "construct one for each" in message
        return
    other = keras_hvd.DistributedOptimizer(optimizer_for(compressor), compression=compressor)
    first.compile(optimizer=optimizer, loss="mse")
    second.compile(optimizer=other, loss="mse")
    for x, y in batches(2):
        first.train_on_batch(x, y)
        second.train_on_batch(x, y)
    check_records(compressor, 4)
    assert_same_on_all_ranks([*first.get_weights(), *second.get_weights()], "weights")


def bad_arguments(make: Make) -> None:
    """Every rank gets the same clear message before any collective, and goes on training afterwards."""

    def first_step(compressor: Any, optimizer: Any = None, **distributed: Any) -> str:
        def begin() -> None:
            model = keras_model()
            wrapped = keras_hvd.DistributedOptimizer(
                optimizer or optimizer_for(compressor), compression=compressor, **distributed
            )
            model.compile(optimizer=wrapped, loss="mse")
            model.train_on_batch(*next(batches(1)))

        return message_of(begin)

    compressor = make()
    arguments = {} if isinstance(compressor, hvq.BinSGDM) else {"bits": 4}
    message = first_step(make(overrides={"layer7.*": arguments}))
    assert "'layer7.*' matches no parameter" in message
    assert "first/kernel:0" in message
    assert "exclude" in first_step(make(exclude="*.wait"))
    assert "overlap=False" in message_of(lambda: make(overlap=False), ValueError)
    if isinstance(compressor, hvq.BinSGDM):
        message = first_step(compressor, tf.keras.optimizers.SGD(0.1))
        assert "optimizer of the same name" in message
        assert "SGD" in message
        assert "beta=0.5" in first_step(BinSGDM(beta=0.5))
        model = keras_model()
        step = tape_step(BinSGDM(), model, tf.keras.optimizers.SGD(0.1))
        assert "BinSGDM(optimizer=...)" in message_of(lambda: step(*next(batches(1))))
    else:
        assert "compression=hvq.BinSGDM()" in first_step(compressor, hvq.optim.BinSGDM())
        message = message_of(
            lambda: hvd.allreduce(tf.ones(2000, tf.complex64), compression=compressor), TypeError
        )
        assert "complex64" in message
        assert "float32" in message
        message = message_of(lambda: hvd.allreduce(tf.ones(2000), op=hvd.Max, compression=compressor))
        assert "op=" in message
        assert "hvd.Average" in message
        message = message_of(lambda: hvd.reducescatter(tf.ones(2000), compression=compressor))
        assert "only allreduce" in message
        if hvd.size() & (hvd.size() - 1) == 0:
            message = message_of(lambda: hvd.allreduce(tf.ones(2000), op=hvd.Adasum, compression=compressor))
            assert "op=Adasum" in message
    if isinstance(compressor, hvq.GlobalQSGD):
        message = message_of(lambda: GlobalQSGD(bits=2), ValueError)
        assert "2 workers need bits >= 3 with norm='max'" in message
    if SUBSET[0].included():
        message = message_of(
            lambda: hvd.allreduce(tf.ones(2000), compression=make(process_set=SUBSET[0])), ValueError
        )
        assert "process_set=" in message
    fit(make(), steps=1)


def workers_disagree(make: Make) -> None:
    """Another seed on one rank: noticed on every rank, by the argument's name where workers gather, else by that of the
    gradient; the next model trains.
    """
    compressor = make(seed=hvd.rank())
    model = keras_model()
    model.compile(
        optimizer=keras_hvd.DistributedOptimizer(optimizer_for(compressor), compression=compressor),
        loss="mse",
    )
    # Horovod's elastic training would take an UnknownError for the end.
    message = message_of(lambda: model.train_on_batch(*next(batches(1))), tf.errors.InvalidArgumentError)
    gather_objects(None)
    assert ("kernel:0" if isinstance(compressor, GlobalQSGD) else "seed") in message
    assert "same arguments" in message
    fit(make(), steps=1)


def an_error_while_data_are_awaited(make: Make) -> None:
    """The error of a graph ends the wait for data; a worker that has them gives its gradients to Horovod meanwhile."""
    weights, bias = tf.Variable(tf.ones([64, 64]), name="weights"), tf.Variable(tf.ones([10]), name="bias")
    compressor, runs = make(seed=hvd.rank()), threading.Event()
    data = tf.queue.FIFOQueue(1, [tf.float32], [[]])

    @tf.function
    def step() -> Any:
        tf.numpy_function(runs.set, [], [])
        with tf.GradientTape() as tape:
            loss = data.dequeue() * (tf.reduce_sum(weights * weights) + tf.reduce_sum(bias * bias))
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return tape.gradient(loss, [weights, bias])

    def give() -> None:
        runs.wait()
        time.sleep(0.3 if hvd.rank() == 0 else 0)
        data.enqueue(1.0)

    source = threading.Thread(target=give, daemon=True)
    source.start()
    message = message_of(step, tf.errors.InvalidArgumentError)
    source.join()
    gather_objects(None)
    assert "same arguments" in message


def binsgdm_moves_by_the_rate(make: Make) -> None:
    """Every element by +-lr, quantized or not; the optimizer's state is that of the simulator; one worker alone too."""
    if not isinstance(make(), hvq.BinSGDM):
        return
    for legacy, clip_norm in taken((False, None), (True, None), (False, 0.01), (True, 0.01)):
        model, compressor = keras_model(), make()
        before = model.get_weights()
        optimizer = optimizer_for(compressor, legacy, clip_norm=clip_norm)
        assert optimizer.get_config()["clip_norm"] == clip_norm
        model.compile(
            optimizer=keras_hvd.DistributedOptimizer(optimizer, compression=compressor),
            loss="mse",
        )
        model.train_on_batch(*next(batches(1)))
        oracle = Oracle(compressor, clip_norm=clip_norm)
        everyone = gather_objects({name: raw for name, raw, _ in compressor.records})
        check_records(compressor, 1, oracle=oracle)
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_allclose(np.abs(new - old), 1e-3, rtol=1e-2)
        for variable in model.trainable_variables:
            if len(variable.shape) < 2:
                continue
            momentum, scale, _ = model.optimizer._state_of(variable)
            kept = oracle._states[variable.name][hvd.rank()][0]
            assert np.array_equal(momentum.numpy().reshape(-1), kept.momentum)
            assert np.array_equal(scale.numpy().reshape(-1), kept.scale)
            gradient = everyone[hvd.rank()][variable.name].reshape(-1)
            length = np.linalg.norm(gradient)
            assert length > 0.01
            gradient = gradient if clip_norm is None else gradient * (clip_norm / length)
            np.testing.assert_allclose(kept.momentum, (1 - DEFAULT_BETA) * gradient, rtol=1e-4, atol=1e-9)
        hvd.broadcast_variables(model.optimizer.variables(), root_rank=0)
        assert_same_on_all_ranks(model.optimizer.variables(), "broadcast state")
    alone = keras_model()
    alone.compile(optimizer=hvq.optim.BinSGDM(1e-3), loss="mse")
    before = alone.get_weights()
    alone.train_on_batch(*next(batches(1)))
    for old, new in zip(before, alone.get_weights()):
        np.testing.assert_allclose(np.abs(new - old), 1e-3, rtol=1e-2)
    if SUBSET[0].size() == 1:  # neither its worker nor the other has anybody to reduce with
        compressor, model = make(process_set=SUBSET[0]), keras_model()
        optimizer = keras_hvd.DistributedOptimizer(
            hvq.optim.BinSGDM(1e-3), compression=compressor, process_set=SUBSET[0]
        )
        model.compile(optimizer=optimizer, loss="mse")
        model.train_on_batch(*next(batches(1)))
        for one, other in zip(model.get_weights(), alone.get_weights()):
            assert_bits_equal(one, other, "one worker, with Horovod's optimizer")


def binsgdm_and_zero_gradients(make: Make) -> None:
    """A variable whose gradient is zero on every worker stays, applied without a pass too; else all of it moves."""
    for legacy, alone in taken((False, False), (True, False), (False, True), (True, True)):
        model, compressor = keras_model(), make()
        optimizer = optimizer_for(compressor, legacy)
        if not alone:
            optimizer = keras_hvd.DistributedOptimizer(optimizer, compression=compressor)
        variables = model.trainable_variables
        if not legacy:
            optimizer.build(variables)
        zeros = [tf.zeros_like(variable) for variable in variables]
        has_some = alone or hvd.rank() == 0
        some = [has_some * rank_data(*variable.shape) for variable in variables]
        if alone:
            for gradient in some:
                gradient.flat[0] = 0.0
        some = [tf.constant(gradient) for gradient in some]

        def loss(gradients: Any) -> tf.Tensor:
            return tf.add_n([tf.reduce_sum(v * each) for v, each in zip(variables, gradients)])  # noqa: B023

        for step, gradients in enumerate((zeros, zeros, some, zeros)):
            before = model.get_weights()
            if step == 0:  # as scripts do that load an optimizer's weights next
                optimizer.apply_gradients(zip(gradients, variables))
            else:
                optimizer.minimize(functools.partial(loss, gradients), variables)
            for old, new in zip(before, model.get_weights()):
                moved = np.mean(old != new)
                assert moved == 0 if gradients is zeros else moved > 0.3  # averages of bits may be 0
                assert not alone or old.flat[0] == new.flat[0], "an element without a gradient moved"
        if not alone:
            assert_same_on_all_ranks(model.get_weights(), "weights")


def binsgdm_moves_by_averages(make: Make) -> None:
    """Every element by the average of the workers' bits, whatever scales it: a sum, a loss scale."""
    fractions: set[float] = set()
    for eager, op, scale in taken((False, hvd.Average, 1.0), (True, hvd.Sum, 1.0), (False, hvd.Sum, 64.0)):
        model = keras_model()
        compressor, optimizer = make_for_tape(make, model)

        def step(
            x: Any,
            y: Any,
            model: Any = model,
            compressor: Any = compressor,
            optimizer: Any = optimizer,
            op: Any = op,
            scale: float = scale,
        ) -> None:
            with tf.GradientTape() as tape:
                loss = scale * tf.reduce_mean((model(x) - y) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compressor, op=op)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip([each / scale for each in gradients], model.trainable_variables))

        run = step if eager else tf.function(step)
        for number, (x, y) in enumerate(batches(2)):
            before = model.get_weights()
            run(x, y)
            records = compressor.records[number * len(before) :]
            fractions |= _moved_by_averages(before, model, records, 1.0 if op is hvd.Average else hvd.size())
        check_records(compressor, 2, factor=1.0 / hvd.size() if op is hvd.Average else 1.0)
    for legacy in taken(False, True):
        model, compressor = keras_model(), make()
        optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor, legacy), compression=compressor)
        model.compile(optimizer=optimizer, loss="mse")
        before = model.get_weights()
        model.train_on_batch(*next(batches(1)))
        _moved_by_averages(before, model, compressor.records, 1.0)
    assert len(fractions) > 1, "no bits differ"


def _moved_by_averages(before: Any, model: Any, records: Any, unit: float) -> set[float]:
    """Checks the quantized variables' last update; returns the magnitudes of what they moved by."""
    reduced, fractions = {name: values / unit for name, _, values in records}, set()
    for variable, old, new in zip(model.trainable_variables, before, model.get_weights()):
        if variable.name in KERNELS:
            np.testing.assert_allclose(old - new, 1e-3 * reduced[variable.name], rtol=1e-4, atol=1e-7)
            fractions |= set(np.unique(np.abs(reduced[variable.name])).tolist())
    return fractions


def counts_that_differ(make: Make) -> None:
    """As after a worker has come later: the averages are right nevertheless, and the same on all."""
    for eager in taken(False, True):
        model = keras_model()
        compressor, optimizer = make_for_tape(make, model)
        compressor.load_state_dict({"exchanges": {v.name: 7 * hvd.rank() for v in model.variables}})
        step = tape_step(compressor, model, optimizer)
        step = step if eager else tf.function(step)
        for x, y in batches(2):
            step(x, y)
        _check_averages(compressor, 2)


def a_worker_that_joins(make: Make) -> None:
    """GlobalQSGD goes on without it, with the average over all, as Horovod's own; the others say that they cannot."""
    for eager in taken(False, True):
        model = keras_model()
        compressor, optimizer = make_for_tape(make, model)
        step = tape_step(compressor, model, optimizer)
        step = step if eager else tf.function(step)
        *first, last = batches(3)
        for x, y in first:
            step(x, y)
        oracle = Oracle(compressor)
        check_records(compressor, 2, oracle=oracle)
        can_go_on = isinstance(compressor, GlobalQSGD)
        if hvd.rank() > 0 and can_go_on:
            step(*last)
        elif hvd.rank() > 0:
            assert "hvd.join()" in message_of(functools.partial(step, *last))
        hvd.join()
        everyone = gather_objects({name: raw for name, raw, _ in compressor.records if can_go_on})
        for name, raw, reduced in compressor.records if can_go_on else ():
            gradients = [{name: own.get(name, np.zeros_like(raw))} for own in everyone]
            expected = oracle.expected(gradients, name, 1.0 / hvd.size())
            if expected is not None:
                assert_bits_equal(reduced, expected.reshape(raw.shape), name)


def _check_averages(compressor: Any, exchanges: int) -> None:
    """As `check_records`, where the workers' counts of exchanges differ, so that an `Oracle` cannot follow."""
    everyone = gather_objects(compressor.records)
    assert [len(own) for own in everyone] == [(len(KERNELS) + 1) * exchanges] * hvd.size()  # and a bias
    for records in zip(*(sorted(own, key=lambda record: record[0]) for own in everyone)):
        name, _, reduced = records[0]
        for other, _, result in records:
            assert other == name
            assert_bits_equal(result, reduced, name)
        scheme = compressor.policy.scheme_for(name, reduced.size)
        gradients = [raw.reshape(-1) for _, raw, _ in records]
        assert_average(scheme, gradients, reduced, name, isinstance(compressor, BinSGDM))


MAKERS = {**METHODS, **VARIANTS, **IN_TENSORFLOW}
