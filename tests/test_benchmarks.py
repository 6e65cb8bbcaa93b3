"""That the exchange benchmark runs; its times are nobody's business here."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "parallel"))

from launching import environment, horovodrun  # noqa: E402

from horovod_quant.analysis.models import MODELS, elements  # noqa: E402

METHODS = ["none", "fp16", "nuqsgd-8", "global-qsgd-4", "global-qsgd-2", "binsgdm"]


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize(
    ("framework", "controller"), [("torch", "gloo"), ("torch", "mpi"), ("tensorflow", "gloo")]
)
def test_exchange_benchmark_runs(framework: str, controller: str, tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        controller, 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--framework", framework, "--model", "tiny",
         "--rounds", 2, "--json", report, "--methods", *METHODS],
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
        assert_sane(method, result)
    sent = {method: result["bytes_sent"] for method, result in results.items()}
    assert sent["no exchange"] == 0
    assert sent["none"] == 4 * elements(MODELS["tiny"]) == 2 * sent["fp16"]
    assert sent["binsgdm"] < sent["global-qsgd-4"] < sent["nuqsgd-8"] < sent["fp16"]


@pytest.mark.parallel
@pytest.mark.extended
def test_groups_of_several_sizes_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        "gloo", 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--model", "tiny", "--rounds", 2, "--json", report,
         "--group-bytes", 0.01, 32, "--methods", "none", "qsgd-4"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    results = {result["method"]: result for result in json.loads(report.read_text())["results"]}
    sizes = ["qsgd-4, 0.01 MiB", "qsgd-4, 32 MiB"]
    assert list(results) == ["no exchange", "none", *sizes]
    assert [results[label]["group_bytes"] for label in sizes] == [10485, 32 * 2**20]


@pytest.mark.parallel
@pytest.mark.extended
def test_hierarchical_exchanges_are_measured_beside_flat_ones(tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        "gloo", 4,
        ["-H", "localhost:2,127.0.0.1:2", sys.executable, ROOT / "benchmarks" / "exchange.py", "--model", "tiny",
         "--rounds", 2, "--json", report, "--also-hierarchical", "--methods", "none", "binsgdm"],
        env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    results = {result["method"]: result for result in json.loads(report.read_text())["results"]}
    assert list(results) == ["no exchange", "none", "binsgdm", "binsgdm hierarchical"]
    # Within a host more than one bit travels.
    assert results["binsgdm hierarchical"]["bytes_sent"] > 2 * results["binsgdm"]["bytes_sent"] > 0


@pytest.mark.parallel
@pytest.mark.extended
def test_the_share_of_a_step_that_measuring_the_nmse_takes_is_printed(tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        "gloo", 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--model", "tiny", "--rounds", 3, "--json", report,
         "--also-nmse", "--methods", "none", "qsgd-4", "binsgdm"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    found = {
        each["method"]: np.array(each["wall_seconds"]) for each in json.loads(report.read_text())["results"]
    }
    assert {"qsgd-4", "qsgd-4 nmse"} <= set(found)
    assert "binsgdm nmse" not in found
    share = np.median(found["qsgd-4 nmse"] / found["qsgd-4"]) - 1
    added = 1e3 * np.median(found["qsgd-4 nmse"] - found["qsgd-4"])
    (line,) = re.findall(
        r"\| qsgd-4 +\| +(\S+) \| +(\S+) \|$", done.stdout.partition("nmse_every=1 adds")[2], re.M
    )
    assert line == (f"{added:+,.1f}", f"{share:+.1%}")


@pytest.mark.parallel
@pytest.mark.extended
def test_many_small_gradients_have_their_time_in_hooks(tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    done = horovodrun(
        "gloo", 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--many-small", 30, "--rounds", 2,
         "--json", report, "--methods", "none", "fp16", "global-qsgd-4"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Microseconds for each of 30 gradients" in done.stdout
    found = json.loads(report.read_text())
    assert (found["model"], found["elements"]) == ("many-small", 30 * 4096)
    results = {result["method"]: result for result in found["results"]}
    assert list(results) == ["no exchange", "none", "fp16", "global-qsgd-4"]
    assert results["no exchange"]["hook_seconds"] == [0, 0]
    assert results["none"]["cpu_times_none"] == 1
    for method in ("none", "fp16", "global-qsgd-4"):
        result = results[method]
        for name in ("hook", "hook_cpu", "finish_cpu"):
            assert all(0 < seconds < 60 for seconds in result[f"{name}_seconds"])


@pytest.mark.parallel
@pytest.mark.extended
def test_auto_is_measured_beside_all_that_it_tries(tmp_path: Path) -> None:
    report = tmp_path / "gloo-2-none.json"
    done = horovodrun(
        "gloo", 2,
        [sys.executable, ROOT / "benchmarks" / "auto.py", "--shapes", "60x50", "64", "--rounds", 2, "--watch", 1,
         "--json", report],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(report.read_text())
    labels = [result["method"] for result in found["results"]]
    taken, measurements, workers, *_ = found["auto"].values()
    assert labels == ["none", "auto", *(own[0] for own in measurements[1:])]
    assert measurements[0][0] == "none"
    assert taken in labels
    assert workers == 2
    assert "% of the time of " in done.stdout
    said = subprocess.run(
        [sys.executable, ROOT / "scripts" / "lab_auto.py", tmp_path], capture_output=True, text=True
    )
    assert f"gloo, 2 hosts, none: took {taken}, " in said.stdout
    assert said.returncode == int("MISSED" in said.stdout)


# A worker for whom PyTorch has a GPU, whose tensors are the host's; Horovod is what it is, or built with CUDA.
GPU_DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import horovod.torch as hvd, torch
import exchange, exchange_cuda
exchange_cuda.DEVICE = "cpu"
torch.version.cuda = "13.0"
waits = []
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.set_device, torch.cuda.get_device_name = waits.append, lambda: "no GPU"
torch.cuda.synchronize = lambda: waits.append(None)
if sys.argv[2] == "cuda":
    hvd.cuda_built = lambda: True
if sys.argv[2] == "nccl":
    hvd.cuda_built = hvd.nccl_built = lambda: True
del sys.argv[:3]
sys.argv.insert(0, "exchange.py")
status = exchange.main()
assert waits[0] == 0 and len(waits) > 4
sys.exit(status)
"""


