"""Schemes that are not part of the package have what the package's have, and what their papers say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import assert_mean, assert_unbiased, gaussian, heavy_tailed, same_bits
from literature import LITERATURE, Natural, ScaledSign, TernGrad

from horovod_quant import simulator
from horovod_quant.kernels import native_library
from horovod_quant.schemes import GlobalQSGD
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import Hierarchical

every_scheme = pytest.mark.parametrize("scheme", LITERATURE.values(), ids=LITERATURE)
LENGTHS = (0, 1, 33, 1024, 5000)


def groups_of(workers: int) -> list[list[np.ndarray]]:
    return [[heavy_tailed(10 * rank + i, n) for i, n in enumerate(LENGTHS)] for rank in range(workers)]


@every_scheme
@pytest.mark.parametrize("local_size", [1, 2])
def test_the_native_kernels_return_the_references_bits(scheme: Scheme, local_size: int) -> None:
    native_library.load()
    scheme = scheme if local_size == 1 else Hierarchical(scheme)
    results = [
        simulator.run(scheme, groups_of(4), step=7, local_size=local_size, kernels=backend)
        for backend in ("numpy", "native")
    ]
    for own, other in zip(*(result.decoded for result in results)):
        assert all(same_bits(one, two) for one, two in zip(own, other))
        assert all(same_bits(one, two) for one, two in zip(own, results[0].decoded[0]))


@every_scheme
def test_zeros_are_exact(scheme: Scheme) -> None:
    result = simulator.run(scheme, [np.zeros(3000, np.float32)] * 3)
    assert not np.any(result.decoded[0][0])


@every_scheme
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_everybody_and_no_other_tensor(scheme: Scheme, bad: float) -> None:
    groups = groups_of(3)
    groups[1][4][17] = bad
    decoded = simulator.run(scheme, groups).decoded
    for own in decoded:
        assert not np.any(np.isfinite(own[4]))
        assert all(np.all(np.isfinite(array)) for array in own[:4])


@every_scheme
def test_tensors_of_a_group_do_not_matter_to_each_other(scheme: Scheme) -> None:
    groups = groups_of(2)
    together = simulator.run(scheme, groups).decoded[0]
    for i, array in enumerate(together):
        alone = simulator.run(scheme, [[own[i]] for own in groups], names=[str(i)]).decoded[0][0]
        assert same_bits(array, alone)


@every_scheme
def test_a_hierarchical_exchange_keeps_tensors_whole(scheme: Scheme) -> None:
    """Two nodes whose workers agree get what two workers get."""
    two = groups_of(2)
    expected = simulator.run(scheme, two).decoded[0]
    four = [own for own in two for _ in range(2)]
    result = simulator.run(Hierarchical(scheme), four, local_size=2)
    assert all(same_bits(one, other) for one, other in zip(expected, result.decoded[0]))


# ---- TernGrad


def test_terngrads_average_without_clipping_is_unbiased() -> None:
    copies, workers = 4000, [gaussian(rank, 64) for rank in range(3)]
    result = simulator.run(TernGrad(clip=None), [np.tile(g, copies) for g in workers])
    reach = 2 * float(np.abs(workers).max())
    expected = np.mean(np.array(workers, np.float64), axis=0)
    assert_unbiased(result.decoded[0][0].reshape(copies, 64), expected, reach, reach * 2.0**-22)


def test_terngrad_has_2n_plus_1_values_and_one_scale() -> None:
    groups = [gaussian(rank, 20_000) for rank in range(4)]
    (decoded,) = simulator.run(TernGrad(clip=2.0), groups).decoded[0]
    limits = [2.0 * g.astype(np.float64).std() for g in groups]
    levels = np.unique(decoded)
    assert len(levels) == 9
    assert levels[-1] == pytest.approx(max(limits), rel=1e-5)
    assert np.allclose(np.diff(levels), max(limits) / 4, rtol=1e-5)


def test_terngrad_cuts_elements_off_before_it_rounds_them() -> None:
    """The mean of many roundings of an element is that of its clipped value, by each worker's own deviation."""
    copies = 40_000
    pattern = np.array([4.0, -4.0, *[0.5, -0.5] * 15], np.float32)
    groups = [np.tile(pattern * scale, copies) for scale in (1.0, 0.25)]
    (decoded,) = simulator.run(TernGrad(clip=2.0), groups).decoded[0]
    deviation = pattern.astype(np.float64).std()
    expected = np.clip(pattern, -2 * deviation, 2 * deviation) * (1 + 0.25) / 2
    samples = decoded.reshape(copies, len(pattern))
    for element in (0, 1, 2, 3):
        assert_mean(samples[:, element], expected[element], 1e-5)


def test_terngrad_without_clipping_is_global_qsgd_of_one_level_and_one_bucket() -> None:
    groups = [heavy_tailed(rank, 3000) for rank in range(4)]
    one_level = GlobalQSGD(4, bucket_size=4096, rounding="independent")
    assert one_level.levels_for(4) == 1
    ours, theirs = (simulator.run(scheme, groups).decoded[0][0] for scheme in (TernGrad(None), one_level))
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, math.inf, True, "2.5"])
def test_terngrad_checks_its_argument(clip: object) -> None:
    with pytest.raises(ValueError, match="clip=.*use a positive number"):
        TernGrad(clip)


def test_terngrads_largest_number_of_workers() -> None:
    TernGrad().check_workers(32767)
    with pytest.raises(ValueError, match="32768 workers"):
        TernGrad().check_workers(32768)


def test_terngrads_predicted_error_is_the_measured_one() -> None:
    for clip in (1.0, 2.5):
        groups = [gaussian(rank, 200_000) for rank in range(4)]
        measured = math.sqrt(simulator.run(TernGrad(clip), groups).nmse)
        assert TernGrad(clip).relative_error(4, 4) == pytest.approx(measured, rel=0.02)


# ---- the others


def test_scaled_signs_of_one_worker() -> None:
    x = heavy_tailed(3, 5000)
    x[:3] = 0.0, -0.0, 1e-45
    (decoded,) = simulator.run(ScaledSign(), [x]).decoded[0]
    magnitude = np.abs(x.astype(np.float64)).mean()
    assert np.allclose(decoded, np.where(x < 0, -magnitude, magnitude), rtol=1e-6)
    assert len(np.unique(decoded)) == 2
    assert simulator.run(ScaledSign(), [x] * 2).bytes_sent == {"allgather": 4 * (1 + 157)}


def test_natural_compression_takes_a_power_of_two_beside_each_element() -> None:
    copies, x = 4000, heavy_tailed(5, 64)
    (decoded,) = simulator.run(Natural(), [np.tile(x, copies)]).decoded[0]
    mantissas, _ = np.frexp(decoded)
    assert np.all(np.abs(mantissas) == 0.5)
    below = np.exp2(np.floor(np.log2(np.abs(np.tile(x, copies)))))
    assert np.all((np.abs(decoded) == below) | (np.abs(decoded) == 2 * below))
    reach = 4 * float(np.abs(x).max())
    assert_unbiased(decoded.reshape(copies, 64), x.astype(np.float64), reach, reach * 2.0**-22)
