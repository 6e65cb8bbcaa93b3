"""What tf_scenarios.py tries, with hierarchical exchanges. Run by worker.py; see test_hierarchical_exchange.py."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from pathlib import Path
from typing import Any, Callable

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as keras_hvd
import numpy as np
import tensorflow as tf
from oracle import Oracle
from tf_harness import (
    IN_TENSORFLOW,
    METHODS,
    VARIANTS,
    Make,
    assert_bits_equal,
    assert_same_on_all_ranks,
    batches,
    gather_objects,
    keras_model,
    message_of,
    optimizer_for,
    rank_data,
)
from tf_scenarios import clean, finish  # noqa: F401 (part of a module of scenarios)
from turns import EVERY_CASE, taken

import horovod_quant.tensorflow as hvq
from horovod_quant.kernels.layout import TILE, ceil_div

HIERARCHICAL: Any = {"True": True}.get(os.environ["HIERARCHICAL"]) or int(os.environ["HIERARCHICAL"])
"""What the compressors are told."""

MAKERS = {
    name: functools.partial(make, hierarchical=HIERARCHICAL)
    for name, make in {**METHODS, **VARIANTS, **IN_TENSORFLOW}.items()
}


def start() -> int:
    static = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1"
    ranks_per_node = None if HIERARCHICAL is True else HIERARCHICAL
    hvd.init(process_sets=hvq.hierarchical_process_sets(ranks_per_node) if static else [])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    gc.freeze()
    return hvd.rank()


def a_tensor_smaller_than_the_node(make: Make) -> None:
    """Not every worker owns a part of it."""
    compressor = make(min_elements=0)
    oracle = Oracle(compressor)
    reduce = functools.partial(hvd.allreduce, name="small", compression=compressor)
    for function in (reduce, tf.function(reduce)):
        for _ in range(2):
            given = rank_data(70)
            expected = oracle.expected(gather_objects({"small": given}), "small", 1 / hvd.size())
            assert_bits_equal(function(tf.constant(given)).numpy(), expected, "small")


def what_travels_inside(make: Make) -> None:
    for inside in taken("float16", 8):
        compressor, name = make(inside=inside), f"inside.{inside}"
        oracle = Oracle(compressor)
        reduce = functools.partial(hvd.allreduce, name=name, compression=compressor)
        for function in (reduce, tf.function(reduce)):
            given = rank_data(5000)
            expected = oracle.expected(gather_objects({name: given}), name, 1 / hvd.size())
            assert_bits_equal(function(tf.constant(given)).numpy(), expected, name)


def dynamic_shapes(make: Make) -> None:
    """One trace serves gradients of any length, among them one that few workers own a part of."""
    compressor = make()
    oracle = Oracle(compressor)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, name="any", compression=compressor)

    for length in (5000, 33, 2500):
        given = rank_data(length)
        expected = oracle.expected(gather_objects({"any": given}), "any", 1 / hvd.size())
        if expected is not None:
            assert_bits_equal(reduce(tf.constant(given)).numpy(), expected, f"{length} elements")


def the_state_of_binsgdm_survives_the_broadcast(make: Make) -> None:
    """Horovod's callback broadcasts after the first step, when each worker has its own share already."""
    callbacks = [keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    runs = []
    for given in ([], callbacks):
        model, compressor = keras_model(), make()
        optimizer = keras_hvd.DistributedOptimizer(hvq.optim.BinSGDM(1e-3), compression=compressor)
        model.compile(optimizer=optimizer, loss="mse")
        x, y = next(batches(1))
        model.fit(x, y, batch_size=len(x) // 2, shuffle=False, epochs=1, verbose=0, callbacks=given)
        model.optimizer.gather_state()
        kernels = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
        runs.append([held.numpy() for each in kernels for held in model.optimizer._state_of(each)[:2]])
    for alone, broadcast in zip(*runs):
        assert_bits_equal(broadcast, alone, "momentum or scale")


def the_state_of_binsgdm_is_shared_out(make: Make) -> None:
    """It is saved whole or not at all, and shared out again when it was loaded, whatever is there."""
    local_size = _local_size()
    for legacy in taken(False, True):
        model, compressor = keras_model(), make(min_elements=0)
        optimizer = keras_hvd.DistributedOptimizer(optimizer_for(compressor, legacy), compression=compressor)
        model.compile(optimizer=optimizer, loss="mse")
        optimizer, checkpoint = model.optimizer, tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        sizes = [variable.shape.num_elements() for variable in model.trainable_variables]

        def train(model: Any = model) -> list[np.ndarray]:
            for x, y in batches(2):
                model.train_on_batch(x, y)
            return model.get_weights()

        def assert_shared_out(optimizer: Any = optimizer, sizes: list[int] = sizes) -> None:
            most = sum(min(size, ceil_div(ceil_div(size, TILE), local_size) * TILE) for size in sizes)
            assert _state_bytes(optimizer) <= 2 * 4 * most
            everyone = gather_objects(_state_bytes(optimizer))
            for first in range(0, hvd.size(), local_size):
                assert sum(everyone[first : first + local_size]) == 2 * 4 * sum(sizes)

        train()
        assert_shared_out()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "checkpoint")
            ways: list[Callable[[], Any]] = [
                optimizer.get_weights if legacy else functools.partial(optimizer.save_own_variables, {}),
                functools.partial(checkpoint.write, path),
                functools.partial(model.save_weights, path),
            ]
            if EVERY_CASE:  # it traces the model first
                ways.append(functools.partial(model.save, path))
            for save in ways:
                assert "gather_state()" in message_of(save, RuntimeError)
            optimizer.gather_state()
            checkpoint.write(path)
            whole = [variable.numpy() for variable in optimizer.variables()]
            weights, after = model.get_weights(), train()
            assert_shared_out()
            checkpoint.read(path).assert_consumed()
            from_checkpoint = train()
        model.set_weights(weights)
        optimizer.set_weights(whole)
        for expected, *loaded in zip(after, from_checkpoint, train()):
            for actual in loaded:
                assert_bits_equal(actual, expected, "weights after loading")
        assert_shared_out()


def _local_size() -> int:
    return hvd.local_size() if HIERARCHICAL is True else HIERARCHICAL


def _state_bytes(optimizer: Any) -> int:
    """What momentum and scale take on this worker."""
    held = [part.share for part in optimizer._state_parts()]
    held += [part.variable for part in optimizer._state_parts()]
    return sum(variable.numpy().nbytes for variable in held)


def the_state_of_binsgdm_is_gathered_saved_and_loaded(make: Make) -> None:
    local_size = _local_size()
    model, compressor = keras_model(), make()
    optimizer = keras_hvd.DistributedOptimizer(hvq.optim.BinSGDM(1e-3), compression=compressor)
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(*next(batches(1)))
    oracle = Oracle(compressor)
    everyone = gather_objects({name: raw for name, raw, _ in compressor.records})
    first = hvd.rank() // local_size * local_size
    assert "gather_state()" in message_of(model.optimizer.get_config, RuntimeError)
    model.optimizer.gather_state()
    for variable in model.trainable_variables:
        if len(variable.shape) < 2:
            continue
        oracle.expected(everyone, variable.name, 1.0)
        node = [kept[0] for kept in oracle._states[variable.name][first : first + local_size]]
        for place, kept in zip(model.optimizer._state_of(variable), zip(*(state[:2] for state in node))):
            # The parts in whatever order the workers own them.
            assert np.array_equal(np.sort(np.concatenate(kept)), np.sort(place.numpy().reshape(-1)))
    weights = [variable.numpy() for variable in model.optimizer.variables()]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.h5")
        model.save(path)
        loaded = keras_hvd.load_model(path, custom_optimizers=[hvq.optim.BinSGDM], compression=make())
    for kept, restored in zip(weights, loaded.optimizer.variables()):
        assert np.array_equal(kept, restored.numpy())
    for x, y in batches(2):
        assert model.train_on_batch(x, y) == loaded.train_on_batch(x, y)
    assert_same_on_all_ranks(loaded.get_weights(), "weights")
    for kept, restored in zip(model.get_weights(), loaded.get_weights()):
        assert_bits_equal(restored, kept, "weights after loading")
