"""What a training script may do with Keras 3 and ``horovod_quant.keras``. Run by worker.py."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras_harness import BATCH, KERNELS, MAKERS, base_optimizer, data_of, model_of, trained, union_of
from oracle import Oracle
from tf_harness import (
    GlobalQSGD,
    Make,
    assert_same_on_all_ranks,
    check_records,
    gather_objects,
    message_of,
    rank_data,
)
from turns import taken

import horovod_quant.keras as hvq

SUBSET: list[Any] = []

PATIENCE = 60
"""Seconds after which workers that wait for each other are ended, with what each one does."""


def start() -> int:
    size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "0")))
    SUBSET.append(hvd.ProcessSet([0, size - 1] if size > 2 else [size - 1]))
    hvd.init(process_sets=SUBSET)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return hvd.rank()


def clean() -> None:
    keras.config.set_dtype_policy("float32")
    gc.collect()


def finish() -> None:
    gather_objects(None)


# ---- equal to the simulator, bit for bit -------------------------------------------------------------------------


def fit(make: Make) -> None:
    compressor, reported = make(), dict[str, float]()
    reader = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: reported.update(logs))
    trained(make, compressor=compressor, callbacks=[hvq.MetricsCallback(compressor), reader])
    metrics = compressor.stats().metrics()
    assert metrics
    assert {name: reported[name] for name in metrics} == metrics
    named = {name.rpartition("/")[2] for name in compressor.stats().parameters}
    assert named == {"kernel", "bias"}, "statistics speak of paths"


def fit_in_groups(make: Make) -> None:
    for own in taken(False, True):
        model = model_of()
        kernels = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
        trained(make, model=model, groups=[kernels] if own else 2)


def fit_eagerly(make: Make) -> None:
    trained(make, compile_options={"run_eagerly": True})


def fit_several_steps_at_once(make: Make) -> None:
    trained(make, steps=4, compile_options={"steps_per_execution": 2})


def fit_with_sum_and_predivide(make: Make) -> None:
    for options in taken({"op": hvd.Sum, "factor": 1.0}, {"gradient_predivide_factor": 4.0}):
        trained(make, **options)


def accumulation(make: Make) -> None:
    """One exchange for each real step, of accumulated gradients."""
    optimizer = base_optimizer(make, gradient_accumulation_steps=2)
    trained(make, steps=6, exchanges=3, optimizer=optimizer)


def clipping_decay_and_averages_of_weights(make: Make) -> None:
    for clip in taken({"clipnorm": 0.01}, {"global_clipnorm": 0.01}, {"clipvalue": 0.001}):
        options = {"weight_decay": 0.01, "use_ema": True, "ema_overwrite_frequency": 2, **clip}
        trained(make, optimizer=base_optimizer(make, **options))


def within_a_process_set(make: Make) -> None:
    trained(make, process_set=SUBSET[0])


def steps_of_ones_own(make: Make) -> None:
    """A train_step, train_on_batch and tapes, in a function and in eager code."""

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    trained(make, model=Custom())
    compressor, model = make(), model_of()
    optimizer = hvq.DistributedOptimizer(base_optimizer(make), compression=compressor)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    optimizer.build(model.trainable_variables)
    x, y = data_of(1)
    for way in (tf.function(step), step):
        way(x, y)
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(x, y)
    assert check_records(compressor, 3) == KERNELS
    assert_same_on_all_ranks(model.get_weights(), "weights")


def an_overflow_on_one_rank(make: Make) -> None:
    """No rank moves, each loss scale is halved, the next step is clean; wherever the loss-scaling optimizer is made."""
    for place in taken("compile", "inside", "outside"):
        keras.config.set_dtype_policy("mixed_float16")
        compressor, model = make(), model_of(dtype="mixed_float16")
        optimizer = base_optimizer(make)
        if place == "inside":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer = hvq.DistributedOptimizer(optimizer, compression=compressor)
        if place == "outside":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer=optimizer, loss="mse", auto_scale_loss=place == "compile")
        x, y = data_of(1)
        clean_steps = 0
        for step in range(5):
            is_bad = step in (1, 3)
            data = x.copy()
            if is_bad and hvd.rank() == step % hvd.size():
                data[0, 0] = np.inf
            before = model.get_weights()
            model.train_on_batch(data, y)
            moved = any(not np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
            assert moved is not is_bad, f"step {step}"
            clean_steps += not is_bad
            assert_same_on_all_ranks(model.get_weights(), "weights")
        scale = model.optimizer
        assert int(scale.iterations.numpy()) == clean_steps
        assert float(scale.dynamic_scale.numpy()) == scale.initial_scale / 4
        assert check_records(compressor, clean_steps) == KERNELS


def resuming_gives_the_same_bits(make: Make) -> None:
    """Saved, loaded by `load_model` and trained on: as without the interruption; also loaded on one rank alone.

    BinSGDM's momentum is each rank's own, so that each loads its own file, and none is broadcast.
    """
    binary = make is MAKERS["binsgdm"]
    x, y = data_of(4)
    half = 2 * BATCH
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}

    def begun() -> Any:
        model = model_of()
        optimizer = hvq.DistributedOptimizer(base_optimizer(make), compression=make())
        model.compile(optimizer=optimizer, loss="mse")
        return model

    whole = begun()
    whole.fit(x, y, **options)
    model = begun()
    model.fit(x[:half], y[:half], **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        for everywhere in (True,) if binary else (True, False):
            compressor = make()
            if everywhere or hvd.rank() == 0:
                loaded = hvq.load_model(path, compression=compressor)
            else:
                loaded = model_of(seed=9)
                optimizer = hvq.DistributedOptimizer(base_optimizer(make), compression=compressor)
                loaded.compile(optimizer=optimizer, loss="mse")
            loaded.fit(
                x[half:],
                y[half:],
                callbacks=[] if binary else [hvq.callbacks.BroadcastGlobalVariablesCallback(0)],
                **options,
            )
            for kept, found in zip(whole.get_weights(), loaded.get_weights()):
                assert np.array_equal(kept, found), f"resumed run differs (everywhere={everywhere})"
            oracle = Oracle(compressor, step=lambda exchange: exchange + 2)
            if not binary:  # whose momentum the oracle did not see grow
                assert check_records(compressor, 2, oracle=oracle) == KERNELS
        plain = keras.saving.load_model(path)
    assert type(plain.optimizer) is type(base_optimizer(make))
    assert int(plain.optimizer.iterations.numpy()) == 2


def models_made_on_one_rank_only(make: Make) -> None:
    """Keras counts a process's layers: the paths differ, and nothing else."""
    for _ in range(hvd.rank() * 2):
        extra = model_of()
        extra.compile(hvq.DistributedOptimizer(base_optimizer(make), compression=make()), loss="mse")
    model, _ = trained(make)
    paths = gather_objects([variable.path for variable in model.trainable_variables])
    assert len(set(map(tuple, paths))) == hvd.size()


