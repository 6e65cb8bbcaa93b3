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
from reproduction import binsgdm_tuning, bytes_count, common, eden, machines, running, transformer

from horovod_quant.autotune.candidates import bits_sent
from horovod_quant.frontends import methods
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, GlobalQSGD, registry
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.transports.traffic import ring_allreduce_bytes


def figures_of(claim: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / f"{claim}.json").read_text())["figures"]


FIGURES = readme_picture.together(*map(figures_of, ("transformer", "binsgdm-tuning", "machines")))
EDENS = figures_of("eden")
"""Trainings of the same model, with float32's of their own."""

MORE = figures_of("more-workers")["clusters"]["16"]
"""The same with 16 workers."""


WORKERS = 4
"""Of all these trainings."""


def as_run(scheme: Scheme | None) -> Scheme | None:
    return None if scheme is None else scheme.for_workers(Workers(0, WORKERS))


def scheme_of(training: transformer.Training) -> Scheme | None:
    scheme = methods.parse(training.method, version=running.NAMES, workers=WORKERS).scheme()
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
        and (
            training.recommended or study is eden and all("server-bits" in each for each in training.options)
        )
        and as_run(scheme_of(training)) == as_run(kind())
    ]
    assert own, f"{kind()!r} is none of the settings that docs/results.md recommends"
    assert all(transformer.loss_ratio(figures, training.key) <= transformer.LIMIT for training in own)
    assert kind.own_optimizer or all(transformer.loss_ratio(figures, each.key) < 1.005 for each in own)


@pytest.mark.parametrize(
    ("begin", "key", "more"),
    [
        ("`GlobalQSGD()`", "global-qsgd-8", "global-qsgd-8"),
        ("`QSGD()`", "qsgdinf-4/256", "qsgd-4-alltoall"),
        ("`NUQSGD()`", "nuqsgd-4", ""),
        ("`EDEN()`", "eden-3/4", "eden-3"),
        ("`EDEN(server_bits=3)`", "eden-3", ""),
        ("`BinSGDM()`", "tuned", ""),
        ("the same with twice the steps", "tuned, more steps", ""),
    ],
)
def test_the_readme_shows_these_losses(begin: str, key: str, more: str) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {begin}") and "%" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    losses = EDENS if key.startswith("eden") else FIGURES
    loss, _, _ = cells[2].partition(" (")
    assert [loss, cells[3]] == [
        transformer.difference(losses, key),
        transformer.difference(MORE, more) if more else "",
    ]  # after the traffic, see test_work.py


def test_the_readme_shows_the_losses_of_a_larger_model() -> None:
    counted = figures_of("bytes-count")
    readme = (ROOT / "README.md").read_text()
    for begin, key in (
        ("fp16 (`hvd.Compression.fp16`)", "fp16"),
        ("`GlobalQSGD()`", "global-qsgd-8"),
        ("`QSGD()`", "qsgd-4"),
        ("`EDEN()`", "eden-3"),
    ):
        assert len(counted["losses"][key]["losses"]) == 3
        (line,) = (
            line for line in readme.splitlines() if line.startswith(f"| {begin}") and line.count("|") == 6
        )
        assert line.endswith(f"| {bytes_count.difference(counted, key)} |")
    assert common.link("bytes-count", "docs/results/").partition("](")[2] in readme


def test_the_readme_compares_binsgdm_with_adam_in_the_same_number_of_steps() -> None:
    (found,) = (
        each
        for each in binsgdm_tuning.verdicts(figures_of("binsgdm-tuning"))
        if "After 2,000 steps" in each.statement
    )
    assert (
        f" (relative to Adam with twice the steps: {found.evidence}) | " in (ROOT / "README.md").read_text()
    )


