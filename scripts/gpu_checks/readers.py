"""Turn the files of steps into rows of the report.

Also those of steps that were cut off.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpu_checks.steps import Findings

WARM_UP = 10
"""Steps of a training, with compilation, that its speed leaves out."""


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON lines.

    The last one may have been cut off.
    """
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def outcomes(path: Path, name: str) -> Findings:
    """Count the outcomes of tests."""
    entries = lines(path)
    ended = [entry for entry in entries if "outcome" in entry]
    counts = Counter(entry["outcome"] for entry in ended)
    total = next((entry["tests"] for entry in entries if "tests" in entry), None)
    row = {"tests": name, "all": total, **{kind: counts[kind] for kind in ("passed", "failed", "skipped")}}
    failed = [f"{entry['test']}: {entry['text'][-300:]}" for entry in ended if entry["outcome"] == "failed"]
    if not failed and total is not None and not counts["passed"]:
        failed = [] if len(ended) < total else ["no test has passed"]
    summary = (
        f"{counts['passed']} of {'unknown' if total is None else total} passed, {counts['failed']} failed"
    )
    slowest = sorted(ended, key=lambda entry: -entry["seconds"])[:3]
    if slowest:
        named = (f"{entry['test'].rpartition('::')[2]} {entry['seconds']:.0f} s" for entry in slowest)
        summary += f"; slowest: {', '.join(named)}"
    return Findings([row], summary, failed)


def speed(path: Path, sizes: Sequence[str]) -> Findings:
    """Return a row for each kernel: time and bandwidth at each size."""
    results = json.loads(path.read_text())["results"] if path.exists() else []
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        row = rows.setdefault(result["kernel"], {"kernel": result["kernel"]})
        row[f"{result['size']}: ms"] = result["milliseconds"]
        row[f"{result['size']}: share of copy bandwidth"] = result["share_of_copy"]
        if result["target"] is not None:
            row["target"] = result["target"]
    measured = list(dict.fromkeys(result["size"] for result in results))
    missed = sum(
        result["target"] is not None and result["share_of_copy"] < result["target"] for result in results
    )
    summary = f"measured at {', '.join(measured) or 'no size'} of {', '.join(sizes)}; {missed} below target"
    return Findings(list(rows.values()), summary)


def exchange(path: Path, name: str) -> Findings:
    """Return a row for each method."""
    found = json.loads(path.read_text()) if path.exists() else {"results": []}
    rows = []
    for result in found["results"]:
        if not result.get("hook_seconds"):
            continue
        counts = result.get("counts") or {}
        rows.append(
            {
                "exchange": name,
                "method": result["method"],
                "hooks, ms": 1e3 * median(result["hook_seconds"]),
                "hooks, x none": result.get("hook_times_none"),
                "total, ms": 1e3 * median(result["wall_seconds"]),
                "total, x none": result.get("wall_times_none"),
                "launches": counts.get("triton"),
                "all kernels": counts.get("kernels"),
                "copies": counts.get("copies"),
                "GPU, ms": None if counts.get("gpu_seconds") is None else 1e3 * counts["gpu_seconds"],
            }
        )
    problems = [(result.get("counts") or {}).get("problem") for result in found["results"]]
    problem = next(filter(None, problems), None)
    summary = f"{len(rows)} rows" + (f"; launches not counted: {problem}" if problem else "")
    return Findings(rows, summary)


def scenarios(folder: Path, name: str, names: Sequence[str], workers: int) -> Findings:
    """Count the scenarios that passed on every worker."""
    ends = [
        {entry["scenario"]: entry for entry in lines(folder / f"{rank}.jsonl")} for rank in range(workers)
    ]
    everywhere = [scenario for scenario in names if all(scenario in end for end in ends)]
    failed = [
        f"{scenario}, rank {rank}: {end[scenario]['failure'].strip()[-400:]}"
        for scenario in names
        for rank, end in enumerate(ends)
        if scenario in end and end[scenario]["failure"]
    ]
    passed = [scenario for scenario in everywhere if not any(end[scenario]["failure"] for end in ends)]
    row = {"scenarios": name, "all": len(names), "ran": len(everywhere), "passed": len(passed)}
    summary = f"{len(passed)} of {len(names)} passed"
    if len(everywhere) < len(names):
        summary += f"; the first that did not end is {names[len(everywhere)]}"
    return Findings([row], summary, failed)


def training(path: Path, name: str) -> Findings:
    """Return the speed and the losses of a training."""
    if not path.exists():
        return Findings()
    run = json.loads(path.read_text())["runs"][0]
    ends, steps = run["ends"], run["steps"]
    warm_up = min(WARM_UP, steps // 2)
    steady = (steps - warm_up) / (ends[-1] - ends[warm_up - 1])
    row = {
        "training": name,
        "steps": steps,
        "steps per second": steady,
        "with warm-up": steps / ends[-1],
        "first step, s": ends[0],
        "training loss at the end": run["losses"][-1],
        "validation loss": run["validation_loss"],
        "bytes per step": run["bytes_per_step"],
    }
    return Findings([row], f"{steady:.2f} steps per second, validation loss {run['validation_loss']:.4f}")
