from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from helpers import assert_unbiased, fresh_states, gaussian, heavy_tailed, lockstep, same_bits, simulate
from hypothesis import given
from hypothesis import strategies as st

from horovod_quant.codecs.signs import Signs
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import TILE, tiles
from horovod_quant.reductions.shards import shards_of
from horovod_quant.schemes import BinSGDM
from horovod_quant.schemes.base import BinaryState, Gradient, Workers

COPIES = 1000
ELEMENTS = 3000


def states_of(size: int, elements: int) -> list[list[BinaryState]]:
    """States as after some steps: ``|momentum| <= scale``."""
    states = []
    for worker in range(size):
        scale = np.abs(heavy_tailed(worker, elements))
        ratio = np.random.default_rng(worker).uniform(-1, 1, elements).astype(np.float32)
        states.append([BinaryState(ratio * scale, scale, 0.75)])
    return states


@pytest.mark.parametrize(
    ("size", "server_bits"), [(1, 1), (2, 1), (3, 1), (5, 1), (4, 3), (5, 2), (5, 3), (16, 3)]
)
def test_the_expectation_of_the_result_is_the_mean_of_momentum_over_scale(
    size: int, server_bits: int
) -> None:
    """Whether the result is a bit, an exact average, or one that is rounded because the codes have too few levels."""
    gradients = [gaussian(worker, TILE) for worker in range(size)]
    single = states_of(size, TILE)
    u = []
    for g, (state,) in zip(gradients, single):
        momentum = 0.75 * state.momentum.astype(np.float64) + 0.25 * g
        u.append(momentum / (0.75 * state.scale.astype(np.float64) + 0.25 * np.abs(g)))
    repeated = [
        [BinaryState(np.tile(state.momentum, COPIES), np.tile(state.scale, COPIES), 0.75)]
        for (state,) in single
    ]
    result = simulate(BinSGDM(server_bits), [np.tile(g, COPIES) for g in gradients], states=repeated)
    # The bits have 24 random bits, u the roundings of float32.
    assert_unbiased(result.decoded[0][0].reshape(COPIES, TILE), np.mean(u, axis=0), 2.0, 1e-6)


def test_workers_draw_independent_bits() -> None:
    # Gradients of zero and fresh states: fair coins. Their average over 4 workers is seen in what they send.
    zeros = np.zeros(256 * TILE, np.float32)
    bits = []
    for rank in range(4):
        members = [Gradient(zeros, RngKey(0, "w"), 0, fresh_states([zeros])[0])]
        request = next(BinSGDM().begin(members, Workers(rank, 4), reference))
        assert list(request.splits) == [64 * 32 + 2] * 4  # 64 tiles of signs, and their flags
        pieces = request.array.reshape(4, -1)[:, : 64 * 32]
        bits.append(reference.unpack_codes(np.ascontiguousarray(pieces).reshape(-1), 1, len(zeros)))
    signs = 2 * np.array(bits, np.float64) - 1
    for i in range(4):
        for j in range(i):  # 6 correlations of N = 2^18 pairs, 6 deviations: 2e-9 each
            assert abs((signs[i] * signs[j]).mean()) < 6 / len(zeros) ** 0.5


