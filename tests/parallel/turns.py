"""Cases within a scenario that the methods take in turn by default, so that together they take all; with ``--all`` each
method takes each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from scenario_table import split

Case = TypeVar("Case")

EVERY_CASE = os.environ.get("EVERY_CASE") == "1"
"""Set by tests/conftest.py."""

_turn = 0


def begin(scenario: str, methods: Sequence[str], features: Sequence[str]) -> None:
    """Called by worker.py before each scenario, with its module's methods and features."""
    global _turn
    feature, method = split(scenario)
    # A feature further another method begins, so that none has the first case of all.
    _turn = features.index(feature) + (methods.index(method) if method else 0)


def taken(*cases: Case) -> Sequence[Case]:
    """Those that the scenario has to try."""
    return cases if EVERY_CASE else (cases[_turn % len(cases)],)
