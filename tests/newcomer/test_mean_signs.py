"""A codec from outside the package: what it computes, with the same bits everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import gaussian, heavy_tailed, lockstep, same_bits
from mean_signs import MeanSigns

from horovod_quant import kernels, simulator
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.reference import as_float32
from horovod_quant.schemes import Hierarchical

LENGTHS = (0, 1, 31, 33, 1024, 1025, 5000, 20_000)


def groups_of(workers: int) -> list[list[np.ndarray]]:
    return [[heavy_tailed(10 * rank + i, n) for i, n in enumerate(LENGTHS)] for rank in range(workers)]


def signs_times_means(x: np.ndarray, bucket_size: int) -> np.ndarray:
    found = np.empty(len(x))
    for low in range(0, len(x), bucket_size):
        bucket = x[low : low + bucket_size].astype(np.float64)
        found[low : low + bucket_size] = np.where(bucket < 0, -1, 1) * np.abs(bucket).mean()
    return found


@pytest.mark.parametrize("bucket_size", [32, 96, 1024, 4096])
def test_every_worker_gets_the_sum_of_signs_times_means(bucket_size: int) -> None:
    groups = groups_of(3)
    decoded = simulator.run(MeanSigns(bucket_size), groups, factor=1.0).decoded
    for i, own in enumerate(zip(*groups)):
        expected = sum(signs_times_means(x, bucket_size) for x in own)
        for worker in decoded:
            np.testing.assert_allclose(worker[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bucket_size", [96, 1024])
@pytest.mark.parametrize("local_size", [1, 2])
def test_native_and_numpy_kernels_return_the_same_bits(bucket_size: int, local_size: int) -> None:
    scheme = MeanSigns(bucket_size)
    chosen = scheme if local_size == 1 else Hierarchical(scheme, inside=8)
    results = [
        simulator.run(chosen, groups_of(4), local_size=local_size, kernels=backend).decoded
        for backend in ("numpy", "native")
    ]
    for one, other in zip(*results):
        assert all(same_bits(a, b) for a, b in zip(one, other))
        assert all(same_bits(a, b) for a, b in zip(one, results[0][0]))


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_gradients_of_all_types(dtype: str) -> None:
    groups = groups_of(2)
    if dtype == "bfloat16":  # the upper half of a float32's bits
        stored = [[(x.view(np.uint32) >> 16).astype(np.uint16) for x in own] for own in groups]
    else:
        stored = [[x.astype(dtype) for x in own] for own in groups]
    read = [[as_float32(x) for x in own] for own in stored]
    backend = kernels.get()
    ours, theirs = (lockstep(MeanSigns(), each, kernels=backend)[1] for each in (stored, read))
    for i, x in enumerate(read[0]):
        found, expected = (each.write(i, 0.5, np.empty_like(x)) for each in (ours, theirs))
        assert same_bits(found, expected)
        as_stored = ours.write(i, 0.5, np.empty_like(stored[0][i]))
        np.testing.assert_allclose(as_float32(as_stored), expected, rtol=2**-8)


FEW = [[heavy_tailed(rank, n) for n in (0, 33, 1025)] for rank in range(2)]
NONE = [[None] * 3] * 2
"""The states of few gradients: no scheme but BinSGDM has any."""


def test_tensorflow_operations_in_a_graph_return_the_same_bits() -> None:
    tf = pytest.importorskip("tensorflow")
    from horovod_quant.tensorflow import kernels as operations

    @tf.function
    def averages(tensors: list) -> list:
        decoded = lockstep(MeanSigns(96), tensors, NONE, kernels=operations)[1]
        return [decoded.write(i, 0.5, operations.empty(len(x))) for i, x in enumerate(FEW[0])]

    found = averages([[tf.constant(x) for x in own] for own in FEW])
    expected = simulator.run(MeanSigns(96), FEW).decoded[1]
    assert all(same_bits(a.numpy(), b) for a, b in zip(found, expected))


def test_gradients_that_are_given_as_spans() -> None:
    """What the frontend for PyTorch gives."""
    spans = [[BufferView(x.dtype, len(x), lambda owner: owner).at(0, x, x) for x in own] for own in FEW]
    found, expected = (lockstep(MeanSigns(), each, NONE)[0] for each in (spans, FEW))
    for i, x in enumerate(FEW[0]):
        assert same_bits(found.write(i, 1.0, np.empty_like(x)), expected.write(i, 1.0, np.empty_like(x)))


@pytest.mark.parametrize("backend", ["numpy", "native"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_all_workers_in_its_bucket(bad: float, backend: str) -> None:
    groups = groups_of(3)
    groups[1][6][1024 + 17] = bad
    for own in simulator.run(MeanSigns(), groups, kernels=backend).decoded:
        broken = np.isnan(own[6])
        assert np.all(broken[1024:2048])
        assert not np.any(broken[:1024])
        assert not np.any(broken[2048:])
        assert all(np.all(np.isfinite(own[i])) for i in range(len(LENGTHS)) if i != 6)


@pytest.mark.parametrize("bucket_size", [32, 1024])
def test_the_error_of_gaussian_gradients_is_as_stated(bucket_size: int) -> None:
    for workers in (1, 4):
        error = simulator.run(MeanSigns(bucket_size), gaussian(0, workers, 200_000)).nmse
        assert error == pytest.approx(MeanSigns(bucket_size).expected_nmse(workers, 1), rel=0.02)


@pytest.mark.parametrize("bucket_size", [0, -32, 33, 1024.0, True, "1024", None])
def test_a_bad_bucket_size_is_refused(bucket_size: object) -> None:
    with pytest.raises(ValueError, match="bucket_size=.*: use a multiple of 32"):
        MeanSigns(bucket_size)  # type: ignore[arg-type]
