"""``stats()`` against the loopback interface's own counters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import extended
from launching import horovodrun
from scenario_table import METHODS, TF_VARIANTS, TORCH_VARIANTS

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("workers", [2, extended(3)])
@pytest.mark.parametrize(
    ("framework", "methods"),
    [
        ("torch", METHODS),
        extended("torch", TORCH_VARIANTS),
        extended("tensorflow", [*METHODS, *TF_VARIANTS, "global-qsgd-in-tensorflow"]),
    ],
    ids=["torch", "torch-variants", "tensorflow"],
)
def test_bytes_on_the_wire_agree_with_stats(framework: str, methods: Sequence[str], workers: int) -> None:
    # Horovod's workers talk to each other in every cycle, also when idle: let them do it rarely.
    program = [sys.executable, Path(__file__).with_name("wire_worker.py"), framework, *methods]
    done = horovodrun("gloo", workers, program, env={"HOROVOD_CYCLE_TIME": "20"}, own_network=True)
    assert done.returncode == 0, done.stdout[-3000:]
    figures = [json.loads(text) for text in re.findall(r"FIGURES (\{.*?\})", done.stdout)]
    assert [figure["method"] for figure in figures] == list(methods)
    for figure in figures:
        assert figure["wire"] == pytest.approx(figure["counted"], rel=0.10), figure
