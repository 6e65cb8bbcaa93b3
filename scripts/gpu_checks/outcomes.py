"""A pytest plugin that writes each test's outcome when it is known.

It can also keep only one case of each test.

Variables of the environment:
    GPU_CHECK_OUTCOMES: the file, a line of JSON for each outcome, and one with the number of tests.
    GPU_CHECK_CASES: ``first`` for the first case of each test, or of each of its topics, without those that draw
        examples.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def write(**entry: Any) -> None:
    with open(os.environ["GPU_CHECK_OUTCOMES"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def is_worker(config: Any) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if os.environ.get("GPU_CHECK_CASES") != "first":
        return
    kept = {}
    for item in items:
        if not hasattr(item.function, "hypothesis"):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            kept.setdefault((item.function, parameters.get("topic")), item)
    chosen = set(kept.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session: Any) -> None:
    config = session.config
    if not is_worker(config) and not getattr(config.option, "numprocesses", None):
        write(tests=len(session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if node.gateway.id == "gw0":
        write(tests=len(ids))


class Outcomes:
    """A plugin for the first process, which hears of all tests."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if (
            report.when == "call" or report.outcome != "passed"
        ):  # a setup that fails or is skipped has no call
            text = str(report.longrepr)[-2000:] if report.outcome == "failed" else ""
            write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)


def pytest_configure(config: Any) -> None:
    if not is_worker(config):
        config.pluginmanager.register(Outcomes(), "gpu-check-outcomes")
