"""Exchanges the same gradients with one of the frameworks and writes down what comes back. Run by test_frameworks.py.

horovodrun -np 2 python frameworks_worker.py torch|tensorflow FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"first": (40, 60), "second": (3000,), "third": (3, 3, 16, 20)}
STEPS = 3
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgd": ("QSGD", {"bits": 4}),
    "qsgd-elias": ("QSGD", {"bits": 4, "coding": "elias"}),
    "nuqsgd": ("NUQSGD", {"bits": 5, "norm": "max"}),
    "global-qsgd": ("GlobalQSGD", {"bits": 8}),
    "global-qsgd-l2": ("GlobalQSGD", {"bits": 8, "norm": "l2"}),
    "global-qsgd-exponential": ("GlobalQSGD", {"bits": 4, "levels": "exponential"}),
    "eden": ("EDEN", {"bits": 2}),
    "binsgdm": ("BinSGDM", {}),
}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def with_torch(kind: str, arguments: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    import horovod.torch as hvd
    import torch

    import horovod_quant.torch as hvq

    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    plain: Any = hvq.optim.BinSGDM if kind == "BinSGDM" else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(
        plain(parameters.values(), lr=0.1),
        list(parameters.items()),
        compression=getattr(hvq, kind)(seed=5, **arguments),
    )
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        own = gradients(hvd.rank(), step)
        sum(
            (parameter * torch.from_numpy(own[name])).sum() for name, parameter in parameters.items()
        ).backward()
        optimizer.synchronize()
        found.append({name: parameter.grad.numpy().copy() for name, parameter in parameters.items()})
        with optimizer.skip_synchronize():
            optimizer.step()
    return found


def with_tensorflow(kind: str, arguments: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import horovod_quant.tensorflow as hvq

    variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvq.optim.BinSGDM() if kind == "BinSGDM" else tf.keras.optimizers.SGD(0.1)
    optimizer.build(list(variables.values()))
    if kind == "BinSGDM":
        arguments = {**arguments, "optimizer": optimizer}
    compressor = getattr(hvq, kind)(seed=5, named_parameters=variables.items(), **arguments)

    @tf.function
    def step(own: dict[str, Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable * own[name]) for name, variable in variables.items())
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        reduced = tape.gradient(loss, list(variables.values()))
        optimizer.apply_gradients(zip(reduced, variables.values()))
        return reduced

    found = []
    for number in range(STEPS):
        own = {name: tf.constant(value) for name, value in gradients(hvd.rank(), number).items()}
        found.append({name: value.numpy() for name, value in zip(variables, step(own))})
    return found


def main() -> None:
    framework, folder = sys.argv[1], Path(sys.argv[2])
    if framework == "torch":
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd
    hvd.init()
    exchange = with_torch if framework == "torch" else with_tensorflow
    arrays = {
        f"{method} {step} {name}": value
        for method, (kind, arguments) in METHODS.items()
        for step, values in enumerate(exchange(kind, arguments))
        for name, value in values.items()
    }
    np.savez(folder / f"{framework}-{hvd.rank()}.npz", **arrays)


if __name__ == "__main__":
    main()
