"""TensorFlow training script with quantized gradients, to copy: replace data and model.

horovodrun -np 2 python minimal_tensorflow.py    # append another class of hvq to use it, such as EDEN
"""

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import horovod_quant.tensorflow as hvq

hvd.init()
tf.random.set_seed(1)
images = tf.random.normal([4096, 64])
labels = tf.argmax(images @ tf.random.normal([64, 10]), axis=1)
own_images, own_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

w1 = tf.Variable(tf.random.normal([64, 256], stddev=0.15), name="w1")
w2 = tf.Variable(tf.random.normal([256, 10], stddev=0.09), name="w2")
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()  # outside of the step
hvd.broadcast_variables([w1, w2], root_rank=0)


@tf.function
def step():
    with tf.GradientTape() as tape:
        logits = tf.nn.relu(own_images @ w1) @ w2
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own_labels, logits))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    optimizer.apply_gradients(zip(tape.gradient(loss, [w1, w2]), [w1, w2]))


for _step in range(100):
    step()
right = tf.argmax(tf.nn.relu(images @ w1) @ w2, axis=1) == labels
if hvd.rank() == 0:
    accuracy, sent = float(tf.reduce_mean(tf.cast(right, tf.float32))), compression.stats().total
    print(f"{compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)
