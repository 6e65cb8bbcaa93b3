"""Shapes of gradients from the command line or a file."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_quant.analysis.json_file import read_json
from horovod_quant.analysis.models import Shapes, elements

MOST_ELEMENTS = 2**33
"""Size limit of all gradients: 32 GiB, which the model handles within a minute."""

MOST_SIZES = 32
"""Size limit of a gradient, from numpy."""

_INLINE = re.compile(r"[0-9]+(x[0-9]+)*")


def parse_shapes(given: Sequence[str]) -> Shapes:
    """Return shapes from ``["1000x1000", "64"]``, or from a file, ``["shapes.json"]``.

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
    return _of_bearable_size(" ".join(given), shapes)


def _from_file(path: str) -> Shapes:
    found = read_json(path)
    if isinstance(found, dict) and isinstance(found.get("shapes"), dict):
        found = found["shapes"]
    return shapes_of(path, found)


def shapes_of(path: str | Path, found: Any) -> Shapes:
    """Return the shapes in a file's object.

    Raises:
        ValueError: it has no valid shapes.
    """
    if not isinstance(found, dict) or not found:
        raise ValueError(f'{path}: write an object of lists of sizes, such as {{"fc.weight": [10, 64]}}')
    shapes = {name: _shape(f"{path}: {name}", sizes) for name, sizes in found.items()}
    return _of_bearable_size(path, shapes)


def _shape(what: str, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**40 for size in sizes):
        raise ValueError(f"{what}: use sizes that are integers, 1 or more, not {reprlib.repr(sizes)}")
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{what}: use {MOST_SIZES} sizes or fewer, not {len(sizes)}")
    return tuple(sizes)


def _of_bearable_size(what: str | Path, shapes: Shapes) -> Shapes:
    count = elements(shapes)
    if count > MOST_ELEMENTS:
        raise ValueError(f"{what}: use {MOST_ELEMENTS:,} elements or fewer, not {count:,}")
    return shapes
