"""A small model of Keras 3, its data, and its training compared with the simulator. Used by keras_scenarios.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from tf_harness import METHODS, GlobalQSGD, Make, assert_same_on_all_ranks, check_records

import horovod_quant.keras as hvq

MAKERS: dict[str, Make] = {
    **METHODS,
    "global-qsgd-in-tensorflow": lambda **common: GlobalQSGD(bits=8, kernels="tensorflow", **common),
    "eden-in-tensorflow": lambda **common: METHODS["eden"](kernels="tensorflow", **common),
}

KERNELS = {"variable 0", "variable 2"}
"""The names that random bits are drawn with, of what is quantized."""

BATCH = 8


def model_of(seed: int = 1, dtype: Any = "float32", rate: float = 0.0) -> Any:
    """Kernels that are quantized, and a bias that is not."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((40,)),
            keras.layers.Dense(70, activation="tanh", dtype=dtype),
            *([keras.layers.Dropout(rate)] if rate else []),
            keras.layers.Dense(30, use_bias=False, dtype=dtype),
        ]
    )


def data_of(steps: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A worker's batches."""
    draw = np.random.default_rng([hvd.rank() if rank is None else rank, 7]).standard_normal
    return draw((BATCH * steps, 40)).astype("f"), draw((BATCH * steps, 30)).astype("f")


def base_optimizer(make: Make | None, **options: Any) -> Any:
    if make is MAKERS["binsgdm"]:
        return hvq.optim.BinSGDM(1e-3, **options)
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def trained(
    make: Make,
    steps: int = 3,
    exchanges: int | None = None,
    optimizer: Any = None,
    compile_options: dict[str, Any] | None = None,
    model: Any = None,
    factor: float | None = None,
    process_set: Any = None,
    compressor: Any = None,
    callbacks: Sequence[Any] = (),
    **distributed: Any,
) -> tuple[Any, Any]:
    """Trains with ``model.fit``; checks every gradient against the simulator, and the weights."""
    compressor = make() if compressor is None else compressor
    model = model_of() if model is None else model
    optimizer = base_optimizer(make) if optimizer is None else optimizer
    distributed["process_set"] = process_set
    model.compile(
        optimizer=hvq.DistributedOptimizer(optimizer, compression=compressor, **distributed),
        loss="mse",
        **(compile_options or {}),
    )
    model.fit(*data_of(steps), batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))
    if process_set is None or process_set.included():
        if process_set is None or process_set.size() > 1:
            assert check_records(compressor, exchanges or steps, factor, process_set) == KERNELS
        assert_same_on_all_ranks(model.get_weights(), "weights", process_set)
    return model, compressor


def union_of(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The batches of one process that sees what all workers see in each step."""
    parts = [data_of(steps, rank) for rank in range(hvd.size())]
    joined = [
        np.concatenate([part[which].reshape(steps, BATCH, -1) for part in parts], axis=1) for which in (0, 1)
    ]
    x, y = (each.reshape(-1, each.shape[2]) for each in joined)
    return x, y


def elastic_state_of(model: Any, **values: Any) -> Any:
    """Horovod's state of a compiled model, as docs/keras.md makes it."""
    model.optimizer.build(model.trainable_variables)
    return hvd.elastic.TensorFlowKerasState(
        SimpleNamespace(built=True, variables=[each.value for each in model.weights]),
        SimpleNamespace(variables=lambda: [each.value for each in model.optimizer.variables]),
        **values,
    )
