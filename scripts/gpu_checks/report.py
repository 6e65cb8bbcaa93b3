"""report.json, report.md and logs.tar.gz, written as a whole after each step."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.parts import TITLES
from gpu_checks.steps import CUT_OFF, FAILED, LEFT_OUT, PASSED, Findings, Part, Step

VERSIONS = ("python", "torch", "cuda", "nccl", "triton", "numpy", "horovod", "driver", "commit")
FAILURES_SHOWN = 10
NOT_RUN = "not run"


class Report:
    """The results so far, and the files that have them.

    Args:
        out: folder of the three files.
        logs: folder of the steps' logs.
        limit: seconds for everything.
        rehearsal: whether Triton's interpreter replaces the GPU.

    Attributes:
        data: the content of report.json.
    """

    def __init__(self, out: Path, logs: Path, limit: float, rehearsal: bool) -> None:
        self.page = out / "report.md"
        self._out, self._logs, self._begin = out, logs, time.monotonic()
        self.data: dict[str, Any] = {"rehearsal": rehearsal, "limit": limit, "machine": {}, "parts": []}

    def plan(self, parts: Sequence[Part]) -> None:
        """Add the parts, none of which has run."""
        for part in parts:
            entry = {"name": part.name, "state": NOT_RUN, "seconds": 0.0, "steps": [], "table": []}
            self.data["parts"].append(entry)
        self.write()

    def end(
        self, part: Part, step: Step, state: str, seconds: float, limit: float, findings: Findings
    ) -> None:
        """Add a step that has ended to its part."""
        entry = next(each for each in self.data["parts"] if each["name"] == part.name)
        entry["steps"].append(
            {
                "name": step.name,
                "state": state,
                "seconds": seconds,
                "limit": limit,
                "summary": findings.summary,
                "failed": list(findings.failed),
            }
        )
        entry["seconds"] += seconds
        entry["table"] += findings.rows
        states = [each["state"] for each in entry["steps"]]
        entry["state"] = next((worst for worst in (FAILED, CUT_OFF, LEFT_OUT) if worst in states), PASSED)
        if len(states) < len(part.steps):
            entry["state"] += f", {len(part.steps) - len(states)} of {len(part.steps)} steps not run"
        print(
            f"gpu-check: {part.name}: {step.name}: {state}, {seconds:.0f} s. {findings.summary}", flush=True
        )
        self.write()

    def write(self) -> None:
        """Write all three files."""
        self.data["seconds"] = time.monotonic() - self._begin
        self._replace("report.json", json.dumps(self.data, indent=1, default=str))
        self._replace("report.md", "\n".join(self._lines()) + "\n")
        partial = self._out / "logs.tar.gz.partial"
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(self._logs, "logs")
        partial.replace(self._out / "logs.tar.gz")

    def _replace(self, name: str, text: str) -> None:
        partial = self._out / f"{name}.partial"
        partial.write_text(text)
        partial.replace(self._out / name)

    def is_good(self) -> bool:
        """True if all parts have passed."""
        return "stopped" not in self.data and all(part["state"] == PASSED for part in self.data["parts"])

    def summary(self) -> str:
        """Name the states of the parts."""
        return ", ".join(f"{part['name']} {part['state']}" for part in self.data["parts"])

    def _lines(self) -> list[str]:
        machine, what = (
            self.data["machine"],
            "rehearsal on the CPU" if self.data["rehearsal"] else "GPU check",
        )
        lines = [f"# {what}: {machine.get('gpu') or machine.get('processor', 'unknown')}", ""]
        lines += table([{"": name, "version": machine[name]} for name in VERSIONS if machine.get(name)])
        lines += [
            "",
            f"{machine.get('cores')} cores, {machine.get('processor')}, {machine.get('gpus', 0)} GPU(s).",
        ]
        lines += [f"{self.data['seconds']:.0f} of {self.data['limit']:.0f} s."]
        if "stopped" in self.data:
            lines += [f"**Stopped {self.data['stopped']}.**"]
        rows = [{"part": part["name"], "state": part["state"], "seconds": part["seconds"], "what": TITLES[part["name"]]}
                for part in self.data["parts"]]  # fmt: skip
        lines += ["", *table(rows)]
        for part in self.data["parts"]:
            lines += ["", f"## {part['name']}: {TITLES[part['name']]}", ""]
            for step in part["steps"]:
                limit = f"{step['seconds']:.1f} of {step['limit']:.0f} s"
                lines.append(f"- {step['name']}: **{step['state']}**, {limit}. {step['summary']}")
                lines += [f"  - failed: {one}" for one in step["failed"][:FAILURES_SHOWN]]
                if len(step["failed"]) > FAILURES_SHOWN:
                    lines.append(f"  - and {len(step['failed']) - FAILURES_SHOWN} more, see report.json")
            if part["table"]:
                lines += ["", *table(part["table"])]
        return lines


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def cell(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
