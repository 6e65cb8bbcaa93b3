"""Random bits that every backend reproduces: keys, and the counter-based hash that they select.

A kernel needs one 32-bit random number for each element. It is ``hash32(i, key)``, a function of the element's
index and of a key alone, so that any backend computes it in any order. The key comes from what identifies the
rounding: (seed, tensor name, stage, step, worker).
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import numpy as np

WEYL = 0x9E3779B9
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B

_MASK64 = (1 << 64) - 1


class Key(NamedTuple):
    """Two 32-bit words that select one stream of the hash."""

    k0: int
    k1: int


def _splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _absorb(state: int, value: int) -> int:
    return _splitmix(((state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64)


@functools.lru_cache(maxsize=64)  # the stages, for each key
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class KeyChain:
    """The keys of one tensor.

    What is fixed for the tensor's life (seed, name) is mixed once; stage, step and worker follow for each key.

    Args:
        seed: any integer.
        name: the tensor's name, the same on every worker.
    """

    def __init__(self, seed: int, name: str) -> None:
        self.seed = seed
        self.name = name
        self._prefix = _absorb(_absorb(0, seed), _digest(name))

    def key(self, stage: str, step: int, worker: int = 0) -> Key:
        """The key of one rounding.

        Args:
            stage: what is rounded, e.g. ``"worker"`` for a worker's own gradient.
            step: number of the exchange, from 0.
            worker: rank of the worker that rounds; left at 0 where every worker must draw the same bits.
        """
        state = _absorb(_absorb(_absorb(self._prefix, _digest(stage)), step), worker)
        return Key(state & 0xFFFFFFFF, state >> 32)


def hash32(start: int, count: int, key: Key) -> np.ndarray:
    """Random bits of the elements ``start .. start + count - 1``.

    The Weyl sequence ``i * WEYL + k0`` goes through the lowbias32 finalizer with ``k1`` added between its two
    multiplications; all arithmetic is modulo 2^32.

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
    return h
