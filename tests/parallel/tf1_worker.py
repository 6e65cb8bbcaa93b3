"""Programs of TensorFlow 1, in its default graph. Run by test_tf1.py.

    horovodrun -np 2 python tf1_worker.py disable_eager_execution|disable_v2_behavior

Prints FINISHED when all went as it should.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_quant.tensorflow as hvq

sys.path.insert(0, str(Path(__file__).parent))
from oracle import Oracle

METHODS = [hvq.QSGD, hvq.NUQSGD, hvq.GlobalQSGD]


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    getattr(tf.compat.v1, sys.argv[1])()
    hvd.init()
    compressors = [method(kernels=kernels) for method in METHODS for kernels in ("native", "tensorflow")]
    inputs = tf.compat.v1.placeholder(tf.float32, [2000])
    sums = [
        hvd.allreduce(inputs, name=f"direct_{i}", op=hvd.Sum, compression=compressor)
        for i, compressor in enumerate(compressors)
    ]
    trainings = [training(i, compressor) for i, compressor in enumerate(compressors)]
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
        for i, (compressor, summed) in enumerate(zip(compressors, sums)):
            oracle, name = Oracle(compressor), f"direct_{i}"
            for step in range(2):
                given = [{name: data(rank, step, 2000)} for rank in range(hvd.size())]
                result = session.run(summed, {inputs: given[hvd.rank()][name]})
                expected = oracle.expected(given, name, 1.0)
                assert np.array_equal(result, expected), f"{type(compressor).__name__} {step}"
        for compressor, (update, loss, weights) in zip(compressors, trainings):
            losses = [session.run([loss, update])[0] for _ in range(5)]
            assert losses[-1] < losses[0], losses
            everyone = session.run(hvd.allgather(weights))
            assert (np.split(everyone, hvd.size()) == everyone[: len(everyone) // hvd.size()]).all()
            assert compressor.stats().total.ratio > 2
    print("FINISHED", flush=True)


def training(number: int, compressor: Any) -> tuple[Any, Any, Any]:
    """An update, the loss before it, and the weights."""
    weights = tf.compat.v1.get_variable(f"weights_{number}", [64, 40])
    loss = tf.reduce_mean((tf.constant(data(hvd.rank(), 9, 32, 64)) @ weights - 1.0) ** 2)
    optimizer = hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.05), compression=compressor
    )
    return optimizer.minimize(loss), loss, weights


def data(rank: int, step: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(shape).astype(np.float32)


if __name__ == "__main__":
    main()
