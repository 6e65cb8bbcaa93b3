"""Shapes of gradients from the command line or a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from horovod_quant.analysis.models import Shapes

_INLINE = re.compile(r"[0-9]+(x[0-9]+)*")


def parse_shapes(given: Sequence[str]) -> Shapes:
    """Shapes such as ``["1000x1000", "64"]``, or those in a file, ``["shapes.json"]``.

    The file holds an object of lists of sizes, ``{"fc.weight": [10, 64], "fc.bias": [10]}``, or is what ``horovod-quant
    bench --json`` has written.

    Raises:
        ValueError: a shape cannot be read, or has no elements.
        OSError: the file cannot be read.
    """
    if len(given) == 1 and not _INLINE.fullmatch(given[0]):
        return _from_file(given[0])
    shapes: Shapes = {}
    for place, text in enumerate(given):
        if not _INLINE.fullmatch(text):
            raise ValueError(
                f"{text!r} is not a shape; use shapes such as 3x3x64x64 and 64, or one JSON file"
            )
        shapes[f"gradient{place}"] = _shape(text, [int(size) for size in text.split("x")])
    return shapes


def _from_file(path: str) -> Shapes:
    with open(path) as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("shapes"), dict):
        found = found["shapes"]
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{path}: write an object of lists of sizes, such as {{"fc.weight": [10, 64]}}')
    return {name: _shape(f"{path}: {name}", sizes) for name, sizes in found.items()}


def _shape(what: str, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**40 for size in sizes):
        raise ValueError(f"{what}: use sizes that are integers, 1 or more, not {sizes!r}")
    return tuple(sizes)
