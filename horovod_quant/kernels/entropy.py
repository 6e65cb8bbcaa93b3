"""Elias coding of quantized gradients: the reference that fixes the bits.

Source: QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017), section 3.1 (the sparse layout) and
the appendix's Code' (the dense layout); the integer codes are those of Elias (IEEE Transactions on
Information Theory, 1975).

The stream. Bit ``i`` of the stream is bit ``i % 8`` (0 is the least significant) of byte ``i // 8``.

1. One bit of layout: 0 is sparse, 1 is dense.
2. Sparse: for each non-zero element ``Elias(gap)``, a sign bit (1 is negative), ``Elias(magnitude)``. The gap
   is the distance from the non-zero element before; the first counts from index -1. One last
   ``Elias(gap)`` that leads to index ``count`` closes the stream.
   Dense: for each element ``Elias(magnitude + 1)``, then a sign bit if the element is not zero.
3. Zero bits up to the end of the byte.

The encoder uses the layout with fewer bits, sparse on a tie, so a gradient has one encoding. An empty
gradient is sparse with a closing gap of 1, although the layout bit alone would do.

The integer codes, for ``v >= 1`` and ``N = floor(log2 v)``:

- ``"gamma"``: ``N`` zero bits, a one bit, then the ``N`` low bits of ``v``, least significant first (so ``N``
  is a count of trailing zeros);
- ``"omega"``: a group for each number of the chain ..., ``floor(log2 N)``, ``N``, ``v`` that is above 1, the
  smallest first, then a zero bit. A group is a one bit, then the low bits of its number, least significant
  first; the number of the group before is the number of these bits (one, for the first group).

Magnitudes go up to ``MAX_MAGNITUDE`` and gaps up to ``MAX_COUNT + 1``, so no code word is longer than 57
bits: one unaligned 64-bit load, shifted by the bit offset within its byte, always contains a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_MAGNITUDE = 2**15 - 1
MAX_COUNT = 2**29 - 2

_LONGEST = 57
_TOP = 28  # floor(log2) of the largest gap
# A record of the sparse layout: two code words and a sign, rounded up to whole bytes.
_RECORD_BYTES = 15
# Both are sized to keep the temporaries in the cache, and memory proportional to the input alone.
_ENCODE_ELEMENTS = 1 << 16
_DECODE_BYTES = 1 << 13

_Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_ONE = np.uint64(1)


class CorruptPayloadError(ValueError):
    """Error for a payload that does not encode the expected gradient."""


def encode(values: npt.NDArray[np.int32], code: str = "gamma") -> npt.NDArray[np.uint8]:
    """Encode signed level indices in the shorter of the two layouts.

    Args:
        values: int32[d], ``|values| <= MAX_MAGNITUDE``, ``d <= MAX_COUNT``; any strides, not modified.
        code: ``"gamma"`` or ``"omega"``.

    Returns:
        uint8 array with the stream, without spare bytes. The norm is not part of it.

    Raises:
        ValueError: ``code`` is unknown.

    Source: QSGD, section 3.1, and Code' of its appendix.
    """
    elias = elias_of(code)
    hits = np.flatnonzero(values)
    gaps = np.diff(hits, prepend=-1, append=values.size)
    magnitudes = np.abs(values[hits])

    # The lengths of magnitudes follow from their histogram.
    seen = np.bincount(magnitudes)
    present = np.flatnonzero(seen)
    seen = seen[present]
    gap_bits = sum(int(elias.words(gaps[part])[1].sum()) for part in _parts(gaps.size))
    sparse = gap_bits + hits.size + int(seen @ elias.words(present)[1])
    dense = values.size + int(seen @ elias.words(present + 1)[1])  # a bit for each zero or sign

    if not values.size:
        dense = sparse
    writer = _Writer(1 + min(sparse, dense))
    if sparse <= dense:
        writer.put(np.zeros(1, np.uint64), np.ones(1, np.int64))
        for part in _parts(hits.size):
            gap_word, gap_length = elias.words(gaps[part])
            word, bits = elias.words(magnitudes[part].astype(np.int64))
            word = (word << _ONE) | (values[hits[part]] < 0).astype(np.uint64)
            writer.put(_interleave(gap_word, word), _interleave(gap_length, bits + 1))
        writer.put(*elias.words(gaps[-1:]))
    else:
        writer.put(np.ones(1, np.uint64), np.ones(1, np.int64))
        for part in _parts(values.size):
            element = values[part].astype(np.int64)
            word, bits = elias.words(np.abs(element) + 1)
            word |= (element < 0).astype(np.uint64) << bits.astype(np.uint64)
            writer.put(word, bits + (element != 0))
    return writer.payload()


def decode(
    payload: npt.NDArray[np.uint8], count: int, max_magnitude: int, code: str = "gamma"
) -> npt.NDArray[np.int32]:
    """Decode an untrusted payload of ``encode``.

    Time and memory are at most proportional to ``count + payload.size`` for any payload.

    Args:
        payload: uint8 array, the whole stream and nothing else; not modified.
        count: number of elements the gradient has, 0 to ``MAX_COUNT``.
        max_magnitude: largest magnitude the quantizer can have sent, 1 to ``MAX_MAGNITUDE``.
        code: the code it was encoded with, ``"gamma"`` or ``"omega"``.

    Returns:
        int32[count], each element within ``[-max_magnitude, max_magnitude]``.

    Raises:
        CorruptPayloadError: ``payload`` is empty, ends early, continues after the stream, has a one among the
            closing bits, or has a magnitude, a gap or a code word that is too large.
        ValueError: ``code`` is unknown.

    Source: as for ``encode``.
    """
    elias = elias_of(code)
    if not payload.size:
        raise CorruptPayloadError("payload is empty; even a gradient of no elements takes a byte")

    if not payload[0] & 1:
        values, end = _decode_sparse(payload, count, max_magnitude, elias)
    else:
        values, end = _decode_dense(payload, count, max_magnitude, elias)

    needed = -(-end // 8)
    if payload.size > needed:
        raise CorruptPayloadError(
            f"payload has {payload.size} bytes, but its stream of {count} elements ends at bit {end}, "
            f"in byte {needed} of them"
        )
    if end % 8 and payload[-1] >> (end % 8):
        raise CorruptPayloadError(f"payload has a one among its closing zero bits, at bit {end} or later")
    return values


# ---- integer codes


class EliasCode(NamedTuple):
    """A code of integers from 1 on."""

    name: str
    # Values to (code words, first bit lowest; their lengths).
    words: Callable[[_Ints], tuple[_Words, _Ints]]
    # Stream bits, first bit lowest, to (value, length); length 0 where no valid code word starts.
    parse: Callable[[_Words], tuple[_Ints, _Ints]]


def _gamma_words(v: _Ints) -> tuple[_Words, _Ints]:
    log = _floor_log2(v)
    top = np.left_shift(1, log)
    return (top | ((v ^ top) << (log + 1))).astype(np.uint64), 2 * log + 1


def _gamma_parse(stream: _Words) -> tuple[_Ints, _Ints]:
    lowest = stream & (~stream + _ONE)
    log = _floor_log2(lowest)
    valid = (log >= 0) & (log <= _TOP)
    log = np.where(valid, log, 0)
    top = np.left_shift(1, log)
    low = (stream >> (log + 1).astype(np.uint64)).astype(np.int64) & (top - 1)
    return top | low, np.where(valid, 2 * log + 1, 0)


def _omega_words(v: _Ints) -> tuple[_Words, _Ints]:
    word = np.zeros(v.shape, np.int64)
    length = np.ones(v.shape, np.int64)
    group = v
    while (group > 1).any():
        log = _floor_log2(group)
        shift = np.where(group > 1, log + 1, 0)
        bits = ((group ^ np.left_shift(1, log)) << 1) | 1
        word = np.where(group > 1, (word << shift) | bits, word)
        length += shift
        group = np.maximum(log, 1)
    return word.astype(np.uint64), length


def _omega_parse(stream: _Words) -> tuple[_Ints, _Ints]:
    value = np.ones(stream.shape, np.int64)
    used = np.zeros(stream.shape, np.int64)
    rest = stream.astype(np.int64)
    # Groups of 1 to 28 bits lead from 1 past 28 in at most four steps: 2..3, 4..15, 16..65535, then more.
    for _ in range(4):
        open_ = ((rest & 1) == 1) & (value <= _TOP)
        bits = np.where(open_, value, 0)
        top = np.left_shift(1, bits)
        value = np.where(open_, top | ((rest >> 1) & (top - 1)), value)
        bits += open_
        rest >>= bits
        used += bits
    return value, np.where(rest & 1, 0, used + 1)


_CODES = {
    "gamma": EliasCode("gamma", _gamma_words, _gamma_parse),
    "omega": EliasCode("omega", _omega_words, _omega_parse),
}


def _floor_log2(v: npt.NDArray[np.integer]) -> _Ints:
    # float64 represents every integer here exactly, and its exponent is the result; 0 gives -1.
    return np.frexp(v.astype(np.float64))[1].astype(np.int64) - 1


# ---- writing


class _Writer:
    """A bit string of known length, filled from the front."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        # Little endian on every machine, so that its bytes are the stream.
        self._words = np.zeros(bits // 64 + 2, "<u8")
        self._end = 0

    def put(self, words: _Words, lengths: _Ints) -> None:
        if not words.size:
            return
        ends = self._end + np.cumsum(lengths)
        starts = ends - lengths
        self._end = int(ends[-1])
        target = starts >> 6
        offset = (starts & 63).astype(np.uint64)
        # The targets ascend: one reduction per word replaces a slow unbuffered scatter.
        first = np.flatnonzero(np.diff(target, prepend=-1))
        self._words[target[first]] |= np.bitwise_or.reduceat(words << offset, first)
        # Only the last code word that starts in a word can spill, so these targets are distinct too.
        spill = np.flatnonzero((ends - 1) >> 6 > target)
        self._words[target[spill] + 1] |= words[spill] >> (np.uint64(64) - offset[spill])

    def payload(self) -> npt.NDArray[np.uint8]:
        return self._words.view(np.uint8)[: -(-self._bits // 8)].copy()


def _parts(size: int) -> Iterator[slice]:
    return (slice(i, min(i + _ENCODE_ELEMENTS, size)) for i in range(0, size, _ENCODE_ELEMENTS))


def _interleave(a: npt.NDArray, b: npt.NDArray) -> npt.NDArray:
    return np.stack((a, b), axis=1).ravel()


# ---- reading


class _Window(NamedTuple):
    """Positions in the payload, each parsed as a code word's start."""

    base: int  # stream position of index 0
    size: int  # records may start at the indices below; the code words after are look-ahead
    bit: _Ints
    value: _Ints
    length: _Ints


class _Reader:
    def __init__(self, payload: npt.NDArray[np.uint8], elias: EliasCode) -> None:
        self.bits = 8 * payload.size
        self._elias = elias
        self._bytes = payload.size
        # Zero bytes for the look-ahead beyond the end; every use of them is caught by `bits`.
        padded = np.zeros(payload.size + 1 + _RECORD_BYTES + 8, np.uint8)
        padded[: payload.size] = payload
        self._words: npt.NDArray[np.uint64] = np.ndarray(
            (padded.size - 7,), np.dtype("<u8"), buffer=padded, strides=(1,)
        )

    def window(self, position: int) -> _Window:
        start = position // 8
        size = min(_DECODE_BYTES, self._bytes - start + 1)
        words = self._words[start : start + size + _RECORD_BYTES].astype(np.uint64)
        stream = (words[:, None] >> np.arange(8, dtype=np.uint64)).ravel()
        value, length = self._elias.parse(stream)
        return _Window(8 * start, 8 * size, (stream & _ONE).astype(np.int64), value, length)

    def code_word(self, what: str, position: int, length: int) -> int:
        """Return the end of a code word.

        Raise CorruptPayloadError for an invalid one.
        """
        if not length:
            raise CorruptPayloadError(
                f"payload has no {self._elias.name} code word of at most {_LONGEST} bits for {what} "
                f"at bit {position} of {self.bits}"
            )
        self.within(what, position, position + length)
        return position + length

    def within(self, what: str, position: int, end: int) -> None:
        if end > self.bits:
            raise CorruptPayloadError(
                f"payload ends at bit {self.bits}, inside {what} that starts at bit {position}"
            )


def _follow(start: int, following: _Ints, stop: int) -> _Ints:
    """Return a chain of indices up to ``stop`` or a negative one."""
    # Finding the positions of records is the only sequential part of decoding; a list makes it fast.
    links = following.tolist()
    visited = []
    at = start
    while 0 <= at < stop:
        visited.append(at)
        at = links[at]
    return np.array(visited, np.int64)


def _decode_sparse(
    payload: npt.NDArray[np.uint8], count: int, max_magnitude: int, elias: EliasCode
) -> tuple[npt.NDArray[np.int32], int]:
    reader = _Reader(payload, elias)
    values = np.zeros(count, np.int32)
    position, element = 1, -1
    while True:
        w = reader.window(position)
        index_ = np.arange(w.size)
        sign_at = index_ + w.length[: w.size]
        length = w.length[sign_at + 1]
        valid = (w.length[: w.size] > 0) & (length > 0)
        following = np.where(valid, sign_at + 1 + length, -1)
        starts = _follow(position - w.base, following, w.size)

        elements = element + np.cumsum(w.value[starts])
        signs = sign_at[starts]
        magnitudes = w.value[signs + 1]
        good = valid[starts] & (w.base + following[starts] <= reader.bits)
        good &= (elements < count) & (magnitudes <= max_magnitude)
        kept = starts.size if good.all() else int(good.argmin())
        values[elements[:kept]] = np.where(w.bit[signs[:kept]], -magnitudes[:kept], magnitudes[:kept])

        if kept == starts.size:
            position = w.base + int(following[starts[-1]])
            element = int(elements[-1])
            continue

        # The first record that is not a whole non-zero element: the closing gap, or an error.
        at = int(starts[kept])
        end = reader.code_word("a gap", w.base + at, int(w.length[at]))
        if elements[kept] == count:
            return values, end
        if elements[kept] > count:
            raise CorruptPayloadError(
                f"payload has a gap to element {elements[kept]} at bit {w.base + at}, "
                f"but the gradient has {count} elements"
            )
        at = int(sign_at[at]) + 1
        reader.within("a sign", end, end + 1)
        reader.code_word("a magnitude", w.base + at, int(w.length[at]))
        raise _too_large(int(w.value[at]), w.base + at, max_magnitude)


def _decode_dense(
    payload: npt.NDArray[np.uint8], count: int, max_magnitude: int, elias: EliasCode
) -> tuple[npt.NDArray[np.int32], int]:
    reader = _Reader(payload, elias)
    # Every element takes at least a bit: no reason to allocate for a count that cannot be there.
    reader.within(f"a dense stream of {count} elements", 0, 1 + count)
    values = np.empty(count, np.int32)
    position, done = 1, 0
    while done < count:
        w = reader.window(position)
        length = w.length[: w.size]
        following = np.where(length > 0, np.arange(w.size) + length + (w.value[: w.size] > 1), -1)
        starts = _follow(position - w.base, following, w.size)[: count - done]

        ends = following[starts]
        magnitudes = w.value[starts] - 1
        good = (ends >= 0) & (w.base + ends <= reader.bits) & (magnitudes <= max_magnitude)
        if not good.all():
            at = int(starts[good.argmin()])
            magnitude = int(w.value[at]) - 1
            end = reader.code_word("an element", w.base + at, int(w.length[at]))
            if magnitude > max_magnitude:
                raise _too_large(magnitude, w.base + at, max_magnitude)
            reader.within("a sign", end, end + 1)
        # The bit before the end is the sign; a zero has none, and its value does not change.
        values[done : done + starts.size] = np.where(w.bit[ends - 1], -magnitudes, magnitudes)
        position = w.base + int(ends[-1])
        done += starts.size
    return values, position


def _too_large(magnitude: int, position: int, max_magnitude: int) -> CorruptPayloadError:
    return CorruptPayloadError(
        f"payload has magnitude {magnitude} at bit {position}; at most {max_magnitude} can have been sent"
    )


# ---- arguments


def elias_of(code: str) -> EliasCode:
    if not isinstance(code, str) or code not in _CODES:
        raise ValueError(f"code={code!r} is unknown; use 'gamma' or 'omega'")
    return _CODES[code]
