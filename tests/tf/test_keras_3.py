"""Under Keras 3, where Horovod's optimizers do not average. (CI has Keras 2; the README says where this has run.)"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horovod.tensorflow")
hvq = pytest.importorskip("horovod_quant.tensorflow")

pytestmark = pytest.mark.skipif(
    int(getattr(tf.keras, "__version__", "2").partition(".")[0]) < 3, reason="TensorFlow has Keras 2 here"
)


@pytest.fixture(scope="module", autouse=True)
def _initialized():
    hvd.init()


@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
@pytest.mark.parametrize("kind", [hvq.GlobalQSGD, hvq.QSGD, hvq.NUQSGD, hvq.BinSGDM])
def test_an_optimizer_is_refused_where_it_is_made(module, kind):
    with pytest.raises(RuntimeError, match="does not average gradients under Keras 3.*TF_USE_LEGACY_KERAS=1"):
        importlib.import_module(module).DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=kind())


@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_the_optimizers_of_binsgdm_say_what_they_need(kind):
    with pytest.raises(RuntimeError, match="optimizer of Keras 2.*tf-keras"):
        kind(1e-3)


def test_a_tape_works():
    model = tf.keras.Sequential([tf.keras.Input((40,)), tf.keras.layers.Dense(60)])
    variables = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(np.ones((2, 40), np.float32)) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=hvq.GlobalQSGD())
    assert [gradient.shape for gradient in tape.gradient(loss, variables)] == [(40, 60), (60,)]
