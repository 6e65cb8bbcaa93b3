"""Cases within a scenario that the methods take in turn by default, so that together they take all; with ``--all`` each
method takes each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from scenario_table import BINSGDM, split

Case = TypeVar("Case")

EVERY_CASE = os.environ.get("EVERY_CASE") == "1"
"""Set by tests/conftest.py."""

_method, _turn = "", 0


def begin(scenario: str, methods: Sequence[str]) -> None:
    """Called by worker.py before each scenario, with its module's methods."""
    global _method, _turn
    _method = split(scenario)[1]
    _turn = methods.index(_method) if _method else 0


def taken(*cases: Case) -> Sequence[Case]:
    """Those that the scenario has to try. BinSGDM, whose optimizers are its own, takes the first and the last."""
    if EVERY_CASE:
        return cases
    if _method.partition("-in-")[0] in BINSGDM:
        return cases[:1] + cases[1:][-1:]
    return (cases[_turn % len(cases)],)