def exchange_on_a_gpu(built: str, workers: int, report: Path) -> str:
    done = horovodrun(
        "gloo", workers,
        [sys.executable, "-c", GPU_DRIVER, ROOT / "benchmarks", built, "--device", "cuda", "--model", "tiny",
         "--rounds", 2, "--json", report, "--methods", "none", "fp16", "global-qsgd-8", "binsgdm"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 2])
def test_the_time_in_hooks_is_beside_the_total(workers: int, tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    told = exchange_on_a_gpu("cuda", workers, report)
    assert "Milliseconds of an exchange on no GPU" in told
    found = json.loads(report.read_text())
    assert found["device"] == "cuda"
    results = {result["method"]: result for result in found["results"]}
    assert list(results) == ["no exchange", "none", "fp16", "global-qsgd-8", "binsgdm"]
    assert results["no exchange"]["hook_seconds"] == [0, 0]
    for method in ("none", "fp16", "global-qsgd-8", "binsgdm"):
        result = results[method]
        for hook, wall in zip(result["hook_seconds"], result["wall_seconds"]):
            assert 0 < hook < wall
        for name in ("hook", "wall"):
            assert result[f"{name}_times_none"] > 0
            assert result[f"{name}_times_fp16"] > 0
    assert results["none"]["hook_times_none"] == results["fp16"]["wall_times_fp16"] == 1


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize(
    ("built", "why"),
    [("host", "built without CUDA: it accepts"), ("nccl", "refuses two workers on one GPU")],
)
def test_what_horovod_cannot_reduce_on_a_gpu_is_left_out(built: str, why: str, tmp_path: Path) -> None:
    report = tmp_path / "exchange.json"
    told = exchange_on_a_gpu(built, 2, report)
    for method in ("none", "fp16"):
        assert f"{method} is left out: not available with this Horovod, built with" in told
    assert why in told
    results = {result["method"]: result for result in json.loads(report.read_text())["results"]}
    assert list(results) == ["no exchange", "global-qsgd-8", "binsgdm"]
    assert results["binsgdm"]["hook_times_none"] is results["binsgdm"]["wall_times_fp16"] is None


@pytest.mark.parallel
@pytest.mark.extended
def test_without_a_gpu_the_benchmark_says_so() -> None:
    done = horovodrun(
        "gloo", 2,
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--device", "cuda", "--model", "tiny"],
        env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout.count("benchmarks/exchange.py: error: --device cuda: PyTorch ") == 1


def test_a_gpu_is_refused_for_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "exchange.py", "--device", "cuda", "--framework", "tensorflow"],
        capture_output=True, text=True, timeout=300, env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert "exchange.py: error: --device cuda: it is for PyTorch; use --framework torch" in done.stderr


def assert_sane(method: str, result: dict[str, Any]) -> None:
    for name in ("wall", "cpu", "horovod_cpu", "system_cpu"):
        seconds = result[f"{name}_seconds"]
        assert len(seconds) == 2
        assert all(math.isfinite(each) and each >= 0 for each in seconds), (method, name)


def test_correlated_rounding_leaves_less_of_the_error() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "correlated_rounding.py", "--elements", "4096"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 15
    shares = []
    for _, *cells in rows:
        independent, correlated = zip(*(map(float, cell.split(",")) for cell in cells))
        shares.append(sum(correlated) / sum(independent))
    assert max(shares[:9]) < 0.7
    # An alltoall's second rounding, and exponential levels, gain less or nothing.
    assert max(shares[9:]) < 1.05


@pytest.mark.extended
def test_the_hosts_part_of_an_exchange_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    report = tmp_path / "host.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_host.py", "--models", "tiny", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", report], capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(report.read_text())
    launches = {"global-qsgd-8": 4, "qsgd-4": 3, "eden-3": 3, "binsgdm": 5}  # of a group, with many gradients
    assert [(found["method"], found["workers"]) for found in results] == [
        (method, workers) for method in launches for workers in (1, 2)
    ]
    for found in results:
        assert found["launches"] == launches[found["method"]] * found["groups"]
        assert 2 <= found["uploads"] <= found["launches"]
        assert 0 < found["us_a_gradient"] < 1e6
        assert f"| {found['method']} " in done.stdout


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize(("controller", "workers"), [("gloo", 2), ("gloo", 3), ("mpi", 4)])
def test_every_way_of_an_alltoall_brings_every_chunk(controller: str, workers: int) -> None:
    """The benchmark compares what arrives with what was sent."""
    command = [sys.executable, ROOT / "benchmarks" / "alltoalls.py", "--bytes", 4000, "--rounds", 1]
    done = horovodrun(controller, workers, [*command, "--rate", "1gbit"])
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{workers} workers, {4000 * (workers - 1):,} bytes from each" in done.stdout
    for way in ("one call", "shifts", "oriented", "split, 4 calls", "pairwise sums", "gather"):
        assert f"| {way} " in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bytes", "4001"], "--bytes 4001: use a positive multiple of 4"),
        (["--rounds", "0"], "--rounds 0: use at least 1"),
        (["--rate", "fast"], "--rate: 'fast' is not a rate"),
        ([], "one worker has no peer to exchange with"),
    ],
)
def test_what_alltoalls_cannot_be_measured_with_is_refused(options: list[str], message: str) -> None:
    pytest.importorskip("horovod.torch")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "alltoalls.py", *options],
        capture_output=True, text=True, timeout=300, env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"alltoalls.py: error: {message}" in done.stderr
