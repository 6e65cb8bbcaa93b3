"""Numbers of reductions by gradient, which with the seed select random bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_quant.frontends.arguments import in_short

UNNAMED = "unnamed"
"""Name of all unnamed gradients. It has no shape, so that differing shapes are detected."""

REMEMBERED_NAMES = 1024
"""Maximum number of remembered names of direct allreduces."""

_FORGOTTEN = "forgotten"
"""Key in a compressor's state of the largest count of forgotten names."""


def saved(counts: Mapping[str, int], first_step: int) -> dict[str, Any]:
    """Return the state of a compressor, see `BaseCompressor.state_dict`.

    Args:
        counts: number of reductions by name.
        first_step: the largest count of forgotten names, 0 if there are none.
    """
    return {"exchanges": dict(counts), **({_FORGOTTEN: first_step} if first_step else {})}


def read(state: Any) -> tuple[dict[str, int], int]:
    """Return the arguments of `saved` for a state.

    Raises:
        ValueError: ``state`` is not a result of `saved`.
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
