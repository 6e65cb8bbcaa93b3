"""Fingerprint of compressors' arguments, which workers compare.

Each argument has a slot, where the signs of its text are summed over the workers. The slots do not depend on the
scheme, so that workers with different schemes, or with other versions, send arrays of the same length: one slot for
each argument of compressors, and `FIELD_SLOTS` for those of the scheme, in the order of its fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

SIGNS = 16
"""Number of signs of a text. Different texts have equal signs with probability 1 / 65,536."""

COMMON = (
    "compression", "min_elements", "exclude", "overrides", "seed", "hierarchical", "inside", "group_bytes", "overlap",
)  # fmt: skip
"""Arguments of every compressor that must be the same on all workers; the first is the scheme's name."""

WIRE_VERSION = 2
"""Version of the payloads' layouts, compared with the scheme's name."""

FIELD_SLOTS = 8
"""Number of slots for a scheme's arguments; a scheme with more shares slots."""

SLOTS = len(COMMON) + FIELD_SLOTS

_NO_FIELD = "an argument that this worker's scheme does not have"


def signs_of(text: str) -> tuple[int, ...]:
    """Return `SIGNS` numbers, +1 or -1, that depend on ``text``."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SIGNS // 8).digest(), "little")
    return tuple(1 if digest >> bit & 1 else -1 for bit in range(SIGNS))


def fingerprint_of(arguments: Mapping[str, str]) -> list[int]:
    """Return the signs of each slot, for a sum over the workers.

    Args:
        arguments: texts of the arguments in `COMMON`, and of the scheme's in the order of its fields.
    """
    texts = [f"{arguments[COMMON[0]]}, wire format {WIRE_VERSION}"]
    texts += [arguments.get(name, "") for name in COMMON[1:]]
    texts += ["; ".join(f"{name}={arguments[name]}" for name in names) for names in _field_slots(arguments)]
    return [sign for text in texts for sign in signs_of(text)]


def labels(arguments: Mapping[str, str]) -> list[str]:
    """Return the names of the slots."""
    return [*COMMON, *(", ".join(names) or _NO_FIELD for names in _field_slots(arguments))]


def different(arguments: Mapping[str, str], total: Sequence[int], workers: int) -> list[str]:
    """Return the arguments that differ between workers.

    A scheme's arguments are left out if the schemes differ.

    Args:
        arguments: this worker's arguments.
        total: the sum of the fingerprints.
        workers: the number of workers in the sum.
    """
    equal = [
        all(abs(value) == workers for value in total[SIGNS * slot : SIGNS * (slot + 1)])
        for slot in range(SLOTS)
    ]
    named = labels(arguments) if equal[0] else COMMON
    return [label for label, same in zip(named, equal) if not same]


def disagreement(arguments: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the error message on this worker."""
    described = ", ".join(f"{name}={arguments[name]}" if name in arguments else name for name in names)
    if COMMON[0] in names:
        return (
            f"{described} (wire format {WIRE_VERSION}) here, but not on all other workers; construct it with the same "
            f"arguments on all workers, and install the same version of horovod_quant there"
        )
    return (
        f"{arguments['compression']} has {described} here, but not on all other workers; construct it with the same "
        f"arguments and environment variables on all workers"
    )


def _field_slots(arguments: Mapping[str, str]) -> list[list[str]]:
    """Return the names of the scheme's arguments in each slot."""
    names = [name for name in arguments if name not in COMMON]
    return [names[slot::FIELD_SLOTS] for slot in range(FIELD_SLOTS)]
