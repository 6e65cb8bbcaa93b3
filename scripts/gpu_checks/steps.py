"""The steps of a part and their findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PASSED, FAILED, CUT_OFF, LEFT_OUT = "passed", "failed", "cut off", "left out"


class Findings(NamedTuple):
    """The findings of a step.

    Attributes:
        rows: of the part's table, with the same keys in all steps of a part.
        summary: in a few words.
        failed: what is wrong, an entry each.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    summary: str = ""
    failed: Sequence[str] = ()


class Step(NamedTuple):
    """A command.

    Attributes:
        weight: its share of the time, against those of the other steps that are yet to run.
        read: returns what the command has left so far; called when it has ended or was cut off.
        horovod: which Horovod it needs, ``"nccl"`` or ``"host"``.
        environment: variables, beside those of all steps.
    """

    name: str
    command: Sequence[str]
    weight: float
    read: Callable[[], Findings]
    horovod: str | None = None
    environment: Mapping[str, str] = {}


class Part(NamedTuple):
    """Steps with one table."""

    name: str
    steps: Sequence[Step]
