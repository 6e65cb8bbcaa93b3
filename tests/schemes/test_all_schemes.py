"""Properties that every scheme has."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    LENGTHS,
    SCHEMES,
    OverAllreduce,
    assert_unbiased,
    extended,
    fresh_states,
    gaussian,
    heavy_tailed,
    lockstep,
    owned_states,
    same_bits,
    simulate,
)

from horovod_quant.kernels import native, reference
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of

every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
WITH_ZERO = {name: scheme for name, scheme in SCHEMES.items() if not isinstance(scheme, BinSGDM)}
schemes_with_zero = pytest.mark.parametrize("scheme", WITH_ZERO.values(), ids=WITH_ZERO)
exponential = [GlobalQSGD(bits, norm, "exponential", 64) for bits in (2, 4, 8) for norm in ("max", "l2")]
averaging = [
    *(QSGD(bits, norm, 96) for bits in (2, 4, 8, 12, 16) for norm in ("l2", "max")),
    *(NUQSGD(bits, norm, 96) for bits in (2, 4, 8) for norm in ("l2", "max")),
    *(GlobalQSGD(bits, norm, "uniform", 96) for bits in (3, 4, 8, 12, 16) for norm in ("max", "l2")),
    *exponential,
    *(QSGD(bits, norm, 64, exchange="alltoall") for bits in (3, 8) for norm in ("l2", "max")),
    *(NUQSGD(bits, norm, 64, exchange="alltoall") for bits in (3, 8) for norm in ("l2", "max")),
    *(kind(4, "max", bucket_size=64, rounding="independent") for kind in (QSGD, NUQSGD, GlobalQSGD)),
]
COPIES = 4000


def bucket_of(scheme: Scheme) -> int:
    return getattr(scheme, "bucket_size", 1024)


def damaged(gradients: list, worker: int, element: int, value: float) -> list:
    copies = [g.copy() for g in gradients]
    copies[worker][element] = value
    return copies


# ---- many gradients


@every_scheme
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_group_in_one_call_has_the_bits_of_a_call_for_each_gradient(
    scheme: Scheme, workers: int, is_broken: bool
) -> None:
    """The native kernels take a whole group in one call; those of the reference take one gradient after another."""
    dtypes = [np.float32, np.float64, np.float16]
    lengths = [*LENGTHS, 5000]
    groups = [
        [gaussian(9 * rank + i, length).astype(dtypes[i % 3]) for i, length in enumerate(lengths)]
        for rank in range(workers)
    ]
    if is_broken:
        groups[workers - 1][-1][2000] = np.nan
    steps = [5, 2**32 + 3, 0][:workers]
    expected = lockstep(scheme, groups, steps=steps)
    for reference_s, finished in zip(expected, lockstep(scheme, groups, steps=steps, kernels=native)):
        at_once = [np.zeros(length, own.dtype) for length, own in zip(lengths, groups[0])]
        finished.decode(range(len(lengths)), 0.5, at_once)
        for i, (length, all_s) in enumerate(zip(lengths, at_once)):
            own = reference_s.write(i, 0.5, np.zeros(length, all_s.dtype))
            assert same_bits(finished.write(i, 0.5, np.zeros(length, all_s.dtype)), own)
            assert same_bits(all_s, own)
        some = list(range(len(lengths)))[::-2]
        outs = [np.zeros_like(at_once[i]) for i in some]
        finished.decode(some, 0.5, outs)
        assert all(same_bits(out, at_once[i]) for i, out in zip(some, outs))


# ---- no bias


def workers_of(size: int, bucket: int) -> list[np.ndarray]:
    return [np.concatenate([gaussian(i, bucket - 8), heavy_tailed(i, 8)]) for i in range(size)]


def check_unbiased(scheme: Scheme, workers: list[np.ndarray], custom_reduction: bool) -> None:
    """Buckets with the same content are independent samples."""
    size, bucket = len(workers), bucket_of(scheme)
    gradients = [np.tile(g, COPIES) for g in workers]
    result = simulate(scheme, gradients, custom_reduction=custom_reduction)
    # No estimate is further from 0 than the largest norm; pairwise reductions can double it at each addition.
    norm = np.linalg.norm if scheme.norm == "l2" else lambda x: np.abs(x).max()
    largest = float(norm(np.concatenate(workers)))
    reach = 2 * largest * (2 ** (size - 1) / size if custom_reduction else 1)
    # float32's roundings, and the random bits that rounding to more than 127 levels lacks (relative to a level).
    slack = largest * 2.0**-22
    mean = np.mean(np.array(workers, np.float64), axis=0)
    assert_unbiased(result.decoded[0][0].reshape(COPIES, bucket), mean, reach, slack)


@pytest.mark.parametrize("scheme", averaging, ids=str)
def test_averages_of_three_workers_are_unbiased(scheme: Scheme) -> None:
    check_unbiased(scheme, workers_of(3, bucket_of(scheme)), custom_reduction=False)


@pytest.mark.parametrize("scheme", exponential, ids=str)
def test_averages_by_a_custom_reduction_are_unbiased(scheme: Scheme) -> None:
    first, *others = workers_of(4, 64)
    check_unbiased(scheme, [first, *others], custom_reduction=True)
    # Much cancellation, and a bias in it has the sign of the mean, where all elements can show it together.
    check_unbiased(scheme, [first, np.float32(-0.9) * first], custom_reduction=True)


@pytest.mark.parametrize(
    "scheme", [QSGD(3, "max", 64), GlobalQSGD(5, "max", bucket_size=64), exponential[2]], ids=str
)
def test_huge_gradients_are_finite_and_unbiased(scheme: Scheme) -> None:
    workers = [np.float32(1e38) * np.sin(np.arange(64) + i).astype(np.float32) for i in range(3)]
    workers[0][5] = 3e38
    decoded = simulate(scheme, [np.tile(g, COPIES) for g in workers]).decoded[0][0].reshape(COPIES, 64)
    assert np.isfinite(decoded).all()
    assert_unbiased(decoded / 1e38, np.mean(np.array(workers, np.float64), axis=0) / 1e38, 6.0, 3e-6)


# ---- any number of workers, any length


@every_scheme
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_workers_decode_the_same_at_any_length(scheme: Scheme, size: int) -> None:
    groups = [[gaussian(100 * worker + i, d) for i, d in enumerate(LENGTHS)] for worker in range(size)]
    result = simulate(scheme, groups)
    for own in result.decoded:
        for d, decoded, first in zip(LENGTHS, own, result.decoded[0]):
            assert decoded.shape == (d,)
            assert np.isfinite(decoded).all()
            assert same_bits(decoded, first)
    if isinstance(scheme, BinSGDM):
        magnitudes = np.unique(np.abs(np.concatenate(result.decoded[0])))
        assert magnitudes[-1] <= 1.0001
        assert scheme.server_bits > 1 or magnitudes.tolist() == [1.0]
        return
    for i, decoded in enumerate(result.decoded[0]):
        for at in range(0, LENGTHS[i], bucket_of(scheme)):
            bucket = slice(at, at + bucket_of(scheme))
            parts = np.array([own[i][bucket] for own in groups], np.float64)
            # No element is off by more than the norm (two, where exponential levels are rounded twice).
            norm = np.abs(parts).max() if getattr(scheme, "norm", "l2") == "max" else np.linalg.norm(parts)
            assert np.abs(decoded[bucket] - parts.mean(axis=0)).max() <= 2.0001 * norm


@pytest.mark.parametrize("exchange", ["flat", "hierarchical", "by sums"])
@every_scheme
def test_workers_that_count_differently_decode_the_same(scheme: Scheme, exchange: str) -> None:
    """As after one has come later, or has missed steps: no worker knows another's count."""
    groups = [[gaussian(100 * worker + i, d) for i, d in enumerate((3000, 0, 33))] for worker in range(4)]
    local_size = 2 if exchange == "hierarchical" else 1
    workers = Workers(0, 4, local_size=local_size)
    scheme = (Hierarchical(scheme) if local_size > 1 else scheme).for_workers(workers)
    states = [owned_states(scheme, own, workers._replace(rank=rank)) for rank, own in enumerate(groups)]
    same = lockstep(scheme, groups, states, local_size=local_size)
    run = OverAllreduce(scheme) if exchange == "by sums" else scheme
    finished = lockstep(run, groups, states, local_size=local_size, steps=[5, 2**32 + 3, 0, 5])
    for i, first in enumerate(groups[0]):
        decoded, *others = (result.write(i, 0.25, np.empty(len(first), np.float32)) for result in finished)
        assert all(same_bits(decoded, other) for other in others)
        if i == 0 and not isinstance(inner_of(scheme), BinSGDM):
            exact = np.mean([own[0] for own in groups], axis=0, dtype=np.float64)
            usual = same[0].write(0, 0.25, np.empty(3000, np.float32))
            # Correlated rounding's gain is lost.
            assert ((decoded - exact) ** 2).sum() < 4 * ((usual - exact) ** 2).sum()


@pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["global-max"],
        SCHEMES["global-l2"],
        SCHEMES["global-rotated"],
        SCHEMES["exponential-max"],
        extended(SCHEMES["binsgdm"]),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_a_thousand_workers_decode_the_average(scheme: Scheme) -> None:
    # Element j has the same sign on all workers, the sign of the average; elements near 0 are left out.
    base = gaussian(0, 70)
    base += np.sign(base)
    gradients = [base * np.float32(0.5 + worker / 1000) for worker in range(1000)]
    states = [fresh_states([base]) for _ in range(1000)]
    result = simulate(scheme, gradients, states=states)
    decoded = result.decoded[0][0]
    assert all(same_bits(own[0], decoded) for own in result.decoded)
    if isinstance(scheme, BinSGDM):  # all workers are certain of the sign
        assert np.array_equal(decoded, np.sign(base))
    else:
        assert np.abs(decoded).max() <= 1.001 * np.abs(gradients[-1]).max() * (
            9 if scheme.norm == "l2" else 1
        )
        assert np.corrcoef(decoded, base)[0, 1] > 0.5


@pytest.mark.parametrize(
    "scheme",
    [QSGD(4, bucket_size=96, exchange="allgather"), NUQSGD(4, bucket_size=96, exchange="allgather")],
    ids=str,
)
def test_a_thousand_gathered_workers_decode_the_average(scheme: Scheme) -> None:
    base = gaussian(0, 70)
    groups = [[base * np.float32(0.5 + worker / 1000)] for worker in range(1000)]
    finished = lockstep(scheme, groups)
    out = [np.empty(70, np.float32) for _ in range(2)]
    for decoded, result in zip(out, (finished[0], finished[-1])):
        assert result.active == 1000
        result.write(0, 1 / 1000, decoded)
    assert same_bits(out[0], out[1])
    # The variance of an element is at most a quarter of the square of a level gap (the norm / 4 suffices for both),
    # averaged over 1000 workers; 6 deviations, 2e-9 for each of 70 comparisons.
    deviation = 1.5 * np.linalg.norm(base) / 8 / 1000**0.5
    assert np.abs(out[0] - base * np.float32(0.9995)).max() < 6 * deviation


