"""Writes the table of docs/speed.md from the JSON files of `scripts/lab-speed`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

TARGETS = {"global-qsgd-8": 3.3, "global-qsgd-4": 5.0, "binsgdm": 7.0}
"""Times as fast as Horovod without compression, 4 hosts at 1 Gbit/s."""

NONE = "none"
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

    def times(self, method: str, other: str = NONE) -> float:
        """How many times as long the other method takes: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.walls[method], self.walls[other]))


def table(shaped: dict[str, Run], unshaped: dict[str, Run], ddp: Run) -> str:
    heads = [f"{name}, ms | times as fast" for name in CONTROLLERS.values()]
    heads += [f"{name} without limit, ms" for name in CONTROLLERS.values()]
    lines = ["| method | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (3 * len(CONTROLLERS))]
    for method in methods(shaped["gloo"]):
        cells = []
        for controller in CONTROLLERS:
            run = shaped[controller]
            cells += [milliseconds(run, method), f"{run.times(method):.2f}"]
        cells += [milliseconds(unshaped[controller], method) for controller in CONTROLLERS]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    for method in methods(ddp):
        if method != NONE:
            lines.append(f"| {method} | {milliseconds(ddp, method)} | {ddp.times(method):.2f} |  |  |  |  |")
    return "\n".join(lines)


def methods(run: Run) -> list[str]:
    return [method for method in run.walls if method != "no exchange"]


def milliseconds(run: Run, method: str) -> str:
    return f"{1e3 * run.seconds(method):,.0f}"


def verdicts(shaped: dict[str, Run], unshaped: dict[str, Run], ddp: Run) -> list[tuple[bool, str]]:
    found = []
    for controller, name in CONTROLLERS.items():
        for method, target in TARGETS.items():
            times = shaped[controller].times(method)
            found.append(
                (
                    times >= target,
                    f"{method} with {name}: {times:.2f} times as fast as none ({target:g} wanted)",
                )
            )
            rival = ddp.seconds(RIVAL) / shaped[controller].seconds(method)
            found.append((rival > 1, f"{method} with {name}: {rival:.2f} times as fast as {RIVAL}"))
        for method in methods(unshaped[controller]):
            slower = 1 / unshaped[controller].times(method)
            if method not in (NONE, "fp16"):
                text = f"{method} with {name}, no limit: {slower:.2f} of none's time"
                found.append((slower <= SLOWEST_UNSHAPED, text))
    return found


def main(folder: Path, page: Path) -> int:
    shaped, unshaped = (
        {controller: Run(folder / f"{controller}-{rate}.json") for controller in CONTROLLERS}
        for rate in ("1gbit", "none")
    )
    ddp = Run(folder / "ddp-1gbit.json")
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(shaped, unshaped, ddp)}\n\n{END}{rest.split(END)[1]}")
    checked = verdicts(shaped, unshaped, ddp)
    for reached, text in checked:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    return 0 if all(reached for reached, _ in checked) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
