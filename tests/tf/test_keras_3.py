"""Under Keras 3, where Horovod's optimizers do not average (scripts/test --latest); and what Keras 2 is told."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from helpers import has_keras_3

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horovod.tensorflow")
hvq = pytest.importorskip("horovod_quant.tensorflow")

with_keras_3 = pytest.mark.skipif(not has_keras_3(), reason="TensorFlow has Keras 2 here")


@pytest.fixture(scope="module", autouse=True)
def _initialized():
    hvd.init()


@pytest.mark.skipif(has_keras_3(), reason="TensorFlow has Keras 3 here")
def test_keras_2_is_refused():
    with pytest.raises(ImportError, match=r"for Keras 3.6 or later, and Keras 2.*horovod.tensorflow.keras"):
        importlib.import_module("horovod_quant.keras")


@with_keras_3
@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
@pytest.mark.parametrize("kind", [hvq.GlobalQSGD, hvq.QSGD, hvq.NUQSGD, hvq.BinSGDM])
def test_an_optimizer_is_refused_where_it_is_made(module, kind):
    with pytest.raises(RuntimeError, match=r"does not average gradients under Keras 3.*horovod_quant\.keras"):
        importlib.import_module(module).DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=kind())


@with_keras_3
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_the_optimizers_of_binsgdm_say_what_they_need(kind):
    with pytest.raises(RuntimeError, match=r"optimizer of Keras 2.*horovod_quant\.keras"):
        kind(1e-3)


@with_keras_3
def test_a_tape_works():
    model = tf.keras.Sequential([tf.keras.Input((40,)), tf.keras.layers.Dense(60)])
    variables = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(np.ones((2, 40), np.float32)) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=hvq.GlobalQSGD())
    assert [gradient.shape for gradient in tape.gradient(loss, variables)] == [(40, 60), (60,)]
