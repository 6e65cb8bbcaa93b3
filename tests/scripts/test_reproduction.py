"""scripts/reproduce: the studies run, the page says what their figures say, and verdicts can come out either way."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT, environment

sys.path.append(str(ROOT / "scripts"))

from reproduction import common, page

STUDIES = ("nuqsgd", "global-qsgd", "rotated-sum", "qsgd")  # those that launch no workers


def reproduce(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reproduction", "--size", "tiny", "--output", str(folder), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        env={**environment(), "PYTHONPATH": str(ROOT / "scripts")},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproduction") / "results"
    done = reproduce(folder, *STUDIES)
    assert done.returncode == 0, done.stdout
    return folder


def figures_of(folder: Path, claim: str) -> dict[str, Any]:
    return json.loads((folder / f"{claim}.json").read_text())["figures"]


def verdict(claim: str, figures: dict[str, Any], part: str) -> common.Verdict:
    (found,) = (v for v in common.module_of(claim).verdicts(figures) if part in v.statement)
    return found


def test_the_page_has_each_claim_with_its_verdicts_and_plots(folder: Path) -> None:
    text = folder.with_name("results.md").read_text()
    for claim in STUDIES:
        module, figures = common.module_of(claim), figures_of(folder, claim)
        assert f"## {module.TITLE}" in text
        assert "This is a run of size tiny" in text
        for found in module.verdicts(figures):
            assert f"**{page.outcome(found.holds)}**: {found.statement}" in text
        for plot in module.draw(figures, folder):
            assert f"(results/{plot.file})" in text
            content = (folder / plot.file).read_bytes()
            assert content[:4] == b"\x89PNG"
            assert len(content) < 150_000


def test_the_same_results_give_the_same_page_and_plots(folder: Path) -> None:
    files = [folder.with_name("results.md"), *sorted(folder.glob("*.png"))]
    before = [file.read_bytes() for file in files]
    page.write(folder)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.extended
def test_a_claim_with_a_result_is_tested_again_only_on_demand(folder: Path) -> None:
    path = folder / "qsgd.json"
    before = os.stat(path).st_mtime_ns
    assert "qsgd.json exists" in reproduce(folder, "qsgd").stdout
    assert os.stat(path).st_mtime_ns == before
    figures = figures_of(folder, "qsgd")
    assert reproduce(folder, "--again", "qsgd").returncode == 0
    assert os.stat(path).st_mtime_ns != before
    assert figures_of(folder, "qsgd") == figures, "not repeatable"


def test_an_unknown_claim_is_refused(tmp_path: Path) -> None:
    done = reproduce(tmp_path, "qsdg")
    assert done.returncode == 2
    assert "qsdg: there is no such claim; choose from nuqsgd, " in done.stdout


def test_nuqsgd_fails_with_more_variance_than_qsgd(folder: Path) -> None:
    figures = figures_of(folder, "nuqsgd")
    assert verdict("nuqsgd", figures, "less variance than QSGD").holds
    variances = figures["variances"]
    for key in [key for key in variances if key.startswith("nuqsgd")]:
        other = variances[key.replace("nuqsgd", "qsgd")]
        variances[key] = [[2 * value for value in run] for run in other]
    failed = verdict("nuqsgd", figures, "less variance than QSGD")
    assert not failed.holds
    assert "2.00 ± 0.00" in failed.evidence


def test_nuqsgd_fails_with_a_training_that_broke_down(folder: Path) -> None:
    figures = figures_of(folder, "nuqsgd")
    for rate in ("0.1", "0.2"):
        for run in figures["trainings"][rate]["nuqsgd-4/1024"]:
            run["losses"][-1] = None
    failed = verdict("nuqsgd", figures, "learns faster")
    assert not failed.holds
    assert "broke down" in failed.evidence
    assert not verdict("nuqsgd", figures, "a lower mean loss than QSGD, for most seeds").holds
    assert "broke down" in common.module_of("nuqsgd").tables(figures)


def test_nuqsgd_fails_above_its_bound(folder: Path) -> None:
    figures = figures_of(folder, "nuqsgd")
    assert verdict("nuqsgd", figures, "stay below their bounds").holds
    figures["expected"]["nuqsgd-4/1024"][0][0] = 100.0
    assert not verdict("nuqsgd", figures, "stay below their bounds").holds


@pytest.mark.parametrize(
    ("part", "figure", "key", "factor"),
    [
        ("needs √n more room", "ranges", "l2 worst", 1.0),
        ("√n fewer integers", "levels", "non-zeros", 1.0),
        ("grows at least as √n", "equal", "l2 bytes 4", 3.0),
    ],
)
def test_global_qsgd_fails_with_another_growth(
    folder: Path, part: str, figure: str, key: str, factor: float
) -> None:
    figures = figures_of(folder, "global-qsgd")
    assert verdict("global-qsgd", figures, part).holds
    for own in figures[figure]:
        own[key] = [value * factor * n for value, n in zip(own[key], figures["workers"])]
    assert not verdict("global-qsgd", figures, part).holds


def test_global_qsgd_holds_where_the_error_does_not_grow(folder: Path) -> None:
    figures = figures_of(folder, "global-qsgd")
    assert not verdict("global-qsgd", figures, "costs no accuracy").holds
    for own in figures["levels"]:
        own["error"] = [1.0 + 0.01 * (i % 2) for i, _ in enumerate(own["error"])]
    assert verdict("global-qsgd", figures, "costs no accuracy").holds


@pytest.mark.parametrize(
    ("part", "kind", "figure"),
    [
        ("a tenth", "rows", "error"),
        ("that `advise` tells", "gaussian", "error"),
        ("leave their fields in one bucket", "gaussian", "again"),
        ("leave no larger error", "a sixteenth alike", "error"),
    ],
)
def test_a_rotated_sum_fails_with_more_error_or_overflows(
    folder: Path, part: str, kind: str, figure: str
) -> None:
    figures = figures_of(folder, "rotated-sum")
    assert verdict("rotated-sum", figures, part).holds
    for each in figures["exchanges"]:
        if each["kind"] == kind and each["method"] == "global-qsgd-rotated":
            each[figure] = 100 * each[figure] + 2
    assert not verdict("rotated-sum", figures, part).holds


@pytest.mark.parametrize(
    "part", ["stays below the bound", "proved for them", "At every s", "2.8 B", "√B log B"]
)
def test_qsgd_fails_with_more_of_what_is_bounded(folder: Path, part: str) -> None:
    figures = figures_of(folder, "qsgd")
    worse = copy.deepcopy(figures)
    for cell in worse["cells"]:
        cell["expected"] *= 100
        cell["bits"].update({coding: 100 * cell["bits"][coding] for coding in ("elias", "elias-omega")})
    for cell in worse["headline"] + worse["sparse"]:
        cell["gamma"] *= cell["bucket"]
    statements = [
        v for v in common.module_of("qsgd").verdicts(figures) if part.lower() in v.statement.lower()
    ]
    assert statements
    assert any(v.holds for v in statements)
    failed = [v for v in common.module_of("qsgd").verdicts(worse) if part.lower() in v.statement.lower()]
    assert not any(v.holds for v in failed)


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    x = [1, 2, 4, 8, 16]
    exact = common.fit_slope(x, [3 * v**0.5 for v in x])
    assert exact.value == pytest.approx(0.5)
    assert exact.error == pytest.approx(0, abs=1e-9)
    noisy = common.fit_slope(x, [3 * v**0.5 * (1.1 if i % 2 else 0.9) for i, v in enumerate(x)])
    assert noisy.error > 0.02


def test_a_result_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    with pytest.raises(ValueError, match="nan|JSON"):
        common.save({"figures": {"loss": float("nan")}}, path)
    assert common.load(path) is None
