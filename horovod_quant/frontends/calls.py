"""Validation of calls with a compressor, and positions in Horovod's groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from horovod_quant.frontends.arguments import NO_PROCESS_SET


def check_process_set(given: Any, used: Any, hierarchical: bool) -> None:
    """Raise ValueError unless the compressor can reduce over the used process set."""
    if given is not None and used is not given:
        raise ValueError(f"process_set={given}: Horovod reduces over {used}; use the same for both")
    if hierarchical and used.process_set_id != 0:
        raise ValueError(NO_PROCESS_SET)


def check_operation(compressor: Any, op: Any, usable: Sequence[Any], adasum: Any) -> None:
    """Raise ValueError unless the operation is usable, or None."""
    if op is not None and op not in usable:
        shown = "Adasum" if op == adasum else repr(op)
        raise ValueError(
            f"op={shown}: {type(compressor).__name__} supports only op=hvd.Average and op=hvd.Sum"
        )


def check_dtype(name: str, dtype: Any, usable: Sequence[Any]) -> None:
    """Raise TypeError unless gradients of the dtype can be quantized."""
    if dtype not in usable:
        raise TypeError(
            f"{name}: a gradient of dtype {dtype} cannot be quantized; use float16, bfloat16, float32 or "
            f"float64, or leave compression out of this call"
        )


class Positions(threading.local):
    """Position of a tensor in a list that may have duplicates.

    Horovod compresses the tensors of a group in order.
    """

    def __init__(self) -> None:
        self._call = 0
        self._next = 0

    def next_of(self, tensor: Any, tensors: Sequence[Any], call: object) -> int:
        """Return the tensor's next position; ``call`` lives as long as Horovod's call."""
        first = self._next if self._call == id(call) else 0
        order = [*range(first, len(tensors)), *range(min(first, len(tensors)))]
        position = next((i for i in order if tensors[i] is tensor), None)
        if position is None:  # a wrapping compressor passes on another tensor than it was given
            position = order[0]
        self._call, self._next = id(call), (position + 1) % len(tensors)
        return position
