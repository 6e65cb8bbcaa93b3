from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_unbiased, fresh_states, gaussian, heavy_tailed, lockstep, same_bits, simulate
from hypothesis import given
from hypothesis import strategies as st

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.kernels.layout import TILE, tiles
from horovod_quant.schemes import BinSGDM
from horovod_quant.schemes.base import BinaryState, Gradient, Workers
from horovod_quant.schemes.chunks import Chunks

COPIES = 1000


def states_of(size: int, elements: int) -> list[list[BinaryState]]:
    """States as after some steps: ``|momentum| <= scale``."""
    states = []
    for worker in range(size):
        scale = np.abs(heavy_tailed(worker, elements))
        ratio = np.random.default_rng(worker).uniform(-1, 1, elements).astype(np.float32)
        states.append([BinaryState(ratio * scale, scale, 0.75)])
    return states


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_expectation_of_the_final_bit_is_the_mean_of_momentum_over_scale(size: int) -> None:
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
    result = simulate(BinSGDM(), [np.tile(g, COPIES) for g in gradients], states=repeated)
    # The bits have 24 random bits, u the roundings of float32.
    assert_unbiased(result.decoded[0][0].reshape(COPIES, TILE), np.mean(u, axis=0), 2.0, 1e-6)


def test_workers_draw_independent_bits() -> None:
    # Gradients of zero and fresh states: fair coins. Their average over 4 workers is seen in what they send.
    zeros = np.zeros(256 * TILE, np.float32)
    bits = []
    for rank in range(4):
        members = [Gradient(zeros, KeyChain(0, "w"), 0, fresh_states([zeros])[0])]
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
    key = KeyChain(4, "w").key("worker", 9, 0)
    words, _ = reference.binarize(gradient, copies.momentum, copies.scale, 0.75, key)
    assert same_bits(decoded, reference.decode_signs(words, 1.0, np.empty(3000, np.float32)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_tile_keeps_its_workers_momentum_and_becomes_nan_everywhere(value: float) -> None:
    states, before = states_of(3, 5000), states_of(3, 5000)
    gradients = [gaussian(i, 5000) for i in range(3)]
    gradients[1][2000] = value
    result = simulate(BinSGDM(), gradients, states=states)
    clean = states_of(3, 5000)
    simulate(BinSGDM(), [np.nan_to_num(g, nan=0.0, posinf=0.0) for g in gradients], states=clean)
    for own in result.decoded:
        assert np.flatnonzero(np.isnan(own[0])).tolist() == list(range(1024, 2048))
        assert set(np.unique(np.delete(own[0], slice(1024, 2048)))) == {-1.0, 1.0}
    for worker in range(3):
        for field in ("momentum", "scale"):
            got = getattr(states[worker][0], field)
            expected = getattr(clean[worker][0], field)
            if worker == 1:
                expected[1024:2048] = getattr(before[worker][0], field)[1024:2048]
            assert same_bits(got, expected)


def test_flags_of_every_tile_find_their_place() -> None:
    # 70 tiles among 2 and 3 workers: more than a word of flags in a piece.
    for size, broken in ((2, (0, 33, 34, 69)), (3, (22, 23, 46)), (8, (8, 9))):
        gradients = [gaussian(i, 70 * TILE - 5) for i in range(size)]
        for worker, tile in enumerate(broken):
            gradients[worker % size][tile * TILE + worker] = np.nan
        decoded = simulate(BinSGDM(), gradients).decoded[-1][0]
        assert tuple(np.unique(np.flatnonzero(np.isnan(decoded)) // TILE)) == broken
        assert np.isnan(decoded).sum() == sum(min(TILE, len(decoded) - t * TILE) for t in broken)


@pytest.mark.parametrize("draw", ["joint", "independent"])
def test_the_servers_bits_have_the_same_law_however_the_workers_bits_depend_on_each_other(draw: str) -> None:
    """Which is why the workers draw independently: joint draws would gain nothing."""
    size, copies = 4, 500
    ratios = np.random.default_rng(1).uniform(-1, 1, (size, TILE)).astype(np.float32)
    chain, words = KeyChain(0, "w"), []
    for rank, own in enumerate(ratios):
        key = chain.joint("worker", 0, rank, size) if draw == "joint" else chain.key("worker", 0, rank)
        momentum, scale = np.tile(own, copies), np.ones(TILE * copies, np.float32)
        words.append(reference.binarize(0 * scale, momentum, scale, 1.0, key)[0])
    bits = reference.unpack_codes(reference.vote(words, chain.key("server", 0)), 1, TILE * copies)
    assert_unbiased(2.0 * bits.reshape(-1, TILE) - 1, ratios.mean(axis=0), 2.0, 2.0**-22)


def test_a_gradient_without_state_is_refused() -> None:
    with pytest.raises(ValueError, match="BinSGDM exchanges only gradients of its own optimizer"):
        simulate(BinSGDM(), [np.ones(5)], states=None)


def test_the_sum_over_workers_is_what_is_decoded() -> None:
    states = [fresh_states([np.empty(100)]) for _ in range(4)]
    finished = lockstep(BinSGDM(), [[gaussian(0, 100)]] * 4, states)
    out = np.empty(100, np.float32)
    finished[2].write(0, 1.0, out)
    assert finished[2].active == 4
    assert np.array_equal(out, 4 * np.sign(gaussian(0, 100)))


@given(lengths=st.lists(st.integers(0, 5000), max_size=6), workers=st.integers(1, 9))
def test_chunks_serve_every_element_once_in_whole_tiles(lengths: list, workers: int) -> None:
    chunks = Chunks(lengths, workers)
    served = [np.zeros(length, int) for length in lengths]
    for worker in range(workers):
        tile = 0
        for segment in chunks.segments(worker):
            assert segment.tile == tile
            assert segment.start % TILE == 0
            assert segment.tile_count == tiles(segment.stop - segment.start) > 0
            assert segment.stop % TILE == 0 or segment.stop == lengths[segment.gradient]
            served[segment.gradient][segment.start : segment.stop] += 1
            tile += segment.tile_count
        assert tile == chunks.tile_count(worker)
    assert all((count == 1).all() for count in served)
    counts = [chunks.tile_count(worker) for worker in range(workers)]
    assert max(counts) - min(counts) <= 1
    assert chunks.parts(7) == [7 * tiles(length) for length in lengths]
