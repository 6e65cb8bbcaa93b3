from __future__ import annotations

import re
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import examples, extended
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_quant.kernels import entropy
from horovod_quant.kernels.entropy import MAX_COUNT, MAX_MAGNITUDE, CorruptPayloadError, decode, encode

CODES = ("gamma", "omega")
SIZES = (0, 1, 2, 7, 8, 31, 32, 33, 1000)


def length_of(code: str, v: Any) -> np.ndarray:
    return entropy.elias_of(code).words(np.array(v))[1]


both_codes = pytest.mark.parametrize("code", CODES)


# An encoder written from the module's docstring alone, a character a bit.


def low_bits(v: int) -> str:
    return format(v, "b")[1:][::-1]


def gamma(v: int) -> str:
    return "0" * (v.bit_length() - 1) + "1" + low_bits(v)


def omega(v: int) -> str:
    groups = ""
    while v > 1:
        groups = "1" + low_bits(v) + groups
        v = v.bit_length() - 1
    return groups + "0"


ELIAS = {"gamma": gamma, "omega": omega}


def sparse_bits(values: list[int], code: str) -> str:
    bits, last = "0", -1
    for i, v in enumerate(values):
        if v:
            bits += ELIAS[code](i - last) + ("1" if v < 0 else "0") + ELIAS[code](abs(v))
            last = i
    return bits + ELIAS[code](len(values) - last)


def dense_bits(values: list[int], code: str) -> str:
    bits = "1"
    for v in values:
        bits += ELIAS[code](abs(v) + 1) + (("1" if v < 0 else "0") if v else "")
    return bits


def to_bytes(bits: str) -> np.ndarray:
    return np.packbits([int(b) for b in bits], bitorder="little")


