"""The page of results, from the results on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction import common

INTRODUCTION = """\
# Do the papers' claims hold?

`scripts/reproduce` makes this page: it tests the claims of the papers that this package implements, one section a
claim, and computes each verdict from the figures in `{folder}/`. `scripts/reproduce --again CLAIM` tests one again. A
number with ± is a mean over seeds and their standard deviation; a slope with ± is a fit and its standard error."""


def outcome(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def write(folder: Path) -> Path:
    """Draws the plots into the folder and writes the page beside it, for the claims that have a result.

    Returns:
        The page's path.
    """
    results = {claim: common.load(folder / f"{claim}.json") for claim in (*common.CLAIMS, *common.ON_DEMAND)}
    found = {claim: result for claim, result in results.items() if result is not None}
    parts = [INTRODUCTION.format(folder=folder.name), _summary(found)]
    parts += [_section(claim, result, folder) for claim, result in found.items()]
    path = folder.with_name(folder.name + ".md")
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _summary(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for claim, result in results.items():
        module = common.module_of(claim)
        for verdict in module.verdicts(result["figures"]):
            rows.append((_link(module.TITLE), verdict.statement, outcome(verdict.holds)))
    return "\n".join(["| claim | | |", "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in rows)])


def _section(claim: str, result: dict[str, Any], folder: Path) -> str:
    module, figures = common.module_of(claim), result["figures"]
    machine = result["machine"]
    verdicts = [f"- **{outcome(v.holds)}**: {v.statement} ({v.evidence})" for v in module.verdicts(figures)]
    plots = [f"![{p.caption}]({folder.name}/{p.file})\n\n*{p.caption}*" for p in module.draw(figures, folder)]
    cpu = f" ({result['cpu_seconds']:.0f} s of CPU time)" if "cpu_seconds" in result else ""
    parts = [
        f"## {module.TITLE}",
        f"**Claim.** {module.CLAIM}",
        f"**Test.** {module.METHOD}",
        "**Verdict.**\n\n" + "\n".join(verdicts),
        module.tables(figures),
        *plots,
        f"`scripts/reproduce {claim}`: {result['seconds']:.0f} s{cpu} on {machine['cores']} cores of "
        f"{machine['processor']}, kernels: {machine['kernels']}.",
    ]
    if result["size"] != "full":
        parts.insert(1, f"**This is a run of size {result['size']}: its figures say nothing.**")
    return "\n\n".join(parts)


def _link(heading: str) -> str:
    anchor = "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
    return f"[{heading}](#{anchor})"
