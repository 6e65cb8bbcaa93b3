"""What needs no other worker in TensorFlow. (The rest is in tests/parallel.)"""

from __future__ import annotations

import pickle
import re
from typing import Any, Callable

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvq = pytest.importorskip("horovod_quant.tensorflow")

needs_keras_2 = pytest.mark.skipif(
    int(getattr(tf.keras, "__version__", "2").partition(".")[0]) >= 3, reason="TensorFlow has Keras 3 here"
)

KINDS = [hvq.QSGD, hvq.NUQSGD, hvq.GlobalQSGD, hvq.BinSGDM]

BAD_ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvq.QSGD(overlap=False), "overlap=False"),
    (lambda: hvq.QSGD(kernels="fortran"), "use 'auto', 'native', 'numpy' or 'tensorflow'"),
    (lambda: hvq.QSGD(coding="elias", kernels="tensorflow"), "coding='elias': QSGD then needs its arrays"),
    (lambda: hvq.QSGD(overrides={"x": {"coding": "elias"}}, kernels="tensorflow"), "coding='elias'"),
    (lambda: hvq.BinSGDM(optimizer=tf.keras.optimizers.SGD()), "used with the optimizer SGD"),
]
BAD_ARGUMENTS_OF_OPTIMIZERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvq.BinSGDM(0.5, optimizer=hvq.optim.BinSGDM()), "beta=0.5: the optimizer has beta=[0.85]"),
    *(
        (
            lambda kind=kind: hvq.BinSGDM(server_bits=3, optimizer=kind(clipvalue=0.5)),
            "clipvalue=0.5: with server_bits above 1",
        )
        for kind in (hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM)
    ),
    (lambda: hvq.optim.BinSGDM(beta=-0.1), "beta=-0.1"),
    (lambda: hvq.optim.LegacyBinSGDM(beta=1.0), "beta=1.0"),
    (lambda: hvq.optim.BinSGDM(weight_decay=-1.0), "weight_decay=-1.0"),
    (lambda: hvq.optim.BinSGDM(clip_norm=-1.0), "clip_norm=-1.0: use a positive"),
    (lambda: hvq.optim.BinSGDM(float("nan")), "learning_rate=nan"),
    (lambda: hvq.optim.LegacyBinSGDM(-1.0), "learning_rate=-1.0"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@needs_keras_2
@pytest.mark.parametrize(
    ("make", "message"),
    BAD_ARGUMENTS_OF_OPTIMIZERS,
    ids=[message for _, message in BAD_ARGUMENTS_OF_OPTIMIZERS],
)
def test_bad_arguments_of_optimizers_are_named(make: Callable[[], Any], message: str) -> None:
    test_bad_arguments_are_named(make, message)


def test_a_misspelt_pattern_is_found_at_construction_when_the_names_are_given() -> None:
    named = [("weight", tf.Variable(tf.zeros(3)))]
    with pytest.raises(ValueError, match="'wieght' matches no parameter; the parameters are 'weight'"):
        hvq.QSGD(exclude="wieght", named_parameters=named)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressor_is_hashed_by_identity(kind: Any) -> None:
    one, other = kind(), kind()
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_keeps_the_arguments_and_drops_the_rest(kind: Any) -> None:
    variable = tf.Variable(tf.zeros(3))
    compressor = kind(seed=5, min_elements=7, exclude="bias", named_parameters=[("bias", variable)])
    other = pickle.loads(pickle.dumps(compressor))
    assert (other.policy.scheme, other.seed, other.policy.min_elements) == (compressor.policy.scheme, 5, 7)
    assert other.policy.exclude == ["bias"]
    assert len(pickle.dumps(compressor)) < 1000


def test_an_unknown_caller_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="is not a Horovod function"):
        hvq.QSGD().compress(tf.ones(2000))


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_binsgdm_minimizes_on_one_worker(kind: Any) -> None:
    weights = tf.Variable(np.linspace(-1, 1, 2000, dtype=np.float32))
    optimizer = kind(0.01)
    for _ in range(200):
        optimizer.apply_gradients([(2 * (weights - 0.25), weights)])
    assert np.abs(weights.numpy() - 0.25).mean() < 0.06


