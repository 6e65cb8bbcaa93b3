from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from helpers import correlated_keys, examples, keys
from hypothesis import given
from hypothesis import strategies as st

from horovod_quant.kernels import reference as kernels
from horovod_quant.kernels.keys import ALL_ONES, Key, RngKey, hash32, keys_of

SAMPLES = 1 << 20


def scalar_hash(i: int, key: Key) -> int:
    """KERNELS.md, decision 4, on Python's integers."""
    mask = 0xFFFFFFFF
    h = (i * 0x9E3779B9 + key.k0) & mask
    h ^= h >> 16
    h = h * 0x7FEB352D & mask
    h ^= h >> 15
    h = (h + key.k1) & mask
    h = h * 0x846CA68B & mask
    h ^= h >> 16
    return ((h << key.shift) + key.addend & mask) ^ key.flip


def scalar_key(seed: int, name: str, stage: str, step: int, worker: int) -> Key:
    """SplitMix64's finalizer over seed, name, stage, step, worker; texts through BLAKE2b."""
    mask, state = (1 << 64) - 1, 0
    for value in (seed, name, stage, step, worker):
        if isinstance(value, str):
            value = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
        state = ((state ^ value & mask) + 0x9E3779B97F4A7C15) & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return Key(state & 0xFFFFFFFF, state >> 32)


@given(start=st.integers(0, 2**40), count=st.integers(0, 70), key=keys)
def test_hash_is_the_specified_one(start: int, count: int, key: Key) -> None:
    got = hash32(start, count, key)
    assert got.dtype == np.uint32
    assert got.tolist() == [scalar_hash(start + i, key) for i in range(count)]


def test_hash_does_not_depend_on_where_it_starts() -> None:
    key = RngKey(1, "w").key("worker", 2, 3)
    assert hash32(37, 100, key).tolist() == hash32(0, 137, key)[37:].tolist()


@examples(30)
@given(
    seed=st.integers(-(2**70), 2**70),
    name=st.text(max_size=20),
    stage=st.text(max_size=20),
    step=st.integers(0, 2**40),
    worker=st.integers(0, 2**20),
)
def test_key_is_the_specified_one(seed: int, name: str, stage: str, step: int, worker: int) -> None:
    assert RngKey(seed, name).key(stage, step, worker) == scalar_key(seed, name, stage, step, worker)


def test_every_component_selects_another_key() -> None:
    # 3^5 = 243 keys; two random 64-bit words among them are equal with probability 2e-15.
    keys = [
        RngKey(seed, name).key(stage, step, worker)
        for seed, name, stage, step, worker in itertools.product(
            (0, 1, -1), ("a", "b", "worker"), ("worker", "server", "a"), (0, 1, 2), (0, 1, 2)
        )
    ]
    assert len(set(keys)) == len(keys)
    # Each half alone differs too: both select the stream. 243^2 / 2 pairs, 7e-6 for an equal one.
    assert len({key.k0 for key in keys}) == len(keys) == len({key.k1 for key in keys})


def test_keys_are_the_same_in_every_chain_and_call() -> None:
    chain = RngKey(5, "layer.weight")
    assert (
        chain.key("worker", 3, 1)
        == RngKey(5, "layer.weight").key("worker", 3, 1)
        == chain.key("worker", 3, 1)
    )
    assert chain.key("server", 3) == chain.key("server", 3, 0)


@given(step=st.integers(0, 2**40), size=st.integers(1, 40), start=st.integers(0, 2**40))
def test_correlated_numbers_sum_to_a_constant(step: int, size: int, start: int) -> None:
    chain = RngKey(2, "w")
    drawn = [chain.correlated("worker", step, rank, size) for rank in range(size)]
    if size == 1:
        assert drawn == [chain.key("worker", step)]
        return
    assert len(set(drawn)) == size
    sums = sum(hash32(start, 100, key).astype(np.int64) for key in drawn)
    # Of a pair 2^32 - 1, of the triple half as much more, and a half.
    expected = size // 2 * ALL_ONES + size % 2 * (1 << 31)
    assert sums.tolist() == [expected] * 100