def test_momentum_and_scale_are_exponential_averages_kept_by_each_worker() -> None:
    states = [fresh_states([np.empty(1500)]) for _ in range(2)]
    momentum = [np.zeros(1500), np.zeros(1500)]
    scale = [np.zeros(1500), np.zeros(1500)]
    for step in range(5):
        gradients = [gaussian(10 * step + worker, 1500) for worker in range(2)]
        simulate(BinSGDM(), gradients, states=states, step=step)
        for worker, g in enumerate(gradients):
            momentum[worker] = 0.9 * momentum[worker] + 0.1 * g
            scale[worker] = 0.9 * scale[worker] + 0.1 * np.abs(g)
            np.testing.assert_allclose(states[worker][0].momentum, momentum[worker], rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(states[worker][0].scale, scale[worker], rtol=1e-6)


def test_the_first_update_of_agreeing_workers_is_the_sign() -> None:
    # After one step momentum is (1 - beta) g and scale its magnitude: u is the sign, and nobody hesitates.
    gradient = gaussian(0, 3000)
    for size in (1, 3, 8):
        states = [fresh_states([gradient]) for _ in range(size)]
        decoded = simulate(BinSGDM(), [gradient] * size, states=states).decoded[0][0]
        assert np.array_equal(decoded, np.sign(gradient))


def test_one_worker_decodes_its_own_bits() -> None:
    states, copies = states_of(1, 3000), states_of(1, 3000)[0][0]
    gradient = gaussian(5, 3000)
    decoded = simulate(BinSGDM(), [gradient], states=states, names=["w"], seed=4, step=9).decoded[0][0]
    key = RngKey(4, "w").key("worker", 9, 0)
    words, _ = reference.binarize(gradient, copies.momentum, copies.scale, 0.75, key)
    assert same_bits(decoded, reference.decode_signs(words, 1.0, np.empty(3000, np.float32)))


@pytest.mark.parametrize(
    ("value", "server_bits", "others"),
    [(np.nan, 1, {-1.0, 1.0}), (np.inf, 1, {-1.0, 1.0}), (np.nan, 3, {-3.0, -1.0, 1.0, 3.0})],
)
def test_a_non_finite_tile_keeps_its_workers_momentum_and_becomes_nan_everywhere(
    value: float, server_bits: int, others: set[float]
) -> None:
    factor = 1 / 3 if server_bits == 1 else 1.0
    states, before = states_of(3, 5000), states_of(3, 5000)
    gradients = [gaussian(i, 5000) for i in range(3)]
    gradients[1][2000] = value
    result = simulate(BinSGDM(server_bits), gradients, states=states, factor=factor)
    clean = states_of(3, 5000)
    simulate(BinSGDM(), [np.nan_to_num(g, nan=0.0, posinf=0.0) for g in gradients], states=clean)
    for own in result.decoded:
        assert np.flatnonzero(np.isnan(own[0])).tolist() == list(range(1024, 2048))
        assert set(np.unique(np.delete(own[0], slice(1024, 2048)))) == others
    for worker in range(3):
        for field in ("momentum", "scale"):
            got = getattr(states[worker][0], field)
            expected = getattr(clean[worker][0], field)
            if worker == 1:
                expected[1024:2048] = getattr(before[worker][0], field)[1024:2048]
            assert same_bits(got, expected)


@pytest.mark.parametrize("server_bits", [1, 3])
def test_flags_of_every_tile_find_their_place(server_bits: int) -> None:
    # 70 tiles among 2 and 3 workers: more than a word of flags in a piece.
    for size, broken in ((2, (0, 33, 34, 69)), (3, (22, 23, 46)), (8, (8, 9))):
        gradients = [gaussian(i, 70 * TILE - 5) for i in range(size)]
        for worker, tile in enumerate(broken):
            gradients[worker % size][tile * TILE + worker] = np.nan
        decoded = simulate(BinSGDM(server_bits), gradients).decoded[-1][0]
        assert tuple(np.unique(np.flatnonzero(np.isnan(decoded)) // TILE)) == broken
        assert np.isnan(decoded).sum() == sum(min(TILE, len(decoded) - t * TILE) for t in broken)


@pytest.mark.parametrize("draw", ["correlated", "independent"])
def test_the_servers_bits_have_the_same_law_however_the_workers_bits_depend_on_each_other(draw: str) -> None:
    """Which is why the workers draw independently: correlated draws would gain nothing."""
    size, copies = 4, 500
    ratios = np.random.default_rng(1).uniform(-1, 1, (size, TILE)).astype(np.float32)
    chain, words = RngKey(0, "w"), []
    for rank, own in enumerate(ratios):
        key = (
            chain.correlated("worker", 0, rank, size)
            if draw == "correlated"
            else chain.key("worker", 0, rank)
        )
        momentum, scale = np.tile(own, copies), np.ones(TILE * copies, np.float32)
        words.append(reference.binarize(0 * scale, momentum, scale, 1.0, key)[0])
    bits = reference.unpack_codes(reference.vote(words, chain.key("server", 0)), 1, TILE * copies)
    assert_unbiased(2.0 * bits.reshape(-1, TILE) - 1, ratios.mean(axis=0), 2.0, 2.0**-22)


def test_a_gradient_without_state_is_refused() -> None:
    with pytest.raises(ValueError, match="BinSGDM reduces only gradients of its optimizer"):
        simulate(BinSGDM(), [np.ones(5)], states=None)


def test_the_sum_over_workers_is_what_is_decoded() -> None:
    states = [fresh_states([np.empty(100)]) for _ in range(4)]
    finished = lockstep(BinSGDM(), [[gaussian(0, 100)]] * 4, states)
    out = np.empty(100, np.float32)
    finished[2].write(0, 1.0, out)
    assert finished[2].active == 4
    assert np.array_equal(out, 4 * np.sign(gaussian(0, 100)))


# ---- more bits from the servers


def words_of(size: int, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """What the workers draw from the states of `states_of`, for a gradient named "w", with seed 4 in step 9."""
    drawn = []
    for worker, (g, (state,)) in enumerate(zip(gradients, states_of(size, len(gradients[0])))):
        key = RngKey(4, "w").key("worker", 9, worker)
        drawn.append(reference.binarize(g, state.momentum, state.scale, state.beta, key)[0])
    return drawn


def sum_of(words: list[np.ndarray], elements: int) -> np.ndarray:
    return np.sum([2.0 * reference.unpack_codes(own, 1, elements) - 1 for own in words], axis=0)


def exchanged(size: int, server_bits: int, gradients: list[np.ndarray], **arguments: Any) -> np.ndarray:
    states = states_of(size, len(gradients[0]))
    result = simulate(
        BinSGDM(server_bits), gradients, states=states, names=["w"], seed=4, step=9, **arguments
    )
    assert all(same_bits(own[0], result.decoded[0][0]) for own in result.decoded)
    return result.decoded[0][0]


def least_bits(size: int) -> int:
    """With which the average is exact, by the docstring's words."""
    levels = size if size % 2 else size // 2
    return next(bits for bits in range(2, 9) if levels <= 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("size", range(1, 10))
def test_sums_are_exact_where_codes_have_enough_levels(size: int) -> None:
    gradients = [gaussian(worker, ELEMENTS) for worker in range(size)]
    exact = sum_of(words_of(size, gradients), ELEMENTS)
    assert len(np.unique(exact)) == size + 1, "a count that never occurs is not tested"
    for bits in (least_bits(size), 8):
        assert np.array_equal(exchanged(size, bits, gradients, factor=1.0), exact)
        np.testing.assert_allclose(exchanged(size, bits, gradients), exact / size, rtol=2e-7)
    if least_bits(size) > 2:
        assert not np.array_equal(exchanged(size, least_bits(size) - 1, gradients, factor=1.0), exact)


@pytest.mark.parametrize("server_bits", range(2, 9))
def test_any_possible_sum_of_signs_is_exact_with_enough_levels(server_bits: int) -> None:
    """Also with as many workers as there can be: the largest even and the largest odd number, and few."""
    levels = 2 ** (server_bits - 1) - 1
    for size in {1, 2, levels, 2 * levels}:
        elements = size + 1
        gradients = [
            np.where(np.arange(elements) > worker, 1, -1).astype(np.float32) for worker in range(size)
        ]
        states = [fresh_states([g]) for g in gradients]
        decoded = simulate(BinSGDM(server_bits), gradients, states=states, factor=1.0).decoded[0][0]
        assert np.array_equal(decoded, 2 * np.arange(elements) - size)


def test_least_bits_are_those_of_the_docstring() -> None:
    assert [least_bits(size) for size in (2, 3, 4, 6, 7, 8, 14, 16)] == [2, 3, 3, 3, 4, 4, 4, 5]


@pytest.mark.parametrize("size", [4, 20])
def test_an_average_of_zero_is_zero(size: int) -> None:
    gradients = [gaussian(0, ELEMENTS) * (-1) ** worker for worker in range(size)]
    states = [fresh_states([g]) for g in gradients]
    decoded = simulate(BinSGDM(server_bits=3), gradients, states=states).decoded[0][0]
    assert not decoded.view(np.uint32).any()  # nor -0


def test_one_bit_is_what_the_paper_draws() -> None:
    gradients = [gaussian(worker, ELEMENTS) for worker in range(3)]
    voted = reference.vote(words_of(3, gradients), RngKey(4, "w").key("server", 9))
    expected = reference.decode_signs(voted, 1.0, np.empty(ELEMENTS, np.float32))
    assert same_bits(exchanged(3, 1, gradients), expected)
    assert BinSGDM() == BinSGDM(server_bits=1)


@pytest.mark.parametrize("server_bits", range(1, 9))
def test_one_bit_up_and_server_bits_down(server_bits: int) -> None:
    sent = simulate(BinSGDM(server_bits), [gaussian(i, 64 * TILE) for i in range(4)]).bytes_sent
    one_bit, flags = 3 / 4 * 64 * TILE / 8, 3 / 4 * 4 * 4  # a word for the tiles of each segment
    assert sent == {"alltoall": one_bit + flags, "allgather": server_bits * one_bit + flags}


@pytest.mark.parametrize("value", [0, 9, True, 2.5, "auto", None])
def test_server_bits_that_there_are_not(value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"server_bits={value!r}: use an integer from 1 to 8")):
        BinSGDM(server_bits=value)


def test_numpy_integers_are_integers() -> None:
    assert repr(BinSGDM(server_bits=np.int64(3))) == "BinSGDM(server_bits=3)"


# ---- shards


@given(lengths=st.lists(st.integers(0, 5000), max_size=6), workers=st.integers(1, 9))
def test_every_element_is_in_one_shard_of_whole_tiles(lengths: list, workers: int) -> None:
    shards = shards_of(tuple(lengths), workers, TILE)
    reduced = [np.zeros(length, int) for length in lengths]
    for segment in shards.segments:
        assert segment.start % TILE == 0
        assert segment.elements > 0
        assert segment.stop % TILE == 0 or segment.stop == lengths[segment.tensor]
        reduced[segment.tensor][segment.start : segment.stop] += 1
    assert all((count == 1).all() for count in reduced)
    counts = [sum(tiles(segment.elements) for segment in segments) for segments in shards.of]
    assert max(counts) - min(counts) <= 1
    assert shards.lengths(Signs()) == [sum(Signs().words(each.elements) for each in own) for own in shards.of]
    assert sum(shards.lengths(Signs())) == sum(shards.lengths_by_tensor(Signs()))