def two_optimizers_in_one_step(make: Make) -> None:
    compressors = [make(), make()]
    models = [model_of(seed) for seed in (1, 2)]
    optimizers = [
        hvq.DistributedOptimizer(base_optimizer(make), compression=each, groups=1) for each in compressors
    ]
    for model, optimizer in zip(models, optimizers):
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        for model, optimizer in zip(models, optimizers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = data_of(3)
    for i in range(0, len(x), BATCH):
        step(x[i : i + BATCH], y[i : i + BATCH])
    for compressor in compressors:
        assert check_records(compressor, 3) == KERNELS


# ---- equal to one process on the union of the data ---------------------------------------------------------------


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw-clipped": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.05),
    "accumulating": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=3),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2, clipvalue=0.002),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01)),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)),
    "scaled-by-a-constant": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=64.0),
}


def plain_averages_equal_one_process() -> None:
    steps = 6
    x, y = data_of(steps)
    further: Iterator[dict[str, Any]] = itertools.cycle(
        [{}, {"groups": 2}, {"compression": hvd.Compression.none}]
    )
    for name, options in zip(OPTIMIZERS, further):
        model, single = model_of(), model_of()
        model.compile(hvq.DistributedOptimizer(OPTIMIZERS[name](), **options), loss="mse")
        single.compile(OPTIMIZERS[name](), loss="mse")
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        single.fit(*union_of(steps), batch_size=BATCH * hvd.size(), shuffle=False, verbose=0)
        for kept, found in zip(single.get_weights(), model.get_weights()):
            np.testing.assert_allclose(found, kept, rtol=1e-3, atol=2e-5, err_msg=name)
        assert_same_on_all_ranks(model.get_weights(), f"weights with {name}")


