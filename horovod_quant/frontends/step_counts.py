"""Numbers of exchanges by gradient, which with the seed select random bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_quant.frontends.arguments import in_short

UNNAMED = "unnamed"
"""The name of a gradient that has none, whatever its shape, which shall not differ between workers unnoticed."""

REMEMBERED_NAMES = 1024
"""Of a script's own allreduces, at most."""

_FORGOTTEN = "forgotten"
"""In a compressor's state: the largest count of the names beyond those."""


def saved(counts: Mapping[str, int], first_step: int) -> dict[str, Any]:
    """The state of a compressor, see `BaseCompressor.state_dict`.

    Args:
        counts: by name.
        first_step: the largest count of the names that have been forgotten, 0 if there are none.
    """
    return {"exchanges": dict(counts), **({_FORGOTTEN: first_step} if first_step else {})}


def read(state: Any) -> tuple[dict[str, int], int]:
    """The arguments of `saved`.

    Raises:
        ValueError: ``state`` is something else than what it has returned.
    """
    counts = state.get("exchanges") if isinstance(state, Mapping) else None
    if not isinstance(counts, Mapping) or not {"exchanges"} <= set(state) <= {"exchanges", _FORGOTTEN}:
        counts = None
    elif not all(_is_count(*item) for item in [*counts.items(), (_FORGOTTEN, state.get(_FORGOTTEN, 0))]):
        counts = None
    if counts is None:
        raise ValueError(f"state={in_short(state)}: use what a compressor's state_dict() returned")
    return {name: int(count) for name, count in counts.items()}, state.get(_FORGOTTEN, 0)


def _is_count(name: Any, count: Any) -> bool:
    return isinstance(name, str) and isinstance(count, int) and not isinstance(count, bool) and count >= 0
