"""``horovod-quant bench --transport ddp`` with real workers, and what it says of wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment
from torchrun import torchrun

from horovod_quant.analysis.calibration import read_bench
from horovod_quant.analysis.models import MODELS, elements

COMMAND = Path(sys.executable).with_name("horovod-quant")
DDP = ["bench", "--transport", "ddp"]
RAGGED = 0.02
"""What is on the wire beside payloads, by them: headers, control tensors."""


@pytest.mark.parallel
def test_measures_hooks_beside_ddps_own(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = torchrun(
        2,
        ["--no-python", COMMAND, *DDP, "--model", "tiny", "--rounds", 2, "--json", file],
        env={"LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "tiny in PyTorch's DDP, 2 workers on 1 host, Gloo" in done.stdout
    assert "is left out" not in done.stdout
    found = json.loads(file.read_text())
    assert (found["framework"], found["workers"], found["rounds"]) == ("ddp", 2, 2)
    results = {result["method"]: result for result in found["results"]}
    assert list(results)[:4] == ["none", "fp16", "bf16", "powersgd-1"]
    sent = {method: result["bytes_sent"] for method, result in results.items()}
    assert sent["none"] == 4 * elements(MODELS["tiny"]) == 2 * sent["fp16"] == 2 * sent["bf16"]
    assert (
        0
        < sent["powersgd-1"]
        < sent["binsgdm"]
        < sent["eden-3"]
        < sent["qsgd-4"]
        < sent["global-qsgd-8"]
        < sent["fp16"]
    )
    nmses = {method: result["nmse"] for method, result in results.items()}
    assert (
        nmses["none"]
        < 1e-12
        < nmses["fp16"]
        < nmses["bf16"]
        < nmses["global-qsgd-8"]
        < nmses["eden-3"]
        < 0.09
    )
    assert nmses["powersgd-1"] is nmses["binsgdm"] is None
    assert (
        "In the script: " in done.stdout
        or "In the script (import horovod_quant.torch as hvq): " in done.stdout
    )
    bench = read_bench(file)
    assert bench.controller == "ddp"
    assert {"none", "fp16", "eden-3"} <= bench.measured.keys()
    assert not {"bf16", "powersgd-1"} & bench.measured.keys()


@pytest.mark.parallel
@pytest.mark.extended
def test_what_crosses_the_interface_is_what_is_counted(tmp_path: Path) -> None:
    """3 bits send at most 0.11 of what float32 does."""
    file = tmp_path / "bench.json"
    arguments = [*DDP, "--shapes", "1000x4000", "--methods", "eden-3", "--rounds", 3, "--json", file]
    done = torchrun(2, ["--no-python", COMMAND, *arguments])
    assert done.returncode == 0, done.stdout[-3000:]
    results = {result["method"]: result for result in json.loads(file.read_text())["results"]}
    for result in results.values():
        assert 1 <= result["interface_bytes_sent"] / (2 * result["bytes_sent"]) < 1 + RAGGED
    assert results["eden-3"]["interface_bytes_sent"] < 0.11 * results["none"]["interface_bytes_sent"]


@pytest.mark.parallel
@pytest.mark.extended
def test_the_benchmark_of_exchanges_has_hooks_beside_a_backward_pass(tmp_path: Path) -> None:
    file = tmp_path / "exchange.json"
    exchange = [
        ROOT / "benchmarks" / "exchange.py",
        "--framework",
        "ddp",
        "--model",
        "tiny",
        "--backward",
        0.2,
    ]
    own = ["none", "fp16", "powersgd-2"]
    done = torchrun(2, [*exchange, "--rounds", 2, "--json", file, "--methods", *own, "eden-3", "binsgdm"])
    assert done.returncode == 0, done.stdout[-3000:]
    results = {result["method"]: result for result in json.loads(file.read_text())["results"]}
    assert list(results) == [*own, "eden-3", "binsgdm"]
    assert all(0.2 <= min(result["wall_seconds"]) for result in results.values())
    sent = {method: result["bytes_sent"] for method, result in results.items()}
    assert sent["none"] == 2 * sent["fp16"] > 4 * sent["eden-3"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group-bytes", "5000"], "--group-bytes: with DDP its buckets are the groups; leave it out"),
        (
            ["--framework", "tensorflow"],
            "--transport ddp runs only with PyTorch; leave out --framework tensorflow",
        ),
        (["--methods", "powersgd-9"], "powersgd-9"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [str(COMMAND), *DDP, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_without_torchrun() -> None:
    done = subprocess.run(
        [str(COMMAND), *DDP, "--model", "tiny"], capture_output=True, text=True, timeout=120, cwd=ROOT,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        "start it with torchrun --nproc-per-node 2 --no-python horovod-quant bench --transport ddp"
        in done.stderr
    )