def levels(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def quantized(rng: np.random.Generator, size: int, density: float, largest: int) -> np.ndarray:
    magnitudes = rng.integers(1, largest, size, endpoint=True) * (rng.random(size) < density)
    return (magnitudes * rng.choice([-1, 1], size)).astype(np.int32)


gradients = st.one_of(
    hnp.arrays(np.int32, st.integers(0, 300), elements=st.integers(-MAX_MAGNITUDE, MAX_MAGNITUDE)),
    hnp.arrays(np.int32, st.integers(0, 300), elements=st.integers(-2, 2)),
    hnp.arrays(np.int32, st.integers(0, 3000), elements=st.integers(-7, 7), fill=st.just(0)),
)


# ---- the bits


@pytest.mark.parametrize(
    ("v", "gamma_bits", "omega_bits"),
    [
        (1, "1", "0"),
        (2, "010", "100"),
        (3, "011", "110"),
        (4, "00100", "101000"),
        (5, "00110", "101100"),
        (6, "00101", "101010"),
        (16, "000010000", "10100100000"),
        (19, "000011100", "10100111000"),
    ],
)
def test_code_words_are_the_hand_computed_ones(v: int, gamma_bits: str, omega_bits: str) -> None:
    assert (gamma(v), omega(v)) == (gamma_bits, omega_bits)
    for elias, bits in ((entropy.elias_of("gamma"), gamma_bits), (entropy.elias_of("omega"), omega_bits)):
        word, length = elias.words(np.array([v]))
        assert format(int(word[0]), f"0{int(length[0])}b")[::-1] == bits


@pytest.mark.parametrize(
    ("values", "code", "payload"),
    [
        # flag 0, gap 1
        ((), "gamma", [0b10]),
        ((), "omega", [0b00]),
        # dense: flag 1, Elias(1)
        ((0,), "gamma", [0b11]),
        ((0,), "omega", [0b01]),
        ((0, 0, 0), "gamma", [0b1111]),
        # 5 bits either way, so sparse: flag 0, gap 1 "1", sign "0", magnitude 1 "1", gap 1 "1"
        ((1,), "gamma", [0b11010]),
        # 7 bits either way, so sparse: "0" "1" "1" "011" "1"
        ((-3,), "gamma", [0b1110110]),
        # dense, 8 bits against 11: "1" "1" "1" "011"+"1" "1"
        ((0, 0, -2, 0), "gamma", [0b11110111]),
        # sparse, 19 bits against 24: "0" "0001110" "1" "010" "0001010"
        ((0,) * 10 + (-2,) + (0,) * 9, "gamma", [0b01110000, 0b10000101, 0b010]),
        # sparse, 19 bits against 24: "0" "11"+"1110"+"0" "1" "10"+"0" "11"+"1010"+"0"
        ((0,) * 10 + (-2,) + (0,) * 9, "omega", [0b00111110, 0b01110011, 0b001]),
    ],
)
def test_payload_is_the_hand_computed_one(values: tuple, code: str, payload: list) -> None:
    assert encode(levels(*values), code).tolist() == payload


@both_codes
@given(values=gradients)
def test_payload_is_the_shorter_layout_of_the_specification(code: str, values: np.ndarray) -> None:
    sparse, dense = sparse_bits(values.tolist(), code), dense_bits(values.tolist(), code)
    shorter = sparse if len(sparse) <= len(dense) or not values.size else dense
    np.testing.assert_array_equal(encode(values, code), to_bytes(shorter))


@both_codes
def test_lengths_are_those_of_the_code_words(code: str) -> None:
    near_powers = [2**k + step for k in range(2, 53) for step in (-1, 0, 1)]
    v = np.array([*range(1, 5000), *near_powers])
    np.testing.assert_array_equal(length_of(code, v), [len(ELIAS[code](int(k))) for k in v])


@both_codes
@given(values=gradients)
def test_payload_size_agrees_with_the_lengths(code: str, values: np.ndarray) -> None:
    length = partial(length_of, code)
    hits = np.flatnonzero(values)
    magnitudes = np.abs(values[hits])
    gaps = np.diff(hits, prepend=-1, append=values.size)
    sparse = length(gaps).sum() + hits.size + length(magnitudes).sum()
    dense = length(np.abs(values) + 1).sum() + hits.size
    assert encode(values, code).size == -(-(1 + min(sparse, dense)) // 8)


# ---- round trips


@both_codes
@given(values=gradients)
def test_decoding_inverts_encoding(code: str, values: np.ndarray) -> None:
    before = values.copy()
    payload = encode(values, code)
    kept = payload.copy()
    decoded = decode(payload, values.size, MAX_MAGNITUDE, code)
    assert decoded.dtype == np.int32
    np.testing.assert_array_equal(decoded, values)
    np.testing.assert_array_equal(values, before)
    np.testing.assert_array_equal(payload, kept)


@both_codes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("largest", [1, 7, 127, MAX_MAGNITUDE])
def test_extreme_gradients_survive(code: str, size: int, largest: int) -> None:
    alternating = np.where(np.arange(size) % 2, largest, -largest)
    cases = (
        np.zeros(size),
        np.full(size, largest),
        np.full(size, -largest),
        alternating,
        alternating * (np.arange(size) % 3 == 0),
        np.arange(size) % (largest + 1),
        (np.arange(size) == size - 1) * -largest,
        (np.arange(size) == 0) * largest,
    )
    for case in cases:
        values = case.astype(np.int32)
        np.testing.assert_array_equal(decode(encode(values, code), size, largest, code), values)


@both_codes
@pytest.mark.parametrize(("density", "largest"), [(0.001, 1), (0.1, 7), (0.9, 7), (1.0, 127)])
def test_gradients_longer_than_the_working_chunks_survive(code: str, density: float, largest: int) -> None:
    values = quantized(np.random.default_rng(3), 150_001, density, largest)
    payload = encode(values, code)
    bits = min(sparse_bits(values.tolist(), code), dense_bits(values.tolist(), code), key=len)
    np.testing.assert_array_equal(payload, to_bytes(bits))
    np.testing.assert_array_equal(decode(payload, values.size, largest, code), values)


@both_codes
@pytest.mark.parametrize("layout", [sparse_bits, dense_bits])
@given(values=hnp.arrays(np.int32, st.integers(0, 60), elements=st.integers(-9, 9)))
def test_both_layouts_are_read_whichever_is_shorter(code: str, layout, values: np.ndarray) -> None:
    payload = to_bytes(layout(values.tolist(), code))
    np.testing.assert_array_equal(decode(payload, values.size, 9, code), values)


@both_codes
def test_strided_gradients_are_read_in_their_order(code: str) -> None:
    values = quantized(np.random.default_rng(4), 500, 0.3, 5)
    np.testing.assert_array_equal(encode(values[::-2], code), encode(values[::-2].copy(), code))
    payload = np.repeat(encode(values, code), 2)[::2]
    np.testing.assert_array_equal(decode(payload, values.size, 5, code), values)


@both_codes
def test_gaps_across_a_hundred_million_elements_survive(code: str) -> None:
    values = np.zeros(10**8, np.int32)
    values[-2] = -MAX_MAGNITUDE
    payload = encode(values, code)
    assert payload.size == -(-(1 + length_of(code, [10**8 - 1, MAX_MAGNITUDE, 2]).sum() + 1) // 8)
    decoded = decode(payload, values.size, MAX_MAGNITUDE, code)
    assert np.flatnonzero(decoded).tolist() == [10**8 - 2]
    assert decoded[-2] == -MAX_MAGNITUDE


@both_codes
def test_longest_gap_fits_one_load_at_every_bit_offset(code: str) -> None:
    elias = entropy.elias_of(code)
    gap = np.array([MAX_COUNT + 1])
    word, length = elias.words(gap)
    assert int(length[0]) <= 57
    ones_beyond = ~np.uint64(0) << np.uint64(57)
    value, parsed = elias.parse(word | ones_beyond)
    assert (int(value[0]), int(parsed[0])) == (MAX_COUNT + 1, int(length[0]))


# ---- corrupt payloads


def survives_or_refuses(payload: np.ndarray, count: int, largest: int, code: str) -> None:
    try:
        values = decode(payload, count, largest, code)
    except CorruptPayloadError:
        return
    assert values.dtype == np.int32
    assert values.shape == (count,)
    assert np.abs(values).max(initial=0) <= largest


@both_codes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.03, 0.5, 1.0])
def test_every_truncation_is_refused(code: str, size: int, density: float) -> None:
    payload = encode(quantized(np.random.default_rng(size), size, density, 7), code)
    for kept in range(payload.size):
        with pytest.raises(CorruptPayloadError):
            decode(payload[:kept], size, 7, code)


@both_codes
@pytest.mark.parametrize(
    ("density", "size"),
    [
        extended(density, size) if density * size == max(SIZES) else (density, size)
        for density in (0.03, 0.5, 1.0)
        for size in SIZES
    ],
)
def test_every_flipped_bit_is_refused_or_harmless(code: str, size: int, density: float) -> None:
    payload = encode(quantized(np.random.default_rng(size), size, density, 7), code)
    for bit in range(8 * payload.size):
        payload[bit // 8] ^= 1 << bit % 8
        survives_or_refuses(payload, size, 7, code)
        payload[bit // 8] ^= 1 << bit % 8


@both_codes
@pytest.mark.parametrize("layout", [sparse_bits, dense_bits])
def test_every_one_among_the_closing_zeros_is_refused(code: str, layout) -> None:
    for size in range(1, 12):
        bits = layout([2] * size, code)
        payload = to_bytes(bits)
        np.testing.assert_array_equal(decode(payload, size, 2, code), levels(*[2] * size))
        for bit in range(len(bits), 8 * payload.size):
            flipped = payload.copy()
            flipped[-1] ^= 1 << bit % 8
            with pytest.raises(CorruptPayloadError, match="closing zero bits"):
                decode(flipped, size, 2, code)


@both_codes
@examples(500)
@given(data=st.binary(max_size=200), count=st.integers(0, 1000), largest=st.integers(1, MAX_MAGNITUDE))
def test_random_bytes_are_refused_or_harmless(code: str, data: bytes, count: int, largest: int) -> None:
    survives_or_refuses(np.frombuffer(data, np.uint8), count, largest, code)


@both_codes
@pytest.mark.parametrize(("layout", "element"), [("0", 1), ("1", 0)], ids=["sparse", "dense"])
@examples(200)
@given(data=st.binary(max_size=60), count=st.integers(0, 300), left=st.integers(0, 480))
def test_refusals_do_not_depend_on_what_is_before(
    code: str, layout: str, element: int, data: bytes, count: int, left: int
) -> None:
    """Behind so many equal elements that at most ``left`` bits remain of 8 KiB, which are decoded at a time."""
    one = ELIAS[code](1)
    bits = one + "0" + one if element else one

    def outcome(before: int) -> object:
        payload = to_bytes(layout + bits * before + "".join(f"{byte:08b}" for byte in data))
        try:
            return decode(payload, before + count, 5, code)[before:].tolist()
        except CorruptPayloadError as error:
            return re.sub(r"\d+", "", str(error))

    before = (2**16 - left) // len(bits)
    assert outcome(before) == outcome(before % 8)


@both_codes
@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("first", [0, 1])
def test_endless_zeros_and_ones_are_refused(code: str, byte: int, first: int) -> None:
    payload = np.full(100_000, byte, np.uint8)
    payload[0] = (byte & ~1) | first
    with pytest.raises(CorruptPayloadError):
        decode(payload, 1000, 7, code)


@pytest.mark.parametrize(
    ("bits", "count", "code", "message"),
    [
        ("0" + gamma(3), 1, "gamma", "a gap to element 2 at bit 1, but the gradient has 1 elements"),
        (
            "0" + gamma(3),
            4,
            "gamma",
            "payload has no gamma code word of at most 57 bits for a magnitude at bit 5",
        ),
        ("0" + gamma(1) + "1" + gamma(8) + gamma(1), 1, "gamma", "magnitude 8 at bit 3; at most 7"),
        ("0" + omega(1) + "1" + omega(8) + omega(1), 1, "omega", "magnitude 8 at bit 3; at most 7"),
        ("1" + gamma(9) + "0", 1, "gamma", "magnitude 8 at bit 1; at most 7"),
        ("0" + gamma(1) + "00000000", 0, "gamma", "has 2 bytes, but its stream of 0 elements ends at bit 2"),
        ("0" + gamma(1) + "001", 0, "gamma", "a one among its closing zero bits, at bit 2"),
        (
            "0" + "0" * 40 + "1" * 50,
            5,
            "gamma",
            "no gamma code word of at most 57 bits for a gap at bit 1 of 96",
        ),
        (
            "0" + "111110" + "1" * 50,
            5,
            "omega",
            "no omega code word of at most 57 bits for a gap at bit 1 of 64",
        ),
        ("0000001", 10, "gamma", "payload ends at bit 8, inside a gap that starts at bit 1"),
        ("0" + omega(5) + "1", 10, "omega", "payload ends at bit 8, inside a magnitude that starts at bit 8"),
        ("0" + "0" + omega(4), 10, "omega", "payload ends at bit 8, inside a magnitude that starts at bit 8"),
        ("1" + "1111", 9, "gamma", "payload ends at bit 8, inside a dense stream of 9 elements"),
        ("1" + "1000" + "111", 2, "omega", "payload ends at bit 8, inside an element that starts at bit 5"),
        ("1" + "1111" + "010", 5, "gamma", "payload ends at bit 8, inside a sign that starts at bit 8"),
        ("0" + gamma(8), 20, "gamma", "payload ends at bit 8, inside a sign that starts at bit 8"),
    ],
)
def test_refusals_say_what_is_wrong_and_where(bits: str, count: int, code: str, message: str) -> None:
    with pytest.raises(CorruptPayloadError) as refusal:
        decode(to_bytes(bits), count, 7, code)
    assert message in str(refusal.value)


def test_an_impossible_count_is_refused_before_memory_is_taken() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayloadError):
            decode(np.full(10, 255, np.uint8), MAX_COUNT, 7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_an_empty_payload_is_refused() -> None:
    with pytest.raises(CorruptPayloadError, match="payload is empty"):
        decode(np.zeros(0, np.uint8), 0, 7)


def test_the_code_is_part_of_the_contract() -> None:
    values = quantized(np.random.default_rng(5), 1000, 0.2, 7)
    with pytest.raises(CorruptPayloadError):
        decode(encode(values, "gamma"), 1000, 7, "omega")


@pytest.mark.parametrize("code", ["delta", "", None, 3, ["gamma"]])
def test_unknown_codes_are_refused(code: object) -> None:
    for call in (lambda: encode(levels(1), code), lambda: decode(np.zeros(1, np.uint8), 1, 1, code)):
        with pytest.raises(ValueError, match="code=.* is unknown; use 'gamma' or 'omega'"):
            call()