def sparse_gradients() -> None:
    """Gathered, or made dense, in full precision or quantized, also where an embedding is accumulated."""

    def embedding(accumulated: int | None) -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(50, 40), keras.layers.Flatten()])
        return model, keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulated)

    draw = np.random.default_rng
    words = [draw(rank).integers(0, 50, (16, 4)) for rank in range(hvd.size())]
    wanted = [draw(rank + 9).standard_normal((16, 160)).astype("f") for rank in range(hvd.size())]
    for accumulated in (None, 2):
        for as_dense in (False, True):
            for compression in (None, GlobalQSGD(bits=8)):
                model, optimizer = embedding(accumulated)
                single, alone = embedding(accumulated)
                optimizer = hvq.DistributedOptimizer(
                    optimizer, compression=compression, sparse_as_dense=as_dense
                )
                model.compile(optimizer, loss="mse")
                single.compile(alone, loss="mse")
                for _ in range(2):
                    model.train_on_batch(words[hvd.rank()], wanted[hvd.rank()])
                    single.train_on_batch(np.concatenate(words), np.concatenate(wanted))
                quantized = compression is not None and (as_dense or accumulated is not None)
                (kept,), (found,) = single.get_weights(), model.get_weights()
                np.testing.assert_allclose(found, kept, atol=1e-3 if quantized else 1e-6)
                assert_same_on_all_ranks([found], "embeddings")


def local_variables() -> None:
    for scale, has_loss_scale in ((True, False), (False, False), (True, True)):
        model = model_of()
        sgd = keras.optimizers.SGD(1.0)
        if has_loss_scale:
            sgd = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=1.0)
        optimizer = hvq.DistributedOptimizer(sgd, scale_local_gradients=scale)
        local = model.layers[-1].kernel
        optimizer.register_local_var(local)
        optimizer.build(model.trainable_variables)
        before = local.numpy()
        gradients = [tf.fill(each.shape, hvd.rank() + 1.0) for each in model.trainable_variables]
        optimizer.apply(gradients)
        moved = (before - local.numpy()) * (hvd.size() if scale else 1)
        np.testing.assert_allclose(moved, hvd.rank() + 1.0, rtol=1e-4)
        assert_same_on_all_ranks([model.layers[0].kernel], "averaged variables")


def one_optimizer_is_applied_twice_in_a_step() -> None:
    """To the gradients of two losses: operations of a graph have different names."""
    for has_loss_scale, compression in ((False, None), (True, None), (False, GlobalQSGD(bits=8))):
        _apply_twice(has_loss_scale, compression)


def _apply_twice(has_loss_scale: bool, compression: Any) -> None:
    sgd = keras.optimizers.SGD(1.0)
    if has_loss_scale:
        sgd = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=1.0)
    optimizer = hvq.DistributedOptimizer(sgd, compression=compression)
    variable = keras.Variable(np.zeros((40, 70), "f"))
    optimizer.build([variable])

    @tf.function
    def step(one: Any, other: Any) -> None:
        optimizer.apply([one], [variable])
        optimizer.apply([other], [variable])

    given = [tf.fill(variable.shape, base * (hvd.rank() + 1.0)) for base in (1.0, 100.0)]
    graph = step.get_concrete_function(*given).graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(each.node_def for each in graph.library.function))
    names = [each.name.rpartition("/")[2] for each in nodes if each.op.startswith("HorovodAll")]
    assert len(names) == len(set(names)) > 1, names
    step(*given)
    np.testing.assert_allclose(variable.numpy(), -101.0 * (hvd.size() + 1) / 2, rtol=0.05)
    assert_same_on_all_ranks([variable], "variables")


