"""Keras training script with quantized gradients, to copy: replace data and model.

horovodrun -np 2 python minimal_keras.py    # append another class of hvq to use it, such as EDEN or BinSGDM
"""

import sys

import horovod.tensorflow.keras as hvd
import tensorflow as tf

import horovod_quant.tensorflow as hvq

hvd.init()
tf.keras.utils.set_random_seed(1)
images = tf.random.normal([4096, 64])
labels = tf.argmax(images @ tf.random.normal([64, 10]), axis=1)
own_images, own_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

layers = [tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(10)]
model = tf.keras.Sequential([tf.keras.Input([64]), *layers])
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
if isinstance(compression, hvq.BinSGDM):  # the one method that is an optimizer, too
    optimizer = hvq.optim.BinSGDM(learning_rate=0.003)
else:
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(own_images, own_labels, len(own_images) // 8, epochs=12, callbacks=callbacks, verbose=0)

_, accuracy = model.evaluate(images, labels, verbose=0)
sent = compression.stats().total
if hvd.rank() == 0:
    print(f"{compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)
