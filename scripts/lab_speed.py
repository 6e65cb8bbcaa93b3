"""Writes the table of docs/speed.md from the JSON files of `scripts/lab-speed`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

TARGETS = {"global-qsgd-8": 3.3, "global-qsgd-4": 5.0, "binsgdm": 7.0}
"""Times as fast as Horovod without compression, 4 hosts at 1 Gbit/s."""

RIVAL = "ddp-powersgd-1"
SLOWEST_UNSHAPED = 1.1  # times none
CONTROLLERS = {"gloo": "Gloo", "mpi": "MPI"}
BEGIN, END = "<!-- table: scripts/lab-speed -->", "<!-- /table -->"


class Run:
    """What was measured with a controller and a rate: seconds of each round, by method."""

    def __init__(self, path: Path) -> None:
        self.walls = {
            result["method"]: result["wall_seconds"] for result in json.loads(path.read_text())["results"]
        }

    def seconds(self, method: str) -> float:
        return statistics.median(self.walls[method])

    def times(self, method: str, other: str = "none") -> float:
        """How many times as long the other method takes: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.walls[method], self.walls[other]))


def table(shaped: dict[str, Run], unshaped: dict[str, Run]) -> str:
    heads = [f"{name}, ms | times as fast" for name in CONTROLLERS.values()]
    heads += [f"{name} without limit, ms" for name in CONTROLLERS.values()]
    lines = ["| method | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (3 * len(CONTROLLERS))]
    for method in shaped["gloo"].walls:
        cells = []
        for controller in CONTROLLERS:
            run = shaped[controller]
            cells += [f"{1e3 * run.seconds(method):,.0f}", f"{run.times(method):.2f}"]
        for controller in CONTROLLERS:
            run = unshaped[controller]
            cells.append(f"{1e3 * run.seconds(method):,.0f}" if method in run.walls else "")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(shaped: dict[str, Run], unshaped: dict[str, Run]) -> list[tuple[bool, str]]:
    found = []
    for controller, name in CONTROLLERS.items():
        for method, target in TARGETS.items():
            times, rival = shaped[controller].times(method), shaped[controller].times(method, RIVAL)
            text = f"{method} with {name}: {times:.2f} times as fast as none ({target:g} wanted)"
            found.append((times >= target, text))
            found.append((rival > 1, f"{method} with {name}: {rival:.2f} times as fast as {RIVAL}"))
        for method in unshaped[controller].walls:
            slower = 1 / unshaped[controller].times(method)
            if method not in ("none", "fp16"):
                text = f"{method} with {name}, no limit: {slower:.2f} of none's time"
                found.append((slower <= SLOWEST_UNSHAPED, text))
    return found


def main(folder: Path, page: Path) -> int:
    shaped, unshaped = (
        {controller: Run(folder / f"{controller}-{rate}.json") for controller in CONTROLLERS}
        for rate in ("1gbit", "none")
    )
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(shaped, unshaped)}\n\n{END}{rest.split(END)[1]}")
    checked = verdicts(shaped, unshaped)
    for reached, text in checked:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    return 0 if all(reached for reached, _ in checked) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
