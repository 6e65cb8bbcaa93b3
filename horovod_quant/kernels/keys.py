"""Keys of random bits, and the counter-based hash that they select.

A kernel needs one 32-bit random number for each element. It is ``hash32(i, key)``, a function of the element's
index and of a key alone, so that any backend computes it in any order. The key follows from the identity of the
rounding: (seed, tensor name, domain, step, worker).

Workers that add their rounded values may draw *correlated* bits instead of independent ones: every worker derives
different bits from the same hash, each uniform, such that all workers' numbers in [0, 1) sum to a constant. The error
of ``sum_i floor(y_i + u_i)`` is then ``constant - sum_i frac(y_i + u_i)``: half of the error with independent bits
where gradients differ, and 1 / n of it where they are equal and n is even. (Related: correlated quantization; Suresh,
Sun, Ro, Yu, ICML 2022.)
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

_DOMAINS = 8
"""Maximum number of domains whose states an `RngKey` caches: a scheme has one or two."""


class Key(NamedTuple):
    """32-bit words that select one stream of random bits.

    ``k0`` and ``k1`` select the stream of the hash h; the bits are ``((h << shift) + addend) ^ flip``. If the bits
    represent ``u`` in [0, 1), a shift by one gives ``frac(2 u)``, the addend ``frac(u + a)``, the flip ``1 - u``.
    ``mirror`` is for kernels that round magnitudes: they xor the bits of negative elements with it, so that these are
    also rounded as by ``floor(y + u)``. Flip and mirror have all bits set, or none.
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


@functools.lru_cache(maxsize=64)  # the domains, for each key
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class RngKey:
    """Generator of the keys of one tensor.

    The constants of the tensor (seed, name) are mixed once; domain, step and worker follow for each key.

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
        """Return the key of one rounding.

        Args:
            domain: the purpose of the rounding, e.g. ``"worker"`` for a worker's local gradient.
            step: number of the step, from 0.
            worker: rank of the worker that rounds; 0 where every worker must draw the same bits.
        """
        state = _absorb(_absorb(self.state(domain), step), worker)
        return Key(state & ALL_ONES, state >> 32)

    def state(self, domain: str) -> int:
        """Return the 64-bit state of a domain before step and worker."""
        state = self._states.get(domain)
        if state is None:
            state = _absorb(self._prefix, _digest(domain))
            if len(self._states) < _DOMAINS:
                self._states[domain] = state
        return state

    def correlated(self, domain: str, step: int, rank: int, size: int) -> Key:
        """Return the key of a correlated rounding.

        The random numbers of ``size`` workers sum to a constant. Even numbers of workers draw in pairs, u and 1 - u,
        and each pair's u is the first pair's u, shifted by a multiple of 1 / pairs. Three of an odd number draw u,
        frac(u + 1/2), and 1 - frac(2 u), which sum to 3/2; the others are pairs whose shifts begin at a quarter of 1 /
        pairs (with equal gradients of five workers this has 2/3 of the error of shifts that begin at 0).

        Args:
            domain: the purpose of the rounding.
            step: number of the step, from 0.
            rank: number of the worker among those that add.
            size: number of workers that add. One worker draws the bits of `key`.
        """
        key = self.key(domain, step)
        return Key(key.k0, key.k1, *_share(rank, size))


def _share(rank: int, size: int) -> tuple[int, int, int, int]:
    """Return one worker's shift, addend, flip and mirror for correlated bits."""
    if size == 1:
        return 0, 0, 0, 0
    if size % 2 and rank < 3:
        shift, addend, flip = ((0, 0, 0), (0, 1 << 31, 0), (1, 0, ALL_ONES))[rank]
    else:
        number, pairs, quarters = (rank - 3, (size - 3) // 2, 1) if size % 2 else (rank, size // 2, 0)
        shift, addend, flip = 0, (4 * (number // 2) + quarters << 30) // pairs, number % 2 * ALL_ONES
    return shift, addend, flip, ALL_ONES


def keys_of(
    chains: Sequence[RngKey], domain: str, steps: Sequence[int], worker: int = 0, size: int = 0
) -> np.ndarray:
    """Return `RngKey.key` of many chains and steps, or `RngKey.correlated` with a size.

    The result is uint32 ``[chains, fields of Key]``.
    """
    state = np.array([chain.state(domain) for chain in chains], np.uint64)
    for value in (np.array([step & _MASK64 for step in steps], np.uint64), np.uint64(0 if size else worker)):
        state = (state ^ value) + np.uint64(INCREMENT)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(MIX_2)
        state ^= state >> np.uint64(31)
    keys = np.zeros((len(chains), len(Key._fields)), np.uint32)
    keys[:, 0], keys[:, 1] = state & np.uint64(ALL_ONES), state >> np.uint64(32)
    if size:
        keys[:, 2:] = _share(worker, size)
    return keys


def hash32(start: int, count: int, key: Key) -> np.ndarray:
    """Return random bits of ``count`` elements from ``start`` on.

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