def test_ten_million_elements_are_exchanged() -> None:
    gradients = [np.resize(gaussian(i, 1_000_003), 10**7) for i in range(2)]
    result = simulate(GlobalQSGD(8), gradients)
    decoded = result.decoded[0][0]
    assert same_bits(decoded, result.decoded[1][0])
    level = np.float32(max(np.abs(g).max() for g in gradients) / 63)
    for at in (
        0,
        5 * 10**6 - 7,
        10**7 - 1000,
    ):  # nothing is displaced: no element is off by more than a level
        part = slice(at, at + 1000)
        assert np.abs(decoded[part] - (gradients[0][part] + gradients[1][part]) / 2).max() <= level * 1.0001


# ---- independence of what is exchanged together


@every_scheme
def test_a_group_of_tensors_is_exchanged_as_each_alone(scheme: Scheme) -> None:
    # With other tensors in the group, other workers serve other chunks.
    lengths = (5000, 33, 0, 1025, 1, 2048, 3000)
    groups = [[gaussian(10 * worker + i, d) for i, d in enumerate(lengths)] for worker in range(3)]
    names = [f"layer{i}.weight" for i in range(len(lengths))]
    together = simulate(scheme, groups, names=names, seed=3, step=7).decoded[0]
    for i, name in enumerate(names):
        alone = simulate(scheme, [[own[i]] for own in groups], names=[name], seed=3, step=7)
        assert same_bits(alone.decoded[0][0], together[i])
    backwards = simulate(scheme, [own[::-1] for own in groups], names=names[::-1], seed=3, step=7).decoded[0]
    assert all(map(same_bits, backwards[::-1], together))


