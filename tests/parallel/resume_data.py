"""What the workers and the test of resumed training share: methods, data, and how arrays are written down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from turns import EVERY_CASE

from horovod_quant.frontends.methods import BINSGDM, Method, compared, families, parse

HIERARCHICAL_BINSGDM = f"hierarchical {BINSGDM}"
"""All workers on one node, where each keeps a share of momentum and scale."""


def _of_many_bits(family: str) -> str:
    """With few of them rounding hides what a training gains."""
    name = family.replace("BITS", "8")
    try:
        return parse(name).name
    except ValueError:
        return family.replace("BITS", "4")


TRAINED = {
    "torch": [
        *dict.fromkeys([*compared(), *map(_of_many_bits, families())]),
        HIERARCHICAL_BINSGDM,
    ],
    "tensorflow": [BINSGDM, "global-qsgd-8", HIERARCHICAL_BINSGDM],
}
"""The methods of each framework: all that have a name, in PyTorch."""

BY_DEFAULT = [
    *{parse(name).class_name: name for name in TRAINED["torch"] if name != HIERARCHICAL_BINSGDM}.values(),
    HIERARCHICAL_BINSGDM,
]
"""With PyTorch, one of each class; the others are left to --all."""


def trained(framework: str) -> list[str]:
    """The methods that the workers of this run train."""
    return [name for name in TRAINED[framework] if EVERY_CASE or name in BY_DEFAULT]


SAVING, RESUMING = 2, 3
"""Workers before and after."""

SAVED_AFTER, STEPS = 20, 40
INPUTS, OUTPUTS, BATCH = 40, 30, 16


def method_of(name: str) -> tuple[Method, dict[str, Any]]:
    """The method of that name, and further arguments of its compressor."""
    if name == HIERARCHICAL_BINSGDM:
        return parse(BINSGDM), {"hierarchical": True}
    return parse(name), {}


def batch(step: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A worker's own inputs and the outputs that the model shall learn."""
    inputs = np.random.default_rng([step, rank, size]).standard_normal((BATCH, INPUTS), np.float32)
    return inputs, _answers(inputs)


def evaluation() -> tuple[np.ndarray, np.ndarray]:
    """The same for everybody."""
    inputs = np.random.default_rng(1).standard_normal((256, INPUTS), np.float32)
    return inputs, _answers(inputs)


def _answers(inputs: np.ndarray) -> np.ndarray:
    teacher = np.random.default_rng(2).standard_normal((INPUTS, OUTPUTS), np.float32) / np.float32(
        INPUTS**0.5
    )
    return inputs @ teacher


Arrays = dict[str, dict[str, np.ndarray]]
"""By kind ("parameter", "momentum", "reduced", ...) and by the parameter's name."""


def write(path: Path, arrays: Mapping[str, Mapping[str, Any]]) -> None:
    np.savez(path, **{f"{kind} {name}": value for kind, own in arrays.items() for name, value in own.items()})


def read(path: Path) -> Arrays:
    found: Arrays = {}
    with np.load(path) as arrays:
        for key, value in arrays.items():
            kind, _, name = key.partition(" ")
            found.setdefault(kind, {})[name] = value
    return found


def file_of(folder: Path, framework: str, method: str, what: str, rank: int) -> Path:
    return folder / f"{framework}-{method.replace(' ', '-')}-{what}-{rank}.npz"
