from __future__ import annotations

import math

import pytest

from horovod_quant.kernels import layout

ELEMENTS = (0, 1, 31, 32, 33, 1023, 1024, 1025, 4096, 10**7 + 1)


@pytest.mark.parametrize("elements", ELEMENTS)
def test_counts_round_up(elements: int) -> None:
    assert layout.rows(elements) == math.ceil(elements / 32)
    assert layout.tiles(elements) == math.ceil(elements / 1024)
    assert layout.buckets(elements, 96) == math.ceil(elements / 96)


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("width", range(2, 17))
def test_sums_take_a_word_for_every_32_over_width_rows(elements: int, width: int) -> None:
    fields = 32 // width
    assert layout.sum_words(elements, width) == 32 * math.ceil(math.ceil(elements / 32) / fields)


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("bits", range(1, 17))
def test_codes_take_their_bits_and_less_than_a_row_of_words_more(elements: int, bits: int) -> None:
    words = layout.code_words(elements, bits)
    assert words % 32 == 0
    assert 0 <= 32 * words - math.ceil(elements / 32) * 32 * bits < 32 * 32


@pytest.mark.parametrize("bits", range(1, 17))
def test_a_tile_of_codes_wastes_no_bit(bits: int) -> None:
    assert layout.code_words(layout.TILE, bits) * 32 == layout.TILE * bits


@pytest.mark.parametrize(("width", "rate"), [(2, 16), (4, 8), (5, 6), (8, 4), (11, 2), (16, 2)])
def test_sum_words_are_those_of_the_cost_table(width: int, rate: int) -> None:
    assert layout.sum_words(2**20 * 3, width) == math.ceil(2**20 * 3 / rate / 32) * 32
