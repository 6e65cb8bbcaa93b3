"""The same training as keras_digits.py, with Keras 3.

    horovodrun -np 4 python examples/keras3_digits.py --compression global-qsgd --bits 8

Horovod's optimizer and callbacks do not work under Keras 3: optimizer, callbacks and compressors come from
horovod_quant.keras. ``--compression none`` averages in full precision. Works with any number of workers, including a
single one without horovodrun.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; read when TensorFlow is imported

import digits
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
import training
from keras_digits import RecordSteps
from tf2_digits import make_batches, make_model

import horovod_quant.keras as hvq

WARMUP_EPOCHS = 1


def make_optimizer(args: argparse.Namespace, seed: int) -> keras.optimizers.Optimizer:
    if args.optimizer == "sgd":
        return keras.optimizers.SGD(args.lr, momentum=0.9)
    if args.optimizer == "adam":
        return keras.optimizers.Adam(args.lr)
    return hvq.optim.BinSGDM(args.lr, seed=seed)


def train(args: argparse.Namespace, seed: int, data: digits.Data) -> dict[str, Any]:
    """Train once; return the figures."""
    keras.utils.set_random_seed(seed)
    model = make_model()
    batches = make_batches(args, seed, data)
    compression = training.make_compression(args, seed, hvd, hvq)
    model.compile(
        optimizer=hvq.DistributedOptimizer(make_optimizer(args, seed), compression=compression, groups=1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot run Horovod's operations
    )

    def cosine(epoch: float) -> float:
        return (1 + math.cos(math.pi * epoch / args.epochs)) / 2

    steps = args.epochs * len(batches)
    with training.Record(args, seed, steps, compression, model.count_params(), hvd) as record:
        callbacks = [
            hvq.callbacks.BroadcastGlobalVariablesCallback(0),
            hvq.callbacks.MetricAverageCallback(),
            hvq.callbacks.LearningRateWarmupCallback(args.lr, warmup_epochs=WARMUP_EPOCHS),
            hvq.callbacks.LearningRateScheduleCallback(
                args.lr, cosine, start_epoch=WARMUP_EPOCHS, staircase=False
            ),
            RecordSteps(record),
        ]
        model.fit(batches, epochs=args.epochs, callbacks=callbacks, verbose=0)

    _, accuracy = model.evaluate(data.test_images[..., None], data.test_labels, verbose=0)
    return record.figures({"accuracy": accuracy}, model.get_weights())


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several workers share a machine
    tf.config.threading.set_inter_op_parallelism_threads(1)
    args = digits.parse_arguments("keras3_digits.py", hvd, hvq)
    data = digits.load_data()
    training.train_all(args, lambda seed: train(args, seed, data), digits.describe, hvd)


if __name__ == "__main__":
    main()
