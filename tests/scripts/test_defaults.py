"""Whatever is made without arguments trains: docs/results' figures say so."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

from reproduction import transformer

from horovod_quant import methods
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme

FIGURES: dict[str, Any] = json.loads((ROOT / "docs" / "results" / "transformer.json").read_text())["figures"]

UNTRAINED = {"EDEN"}
"""No training of the transformer has been measured with them yet."""


def scheme_of(training: transformer.Training) -> Scheme | None:
    scheme = methods.parse(training.method).scheme()
    given = dict(option.removeprefix("--").split("=") for option in training.options)
    changes: Any = {name.replace("-", "_"): int(value) for name, value in given.items()}
    return scheme if scheme is None else replace(scheme, **changes)  # type: ignore[type-var]


@pytest.mark.parametrize("kind", registry.own(), ids=lambda kind: kind.__name__)
def test_a_constructor_without_arguments_ends_within_a_hundredth_of_float32(kind: type[Scheme]) -> None:
    own = [
        training
        for training in transformer.TRAININGS
        if training.key in FIGURES["trainings"] and scheme_of(training) == kind()
    ]
    if kind.__name__ in UNTRAINED:
        assert not own, f"there are figures now: {kind.__name__} need not be left out"
        pytest.skip("not trained yet")
    recommended = [training for training in own if training.recommended]
    assert recommended, f"{kind()!r} is none of the settings that docs/results.md recommends"
    assert all(transformer.loss_ratio(FIGURES, training.key) <= transformer.LIMIT for training in recommended)


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("GlobalQSGD()", "global-qsgd-8"),
        ("QSGD()", "qsgdinf-4/256"),
        ("NUQSGD()", "nuqsgd-4"),
        ("BinSGDM()", "binsgdm, longer"),
    ],
)
def test_the_readme_shows_these_figures(code: str, key: str) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| `{code}`") and "%" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    (training,) = (each for each in transformer.TRAININGS if each.key == key)
    gains = [
        f"{transformer.training_speed_up(FIGURES['speeds'][rate], training.method):.2f}"
        for rate in ("1gbit", "100mbit")
    ]
    assert cells[1:] == [transformer.difference(FIGURES, key), *gains]
