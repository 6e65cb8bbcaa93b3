"""scripts/reproduce: the studies run, the page says what their figures say, and verdicts can come out either way."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.launching import ROOT, environment

sys.path.append(str(ROOT / "scripts"))

from reproduction import clauses, common, page, qsvrg, running, variance
from reproduction.__main__ import main

STUDIES = (  # those that launch no workers
    "nuqsgd", "nuqsgd-gradients", "global-qsgd", "rotated-sum", "qsgd", "qsvrg", "limits",
)  # fmt: skip
RESULTS = ROOT / "docs" / "results"


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
    text = "".join(path.read_text() for path in sorted(folder.glob("*.md")))
    summary = folder.with_name("results.md").read_text()
    for claim in STUDIES:
        module, figures = common.module_of(claim), figures_of(folder, claim)
        assert f"## {module.TITLE}" in text
        assert "This is a run of size tiny" in text
        for found in common.verdicts_of(claim, figures):
            assert f"**{page.outcome(found.holds)}**: {found.statement}" in text
        assert f"**Scale.** {module.SCALE[0].upper()}{module.SCALE[1:]}." in text
        assert f"[{module.TITLE}](results/" in summary
        assert f" | {module.SCALE} | " in summary
    shown = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert {file.name for file in folder.glob("*.png")} == set(shown)
    assert len(shown) >= len(STUDIES)
    for file in shown:
        content = (folder / file).read_bytes()
        assert content[:4] == b"\x89PNG"
        assert len(content) < 150_000


def test_the_same_results_give_the_same_page_and_plots(folder: Path) -> None:
    files = [folder.with_name("results.md"), *sorted(folder.glob("*.md")), *sorted(folder.glob("*.png"))]
    before = [file.read_bytes() for file in files]
    page.write(folder)
    assert [file.read_bytes() for file in files] == before


def test_docs_have_the_pages_that_their_results_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most of the time of a page is in drawing and writing files, which other tests look at.
    monkeypatch.setattr(common, "save_plot", lambda figure, path: common.plt.close(figure))
    copied = Path(shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.md")))
    written = {path.relative_to(tmp_path): path.read_text() for path in page.write(copied)}
    there = [RESULTS.with_name("results.md"), *RESULTS.glob("*.md")]
    assert written == {path.relative_to(RESULTS.parent): path.read_text() for path in there}


def test_the_summary_is_short_and_tells_what_is_not_tested(folder: Path) -> None:
    for summary in (folder.with_name("results.md"), RESULTS.with_name("results.md")):
        _, *parts = summary.read_text().split("\n## ")
        assert [part.splitlines()[0] for part in parts] == ["In short", "What was not tested, and why"]
        assert summary.read_text().count("\n") <= 60
    paged = [claim for _, claims in common.PAGES.values() for claim in claims]
    assert sorted(paged) == sorted([*common.CLAIMS, *common.ON_DEMAND])


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        ([False], "the paper's one statement does not hold"),
        ([True], "the paper's one statement holds"),
        ([True, True], "both of the paper's statements hold"),
        ([True] * 3, "all 3 of the paper's statements hold"),
        ([False] * 3, "none of the paper's 3 statements holds"),
        ([True, False, False], "1 of the paper's 3 statements holds"),
    ],
)
def test_the_summary_counts_in_words(outcomes: list[bool], text: str) -> None:
    assert page._count("the paper's", "statements", outcomes) == text


def test_the_summary_names_what_holds_and_what_does_not() -> None:
    summary = RESULTS.with_name("results.md").read_text()
    for claim in (*common.CLAIMS, *common.ON_DEMAND):
        result = common.load(RESULTS / f"{claim}.json")
        (line,) = (
            (each for each in summary.splitlines() if f"[{common.module_of(claim).TITLE}]" in each)
            if result
            else ("",)
        )
        held, _, failed = line.partition("Does not hold: ")
        for found in common.verdicts_of(claim, result["figures"]) if result else ():
            clause = clauses.clause_of(claim, found.statement)
            assert clause in (held if found.holds else failed), found.statement


def test_a_verdict_without_a_clause_is_an_error() -> None:
    with pytest.raises(LookupError, match="eden: add a part of this statement to CLAUSES: no such statement"):
        clauses.clause_of("eden", "no such statement")


@pytest.mark.parametrize("claim", common.CLAIMS)
def test_a_papers_statement_says_where_it_stands(claim: str) -> None:
    result = common.load(RESULTS / f"{claim}.json")
    assert result is not None
    for found in common.verdicts_of(claim, result["figures"]):
        papers = ("QSGD, ", "NUQSGD, ", "Global-QSGD", "BinSGDM (Birder), ", "EDEN")
        assert found.source.startswith(papers) or found.source in (common.OURS, common.PACKAGE)


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


@pytest.mark.parametrize("claim", common.WITH_PARTS.split(", "))
def test_pages_alone_need_no_cached_runs(claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for result in RESULTS.glob("*.json"):  # a claim may show the figures of another
        shutil.copy(result, tmp_path)
    path = tmp_path / f"{claim}.json"
    before = common.load(path)
    assert before is not None
    assert before["figures"]
    monkeypatch.setattr(page, "write", lambda folder: [])
    monkeypatch.setattr(common.module_of(claim), "problem", lambda size: None, raising=False)
    monkeypatch.setattr(sys, "argv", ["reproduce", claim, "--output", str(tmp_path), "--only"])
    monkeypatch.setattr(running, "KEPT", running.KEPT)  # main() changes it; put it back afterwards
    assert main() == 0
    assert common.load(path) == before


def test_an_unknown_claim_is_refused(tmp_path: Path) -> None:
    done = reproduce(tmp_path, "qsdg")
    assert done.returncode == 2
    assert "qsdg: unknown claim; choose from nuqsgd, " in done.stdout


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


def test_nuqsgd_fails_with_a_training_that_diverged(folder: Path) -> None:
    figures = figures_of(folder, "nuqsgd")
    for rate in ("0.1", "0.2"):
        for run in figures["trainings"][rate]["nuqsgd-4/1024"]:
            run["losses"][-1] = None
    failed = verdict("nuqsgd", figures, "converges faster")
    assert not failed.holds
    assert "diverged" in failed.evidence
    assert not verdict("nuqsgd", figures, "a lower mean loss than QSGD, l2 norm, for most seeds").holds
    assert "diverged" in common.module_of("nuqsgd").tables(figures)


def test_nuqsgd_fails_above_its_bound(folder: Path) -> None:
    figures = figures_of(folder, "nuqsgd")
    assert verdict("nuqsgd", figures, "stay below their bounds").holds
    figures["expected"]["nuqsgd-4/1024"][0][0] = 100.0
    assert not verdict("nuqsgd", figures, "stay below their bounds").holds


@pytest.mark.parametrize(
    ("part", "figure", "key", "factor"),
    [
        ("needs √n× the range", "ranges", "l2 worst", 1.0),
        ("√n× fewer integers", "levels", "non-zeros", 1.0),
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
        own["squared error"] = [1.0 + 0.01 * (i % 2) for i, _ in enumerate(own["squared error"])]
    assert verdict("global-qsgd", figures, "costs no accuracy").holds


@pytest.mark.parametrize(
    ("part", "kind", "figure"),
    [
        ("a tenth", "rows", "nmse"),
        ("that `advise` prints", "gaussian", "nmse"),
        ("overflow their fields in one bucket", "gaussian", "again"),
        ("do not increase the nmse", "a sixteenth alike", "nmse"),
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


@pytest.mark.parametrize(
    ("part", "method", "figure", "factor"),
    [
        ("converges linearly", "qsvrg", "gaps", 1e6),
        ("keeps the convergence of SVRG", "qsvrg", "gaps", 5.0),
        ("An epoch of QSVRG needs", "qsvrg", "bits", 3.0),
        ("fewer bits than SVRG", "qsvrg", "bits", 100.0),
        ("fewer bits than QSGD", "qsgd", "gaps", 1e-9),
        ("fewer bits than gradient descent", "qsvrg", "bits", 100.0),
    ],
)
def test_qsvrg_fails_with_slower_convergence_or_more_bits(
    part: str, method: str, figure: str, factor: float
) -> None:
    figures = figures_of(RESULTS, "qsvrg")
    assert verdict("qsvrg", figures, part).holds
    for run in figures["runs"][method]:
        run[figure] = [value * factor for value in run[figure]]
    if part.endswith("QSGD"):
        for run in figures["runs"][method]:
            run["bits"] = [1.0 for _ in run["bits"]]
    assert not verdict("qsvrg", figures, part).holds


def test_late_updates_fail_where_they_end_farther_away() -> None:
    figures = figures_of(RESULTS, "qsvrg")
    for loss in ("logistic", "sigmoid"):
        assert verdict("qsvrg", figures, f"({loss} loss)").holds
        figures["late"][loss]["32"] = [[2 * value for value in run] for run in figures["late"][loss]["32"]]
        failed = verdict("qsvrg", figures, f"({loss} loss)")
        assert not failed.holds
        assert "2.0" in failed.evidence


def test_quantized_variance_reduction_descends_as_its_definition_says() -> None:
    problem = qsvrg.make_problem(64)
    x = np.random.default_rng(0).standard_normal(64)
    step = 1e-6 * np.eye(64)
    slopes = [(problem.value(x + own) - problem.value(x - own)) / 2e-6 for own in step]
    np.testing.assert_allclose(slopes, problem.gradient(x), rtol=1e-5, atol=1e-9)
    lowest = qsvrg.minimum(problem)
    assert all(problem.value(0.1 * own) > lowest for own in step)


@pytest.mark.parametrize(
    ("part", "method"),
    [("less variance than QSGD", "nuqsgd-4/8192"), ("With 4 bits NUQSGD's variance is", "nuqsgd-4/1024")],
)
def test_nuqsgd_fails_with_more_variance_on_a_transformer(part: str, method: str) -> None:
    figures = figures_of(RESULTS, "nuqsgd-gradients")
    assert verdict("nuqsgd-gradients", figures, part).holds
    figures["variances"][method] = [[100 * value for value in run] for run in figures["variances"][method]]
    assert not verdict("nuqsgd-gradients", figures, part).holds


def test_expected_variances_are_those_of_rounding_at_random() -> None:
    # Means of 4,000 draws within 6 standard errors: 2 false alarms in 10^9 such checks.
    rng = np.random.default_rng(0)
    gradient = (rng.standard_normal(1000) ** 3).astype(np.float32)
    scheme = common.scheme("nuqsgd-4", bucket_size=320)
    levels = 2.0 ** -np.arange(7, -1, -1)
    grid = np.concatenate([-levels[::-1], levels])
    total, squares = np.zeros(4000), np.square(gradient.astype(np.float64)).sum()
    for start in range(0, 1000, 320):
        own = gradient[start : start + 320].astype(np.float64)
        norm = np.linalg.norm(own)
        above = np.clip(np.searchsorted(grid, own / norm, side="right"), 1, len(grid) - 1)
        low, high = grid[above - 1], grid[above]
        up = rng.random((4000, len(own))) * (high - low) < own / norm - low
        total += np.square(norm * np.where(up, high, low) - own).sum(axis=1) / squares
    error = total.std(ddof=1) / 4000**0.5
    assert abs(total.mean() - variance.expected_without_zero(scheme, [gradient])) <= 6 * error


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
