"""The same elastic training as torch_digits_elastic.py, with TensorFlow.

    horovodrun --gloo -np 2 --min-np 2 --max-np 4 --host-discovery-script ./discover_hosts.sh \\
        python examples/tf2_digits_elastic.py --method global-qsgd-8

The discovery script prints lines such as ``localhost:2``; when its output changes, Horovod starts or stops workers.
The learning rate need not change then: the images of a batch are divided among the current workers.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; read when TensorFlow is imported

import digits
import elastic_digits
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tf2_digits import make_model, make_optimizer

import horovod_quant.tensorflow as hvq
from horovod_quant.frontends.methods import BINSGDM, parse


def shares(data: digits.Data, epoch: int, seen: int, batch_size: int) -> tf.data.Dataset:
    """Return this worker's batches of the rest of an epoch.

    Their number and sizes are the same on every worker.
    """
    left = np.random.default_rng(epoch).permutation(len(data.train_images))[seen:]
    left = left[: len(left) // hvd.size() * hvd.size()]
    images = data.train_images[left, ..., None]
    return (
        tf.data.Dataset.from_tensor_slices((images, data.train_labels[left]))
        .shard(hvd.size(), hvd.rank())
        .batch(batch_size // hvd.size())
    )


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several workers share a machine
    tf.config.threading.set_inter_op_parallelism_threads(1)
    parser, args = elastic_digits.parse_arguments("tf2_digits_elastic.py", hvd)
    tf.keras.backend.clear_session()  # where this is called twice, for the same names of variables
    tf.keras.utils.set_random_seed(0)
    data = digits.load_data()
    model = make_model()
    steps = args.epochs * -(-digits.TRAINING_IMAGES // args.batch_size)
    optimizer = make_optimizer(args, steps, seed=0)
    optimizer.build(model.trainable_variables)
    # Momentum is in the optimizer, which the tape does not know.
    ours = {"optimizer": optimizer} if args.method == BINSGDM else {}
    compression = parse(args.method).compression(hvd, hvq, **ours)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # Shapes without the number of images, which changes with the workers and must not retrace the step.
    @tf.function(input_signature=(tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64)))
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    def test_accuracy() -> float:
        predicted = tf.argmax(model(data.test_images[..., None]), axis=1)
        return float(tf.reduce_mean(tf.cast(predicted == data.test_labels, tf.float32)))

    @hvd.elastic.run
    def train(state: hvd.elastic.TensorFlowKerasState) -> None:
        """Train from the agreed state; begins anew whenever the workers change."""
        elastic_digits.check_workers(parser, args, hvd)
        while state.epoch < args.epochs:
            for images, labels in shares(data, state.epoch, state.seen, args.batch_size):
                train_step(images, labels)
                state.seen += len(images) * hvd.size()
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            state.seen = 0
            elastic_digits.report_epoch(args, state.epoch, test_accuracy(), hvd)

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, seen=0, batch=0)
    train(state)
    elastic_digits.report(args, state.batch, test_accuracy(), model.get_weights(), compression, hvd)


if __name__ == "__main__":
    main()
