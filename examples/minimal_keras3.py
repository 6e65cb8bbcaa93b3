"""Keras 3 script with quantized gradients, to copy: replace data and model.

horovodrun -np 2 python minimal_keras3.py    # append another class of hvq to use it, such as EDEN or BinSGDM
"""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np

import horovod_quant.keras as hvq

hvd.init()
keras.utils.set_random_seed(1)
images = np.random.standard_normal([4096, 64]).astype("float32")
labels = np.argmax(images @ np.random.standard_normal([64, 10]), axis=1)
own_images, own_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input([64]), *layers])
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
if isinstance(compression, hvq.BinSGDM):  # the one method that is an optimizer, too
    optimizer = hvq.optim.BinSGDM(learning_rate=0.003)
else:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer = hvq.DistributedOptimizer(optimizer, compression=compression)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)

callbacks = [hvq.callbacks.BroadcastGlobalVariablesCallback(0), hvq.callbacks.MetricAverageCallback()]
model.fit(own_images, own_labels, len(own_images) // 8, epochs=12, callbacks=callbacks, verbose=0)

_, accuracy = model.evaluate(images, labels, verbose=0)
sent = compression.stats().total
if hvd.rank() == 0:
    print(f"{compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)
