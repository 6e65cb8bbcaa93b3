"""Check Auto's choices in `scripts/lab-auto`; write docs/auto.md's table."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages import insert, load_before

AUTO, NONE = "auto", "none"
MOST = {"none": 1.03, "1gbit": 1.05, "100mbit": 1.05}
"""Largest allowed ratio of Auto's time to the fastest method, by rate.

In the table's order.
"""

TITLES = {"none": "none", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


class Cell(NamedTuple):
    """Measurements with one controller, number of hosts and rate.

    Seconds are medians of the rounds.

    Attributes:
        taken: the method that Auto took.
        best: the fastest of the others.
        times: Auto's time relative to that of ``best``, the median of the rounds' ratios.
    """

    rate: str
    controller: str
    hosts: int
    taken: str
    seconds: float
    best: str
    best_seconds: float
    none_seconds: float
    times: float

    @property
    def reached(self) -> bool:
        return self.times <= MOST[self.rate]

    @property
    def difference(self) -> str:
        return f"{100 * (self.times - 1):+.1f}%"


def cells(folder: Path) -> list[Cell]:
    found = [_cell(path) for path in folder.glob("*.json")]
    return sorted(found, key=lambda cell: (list(MOST).index(cell.rate), cell.controller, cell.hosts))


def _cell(path: Path) -> Cell:
    controller, hosts, rate = path.stem.split("-")
    found = json.loads(path.read_text())
    walls = {result["method"]: result["wall_seconds"] for result in found["results"]}
    own = walls.pop(AUTO)
    best = min(walls, key=lambda name: statistics.median(walls[name]))
    return Cell(
        rate, controller, int(hosts), found[AUTO]["method"], statistics.median(own), best,
        statistics.median(walls[best]), statistics.median(walls[NONE]),
        statistics.median(a / b for a, b in zip(own, walls[best])),
    )  # fmt: skip


def watched(folder: Path) -> list[str]:
    """Return the methods that Auto took while the rate fell.

    One after another; empty where that was not measured.
    """
    path = folder / "watched"
    return re.findall(r"after \d+ s auto chose ([\w-]+)", path.read_text()) if path.exists() else []


def verdicts(folder: Path) -> Iterator[tuple[bool, str]]:
    for cell in cells(folder):
        yield (
            cell.reached,
            f"{cell.controller}, {cell.hosts} hosts, {cell.rate}: took {cell.taken}, {cell.difference} of the time of "
            f"{cell.best} ({1e3 * cell.best_seconds:,.0f} ms; none {1e3 * cell.none_seconds:,.0f})",
        )
    taken = watched(folder)
    if taken:
        yield taken[-1] != NONE, f"a rate that falls to 100mbit: took {', '.join(taken)}"


def table(folder: Path) -> str:
    lines = [
        "| limit | | hosts | `none`, ms | fastest, ms | Auto took | ms | against the fastest |",
        "| --- | --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for cell in cells(folder):
        controller = {"gloo": "Gloo", "mpi": "MPI"}[cell.controller]
        lines.append(
            f"| {TITLES[cell.rate]} | {controller} | {cell.hosts} | {1e3 * cell.none_seconds:,.0f} | {cell.best}, "
            f"{1e3 * cell.best_seconds:,.0f} | {cell.taken} | {1e3 * cell.seconds:,.0f} | {cell.difference} |"
        )
    taken = watched(folder)
    if taken:
        lines += [
            "",
            "In successive tuning sessions of a run whose links were limited to 100 Mbit/s after the first one,",
            f"with `again_after=20`, Auto took {', '.join(taken)}.",
        ]
    return "\n".join(lines)


def main(folder: Path, page: Path | None = None) -> int:
    validated = list(verdicts(folder))
    if not validated:
        print(f"nothing has been measured: {folder} has no results")
        return 1
    for reached, text in validated:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    if page is not None:
        text = f"{table(folder)}\n\n{load_before(folder / 'load')}"
        page.write_text(insert(page.read_text(), "table", "lab-auto", text))
    return 0 if all(reached for reached, _ in validated) else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
