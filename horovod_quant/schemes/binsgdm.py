"""BinSGDM: extreme one-bit quantization for communication-efficient large-scale distributed training.

Peng et al. ICLR 2023 submission; published as Birder, NeurIPS 2023. The optimizer's update itself is one bit an
element; momentum and scale stay on their worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_quant.kernels.layout import ROW, TILE, ceil_div, tiles
from horovod_quant.kernels.reference import store_float32
from horovod_quant.schemes.base import (
    Allgather,
    Alltoall,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    split_points,
)
from horovod_quant.schemes.chunks import Chunks


@dataclass(frozen=True)
class BinSGDM(Scheme):
    """BinSGDM's 1-bit allreduce.

    1. every worker updates its momentum and scale and draws a bit an element;
    2. an alltoall brings the bits of a chunk to the worker that serves it;
    3. the server averages the n bits and draws one from the average;
    4. an allgather brings the servers' bits to everybody.

    A tile (1,024 elements) with a non-finite gradient on any worker decodes to NaN on all; one flag bit a tile
    travels with the signs.
    """

    @property
    def collectives(self) -> int:
        return 2

    def exchange(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        chunks = Chunks([len(gradient.values) for gradient in gradients], workers.size)
        pieces = []
        for server in range(workers.size):
            words, broken = _empty_piece(chunks.tile_count(server))
            for segment in chunks.segments(server):
                gradient, state = gradients[segment.gradient], gradients[segment.gradient].state
                if state is None:
                    raise ValueError(
                        "BinSGDM exchanges gradients of its own optimizer only: no momentum given"
                    )
                part = slice(segment.start, segment.stop)
                key = gradient.keys.key("worker", gradient.step, workers.rank)
                in_piece = slice(segment.tile, segment.tile + segment.tile_count)
                _, broken[in_piece] = kernels.binarize(
                    gradient.values[part], state.momentum[part], state.scale[part], state.beta, key, segment.start,
                    words[in_piece].reshape(-1),
                )  # fmt: skip
            pieces.append(_close_piece(words, broken))
        splits = [len(piece) for piece in pieces]

        received = yield Alltoall(np.concatenate(pieces), splits, chunks.parts(4 * ROW))

        own_tiles = chunks.tile_count(workers.rank)
        opened = [_open_piece(piece, own_tiles) for piece in received]
        words, broken = _empty_piece(own_tiles)
        for segment in chunks.segments(workers.rank):
            gradient = gradients[segment.gradient]
            in_piece = slice(segment.tile, segment.tile + segment.tile_count)
            # Every worker would draw the same bits here, so the result does not depend on who serves what.
            key = gradient.keys.key("server", gradient.step)
            votes = [other_words[in_piece].reshape(-1) for other_words, _ in opened]
            kernels.vote(votes, key, segment.start, words[in_piece].reshape(-1))
        for _, other_broken in opened:
            broken |= other_broken

        parts = [count / workers.size for count in chunks.parts(4 * ROW)]
        gathered = yield Allgather(_close_piece(words, broken), parts, splits)

        final = [_open_piece(piece, chunks.tile_count(server)) for server, piece in enumerate(gathered)]
        signs = np.concatenate([piece_words for piece_words, _ in final])
        flags = np.concatenate([piece_broken for _, piece_broken in final])
        tile_at = split_points([tiles(len(gradient.values)) for gradient in gradients])

        def write(i: int, factor: float, out: np.ndarray) -> None:
            own = slice(tile_at[i], tile_at[i + 1])
            kernels.decode_signs(signs[own].reshape(-1), factor * workers.size, out)
            for tile in np.flatnonzero(flags[own]):
                store_float32(np.full(1, np.nan, np.float32), out[tile * TILE : (tile + 1) * TILE])

        return Decoded(workers.size, write)


def _empty_piece(tile_count: int):
    return np.empty((tile_count, ROW), np.int32), np.zeros(tile_count, bool)


def _close_piece(words: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Sign words, then one flag bit a tile in whole words."""
    flags = np.zeros(4 * ceil_div(len(broken), 32), np.uint8)
    packed = np.packbits(broken, bitorder="little")
    flags[: len(packed)] = packed
    return np.concatenate([words.reshape(-1), flags.view(np.int32)])


def _open_piece(piece: np.ndarray, tile_count: int):
    words = piece[: tile_count * ROW].reshape(tile_count, ROW)
    flags = np.unpackbits(piece[tile_count * ROW :].view(np.uint8), count=tile_count, bitorder="little")
    return words, flags.astype(bool)