@needs_keras_2
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_binsgdm_takes_variables_of_other_types(dtype: Any) -> None:
    weights = tf.Variable(tf.zeros(2000, dtype))
    optimizer = hvq.optim.BinSGDM(0.5)
    optimizer.apply_gradients([(tf.ones(2000, dtype), weights)])
    assert set(np.unique(weights.numpy().astype(np.float32))) <= {-0.5, 0.5}
    assert optimizer._momenta[0].dtype is tf.float32


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_binsgdm_decays_weights_and_moves_by_the_rate(kind: Any) -> None:
    weights = tf.Variable(tf.fill([500], 2.0))
    kind(0.1, weight_decay=0.5).apply_gradients([(tf.ones(500), weights)])
    np.testing.assert_allclose(weights.numpy(), 2.0 * (1 - 0.1 * 0.5) - 0.1, rtol=1e-6)


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_binsgdm_reports_a_broken_gradient_and_keeps_its_state(kind: Any) -> None:
    weights = tf.Variable(tf.zeros(500))
    optimizer = kind(0.1)
    optimizer.apply_gradients([(tf.fill([500], float("nan")), weights)])
    assert np.isnan(weights.numpy()).all()
    momentum, scale, _ = optimizer._state_of(weights)
    assert not momentum.numpy().any()
    assert not scale.numpy().any()


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
@pytest.mark.parametrize("unit", [1.0, 3.0, 2.0**-16])
@pytest.mark.parametrize("eager", [False, True])
def test_binsgdm_moves_by_averages_whatever_their_unit(kind: Any, unit: float, eager: bool) -> None:
    averages = tf.constant([0.5, -0.25, 0.0, float("nan"), 0.125])
    weights, optimizer = tf.Variable(tf.zeros(5)), kind(0.5)
    largest = optimizer.stored_state(weights, [weights], averages=True).largest
    assert not [
        each.name for each in optimizer.variables() if "largest" in each.name
    ]  # no part of what is saved

    def step() -> None:
        largest.assign(0.5)
        optimizer.apply_gradients([(averages * unit, weights)])

    (step if eager else tf.function(step))()
    np.testing.assert_allclose(weights.numpy(), [-0.25, 0.125, 0.0, np.nan, -0.0625], rtol=1e-6)


@needs_keras_2
def test_averages_of_zero_move_nothing() -> None:
    weights, optimizer = tf.Variable(tf.ones(3)), hvq.optim.BinSGDM(0.5)
    optimizer.stored_state(weights, [weights], averages=True)
    optimizer.apply_gradients([(tf.zeros(3), weights)])
    assert weights.numpy().tolist() == [1.0, 1.0, 1.0]
    assert float(hvq.optim.largest_magnitude(tf.zeros([0]))) == 0.0


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_binsgdm_is_made_from_its_configuration(kind: Any) -> None:
    schedule = tf.keras.optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = kind(schedule, beta=0.9, weight_decay=0.25, seed=4)
    other = kind.from_config(optimizer.get_config())
    assert (other.beta, other.seed, other.weight_decay) == (0.9, 4, 0.25)
    assert other.get_config() == optimizer.get_config()


@needs_keras_2
@pytest.mark.parametrize("kind", [hvq.optim.BinSGDM, hvq.optim.LegacyBinSGDM])
def test_binsgdm_takes_sparse_gradients(kind: Any) -> None:
    """As dense ones: an element that has had a gradient moves on without one; the others stay."""
    table, optimizer = tf.Variable(tf.zeros([50, 8])), kind(0.5)
    for rows in ([3, 7], [3, 9]):
        before = table.numpy()
        sparse = tf.IndexedSlices(tf.ones([2, 8]), tf.constant(rows), tf.constant([50, 8]))
        optimizer.apply_gradients([(sparse, table)])
        assert (table.numpy()[rows] - before[rows] == -0.5).all()
    moved = (table.numpy() - before != 0).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [3, 7, 9]


def test_auto_says_what_to_use_instead() -> None:
    with pytest.raises(NotImplementedError, match="horovod-quant bench --framework tensorflow.*advise"):
        hvq.Auto(max_nmse=0.04)
    with pytest.raises(NotImplementedError, match="fixes the method when it traces"):
        hvq.Auto.compress(None)
