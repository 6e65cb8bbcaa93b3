"""That the exchange benchmark runs; its times are nobody's business here."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "parallel"))

from launching import horovodrun  # noqa: E402

from horovod_quant.analysis.models import MODELS, elements  # noqa: E402

METHODS = ["none", "fp16", "nuqsgd-8", "global-qsgd-4", "global-qsgd-2", "binsgdm"]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("framework", "controller"), [("torch", "gloo"), ("torch", "mpi"), ("tensorflow", "gloo")]
)
def test_exchange_benchmark_runs(framework: str, controller: str, tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        controller, 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--framework", framework, "--model", "tiny",
         "--rounds", 2, "--split-rounds", 1, "--json", report, "--methods", *METHODS],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(report.read_text())
    assert found["framework"] == framework
    assert found["workers"] == 2
    assert found["elements"] == elements(MODELS["tiny"])
    results = {result["method"]: result for result in found["results"]}
    assert list(results) == ["no exchange", *(method for method in METHODS if method != "global-qsgd-2")]
    assert "2 workers need bits >= 3" in done.stdout
    for method, result in results.items():
        assert_sane(method, result, has_phases=framework == "torch")
    sent = {method: result["bytes_sent"] for method, result in results.items()}
    assert sent["no exchange"] == 0
    assert sent["none"] == 4 * elements(MODELS["tiny"]) == 2 * sent["fp16"]
    assert sent["binsgdm"] < sent["global-qsgd-4"] < sent["nuqsgd-8"] < sent["fp16"]


def assert_sane(method: str, result: dict[str, Any], has_phases: bool) -> None:
    for name in ("wall", "cpu", "horovod_cpu", "system_cpu"):
        milliseconds = result[f"{name}_milliseconds"]
        assert math.isfinite(milliseconds), (method, name)
        assert milliseconds >= 0, (method, name)
    has_phases = has_phases and method not in ("no exchange", "none", "fp16")
    assert ("phases" in result) == has_phases
    if has_phases:
        for phase in ("quantize", "decode", "launch", "wait"):
            wall, cpu = result["phases"][phase]
            assert wall > 0, (method, phase)
            assert cpu >= 0, (method, phase)
