"""Write the pages of results from the results on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction import clauses, common, untested

INTRODUCTION = """\
# Evidence: do the papers' claims hold?

For readers who want to know what was tested before they trust a figure. Afterwards you know at what scale each claim of
the papers was tested, and which claims hold. Each page below has the tests, figures and verdicts of one topic.

`scripts/reproduce` measures the figures in `{folder}/` and writes these pages; `scripts/reproduce --again CLAIM`
measures one claim again. A *statement of a paper* is cited with its place in the paper. *Our reading* is something that
a paper does not state in these words, so a reading that does not hold contradicts no paper. *This package's claims* are
about what the package adds. After a mean over seeds, ± is their standard deviation; after a difference in percent or a
ratio of two means, its standard error. *N× faster* means 1/N of the time.
"""

PAGE = """\
# Evidence: {title}

For readers who want to check what [the summary](../{summary}) states: {title}. Afterwards you know how each claim was
tested, and can measure it again. Each section has a claim, its test, the verdicts with their figures, and the
command. After a mean over seeds, ± is their standard deviation; after a difference in percent, a ratio of two means or
a slope, its standard error. A *speed-up* of N, or *N× faster*, means 1/N of the time; *N× less*, *fewer* or *smaller*
means 1/N of the amount."""


UNDECIDED = "none yet: parts of the measurement are missing"


def outcome(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def write(folder: Path) -> list[Path]:
    """Draw the plots; write the summary and the pages of known results.

    Returns:
        Paths of the pages, the summary first; it is beside the folder.
    """
    results = {claim: common.load(folder / f"{claim}.json") for claim in (*common.CLAIMS, *common.ON_DEMAND)}
    found = {claim: result for claim, result in results.items() if result is not None}
    summary = folder.with_name(folder.name + ".md")
    _write(
        summary, [INTRODUCTION.format(folder=folder.name), _in_short(found, folder.name), untested.section()]
    )
    paths = [summary]
    for name, (title, claims) in common.PAGES.items():
        sections = [_section(claim, found[claim], folder) for claim in claims if claim in found]
        if sections:
            paths.append(folder / f"{name}.md")
            _write(paths[-1], [PAGE.format(title=title, summary=summary.name), *sections])
    return paths


def _write(path: Path, parts: Sequence[str]) -> None:
    path.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n")


def _in_short(results: dict[str, dict[str, Any]], folder: str) -> str:
    """Return the summary's table, one row per claim."""
    rows = ["| section | scale | verdicts |", "| --- | --- | --- |"]
    for _, claims in common.PAGES.values():
        for claim in claims:
            if claim in results:
                module = common.module_of(claim)
                link = common.link(claim, f"{folder}/")
                counts = _counts(claim, results[claim]["figures"])
                rows.append(f"| {link} | {module.SCALE} | {counts} |")
    return "## In short\n\n" + "\n".join(rows)


def _counts(claim: str, figures: dict[str, Any]) -> str:
    """Return how many verdicts of each kind hold, and their clauses."""
    every = common.verdicts_of(claim, figures)
    if not every:
        return UNDECIDED
    counts = ", ".join(_count(*kind, [verdict.holds for verdict in own]) for kind, own in _by_kind(every))
    parts = [counts]
    for holds, beginning in ((True, "Holds"), (False, "Does not hold")):
        about = _about(claim, every, holds)
        if about:
            parts.append(f"{beginning}: {'; '.join(about)}")
    return ". ".join(parts)


def _count(whose: str, what: str, holds: list[bool]) -> str:
    held, of = sum(holds), len(holds)
    if of == 1:
        return f"{whose} one {what.removesuffix('s')} {outcome(holds[0])}"
    if held in (0, of):
        every = "both" if of == 2 else f"all {of}"
        return f"{every} of {whose} {what} hold" if held else f"none of {whose} {of} {what} holds"
    return f"{held} of {whose} {of} {what} {'holds' if held == 1 else 'hold'}"


def _about(claim: str, verdicts: list[common.Verdict], holds: bool) -> list[str]:
    """Return the clauses of verdicts with an outcome.

    With their number where others of the clause have the other outcome.
    """
    own = [(clauses.clause_of(claim, verdict.statement), verdict.holds) for verdict in verdicts]
    found = {}
    for clause, _ in (each for each in own if each[1] is holds):
        of = [held for other, held in own if other == clause]
        found[clause] = clause if len(set(of)) == 1 else f"{clause} ({of.count(holds)} of {len(of)})"
    return list(found.values())


def _by_kind(verdicts: list[common.Verdict]) -> list[tuple[tuple[str, str], list[common.Verdict]]]:
    """Group verdicts by the source of their statements.

    The groups are statements of a paper, our readings and claims of this package.
    """
    ours = {common.OURS: ("our", "readings"), common.PACKAGE: ("this package's", "claims")}
    kinds = [(("the paper's", "statements"), [v for v in verdicts if v.source not in ours])]
    kinds += [(what, [v for v in verdicts if v.source == source]) for source, what in ours.items()]
    return [(what, own) for what, own in kinds if own]


def _time_of(result: dict[str, Any]) -> str:
    """Return the run time of a claim.

    It is that of its trainings if the claim was run in parts.
    """
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
    plots = [f"![{p.caption}]({p.file})\n\n*{p.caption}*" for p in module.draw(figures, folder)]
    parts = [
        f"## {module.TITLE}",
        f"**Scale.** {module.SCALE[0].upper()}{module.SCALE[1:]}.",
        f"**Claim.** {module.CLAIM}",
        f"**Test.** {module.METHOD}",
        "**Verdict.**\n\n" + "\n".join(verdicts) if verdicts else f"**Verdict.** {UNDECIDED.capitalize()}.",
        *([module.in_short(figures)] if hasattr(module, "in_short") else []),
        module.tables(figures),
        *plots,
        f"`scripts/reproduce {claim}`: {_time_of(result)} on {machine['cores']} cores of {machine['processor']}"
        f"{', load before: ' + str(machine['load']) if 'load' in machine else ''}, kernels: {machine['kernels']}.",
    ]
    if result["size"] != "full":
        parts.insert(1, f"**This is a run of size {result['size']}: its figures mean nothing.**")
    return "\n\n".join(part.strip() for part in parts if part)
