"""Whatever is made without arguments trains: docs/results' figures say so."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

import readme_picture
from reproduction import eden, seconds, transformer

from horovod_quant.frontends import methods
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme


def figures_of(claim: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / f"{claim}.json").read_text())["figures"]


FIGURES = readme_picture.both(figures_of("transformer"), figures_of("binsgdm-tuning"))
EDENS = figures_of("eden")
"""Trainings of the same model, with float32's of their own."""


def scheme_of(training: transformer.Training) -> Scheme | None:
    scheme = methods.parse(training.method).scheme()
    given = dict(option.removeprefix("--").split("=") for option in training.options)
    changes: Any = {name.replace("-", "_"): int(value) for name, value in given.items()}
    return scheme if scheme is None else replace(scheme, **changes)  # type: ignore[type-var]


@pytest.mark.parametrize("kind", registry.own(), ids=lambda kind: kind.__name__)
def test_a_constructor_without_arguments_ends_within_a_hundredth_of_float32(kind: type[Scheme]) -> None:
    study, figures = (eden, EDENS) if kind.__name__ == "EDEN" else (transformer, FIGURES)
    own = [
        training
        for training in study.TRAININGS
        if training.key in figures["trainings"]
        and (training.recommended or study is eden and not training.options)
        and scheme_of(training) == kind()
    ]
    assert own, f"{kind()!r} is none of the settings that docs/results.md recommends"
    assert all(transformer.loss_ratio(figures, training.key) <= transformer.LIMIT for training in own)


@pytest.mark.parametrize(
    ("begin", "key", "steps"),
    [
        ("`GlobalQSGD()`", "global-qsgd-8", 1),
        ("`QSGD()`", "qsgdinf-4/256", 1),
        ("`NUQSGD()`", "nuqsgd-4", 1),
        ("`BinSGDM()`", "tuned, more steps", transformer.FACTOR),
        ("the same, as many steps", "tuned", 1),
        ('`GlobalQSGD(levels="exponential")`', "global-qsgd-exp-8", 1),
        ('`QSGD(bits=4, norm="l2")`', "qsgd-4", 1),
    ],
)
def test_the_readme_shows_these_figures(begin: str, key: str, steps: int) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {begin}") and "%" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    row = readme_picture.Row(begin, key, steps)
    gains = [f"{readme_picture.speed_up(FIGURES, row, rate):.2f}" for rate in ("1gbit", "100mbit")]
    assert cells[1:] == [transformer.difference(FIGURES, key), *gains]


def test_the_readme_shows_edens_figures() -> None:
    gains = (
        f"{transformer.steps.speed_up(FIGURES['speeds'][rate], 'eden-3'):.2f}"
        for rate in ("1gbit", "100mbit")
    )
    row = " | ".join(["`EDEN()`", transformer.difference(EDENS, "eden-3"), *gains])
    readme = (ROOT / "README.md").read_text()
    assert f"| {row} |" in readme
    assert (
        f"`EDEN(trellis=True)` ends at {transformer.difference(EDENS, 'eden-trellis-3')} for the same"
        in readme
    )


def test_the_readme_shows_the_rivals_losses() -> None:
    figures = figures_of("rivals")
    adam, powersgd = (transformer.difference(figures, key) for key in ("onebit-adam", "powersgd-2"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"ends at {adam}, PyTorch's PowerSGD hook of rank 2 at {powersgd}." in readme


def test_the_readme_shows_when_trainings_came_to_float32s_loss() -> None:
    figures = figures_of("seconds")

    def gain(key: str, rate: str) -> str:
        own, float32 = (seconds.arrival(figures, rate, each) for each in (key, "none"))
        assert own
        assert float32
        return f"{float32.seconds / own.seconds:.1f}"

    eden_s, halves = ([gain(key, rate) for rate in ("100mbit", "1gbit")] for key in ("eden-3", "fp16"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"loss {eden_s[0]} and {eden_s[1]} times as fast as float32 (100 Mbit/s, 1 Gbit/s)" in readme
    assert f"`hvd.Compression.fp16` {halves[0]} and {halves[1]} times" in readme


def test_the_readme_fits_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_readmes_first_sentence_is_what_was_measured() -> None:
    """About 4 times fewer bytes and 1% for three defaults, 9 times for EDEN; BinSGDM 20 times, and twice the steps."""
    trainings = {**EDENS["trainings"], **FIGURES["trainings"]}
    saved = {
        key: trainings[key]["float32_bytes_per_step"] / trainings[key]["bytes_per_step"]
        for key in ("global-qsgd-8", "qsgdinf-4/256", "nuqsgd-4", "eden-3", "tuned, more steps")
    }
    assert saved.pop("eden-3") == pytest.approx(9, abs=0.1)
    assert saved.pop("tuned, more steps") > 20
    longer, equal = (transformer.loss_ratio(FIGURES, key) for key in ("tuned, more steps", "tuned"))
    assert longer < transformer.LIMIT < equal
    assert all(ratio == pytest.approx(4, abs=0.4) for ratio in saved.values())
    assert all(transformer.loss_ratio(FIGURES, key) < transformer.LIMIT for key in saved)


def test_the_readmes_picture_is_drawn_from_them(tmp_path: Path) -> None:
    readme_picture.draw(FIGURES, tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes()[:4] == b"\x89PNG"
    assert "docs/results/overview.png" in (ROOT / "README.md").read_text()
    assert readme_picture.PICTURE.exists()
