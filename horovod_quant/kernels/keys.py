"""Random bits that every backend reproduces: keys, and the counter-based hash that they select.

A kernel needs one 32-bit random number for each element. It is ``hash32(i, key)``, a function of the element's
index and of a key alone, so that any backend computes it in any order. The key comes from what identifies the
rounding: (seed, tensor name, domain, step, worker).

Workers that add what they round may draw *correlated* bits instead of independent ones: every worker takes the same
hash and makes bits of its own from it, each uniform, such that all workers' numbers in [0, 1) sum to a constant. The
error of ``sum_i floor(y_i + u_i)`` is then ``constant - sum_i frac(y_i + u_i)``: half of what it is with independent
bits where gradients differ, and 1 / n of it where they are equal and n is even. (A relative: correlated quantization;
Suresh, Sun, Ro, Yu, ICML 2022.)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WEYL = 0x9E3779B9
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B

INCREMENT = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_MASK64 = (1 << 64) - 1


ALL_ONES = 0xFFFFFFFF

_STAGES = 8
"""Of a chain, whose states it remembers: a scheme has one or two."""


class Key(NamedTuple):
    """32-bit words that select one stream of random bits.

    ``k0`` and ``k1`` select the stream of the hash h; the bits are ``((h << shift) + addend) ^ flip``. With ``u`` the
    number in [0, 1) that they stand for, a shift by one makes ``frac(2 u)`` of it, the addend ``frac(u + a)``, the flip
    ``1 - u``. ``mirror`` is for kernels that round magnitudes: they xor the bits of negative elements with it, so that
    these are rounded as by ``floor(y + u)``, too. Flip and mirror are of all bits, or 0.
    """

    k0: int
    k1: int
    shift: int = 0
    addend: int = 0
    flip: int = 0
    mirror: int = 0


def _splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * MIX_1) & _MASK64
    state = ((state ^ (state >> 27)) * MIX_2) & _MASK64
    return state ^ (state >> 31)


def _absorb(state: int, value: int) -> int:
    return _splitmix(((state ^ (value & _MASK64)) + INCREMENT) & _MASK64)


@functools.lru_cache(maxsize=64)  # the stages, for each key
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class RngKey:
    """The keys of one tensor.

    What is fixed for the tensor's life (seed, name) is mixed once; domain, step and worker follow for each key.

    Args:
        seed: any integer.
        name: the tensor's name, the same on every worker.
    """

    def __init__(self, seed: int, name: str) -> None:
        self.seed = seed
        self.name = name
        self._prefix = _absorb(_absorb(0, seed), _digest(name))
        self._states: dict[str, int] = {}

    def key(self, domain: str, step: int, worker: int = 0) -> Key:
        """The key of one rounding.

        Args:
            domain: what is rounded, e.g. ``"worker"`` for a worker's own gradient.
            step: number of the exchange, from 0.
            worker: rank of the worker that rounds; left at 0 where every worker must draw the same bits.
        """
        state = _absorb(_absorb(self.state(domain), step), worker)
        return Key(state & ALL_ONES, state >> 32)

    def state(self, domain: str) -> int:
        """What the keys of a domain have in common: 64 bits, into which step and worker are yet to be mixed."""
        state = self._states.get(domain)
        if state is None:
            state = _absorb(self._prefix, _digest(domain))
            if len(self._states) < _STAGES:
                self._states[domain] = state
        return state

    def correlated(self, domain: str, step: int, rank: int, size: int) -> Key:
        """The key of a rounding whose results ``size`` workers add: the workers' numbers sum to a constant.

        Even numbers of workers draw in pairs, u and 1 - u, and each pair's u is the first pair's, shifted by its share
        of 1. Three of an odd number draw u, frac(u + 1/2), and 1 - frac(2 u), which sum to 3/2; the others are pairs
        whose shifts begin with a quarter of their share (at equal gradients of five workers that has 2/3 of the error
        that beginning with none has).

        Args:
            domain: what is rounded.
            step: number of the exchange, from 0.
            rank: number of the worker among those that add.
            size: how many these are. One worker draws the bits of `key`.
        """
        key = self.key(domain, step)
        return Key(key.k0, key.k1, *_share(rank, size))


def _share(rank: int, size: int) -> tuple[int, int, int, int]:
    """Shift, addend, flip and mirror of one of the workers that draw correlated bits."""
    if size == 1:
        return 0, 0, 0, 0
    if size % 2 and rank < 3:
        shift, addend, flip = ((0, 0, 0), (0, 1 << 31, 0), (1, 0, ALL_ONES))[rank]
    else:
        place, pairs, quarters = (rank - 3, (size - 3) // 2, 1) if size % 2 else (rank, size // 2, 0)
        shift, addend, flip = 0, (4 * (place // 2) + quarters << 30) // pairs, place % 2 * ALL_ONES
    return shift, addend, flip, ALL_ONES


def keys_of(chains: Sequence[RngKey], domain: str, steps: Sequence[int], worker: int = 0) -> np.ndarray:
    """The keys that `RngKey.key` gives for each chain and step, uint32 ``[chains, fields of Key]``."""
    state = np.array([chain.state(domain) for chain in chains], np.uint64)
    for value in (np.array([step & _MASK64 for step in steps], np.uint64), np.uint64(worker)):
        state = (state ^ value) + np.uint64(INCREMENT)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(MIX_2)
        state ^= state >> np.uint64(31)
    keys = np.zeros((len(chains), len(Key._fields)), np.uint32)
    keys[:, 0], keys[:, 1] = state & np.uint64(ALL_ONES), state >> np.uint64(32)
    return keys


def correlated_keys_of(
    chains: Sequence[RngKey], domain: str, steps: Sequence[int], rank: int, size: int
) -> np.ndarray:
    """The keys that `RngKey.correlated` gives, as `keys_of` has them."""
    keys = keys_of(chains, domain, steps)
    keys[:, 2:] = _share(rank, size)
    return keys


def hash32(start: int, count: int, key: Key) -> np.ndarray:
    """Random bits of the elements ``start .. start + count - 1``.

    The Weyl sequence ``i * WEYL + k0`` goes through the lowbias32 finalizer with ``k1`` added between its two
    multiplications; shift, addend and flip follow. All arithmetic is modulo 2^32.

    Returns:
        uint32 array of length ``count``.
    """
    h = np.arange(start, start + count, dtype=np.int64).astype(np.uint32)
    h *= np.uint32(WEYL)
    h += np.uint32(key.k0)
    h ^= h >> np.uint32(16)
    h *= np.uint32(MULTIPLIER_1)
    h ^= h >> np.uint32(15)
    h += np.uint32(key.k1)
    h *= np.uint32(MULTIPLIER_2)
    h ^= h >> np.uint32(16)
    h <<= np.uint32(key.shift)
    h += np.uint32(key.addend)
    h ^= np.uint32(key.flip)
    return h