@every_scheme
def test_seed_name_and_step_select_the_random_bits(scheme: Scheme) -> None:
    gradients = [gaussian(worker, 3000) for worker in range(2)]
    base = simulate(scheme, gradients).decoded[0][0]
    assert same_bits(simulate(scheme, gradients).decoded[0][0], base)
    for other in ({"seed": 1}, {"step": 1}, {"names": ["other"]}):
        assert not same_bits(simulate(scheme, gradients, **other).decoded[0][0], base), other


# ---- inputs and outputs


@every_scheme
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint16])
def test_other_types_are_converted_first_and_last(scheme: Scheme, dtype: type) -> None:
    exact = [gaussian(worker, 2500) for worker in range(3)]
    exact[1][1500] = np.nan
    inputs = [[reference.store_float32(g, np.empty(2500, dtype))] for g in exact]
    converted = [[reference.as_float32(g[0])] for g in inputs]
    for custom_reduction in (False, True):
        narrow = lockstep(scheme, inputs, custom_reduction=custom_reduction)
        wide = lockstep(scheme, converted, custom_reduction=custom_reduction)
        out, expected = np.empty(2500, dtype), np.empty(2500, np.float32)
        for rank in range(3):
            narrow[rank].write(0, 0.3, out)
            wide[rank].write(0, 0.3, expected)
            assert same_bits(out, reference.store_float32(expected, np.empty(2500, dtype)))


@every_scheme
def test_inputs_are_not_changed(scheme: Scheme) -> None:
    gradients = [gaussian(worker, 3000) for worker in range(3)]
    gradients[1][7] = np.inf
    copies = [g.copy() for g in gradients]
    for g in gradients:
        g.flags.writeable = False
    simulate(scheme, gradients)
    simulate(scheme, gradients, custom_reduction=True)
    assert all(map(same_bits, gradients, copies))


@every_scheme
def test_a_result_can_be_written_again_with_another_factor(scheme: Scheme) -> None:
    finished = lockstep(scheme, [[gaussian(worker, 1500)] for worker in range(2)])
    out = [np.empty(1500, np.float32) for _ in range(3)]
    for factor, decoded in zip((0.5, 1.0, 0.5), out):
        finished[0].write(0, factor, decoded)
    assert same_bits(out[0], out[2])
    assert same_bits(out[1], 2 * out[0])  # a power of two commutes with every rounding


# ---- special values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize(
    ("scheme", "custom_reduction"),
    [
        *((scheme, False) for scheme in SCHEMES.values()),
        (SCHEMES["exponential-max"], True),
        (SCHEMES["exponential-l2"], True),
    ],
    ids=[*SCHEMES, "exponential-max, reduced", "exponential-l2, reduced"],
)
def test_a_non_finite_element_gives_nan_in_its_bucket_and_nowhere_else(
    scheme: Scheme, value: float, worker: int, custom_reduction: bool
) -> None:
    gradients = [gaussian(i, 5000) for i in range(3)]
    clean = simulate(scheme, gradients, custom_reduction=custom_reduction).decoded[0][0]
    for element in (0, 1500, 4999):
        start = element // bucket_of(scheme) * bucket_of(scheme)
        result = simulate(
            scheme, damaged(gradients, worker, element, value), custom_reduction=custom_reduction
        )
        expected = clean.copy()
        expected[start : start + bucket_of(scheme)] = np.nan
        for own in result.decoded:
            assert same_bits(own[0], expected)


@schemes_with_zero
def test_zeros_and_subnormals_decode_to_exact_zeros(scheme: Scheme) -> None:
    for value in (0.0, -0.0, 1e-45, -1e-40, 1e-38, 2.0**-110):
        gradients = [np.full(1500, value, np.float32) for _ in range(3)]
        for custom_reduction in (False, True):
            decoded = simulate(scheme, gradients, custom_reduction=custom_reduction).decoded
            assert all(np.array_equal(own[0], np.zeros(1500)) for own in decoded)


