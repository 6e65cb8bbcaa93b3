"""Says of the JSON files of `scripts/lab-auto` what Auto has reached."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

AUTO, NONE = "auto", "none"
MOST = {"none": 1.03, "1gbit": 1.05, "100mbit": 1.05}
"""Times the fastest that Auto may take, by rate."""


def verdicts(folder: Path) -> Iterator[tuple[bool, str]]:
    for path in sorted(folder.glob("*.json")):
        controller, hosts, rate = path.stem.split("-")
        found = json.loads(path.read_text())
        walls = {result["method"]: result["wall_seconds"] for result in found["results"]}
        own = walls.pop(AUTO)
        best = min(walls, key=lambda name: statistics.median(walls[name]))
        times = statistics.median(a / b for a, b in zip(own, walls[best]))
        yield (
            times <= MOST[rate],
            f"{controller}, {hosts} hosts, {rate}: took {found[AUTO]['method']}, {100 * (times - 1):+.1f}% of the "
            f"time of {best} ({1e3 * statistics.median(walls[best]):,.0f} ms; none "
            f"{1e3 * statistics.median(walls[NONE]):,.0f})",
        )
    watched = folder / "watched"
    if watched.exists():
        taken = re.findall(r"after \d+ s auto takes ([\w-]+):", watched.read_text())
        yield taken[-1] != NONE, f"a rate that falls to 100mbit: took {', '.join(taken)}"


def main(folder: Path) -> int:
    checked = list(verdicts(folder))
    for reached, text in checked:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    return 0 if checked and all(reached for reached, _ in checked) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
