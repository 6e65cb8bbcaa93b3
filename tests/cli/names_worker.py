"""Exchanges a small model's gradients a few times. Run by test_doctor.py to see Horovod's response cache overflow.

horovodrun -np 2 python names_worker.py torch|tensorflow SCHEME
"""

from __future__ import annotations

import sys
from typing import Any

from horovod_quant.analysis.models import MODELS

SHAPES = MODELS["tiny"]
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgd": ("QSGD", {}),
    "global-qsgd": ("GlobalQSGD", {}),
    "exponential": ("GlobalQSGD", {"bits": 4, "levels": "exponential"}),
}
STEPS = 4


def with_torch(kind: str, arguments: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    import horovod_quant.torch as hvq

    hvd.init()
    torch.set_num_threads(1)
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        list(parameters.items()),
        compression=getattr(hvq, kind)(**arguments),
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss: Any = torch.ones(())
        for parameter in parameters.values():  # one after another, so that they arrive in the reverse order
            loss = loss * parameter.mean()
        loss.backward()
        optimizer.step()


def with_tensorflow(kind: str, arguments: dict[str, Any]) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import horovod_quant.tensorflow as hvq

    hvd.init()
    variables = [tf.Variable(tf.ones(shape), name=name) for name, shape in SHAPES.items()]
    compressor = getattr(hvq, kind)(**arguments)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(variable) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compressor)
        return [tf.reduce_sum(gradient) for gradient in tape.gradient(loss, variables)]

    for _ in range(STEPS):
        step()


if __name__ == "__main__":
    framework, scheme = sys.argv[1:]
    (with_torch if framework == "torch" else with_tensorflow)(*SCHEMES[scheme])
    print("EXCHANGED", flush=True)
