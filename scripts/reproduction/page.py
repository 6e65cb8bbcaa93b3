"""The page of results, from the results on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction import common, untested

INTRODUCTION = """\
# Do the papers' claims hold?

This page tests the claims of the papers that this package implements, in one section per claim. It computes each
verdict from the figures in `{folder}/`. `scripts/reproduce` writes it; `scripts/reproduce --again CLAIM` tests one
claim again. A number with ± is a mean over seeds and their standard deviation; a slope with ± is a fit and its standard
error.

A *statement of a paper* is given with its place in the paper. *Our reading* is something that a paper does not say in
these words, so a reading that does not hold contradicts no paper. *This package's claims* are about what it adds."""


def outcome(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def write(folder: Path) -> Path:
    """Draws the plots into the folder and writes the page beside it, for the claims that have a result.

    Returns:
        The page's path.
    """
    results = {claim: common.load(folder / f"{claim}.json") for claim in (*common.CLAIMS, *common.ON_DEMAND)}
    found = {claim: result for claim, result in results.items() if result is not None}
    parts = [
        INTRODUCTION.format(folder=folder.name),
        _in_short(found),
        _statements(found),
        untested.section(),
    ]
    parts += [_section(claim, result, folder) for claim, result in found.items()]
    path = folder.with_name(folder.name + ".md")
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _in_short(results: dict[str, dict[str, Any]]) -> str:
    """One line per subject."""
    found = ([claim for claim in subject if claim in results] for subject in common.SUBJECTS)
    lines = (
        " ".join(_claim_in_short(each, results[each]["figures"]) for each in own) for own in found if own
    )
    return "## In short\n\n" + "\n".join(f"- {line}" for line in lines)


def _claim_in_short(claim: str, figures: dict[str, Any]) -> str:
    module = common.module_of(claim)
    counts = [
        f"{sum(v.holds for v in own)} of {whose} {len(own)} {what} {'holds' if len(own) == 1 else 'hold'}"
        for (whose, what), own in _by_kind(common.verdicts_of(claim, figures))
    ]
    more = " " + module.in_short(figures) if hasattr(module, "in_short") else ""
    return f"{common.link(module.TITLE)}: {', '.join(counts)}.{more}"


def _by_kind(verdicts: list[common.Verdict]) -> list[tuple[tuple[str, str], list[common.Verdict]]]:
    """A paper's statements, our readings and this package's claims, those that there are."""
    ours = {common.OURS: ("our", "readings"), common.PACKAGE: ("this package's", "claims")}
    kinds = [(("the paper's", "statements"), [v for v in verdicts if v.source not in ours])]
    kinds += [(what, [v for v in verdicts if v.source == source]) for source, what in ours.items()]
    return [(what, own) for what, own in kinds if own]


def _statements(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for claim, result in results.items():
        link = common.link(common.module_of(claim).TITLE)
        for v in common.verdicts_of(claim, result["figures"]):
            rows.append((link, v.statement, v.source, outcome(v.holds)))
    table = ["| claim | statement | source | |", "| --- | --- | --- | --- |"]
    return "## Every statement\n\n" + "\n".join([*table, *(f"| {' | '.join(row)} |" for row in rows)])


def _time_of(result: dict[str, Any]) -> str:
    """What a claim's figures have taken; of parts that ran one by one, with other work beside them, the trainings."""
    if "only" not in result:
        cpu = f" ({result['cpu_seconds']:.0f} s of CPU time)" if "cpu_seconds" in result else ""
        return f"{result['seconds']:.0f} s{cpu}"
    trainings = result["figures"].get("trainings", {}).values()
    seconds = sum(sum(own.get("seconds", ())) for own in trainings)
    return f"part by part, {seconds / 60:.0f} minutes of training in all" if seconds else "part by part"


def _section(claim: str, result: dict[str, Any], folder: Path) -> str:
    module, figures = common.module_of(claim), result["figures"]
    machine = result["machine"]
    verdicts = [
        f"- **{outcome(v.holds)}**: {v.statement} ({v.evidence}). *{v.source}*"
        for v in common.verdicts_of(claim, figures)
    ]
    plots = [f"![{p.caption}]({folder.name}/{p.file})\n\n*{p.caption}*" for p in module.draw(figures, folder)]
    parts = [
        f"## {module.TITLE}",
        f"**Claim.** {module.CLAIM}",
        f"**Test.** {module.METHOD}",
        "**Verdict.**\n\n" + "\n".join(verdicts),
        module.tables(figures),
        *plots,
        f"`scripts/reproduce {claim}`: {_time_of(result)} on {machine['cores']} cores of {machine['processor']}, "
        f"kernels: {machine['kernels']}.",
    ]
    if result["size"] != "full":
        parts.insert(1, f"**This is a run of size {result['size']}: its figures say nothing.**")
    return "\n\n".join(parts)
