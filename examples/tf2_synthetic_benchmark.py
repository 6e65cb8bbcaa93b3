"""The same benchmark as torch_synthetic_benchmark.py, with TensorFlow.

    horovodrun -np 4 python examples/tf2_synthetic_benchmark.py --method none fp16 global-qsgd-8

Several methods are measured one after the other, each with a fresh model. Works with any number of workers.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; read when TensorFlow is imported

import horovod.tensorflow as hvd
import synthetic
import tensorflow as tf

import horovod_quant.tensorflow as hvq
from horovod_quant.frontends.methods import BINSGDM, parse

layers = tf.keras.layers


def convolution(images: tf.Tensor, channels: int, size: int, stride: int = 1) -> tf.Tensor:
    return layers.Conv2D(channels, size, stride, padding="same", use_bias=False)(images)


def block(images: tf.Tensor, channels: int, stride: int) -> tf.Tensor:
    """Two convolutions, and a shortcut around them."""
    path = layers.BatchNormalization()(convolution(images, channels, 3, stride))
    path = layers.BatchNormalization()(convolution(layers.ReLU()(path), channels, 3))
    if stride > 1 or images.shape[-1] != channels:
        images = convolution(images, channels, 1, stride)
    return layers.ReLU()(layers.Add()([path, images]))


def make_model(args: argparse.Namespace) -> tf.keras.Model:
    inputs = layers.Input((args.image_size, args.image_size, 3))
    images = convolution(inputs, args.width, 3)
    for stage in range(synthetic.STAGES):
        for number in range(args.blocks):
            images = block(images, args.width * 2**stage, stride=2 if stage and not number else 1)
    outputs = layers.Dense(synthetic.CLASSES)(layers.GlobalAveragePooling2D()(images))
    return tf.keras.Model(inputs, outputs)


def prepare(args: argparse.Namespace, method: str) -> synthetic.Task:
    tf.keras.backend.clear_session()  # for the same names of variables each time
    tf.keras.utils.set_random_seed(0)
    model = make_model(args)
    images, labels = map(tf.constant, synthetic.make_batch(args, hvd))
    images = tf.transpose(images, (0, 2, 3, 1))
    optimizer_class = hvq.optim.BinSGDM if method == BINSGDM else tf.keras.optimizers.SGD
    optimizer = optimizer_class(synthetic.learning_rate(method))
    optimizer.build(model.trainable_variables)
    # Momentum is in the optimizer, which the tape does not know.
    ours = {"optimizer": optimizer} if method == BINSGDM else {}
    compression = parse(method).compression(hvd, hvq, **ours)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    def step() -> None:
        train_step().numpy()

    def weights() -> list:
        return [variable.numpy() for variable in model.trainable_variables]

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return synthetic.Task(step, weights, compression)


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several workers share a machine
    tf.config.threading.set_inter_op_parallelism_threads(1)
    args = synthetic.parse_arguments("tf2_synthetic_benchmark.py", hvd)
    synthetic.compare(args, lambda method: prepare(args, method), hvd)


if __name__ == "__main__":
    main()