def test_the_readme_shows_the_rivals_losses() -> None:
    figures = figures_of("rivals")
    adam, powersgd = (transformer.difference(figures, key) for key in ("onebit-adam", "powersgd-2"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"1-bit Adam ends at {adam}, PowerSGD of rank 2 at {powersgd} (4 workers)." in readme
    rotated = transformer.difference(MORE, "global-qsgd-8-rotate")
    assert f"`GlobalQSGD(rotate=True)` ends at {rotated} with 16 workers." in readme


def test_the_readmes_advice_for_many_workers_rests_on_trainings() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        "**16 or 32 workers**: `EDEN()`, `QSGD()` or `GlobalQSGD(rotate=True)`, which ended within 1% of the float32 "
        "loss; `GlobalQSGD()` did with 4 only"
    ) in readme
    for workers, figures in figures_of("more-workers")["clusters"].items():
        within = {
            key: transformer.loss_ratio(figures, key) <= transformer.LIMIT
            for key in ("eden-3", "qsgd-4-alltoall", "global-qsgd-8-rotate", "global-qsgd-8")
        }
        assert list(within.values()) == [True, True, True, False], workers
    assert transformer.loss_ratio(FIGURES, "global-qsgd-8") <= transformer.LIMIT


def test_the_readme_shows_when_trainings_came_to_float32s_loss() -> None:
    figures = figures_of("bytes-count")

    def gain(name: str, rate: str) -> str:
        """The lower of AVX-512 and AVX2."""
        found = []
        for place in (rate, f"{rate}-avx2"):
            best = bytes_count.fastest(figures, place, bytes_count.BASELINES)
            assert best
            times = [bytes_count.seconds_needed(figures, place, each) for each in (best, name)]
            assert all(times)
            found.append(times[0] / times[1])  # type: ignore[operator]
        return f"{min(found):.1f}"

    rates = ("1gbit", "100mbit")
    readme = (ROOT / "README.md").read_text()
    for title, rate in (("1 Gbit/s", "1gbit"), ("100 Mbit/s", "100mbit")):
        shown = ("fp16", "eden-3", "binsgdm", "ddp-fp16", "ddp-eden-3", "ddp-eden-2", "ddp-binsgdm")
        gains = " | ".join(gain(name, rate) for name in shown)
        assert f"| at {title} | {gains} |" in readme.splitlines()
    one_core = FIGURES["machines"]["one-core"][machines.SMALL]
    slow, fast = (
        [f"{machines.steps.speed_up(one_core[rate], method):.1f}" for method in ("eden-3-server3", "fp16")]
        for rate in rates
    )
    assert (
        "a step of 119,000 parameters is slower than Horovod's with float32 at 1 Gbit/s "
        f"(`EDEN(server_bits=3)` {slow[0]}x, fp16 {slow[1]}x) and faster at 100 Mbit/s ({fast[0]}x, {fast[1]}x)."
    ) in " ".join(readme.split())


def test_the_readme_fits_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_readmes_first_sentence_is_computed_and_what_was_measured() -> None:
    """Less traffic with 4, 16 and 64 workers, and 0.5% for the defaults that need no other optimizer."""
    for kind in (GlobalQSGD, QSGD, NUQSGD, EDEN):
        saved = [ring_allreduce_bytes(32, size) / bits_sent(kind(), Workers(0, size)) for size in (4, 16, 64)]
        assert 3.8 < min(saved) <= max(saved) < 9.1
    trainings = {**EDENS["trainings"], **FIGURES["trainings"]}
    for key, expected in (
        ("global-qsgd-8", 3.8),
        ("qsgdinf-4/256", 3.7),
        ("nuqsgd-4", 3.8),
        ("eden-3/4", 7.9),
    ):
        measured = trainings[key]["float32_bytes_per_step"] / trainings[key]["bytes_per_step"]
        assert measured == pytest.approx(expected, abs=0.1)  # with what is not compressed
        figures = EDENS if key in EDENS["trainings"] and key.startswith("eden") else FIGURES
        assert transformer.loss_ratio(figures, key) < 1.005
    longer, equal = (transformer.loss_ratio(FIGURES, key) for key in ("tuned, more steps", "tuned"))
    assert longer < transformer.LIMIT < equal


def test_the_readmes_picture_is_drawn_from_them(tmp_path: Path) -> None:
    readme_picture.draw(FIGURES, EDENS, tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes()[:4] == b"\x89PNG"
    assert "docs/results/overview.png" in (ROOT / "README.md").read_text()
    assert readme_picture.PICTURE.exists()