def a_variable_without_a_gradient_is_known() -> None:
    """A pattern that matches it alone is no mistake."""
    compression = GlobalQSGD(bits=8, exclude="unused")
    optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    used, unused = (keras.Variable(np.zeros((40, 70), "f"), name=name) for name in ("used", "unused"))
    optimizer.apply([tf.ones((40, 70)), None], [used, unused])
    np.testing.assert_allclose(used.numpy(), -1.0, atol=0.1)


def the_measured_sample_is_one_where_paths_differ() -> None:
    """By these three names different blocks of it would be drawn."""
    compression = GlobalQSGD(bits=8, nmse_every=1, nmse_share=0.0)
    optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    variable = keras.Variable(np.zeros((100, 100), "f"), name="abc"[hvd.rank()])
    optimizer.apply([tf.constant(rank_data(100, 100))], [variable])
    assert compression.stats().nmse < 0.1


def the_state_of_binsgdm_on_a_node_is_shared_out() -> None:
    """As the reduction shares out the gradient, which has another name; and anew after it was set."""
    compression = MAKERS["binsgdm"](hierarchical=hvd.size())
    optimizer = hvq.DistributedOptimizer(hvq.optim.BinSGDM(1e-3), compression=compression)
    # By this name every worker would own another number of elements than by "variable 0".
    variable = keras.Variable(np.zeros((40, 70), "f"), name="third")
    optimizer.build([variable])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))

    def train() -> np.ndarray:
        for seed in range(2):
            step(tf.constant(rank_data(40, 70, seed=seed)))
        return variable.numpy()

    weights = train()
    assert check_records(compression, 2) == {"variable 0"}
    optimizer.gather_state()
    state = [each.numpy() for each in optimizer.variables]
    expected = train()
    optimizer.set_weights(state)
    variable.assign(weights)
    assert np.array_equal(train(), expected)


# ---- callbacks ---------------------------------------------------------------------------------------------------


