"""Whether all workers have given their compressors the same arguments: what they send, and what its sum tells.

Each argument has a place, where its text's signs are added up. There are as many for every scheme, so that workers with
different ones, or with other versions, send arrays of the same length: one for each of the compressors' own arguments,
and `FIELD_PLACES` for the scheme's, in the order of its fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

SIGNS = 16
"""Signs that stand for a text. Texts that differ have the same ones once in 65,536 times."""

COMMON = (
    "compression", "min_elements", "exclude", "overrides", "seed", "hierarchical", "inside", "group_bytes", "overlap",
)  # fmt: skip
"""Arguments of every compressor that must be the same on all workers; the first is the scheme's name."""

WIRE_VERSION = 2
"""Of the layouts of payloads, raised with each change of one: it is compared with the scheme's name."""

FIELD_PLACES = 8
"""For a scheme's arguments; those of one with more share places."""

PLACES = len(COMMON) + FIELD_PLACES

_NO_FIELD = "an argument that this worker's scheme does not have"


def signs_of(text: str) -> tuple[int, ...]:
    """`SIGNS` numbers, +1 or -1, that depend on ``text``."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SIGNS // 8).digest(), "little")
    return tuple(1 if digest >> bit & 1 else -1 for bit in range(SIGNS))


def signature(arguments: Mapping[str, str]) -> list[int]:
    """Signs of each place, for a sum over the workers.

    Args:
        arguments: those in `COMMON`, and the scheme's in the order of its fields.
    """
    texts = [f"{arguments[COMMON[0]]}, wire format {WIRE_VERSION}"]
    texts += [arguments.get(name, "") for name in COMMON[1:]]
    texts += ["; ".join(f"{name}={arguments[name]}" for name in names) for names in _field_places(arguments)]
    return [sign for text in texts for sign in signs_of(text)]


def labels(arguments: Mapping[str, str]) -> list[str]:
    """What to call each place."""
    return [*COMMON, *(", ".join(names) or _NO_FIELD for names in _field_places(arguments))]


def is_told(equal: Sequence[bool]) -> list[bool]:
    """Which places to name: not a scheme's arguments where the schemes themselves are different."""
    return [not same and (equal[0] or place < len(COMMON)) for place, same in enumerate(equal)]


def different(arguments: Mapping[str, str], total: Sequence[int], workers: int) -> list[str]:
    """The arguments that are not the same on all.

    Args:
        arguments: this worker's.
        total: the sum of the signatures.
        workers: how many have added theirs.
    """
    equal = [
        all(abs(value) == workers for value in total[SIGNS * place : SIGNS * (place + 1)])
        for place in range(PLACES)
    ]
    return [label for label, told in zip(labels(arguments), is_told(equal)) if told]


def disagreement(arguments: Mapping[str, str], names: Sequence[str]) -> str:
    """What to tell the user of this worker."""
    described = ", ".join(f"{name}={arguments[name]}" if name in arguments else name for name in names)
    if COMMON[0] in names:
        return (
            f"{described} (wire format {WIRE_VERSION}) here, but not on all other workers; construct it with the same "
            f"arguments on all workers, and install the same version of horovod_quant there"
        )
    return (
        f"{arguments['compression']} has {described} here, but not on all other workers; construct it with the same "
        f"arguments on all workers"
    )


def _field_places(arguments: Mapping[str, str]) -> list[list[str]]:
    """The names of the scheme's arguments in each of their places."""
    names = [name for name in arguments if name not in COMMON]
    return [names[place::FIELD_PLACES] for place in range(FIELD_PLACES)]
