"""Under Keras 3, where Horovod's optimizers do not average (scripts/test --latest); and what Keras 2 is told."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

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


def test_the_metrics_callback_is_public_in_the_module_for_keras_3():
    """Read, not imported: Keras 2 is refused."""
    spec = importlib.util.find_spec("horovod_quant")
    source = (Path(spec.origin).parent / "keras" / "__init__.py").read_text()
    (public,) = [
        each.value
        for each in ast.parse(source).body
        if isinstance(each, ast.Assign) and each.targets[0].id == "__all__"
    ]
    named = {each.value for each in public.elts if isinstance(each, ast.Constant)}
    assert "MetricsCallback" in named
    imported = {
        alias.asname or alias.name
        for each in ast.parse(source).body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert "MetricsCallback" in imported


@pytest.mark.skipif(has_keras_3(), reason="TensorFlow has Keras 3 here")
def test_under_keras_2_one_worker_finds_mistakes_of_an_optimizer():
    """Where it is made: its steps ask for no compression."""
    keras_hvd = importlib.import_module("horovod.tensorflow.keras")
    other, made = hvd.ProcessSet([0]), tf.keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="process_set=.*: Horovod reduces over .*; use the same for both"):
        keras_hvd.DistributedOptimizer(made, compression=hvq.QSGD(process_set=other))
    with pytest.raises(ValueError, match="hierarchical: it works only with all workers"):
        keras_hvd.DistributedOptimizer(made, process_set=other, compression=hvq.QSGD(hierarchical=True))
    with pytest.raises(ValueError, match="BinSGDM needs compression=hvq.BinSGDM"):
        keras_hvd.DistributedOptimizer(hvq.optim.BinSGDM(), compression=hvq.QSGD())
    with pytest.raises(ValueError, match="was used with the optimizer SGD"):
        keras_hvd.DistributedOptimizer(made, compression=hvq.BinSGDM())
    keras_hvd.DistributedOptimizer(made, process_set=other, compression=hvq.QSGD(process_set=other))


@with_keras_3
@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
@pytest.mark.parametrize("kind", [hvq.GlobalQSGD, hvq.QSGD, hvq.NUQSGD, hvq.BinSGDM])
def test_an_optimizer_is_refused_where_it_is_made(module, kind):
    remedy = r"does not average gradients under Keras 3.*horovod_quant\.keras.*\[v\.value for v in model\."
    with pytest.raises(RuntimeError, match=remedy):
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


def fit(compression, optimizer=None, built=False, units=60):
    hvq = importlib.import_module("horovod_quant.keras")
    model = tf.keras.Sequential([tf.keras.Input((40,)), tf.keras.layers.Dense(units, name="dense")])
    optimizer = tf.keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    if built:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer=hvq.DistributedOptimizer(optimizer, compression=compression), loss="mse")
    model.fit(np.ones((4, 40)), np.ones((4, units)), verbose=0)


@with_keras_3
def test_one_worker_finds_mistakes():
    """Though it averages nothing."""
    keras_hvq = importlib.import_module("horovod_quant.keras")
    fit(hvq.QSGD(exclude="*/bias"))
    for built in (False, True):
        with pytest.raises(
            ValueError, match="'[*].bais' matches no parameter; the parameters are '.*dense/kernel"
        ):
            fit(hvq.QSGD(exclude="*/bais"), built=built)
    with pytest.warns(RuntimeWarning, match="QSGD compresses nothing"):
        fit(hvq.QSGD(), units=2)
    with pytest.raises(ValueError, match="process_set=.*use the same for both"):
        fit(hvq.QSGD(process_set=hvd.ProcessSet([0])))
    with pytest.raises(ValueError, match="was used with the optimizer SGD"):
        fit(hvq.BinSGDM())
    with pytest.raises(ValueError, match="BinSGDM needs compression=hvq.BinSGDM"):
        fit(hvq.QSGD(), keras_hvq.optim.BinSGDM())
    with pytest.warns(RuntimeWarning, match="BinSGDM: .* another compression"):
        fit(None, keras_hvq.optim.BinSGDM())


@with_keras_3
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("QSGDinf", r"write QSGD\(\)"),
        ("DistributedOptimiser", "'DistributedOptimizer'"),
        ("globalqsgd", "'GlobalQSGD'"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_the_nearest(name, message):
    keras_hvq = importlib.import_module("horovod_quant.keras")
    with pytest.raises(
        AttributeError, match=f"module 'horovod_quant.keras' has no attribute '{name}'; .*{message}"
    ):
        getattr(keras_hvq, name)
