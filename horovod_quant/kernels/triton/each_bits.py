"""Single bits of many segments in one call, see `horovod_quant.kernels.triton.each`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE
from horovod_quant.kernels.segment_offsets import keys_of_batch
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.each import check_offsets, keys_and_starts
from horovod_quant.kernels.triton.launching import batch
from horovod_quant.kernels.triton.table import (
    SegmentTable,
    before,
    counts_of,
    launch,
    launch_groups,
    range_of,
    steps_of,
    table_of_values,
)

_KEY = Key(1, 2)
_BYTES = 4
_VECTOR = 15


class BitSegments(SegmentKernels):
    """Methods for one bit per element."""

    def binarize(self, segments: Batch, rounder: Rounder, at: Any) -> torch.Tensor:
        table = table_of_values(segments)
        momenta, scales, betas = zip(*segments.states) if segments.states else ((), (), ())
        m, b = _state(momenta, table, "momenta"), _state(scales, table, "scales")
        words_at, counts = np.array(at, np.int64)[:-1], table.counts(TILE)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        check_offsets("words", words_at, ROW * counts + -(-counts // ROW), len(out))
        broken = torch.empty(int(counts.sum()), dtype=torch.bool, device=table.device)
        given = np.array(betas, np.float64)
        columns = {
            "source": table.addresses,
            "momentum": m.addresses,
            "scale": b.addresses,
            "target": out.data_ptr() + _BYTES * words_at,
            "broken": broken.data_ptr() + before(counts),
            "factor": given.astype(np.float32).view(np.int32),
            "second_factor": (1.0 - given).astype(np.float32).view(np.int32),
            **keys_and_starts(keys_of_batch(segments, rounder), segments.starts, len(table)),
        }
        with batch():
            for group in table.aligned_groups:
                states_aligned = not ((group.of(m.addresses) | group.of(b.addresses)) & _VECTOR).any()
                state = torch.empty(2, dtype=torch.float32, device=table.device)
                local = state[:1] if states_aligned else state[1:]
                launch_groups(table, [group], ("binarize", states_aligned),
                              lambda x: functions.binarize(x, local, local, 0.5, _KEY),  # noqa: B023
                              columns, [table], [m, b, out, broken])  # fmt: skip
            if len(broken):
                (step,) = steps_of("pack flags", lambda: arrays.pack_flags(broken[:1]))
                flags = {"source": columns["broken"], "target": columns["target"] + _BYTES * ROW * counts}
                launch(step, tuple(counts.tolist()), flags, out.device, [range_of(broken)], [range_of(out)],
                       kept=(broken, out))  # fmt: skip
        return out

    def vote(
        self, payloads: Sequence[torch.Tensor], segments: Batch, rounder: Rounder, at: Sequence[int]
    ) -> torch.Tensor:
        if not payloads:
            raise ValueError("no payloads to vote")
        payloads = [typed(payload, torch.int32, "payloads") for payload in payloads]
        words_at = np.array(at, np.int64)[: len(segments.elements)]
        counts = counts_of(segments.elements, TILE)
        flags_at, flag_counts = words_at + ROW * counts, -(-counts // ROW)
        out = torch.empty(at[-1], dtype=torch.int32, device=payloads[0].device)
        check_offsets("words", words_at, ROW * counts + flag_counts, min(map(len, [*payloads, out])))
        if not counts.any():
            return out
        keys = keys_and_starts(keys_of_batch(segments, rounder), segments.starts, len(counts))
        (vote,) = steps_of(
            ("vote", len(payloads)), lambda: functions.vote([payload[:ROW] for payload in payloads], _KEY)
        )
        (any_bits,) = steps_of(
            ("any bits", len(payloads)), lambda: arrays.any_bits([one[:1] for one in payloads], out[:1])
        )
        bases = np.array([one.data_ptr() for one in payloads], np.int64)
        read, written = list(map(range_of, payloads)), [range_of(out)]
        with batch():
            for step, elements, offsets, columns in (
                (vote, 32 * ROW * counts, words_at, keys),
                (any_bits, flag_counts, flags_at, {}),
            ):
                columns = {"target": out.data_ptr() + _BYTES * offsets, **columns}
                pointers = bases + _BYTES * offsets[:, None]
                launch(step, tuple(elements.tolist()), columns, out.device, read, written, pointers,
                       (payloads, out))  # fmt: skip
        return out

    def decode_signs(
        self, payload: torch.Tensor, segments: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        table = SegmentTable(outs, "out")
        words_at, counts = np.array(at, np.int64)[: len(table)], table.counts(TILE)
        check_offsets("words", words_at, ROW * counts + -(-counts // ROW), len(payload))
        source = typed(payload, torch.int32, "payload").data_ptr() + _BYTES * words_at
        columns = {
            "source": source,
            "broken": source + _BYTES * ROW * counts,
            "target": table.addresses,
            "factor": float_entry(factor),
        }
        with batch():
            launch_groups(table, table.aligned_groups, ("signs",),
                          lambda out: functions.decode_signs(payload[:ROW], 1.0, out, payload),
                          columns, [payload], [table])  # fmt: skip
        return outs


def _state(arrays: Sequence[Any], gradients: SegmentTable, name: str) -> SegmentTable:
    state = SegmentTable(arrays, name)
    if state.elements != gradients.elements or any(group.kind != "float32" for group in state.groups):
        raise ValueError(f"{name}: they must be float32 and as long as the gradients")
    return state