def the_first_variables_are_one_rank_s() -> None:
    """Also those of a model that the first batch builds; seeds stay, local variables too, a difference is an error."""
    root = hvd.size() - 1
    x, y = data_of(2)
    for build_late in (False, True):
        model = model_of(seed=10 + hvd.rank(), rate=0.5)
        if build_late:
            model = keras.Sequential([keras.layers.Dense(70), keras.layers.Dense(30)])
        else:
            local = model.layers[0].bias
            local.assign(np.full(70, hvd.rank(), np.float32))
        model.compile(hvq.DistributedOptimizer(keras.optimizers.SGD(0.0, momentum=0.9)), loss="mse")
        callback = hvq.callbacks.BroadcastGlobalVariablesCallback(
            root, local_variables=None if build_late else local
        )
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
        assert callback.broadcast_done
        weights = [each for each in model.weights if build_late or each is not local]
        assert_same_on_all_ranks(weights, "weights")
        assert_same_on_all_ranks(model.optimizer.variables, "the optimizer's variables")
        if not build_late:
            assert len({tuple(each) for each in gather_objects(local.numpy().tolist())}) == hvd.size()
            seeds = [each for each in model.variables if "seed_generator" in each.path]
            assert seeds
            states = gather_objects([each.numpy().tolist() for each in seeds])
            assert len({str(each) for each in states}) == hvd.size(), "the same masks on all ranks"
    width = 30 if hvd.rank() else 31
    other = keras.Sequential([keras.Input((40,)), keras.layers.Dense(width)])
    other.compile(hvq.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    callback = hvq.callbacks.BroadcastGlobalVariablesCallback(0)
    told = message_of(
        lambda: other.fit(x, np.zeros((len(x), width), "f"), verbose=0, callbacks=[callback]), ValueError
    )
    assert "the workers have different variables" in told, told


class Sum(keras.layers.Layer):
    """Of two inputs: Keras cannot build a Sequential that begins with it from their shapes."""

    def call(self, inputs: Any) -> Any:
        return inputs[0] + inputs[1]


class Chain(keras.Model):
    """A model whose layers are built by its first call."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.parts = layers

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def models_built_on_some_ranks_only() -> None:
    """One that has been loaded, and others that the first batch would build; no wait, and no wrong first step."""
    last = hvd.size() - 1
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        for make, is_lost in (
            (keras.Sequential, False),
            (lambda parts: Chain(*parts), False),
            (_sum_of_two, True),
        ):
            for root, built_on in ((0, 0), (0, last)):
                _start_from_one_rank_s(make, root, built_on, is_lost)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _sum_of_two(parts: Sequence[Any]) -> Any:
    return keras.Sequential([Sum(), *parts])


def _start_from_one_rank_s(make: Any, root: int, built_on: int, is_lost: bool) -> None:
    """Trains three steps from the root's variables, where only one rank has trained before.

    Args:
        make: returns a model that is not built.
        is_lost: whether the first batch only builds the other ranks' models.
    """
    keras.utils.set_random_seed(20 + hvd.rank())
    model = make([keras.layers.Dense(70, activation="tanh"), keras.layers.Dense(30)])
    compressor = GlobalQSGD(bits=8)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(hvq.DistributedOptimizer(sgd, compression=compressor), loss="mse")
    x, y = data_of(3)
    inputs = (x, np.ones_like(x)) if make is _sum_of_two else x
    if hvd.rank() == built_on:
        model(tf.nest.map_structure(lambda each: each[:BATCH], inputs))
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(5)
        for each in model.optimizer.variables[2:]:
            each.assign(tf.ones_like(each))
    before = [each.numpy() for each in [*model.weights, *model.optimizer.variables]]
    seen: list[Any] = []

    def note(*_: Any, **__: Any) -> None:
        seen.append([each.numpy() for each in [*model.weights, *model.optimizer.variables]])

    callbacks = [
        hvq.callbacks.BroadcastGlobalVariablesCallback(root),
        keras.callbacks.LambdaCallback(on_train_begin=note, on_train_batch_end=note),
    ]
    model.fit(inputs, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    first = int(is_lost)
    for values in seen[first:]:
        assert_same_on_all_ranks(values, "weights and optimizer's state")
    steps = 3
    if built_on == root:
        steps += 5 - first
        for kept, found in zip(gather_objects(before)[root], seen[first]):
            assert np.array_equal(kept, found), "training does not begin with the root's variables"
    assert int(model.optimizer.iterations.numpy()) == steps


def ranks_stop_early_together() -> None:
    """On averaged metrics of data that differ, with an evaluation in each epoch; rank 0 alone saves the best model."""
    x, y = data_of(3)
    held_back = rank_data(16, 40, seed=50), rank_data(16, 30, seed=51) * (1 + 3 * hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "best.keras"
        model = model_of()
        model.compile(
            hvq.DistributedOptimizer(keras.optimizers.SGD(0.5), compression=GlobalQSGD(bits=8)), loss="mse"
        )
        callbacks = [
            hvq.callbacks.BroadcastGlobalVariablesCallback(0),
            hvq.callbacks.MetricAverageCallback(),
            hvq.callbacks.BestModelCheckpoint(filepath=path),
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
        ]
        history = model.fit(
            x, y, batch_size=BATCH, epochs=40, verbose=0, validation_data=held_back, callbacks=callbacks
        ).history
        assert path.exists() is (hvd.rank() == 0)
        if hvd.rank() == 0:
            best = hvq.load_model(path, compression=GlobalQSGD(bits=8))
            for kept, found in zip(model.get_weights(), best.get_weights()):
                assert np.array_equal(kept, found)
    assert 1 < len(history["val_loss"]) < 40
    assert len({str(each) for each in gather_objects(history)}) == 1
    assert_same_on_all_ranks(model.get_weights(), "weights")
    own = model.evaluate(*held_back, verbose=0)
    np.testing.assert_allclose(min(history["val_loss"]), np.mean(gather_objects(own)), rtol=1e-5)
    names = {"loss": 1.0, **({"accuracy": 1.0} if hvd.rank() else {})}
    told = message_of(lambda: hvq.callbacks.average_metrics(names, hvd.global_process_set), ValueError)
    assert "different metrics" in told, told
    arrays = {"f1": np.array([hvd.rank(), 2], np.float32), "loss": 1.0}
    averages = hvq.callbacks.average_metrics(arrays, hvd.global_process_set)
    assert averages["loss"] == 1
    np.testing.assert_allclose(averages["f1"], [(hvd.size() - 1) / 2, 2])
    narrow = tf.Variable(tf.cast([hvd.rank(), 1], tf.bfloat16))
    hvq.callbacks.broadcast([narrow], hvd.size() - 1, hvd.global_process_set)
    assert tf.cast(narrow, tf.int32).numpy().tolist() == [hvd.size() - 1, 1]
    told = message_of(
        lambda: model.fit(x, y, verbose=0, callbacks=[hvq.callbacks.BestModelCheckpoint()]), ValueError
    )
    assert "filepath=None" in told, told


def learning_rates() -> None:
    """Warm-up and schedule set what Horovod's formulas say; momentum is corrected once by the ratio of the rates."""
    size, steps, epochs = hvd.size(), 4, 3
    x, y = data_of(steps)
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate.numpy()))
    )
    model = model_of()
    model.compile(hvq.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss="mse")
    callbacks = [
        hvq.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1),
        hvq.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=2),
        note,
    ]
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks).history
    expected = [0.2 / size * ((i + 1) / steps * (size - 1) / 2 + 1) for i in range(2 * steps)]
    expected += [0.2 * 0.5**0] * steps
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], expected[steps - 1 :: steps], rtol=1e-5)
    # m' = corrected momentum * m - rate * gradient, in numpy
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    model.compile(hvq.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), loss="mse")
    schedule = [0.4, 0.1, 0.3]
    callback = hvq.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: schedule[int(epoch)])
    ones = np.ones((4, 1), "f")
    model.fit(ones, ones, batch_size=4, epochs=3, verbose=0, callbacks=[callback])
    weight = momentum = 0.0
    rate = 1.0
    for new in schedule:
        momentum = 0.5 * new / rate * momentum - new * 2 * (weight - 1.0)
        weight, rate = weight + momentum, new
    np.testing.assert_allclose(float(model.layers[0].kernel.numpy()[0, 0]), weight, rtol=1e-5)
    model.compile(
        hvq.DistributedOptimizer(
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
        ),
        loss="mse",
    )
    told = message_of(
        lambda: model.fit(ones, ones, verbose=0, callbacks=[hvq.callbacks.LearningRateWarmupCallback(0.1)]),
        ValueError,
    )
    assert "learning-rate schedule" in told, told


