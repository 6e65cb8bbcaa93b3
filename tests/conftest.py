"""Settings of all tests. pytest puts this file's folder on sys.path, so that tests share ``helpers``; of scripts/ they
use ``proofs``.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import timings
from helpers import EVERY_EXAMPLE
from hypothesis import settings

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

# The same examples every time, and no limit on the time of one: a loaded machine is no bug.
settings.register_profile("every", derandomize=True, deadline=None, max_examples=EVERY_EXAMPLE)
settings.register_profile("a fifth", settings.get_profile("every"), max_examples=EVERY_EXAMPLE // 5)

TIERS = {
    "--quick": "while editing: one launch of two workers",
    "--all": "all methods under both controllers, every test in its full size, and those marked `extended`",
    "--thorough": "every scenario with every controller and number of workers, every method in every example, 2,000 "
    "steps of the soak test: some hours more",
}

FOR_WORKERS = {
    "SCRIPT_DRAWS": ("6", "180"),  # torch_scripts.any_script
    "EVERY_CASE": ("0", "1"),  # turns.py
    "ELASTIC_PHASES": ("few", "all"),  # elastic_job.py
}
"""Variables of the environment that workers read, by default and with --all."""

SECONDS_WORTH_A_TABLE = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "how much is tested; without an option what a change has to pass")
    for option, what in TIERS.items():
        group.addoption(
            option, action="store_const", const=option.lstrip("-"), dest="tier", default="default", help=what
        )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("every" if is_extended(config) else "a fifth")
    for name, (default, extended) in FOR_WORKERS.items():
        os.environ.setdefault(name, extended if is_extended(config) else default)


def is_extended(config: pytest.Config) -> bool:
    return config.getoption("tier") in ("all", "thorough")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files out whose tests ``-m parallel`` or ``-m "not parallel"`` would all deselect: to import them takes
    seconds in every process.
    """
    expression = config.getoption("markexpr")
    if expression not in ("parallel", "not parallel") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    if expression == "parallel":
        return True if "mark.parallel" not in text else None
    return True if re.search(r"^pytestmark = pytest\.mark\.parallel$", text, re.MULTILINE) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Launches that share the cores begin in this order, and nobody shall wait for this one at the end.
    items.sort(key=lambda item: item.path.name != "test_elastic.py")
    if is_extended(config):
        return
    left = [item for item in items if item.get_closest_marker("extended")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist's, which tells the first one
        output["launches"] = [list(launch) for launch in timings.LAUNCHES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for launch in getattr(node, "workeroutput", {}).get("launches", ()):
        timings.LAUNCHES.append(timings.Launch(*launch))


def pytest_report_header(config: pytest.Config) -> str:
    left_out = (
        "" if is_extended(config) else "; tests marked `extended` are left to --all, and deselected here"
    )
    return f"tier: {config.getoption('tier')}{left_out}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    if sum(seconds.values()) >= SECONDS_WORTH_A_TABLE:
        terminalreporter.section("where the time went")
        for line in timings.table(seconds, timings.LAUNCHES):
            terminalreporter.write_line(line)