@given(steps=st.lists(st.integers(0, 2**62), min_size=1, max_size=4), size=st.integers(1, 9))
def test_many_keys_at_once_are_the_keys_of_each(steps: list[int], size: int) -> None:
    chains = [RngKey(7, f"w{i}") for i in range(len(steps))]
    for rank in range(size):
        correlated = [chain.correlated("worker", step, rank, size) for chain, step in zip(chains, steps)]
        assert keys_of(chains, "worker", steps, rank, size).tolist() == [list(key) for key in correlated]
        alone = [chain.key("server", step, rank) for chain, step in zip(chains, steps)]
        assert keys_of(chains, "server", steps, rank).tolist() == [list(key) for key in alone]


@given(key=correlated_keys)
def test_correlated_keys_flip_and_mirror_all_bits_or_none(key: Key) -> None:
    # What native_random.h makes use of.
    assert key.flip in (0, ALL_ONES)
    assert key.mirror in (0, ALL_ONES)
    assert key.mirror or key == key._replace(shift=0, addend=0, flip=0)


def streams() -> dict[str, np.ndarray]:
    base = RngKey(0, "layer.weight")
    keys = {
        "base": base.key("worker", 0, 0),
        "next worker": base.key("worker", 0, 1),
        "next step": base.key("worker", 1, 0),
        "next seed": RngKey(1, "layer.weight").key("worker", 0, 0),
        "other stage": base.key("server", 0, 0),
        "other name": RngKey(0, "layer.bias").key("worker", 0, 0),
    }
    return {name: hash32(0, SAMPLES, key) for name, key in keys.items()}


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_workers_correlated_bits_are_uniform(size: int) -> None:
    # As below: 6 deviations of a chi-square, 1e-7 for each of 54 comparisons. No kernel uses more than the upper 24
    # bits, except to draw from sums; a shift leaves the lowest bit constant.
    for rank in range(size):
        stream = hash32(0, SAMPLES, RngKey(0, "layer.weight").correlated("worker", 0, rank, size))
        for shift in (8, 16, 24):
            counts = np.bincount(stream >> np.uint32(shift) & np.uint32(255), minlength=256)
            chi_square = float(((counts - SAMPLES / 256) ** 2).sum() / (SAMPLES / 256))
            assert abs(chi_square - 255) < 6 * 510**0.5, rank


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_every_stream_is_uniform(shift: int) -> None:
    # Chi-square with 255 degrees of freedom, nearly normal: mean 255, deviation sqrt(510). 6 deviations either way
    # (too even is suspicious as well); the right tail is a little fatter, about 1e-7 for each of 24 comparisons.
    for name, stream in streams().items():
        counts = np.bincount(stream >> np.uint32(shift) & np.uint32(255), minlength=256)
        chi_square = float(((counts - SAMPLES / 256) ** 2).sum() / (SAMPLES / 256))
        assert abs(chi_square - 255) < 6 * 510**0.5, name


def test_streams_are_uncorrelated() -> None:
    # A correlation of N independent pairs is normal with deviation 1 / sqrt(N). 6 deviations: 2e-9 for each of
    # 6 * 7 / 2 pairs of streams, each at 9 lags.
    centred = [stream / 2.0**32 - 0.5 for stream in streams().values()]
    window = SAMPLES - 64
    for (i, a), (j, b) in itertools.combinations_with_replacement(enumerate(centred), 2):
        for lag in (0, 1, 2, 3, 16, 31, 32, 33, 64):
            if i == j and lag == 0:
                continue
            correlation = float(np.mean(a[:window] * b[lag : lag + window])) * 12
            assert abs(correlation) < 6 / window**0.5, (i, j, lag)


def test_streams_are_no_shifted_copies_of_each_other() -> None:
    # Of 2^12 words of one stream none should stand in the first 2^20 of another but by chance: expected number of
    # matches 2^(12 + 20 - 32) = 1; a shifted copy gives thousands. 20 or more: 4e-19 by Poisson's law.
    first, *others = streams().values()
    for other in others:
        assert np.isin(first[: 1 << 12], other).sum() < 20


@examples(30)
@given(step=st.integers(0, 2**40), worker=st.integers(0, 1000))
def test_keys_of_steps_that_are_sent_as_words(step: int, worker: int) -> None:
    chain = RngKey(3, "w")
    word = kernels.step_word(step)
    assert (word.dtype, word.shape) == (np.int32, (1,))
    assert kernels.step_word(step, np.zeros(1, np.int32)) == word
    assert kernels.key_of_word(chain, "worker", word, worker) == chain.key("worker", step % 2**32, worker)
    assert kernels.key_of_word(chain, "server", word) == chain.key("server", step % 2**32)
