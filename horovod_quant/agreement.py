"""Whether all workers have given their compressors the same arguments: what they send, and what its sum tells."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

SIGNS = 16
"""Signs that stand for a text. Texts that differ have the same ones once in 65,536 times."""

COMPARED = (
    "compression", "bits", "norm", "levels", "bucket_size", "coding", "exchange", "rounding", "min_elements",
    "exclude", "overrides", "seed", "hierarchical", "group_bytes", "overlap",
)  # fmt: skip
"""Arguments that must be the same on all workers."""


def signs_of(text: str) -> tuple[int, ...]:
    """`SIGNS` numbers, +1 or -1, that depend on ``text``."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SIGNS // 8).digest(), "little")
    return tuple(1 if digest >> bit & 1 else -1 for bit in range(SIGNS))


def signature(arguments: Mapping[str, str]) -> list[int]:
    """Signs of each argument in `COMPARED`, for a sum over the workers."""
    return [sign for name in COMPARED for sign in signs_of(arguments.get(name, ""))]


def different(total: Sequence[int], workers: int) -> list[str]:
    """The arguments that are not the same on all.

    Args:
        total: the sum of the signatures.
        workers: how many have added theirs.
    """
    return [
        name
        for place, name in enumerate(COMPARED)
        if any(abs(value) != workers for value in total[SIGNS * place : SIGNS * (place + 1)])
    ]


def disagreement(arguments: Mapping[str, str], names: Sequence[str]) -> str:
    """What to tell the user of this worker."""
    own = ", ".join(f"{name}={arguments.get(name)}" for name in names)
    return (
        f"{arguments['compression']} has {own} here, and something else on other workers; construct it with the same "
        f"arguments on all"
    )