# ---- messages where stock Horovod would wait, or train alone -----------------------------------------------------


def xla_is_refused() -> None:
    for scaled in (False, True):
        model = model_of()
        optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=GlobalQSGD(bits=8))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, loss="mse", jit_compile=True)
        told = message_of(lambda model=model: model.fit(*data_of(1), verbose=0))
        assert "jit_compile=False" in told, told


def averaging_twice_is_refused() -> None:
    model = model_of()
    optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    x, y = data_of(1)

    def gradients(tape_of: Any) -> Sequence[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape_of(tape).gradient(loss, [each.value for each in model.trainable_variables])

    inner = tf.function(lambda: gradients(hvd.DistributedGradientTape))
    for ours in (
        lambda: gradients(hvd.DistributedGradientTape),
        lambda: [tf.clip_by_norm(each, 1.0) for each in gradients(hvd.DistributedGradientTape)],
        inner,
    ):
        told = message_of(tf.function(lambda ours=ours: optimizer.apply(ours())), ValueError)
        assert "averaged them already" in told, told
    tf.function(lambda: optimizer.apply(gradients(lambda tape: tape)))()
    assert_same_on_all_ranks(model.get_weights(), "weights")


def _refusals() -> Iterator[tuple[str, Any]]:
    wrap = hvq.DistributedOptimizer
    sgd = keras.optimizers.SGD

    class Overriding(sgd):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply(grads, trainable_variables)

    yield "gradient_accumulation_steps=4", lambda: wrap(sgd(0.1), backward_passes_per_step=4)
    yield "use hvq.DistributedOptimizer once", lambda: wrap(wrap(sgd(0.1)))
    yield "overrides apply", lambda: wrap(Overriding(0.1))
    yield "keras.optimizers.Optimizer", lambda: wrap("sgd")
    yield "use an instance, GlobalQSGD()", lambda: wrap(sgd(0.1), compression=hvq.GlobalQSGD)
    yield "compression=3", lambda: wrap(sgd(0.1), compression=3)
    yield "op=Adasum", lambda: wrap(sgd(0.1), compression=hvq.QSGD(), op=hvd.Adasum)
    yield "op=77", lambda: wrap(sgd(0.1), op=77)
    yield "gradient_predivide_factor=0", lambda: wrap(sgd(0.1), gradient_predivide_factor=0)
    yield "it is for op=hvd.Average", lambda: wrap(sgd(0.1), gradient_predivide_factor=2.0, op=hvd.Sum)
    yield "groups=0", lambda: wrap(sgd(0.1), groups=0)
    yield "list of lists of variables", lambda: wrap(sgd(0.1), groups=[1])
    yield "list of lists of variables", lambda: wrap(sgd(0.1), groups=[[np.ones(3)]])
    variable = keras.Variable([0.0], name="twice")
    yield "'twice' appears twice", lambda: wrap(sgd(0.1), groups=[[variable], [variable]])
    yield "num_groups=2: Horovod has replaced it; use groups=2", lambda: wrap(sgd(0.1), num_groups=2)
    yield "process_set=[0, 1]: use an hvd.ProcessSet", lambda: wrap(sgd(0.1), process_set=[0, 1])
    yield "process_set=0: use an hvd.ProcessSet", lambda: wrap(sgd(0.1), process_set=0)
    unknown = wrap(sgd(0.1), process_set=hvd.ProcessSet([0, hvd.size() - 1]))
    yield "Horovod does not know it", lambda: unknown.apply([tf.constant([1.0])], [keras.Variable([0.0])])
    yield "device_dense=3: use the name", lambda: wrap(sgd(0.1), device_dense=3)
    yield "device_sparse='cpu0': use the name", lambda: wrap(sgd(0.1), device_sparse="cpu0")
    yield "sparse_as_dense='no': use True or False", lambda: wrap(sgd(0.1), sparse_as_dense="no")
    yield "scale_local_gradients=None: use", lambda: wrap(sgd(0.1), scale_local_gradients=None)
    yield "name=3: use a text", lambda: wrap(sgd(0.1), name=3)
    yield "var=3: use a variable", lambda: wrap(sgd(0.1)).register_local_var(3)
    yield "gradient_accumulation_steps=N", lambda: wrap(sgd(0.1), backward_passes_per_step=0)
    clipping = hvq.optim.BinSGDM(clipvalue=0.5)
    yield "clipvalue=0.5: with", lambda: wrap(clipping, compression=hvq.BinSGDM(server_bits=3))
    scaled = keras.optimizers.LossScaleOptimizer(sgd(0.1))
    scaled.build([variable])
    wrap(scaled.inner_optimizer)
    yield "give the LossScaleOptimizer to hvq", lambda: scaled.apply([tf.constant([1.0])])
    yield "BinSGDM needs compression", lambda: wrap(hvq.optim.BinSGDM(), compression=hvq.QSGD())
    yield "needs the optimizer of the same name", lambda: wrap(sgd(0.1), compression=hvq.BinSGDM())
    yield "Auto tries methods during training", lambda: hvq.Auto()
    made = type(wrap(sgd(0.1))).from_config(sgd(0.1).get_config())
    yield "use hvq.DistributedOptimizer(...) on it", lambda: made.build(model_of().trainable_variables)
    yield (
        "float8",
        lambda: wrap(sgd(0.1)).build(model_of(dtype="float8_from_mixed_float16").trainable_variables),
    )
    import horovod.tensorflow.keras as stock

    yield (
        "horovod_quant.keras.DistributedOptimizer",
        lambda: stock.DistributedOptimizer(sgd(0.1), compression=hvq.QSGD()),
    )


def bad_arguments() -> None:
    for expected, action in _refusals():
        told = message_of(action)
        assert expected in told, told


def workers_disagree() -> None:
    """On the bits: an error on all of them, not a wait."""
    model = model_of()
    bits = 4 + hvd.rank() % 2
    model.compile(
        hvq.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvq.GlobalQSGD(bits=bits)), loss="mse"
    )
    told = message_of(lambda: model.fit(*data_of(1), verbose=0))
    assert "did not send the same gradient" in told or "Mismatched" in told, told
