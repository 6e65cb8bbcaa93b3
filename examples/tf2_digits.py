"""The same training as torch_digits.py, with TensorFlow and a custom training loop.

    horovodrun -np 4 python examples/tf2_digits.py --compression global-qsgd --bits 8

An ordinary Horovod training script: horovod_quant only appears as the argument ``compression`` of the
DistributedGradientTape. Works with any number of workers, including a single one without horovodrun.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; read when TensorFlow is imported

import digits
import horovod.tensorflow as hvd
import tensorflow as tf
import training

import horovod_quant.tensorflow as hvq


def make_model() -> tf.keras.Model:
    """Make a model of 29,000 parameters.

    98.6% of them are in tensors of at least 1,024 elements, which are quantized.
    """
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPool2D(2),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def make_batches(args: argparse.Namespace, seed: int, data: digits.Data) -> tf.data.Dataset:
    """Return this worker's share of the images, in another order each epoch.

    Every worker has the same number of batches.
    """
    share = len(data.train_images) // hvd.size()
    return (
        tf.data.Dataset.from_tensor_slices((data.train_images[..., None], data.train_labels))
        .take(share * hvd.size())
        .shard(hvd.size(), hvd.rank())
        .shuffle(share, seed=seed)
        .batch(args.batch_size // hvd.size(), drop_remainder=True)
    )


def make_optimizer(args: argparse.Namespace, steps: int, seed: int) -> tf.keras.optimizers.Optimizer:
    schedule = tf.keras.optimizers.schedules.CosineDecay(args.lr, steps)
    if args.optimizer == "sgd":
        return tf.keras.optimizers.SGD(schedule, momentum=0.9)
    if args.optimizer == "adam":
        return tf.keras.optimizers.Adam(schedule)
    return hvq.optim.BinSGDM(schedule, seed=seed)


def train(args: argparse.Namespace, seed: int, data: digits.Data) -> dict[str, Any]:
    """Train once; return the figures."""
    tf.keras.backend.clear_session()  # for the same names of variables each time: the random rounding depends on them
    tf.keras.utils.set_random_seed(seed)
    model = make_model()
    batches = make_batches(args, seed, data)
    steps = args.epochs * len(batches)
    optimizer = make_optimizer(args, steps, seed)
    optimizer.build(model.trainable_variables)
    if args.compression == "binsgdm":  # its momentum is in the optimizer, which the tape does not know
        compression = hvq.BinSGDM(optimizer=optimizer, seed=seed)
    else:
        compression = training.make_compression(args, seed, hvd, hvq)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    with training.Record(args, seed, steps, compression, model.count_params(), hvd) as record:
        for _ in range(args.epochs):
            for images, labels in batches:
                record.step(float(train_step(images, labels)))

    predicted = tf.argmax(model(data.test_images[..., None]), axis=1)
    accuracy = tf.reduce_mean(tf.cast(predicted == data.test_labels, tf.float32))
    return record.figures({"accuracy": float(accuracy)}, model.get_weights())


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several workers share a machine
    tf.config.threading.set_inter_op_parallelism_threads(1)
    args = digits.parse_arguments("tf2_digits.py", hvd, hvq)
    data = digits.load_data()
    training.train_all(args, lambda seed: train(args, seed, data), digits.describe, hvd)


if __name__ == "__main__":
    main()