@pytest.mark.parametrize(
    "scheme",
    [s for s in WITH_ZERO.values() if not isinstance(s, EDEN) and not getattr(s, "rotate", False)],
    ids=str,
)
def test_a_bucket_below_the_smallest_norm_decodes_to_zeros(scheme: Scheme) -> None:
    """docs/reliability.md says where it is. (What rotates leaves no element as it was, and has tests of its own.)"""
    for custom_reduction in (False, True):
        for norm, expected in ((2.0**-96, 2.0**-96), (2.0**-96 * (1 - 2.0**-20), 0.0)):
            gradient = np.zeros(100, np.float32)
            gradient[5] = norm
            decoded = simulate(scheme, [gradient], custom_reduction=custom_reduction).decoded[0][0]
            assert decoded[5] == expected
            assert not np.delete(decoded, 5).any()


def test_binsgdms_bits_know_no_smallest_gradient() -> None:
    gradients = [np.full(1500, 2.0**-110, np.float32) for _ in range(3)]
    states = [fresh_states([gradient]) for gradient in gradients]
    assert (simulate(BinSGDM(), gradients, states=states).decoded[0][0] == 1).all()


@every_scheme
@pytest.mark.parametrize("value", [1e300, -1e39])
def test_a_float64_that_float32_does_not_hold_gives_nan_in_its_bucket_and_nowhere_else(
    scheme: Scheme, value: float
) -> None:
    gradients = [gaussian(i, 5000).astype(np.float64) for i in range(3)]
    clean = lockstep(scheme, [[gradient] for gradient in gradients])[0].write(0, 1.0, np.empty(5000))
    for own in lockstep(scheme, [[gradient] for gradient in damaged(gradients, 1, 1500, value)]):
        decoded = own.write(0, 1.0, np.empty(5000))
        start = 1500 // bucket_of(scheme) * bucket_of(scheme)
        expected = clean.copy()
        expected[start : start + bucket_of(scheme)] = np.nan
        assert same_bits(decoded, expected)


@schemes_with_zero
def test_a_zero_bucket_is_exact_among_others(scheme: Scheme) -> None:
    gradients = [gaussian(i, 3 * 2048) for i in range(3)]
    for g in gradients:
        g[2048:4096] = 0
    decoded = simulate(scheme, gradients).decoded[0][0]
    bucket = bucket_of(scheme)
    inside = slice(-(-2048 // bucket) * bucket, 4096 // bucket * bucket)
    assert not decoded[inside].any()
    assert decoded[:2048].any()
    assert decoded[4096:].any()


@pytest.mark.parametrize("scheme", averaging, ids=str)
def test_one_worker_without_a_gradient_does_not_disturb_the_others(scheme: Scheme) -> None:
    gradients = [np.tile(gaussian(1, bucket_of(scheme)), 300), np.zeros(300 * bucket_of(scheme), np.float32)]
    decoded = simulate(scheme, gradients).decoded[0][0].reshape(300, -1)
    norm = np.linalg.norm if scheme.norm == "l2" else lambda x: np.abs(x).max()
    first = gradients[0][: bucket_of(scheme)]
    assert_unbiased(
        decoded, first.astype(np.float64) / 2, 2 * float(norm(first)), float(norm(first)) * 2.0**-22
    )


@pytest.mark.parametrize("scheme", [s for s in averaging if s.norm == "l2"], ids=str)
def test_square_sums_beyond_float32_decode_to_nan_not_to_something_wrong(scheme: Scheme) -> None:
    gradients = [np.full(200, 3e38, np.float32), np.zeros(200, np.float32)]
    assert np.isnan(simulate(scheme, gradients).decoded[1][0]).all()


@pytest.mark.parametrize("scheme", [s for s in averaging if s.norm == "l2"], ids=str)
def test_one_huge_element_survives_the_two_norm(scheme: Scheme) -> None:
    gradient = np.zeros(200, np.float32)
    gradient[7] = -3e38
    decoded = simulate(scheme, [gradient]).decoded[0][0]
    assert decoded[7] == pytest.approx(-3e38, rel=1e-6)
    assert not np.delete(decoded, 7).any()
