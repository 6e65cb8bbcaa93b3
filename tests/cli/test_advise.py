"""``horovod-quant advise``: what it prints and writes, and its errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from horovod_quant.analysis.fabrics import INSIDE_HOST
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.recommendation import FEW
from horovod_quant.cli import advise, advise_input, advise_plot
from horovod_quant.cli.main import main
from horovod_quant.frontends import methods
from horovod_quant.schemes import QSGD

HERE = ["advise", "--model", "tiny", "--workers", "4", "--bandwidth", "100mbit", "--step", "10ms"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "MEASURING_SECONDS", 0.01)


def run(*arguments: str, expected: int = 0) -> None:
    assert main(arguments) == expected


def test_the_answer_comes_first_then_the_table(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--backward", "4ms")
    out = capsys.readouterr().out
    write, faster, why = out.splitlines()[:3]
    assert write.startswith("Write:   compression=hv")
    assert faster.startswith("Faster:  ")
    assert why.startswith("Why:     ")
    _, title, table, more = out.rstrip().split("\n\n")
    assert title.startswith(
        "tiny: 0.1 million parameters in 23 gradients; 4 workers on 4 hosts; 100 Mbit/s, 50 us, gloo"
    )
    columns = "method communication hidden step speed-up to loss pays below MB sent levels nmse"
    assert table.splitlines()[0].split() == columns.split()
    assert table.splitlines()[1].split()[0] == methods.NONE
    assert 2 < len(table.splitlines()) <= 2 + FEW
    assert more.startswith("More with --verbose: ")


def test_reasons_and_assumptions_are_verbose(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--verbose")
    out = capsys.readouterr().out
    assert "More with --verbose" not in out
    assert "(--all shows them all):\n  " in out
    assert "- Every worker's kernels are as fast as this machine's" in out.partition("Assumed:")[2]


def test_nothing_is_faster_on_a_fast_network(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--bandwidth", "none", "--step", "10s")
    write, faster, _ = capsys.readouterr().out.splitlines()[:3]
    assert write == "Write:   compression=hvd.Compression.none"
    assert faster == "Faster:  no method is meaningfully faster"


@pytest.mark.parametrize("rate", ["10Gbps", "10G", "10GbE"])
def test_rates_as_users_write_them(rate: str, capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--bandwidth", rate, "--methods", "fp16", "--json", "-")
    assert json.loads(capsys.readouterr().out)["bandwidth_bytes_per_second"] == 1.25e9


def test_a_step_that_is_not_given_is_that_of_the_table(capsys: pytest.CaptureFixture) -> None:
    run("advise", "--model", "bert-base", "--hosts", "8", "--bandwidth", "10G", "--methods", "fp16")
    captured = capsys.readouterr()
    assert "a step of 86.2 ms, backward 57.5 ms on an accelerator" in captured.out
    assert "a step is assumed to take 86.2 ms: 16,384 tokens on an a100; give --step" in captured.err
    run("advise", "--model", "tiny", "--hosts", "8", "--bandwidth", "10G", expected=2)
    assert (
        "--step: how long is a step on one worker? Only resnet50, bert-base, pythia-1b"
        in capsys.readouterr().err
    )


def test_the_table_is_ascii_and_has_no_progress(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--workers", "300", "--hosts", "75", "--methods", "global-qsgd-8")
    captured = capsys.readouterr()
    assert captured.out.isascii()
    assert captured.err == ""
    assert (
        "Impossible here:\n  global-qsgd-8: bits=8: the sum of 300 workers' integers does not fit"
        in captured.out
    )
    assert "global-qsgd-8 hierarchical  " in captured.out


def test_json(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--json", "-", "--methods", "fp16", "global-qsgd-2", "qsgd-4")
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["model"], found["workers"], found["hosts"]) == (2, "tiny", 4, 4)
    none, fp16, impossible, qsgd = found["results"]
    assert [none["method"], fp16["method"], qsgd["method"]] == ["none", "fp16", "qsgd-4"]
    assert set(impossible) == {"method", "impossible"}
    assert qsgd["step_seconds"] == pytest.approx(0.01 + qsgd["exchange_seconds"])
    assert none["speed_up"] == 1
    assert qsgd["bytes_sent"] < fp16["bytes_sent"] < none["bytes_sent"]
    assert "relative_error" not in qsgd
    assert qsgd["nmse"] == pytest.approx(QSGD(4).expected_nmse(4, 4))
    assert qsgd["steps_to_loss"] == 1 + qsgd["nmse"]


def written(folder: Path, **changes: Any) -> str:
    """A file of a cluster on which everything is ten times as slow as in the lab."""
    content = {
        "version": 2, "framework": "torch", "model": "tiny", "shapes": MODELS["tiny"], "workers": 4, "hosts": 4,
        "workers_per_host": 1, "controller": "mpi", "cores": 2, "group_bytes": 2**25, "interrupted": False,
        "results": [{"method": name, "wall_seconds": [seconds]} for name, seconds in
                    {"none": 0.1, "fp16": 0.2, "eden-3": 0.3}.items()],
    }  # fmt: skip
    path = folder / "bench.json"
    path.write_text(json.dumps({**content, **changes}))
    return str(path)


def test_a_calibration_is_used(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = written(tmp_path)
    steps = []
    usual = ["--methods", *methods.compared()]
    for more in (usual, [*usual, "--calibrate", f"{path}@none"]):
        run(*HERE, "--json", "-", *more)
        found = json.loads(capsys.readouterr().out)
        steps.append([result["step_seconds"] for result in found["results"]])
    assert found["controller"] == "mpi"
    assert found["warnings"] == []
    assert all(after > before for before, after in zip(*steps))
    run(*HERE, "--calibrate", str(path), "--controller", "gloo", expected=2)
    assert "Gloo, MPI and DDP differ" in capsys.readouterr().err


def test_a_calibration_has_the_links_inside_its_hosts(tmp_path: Path) -> None:
    path = written(tmp_path, hosts=2, workers_per_host=2)
    parser = argparse.ArgumentParser()
    advise_input.add_arguments(parser)
    options = ["--model", "tiny", "--workers", "4", "--hosts", "2", "--bandwidth", "1gbit"]
    arguments = parser.parse_args([*options, "--local-bandwidth", "pcie3", "--calibrate", path])
    network = advise_input.read_network(arguments)
    (observed,), _ = advise_input.read_calibrations(arguments, network)
    assert observed.network.local_bandwidth == network.local_bandwidth == INSIDE_HOST["pcie3"].bandwidth
    assert observed.network.local_latency == network.local_latency == INSIDE_HOST["pcie3"].latency


@pytest.mark.parametrize(
    ("changes", "workers", "warning"),
    [
        (
            {"hosts": 1, "workers_per_host": 4},
            4,
            "was measured on one host, over its loopback interface; measure",
        ),
        ({}, 16, "was measured between 4 hosts, and this predicts for 16"),
        ({}, 4, ""),
    ],
)
def test_a_calibration_of_another_cluster_is_doubted(
    changes: dict, workers: int, warning: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = written(tmp_path, **changes)
    run(*HERE, "--workers", str(workers), "--methods", "fp16", "--calibrate", path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning: ")]
    assert len(lines) == bool(warning)
    assert all(f"{path} {warning}" in line for line in lines)


def test_a_plot_is_drawn_of_few_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "advice.png"
    drawn = set()
    original = advise_plot.step_times
    monkeypatch.setattr(
        advise_plot, "step_times", lambda choice, *others: drawn.add(choice.name) or original(choice, *others)
    )
    run(*HERE, "--plot", str(path), "--methods", *methods.compared())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == advise_plot.MOST_CURVES < len(methods.compared())


def test_numbers_of_hosts_to_draw() -> None:
    assert advise_plot.host_numbers(3, 8192) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert advise_plot.host_numbers(100, 8192)[-1] == 512
    assert advise_plot.host_numbers(100, 128)[-2:] == [100, 128]
    assert advise_plot.host_numbers(100, 100)[-2:] == [64, 100]


def test_without_matplotlib_a_plot_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    run(*HERE, "--plot", "advice.png", expected=2)
    assert "pip install matplotlib" in capsys.readouterr().err


def test_thousands_of_workers() -> None:
    run("advise", "--model", "resnet50", "--workers", "4096", "--workers-per-host", "8", "--bandwidth", "100gbit",
        "--step", "0.2", "--methods", *methods.compared())  # fmt: skip


def test_clusters_as_users_have_them(capsys: pytest.CaptureFixture) -> None:
    """Links by their names; kernels of accelerators, whose model no measurement has confirmed."""
    run("advise", "--model", "bert-base", "--workers", "64", "--hosts", "8", "--bandwidth", "25gbe",
        "--controller", "nccl", "--local-bandwidth", "nvlink3", "--memory-bandwidth", "a100", "--step", "0.35",
        "--methods", "global-qsgd-10", "global-qsgd-8-rotate", "--json", "-")  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert (found["controller"], found["accelerator"]) == ("nccl", True)
    assert (found["bandwidth_bytes_per_second"], found["latency_seconds"]) == pytest.approx((25e9 / 8, 50e-6))
    said = " ".join(found["assumptions"])
    for text in (
        "The bandwidth between two workers of a host is 240 GB/s (--local-bandwidth).",
        "80% of 2,039 GB/s (--memory-bandwidth), or the share measured on an H200, and the host takes 105 us for each",
    ):
        assert text in said
    assert found["warnings"] == [
        "modelled: communication between several GPUs has not been measured with this package."
    ]
    results = {result["method"]: result for result in found["results"]}
    assert results["global-qsgd-10"]["step_seconds"] < results["none"]["step_seconds"]
    refusal = "rotate=True needs the gradients in the host's memory"
    assert results["global-qsgd-8-rotate hierarchical"]["impossible"] == refusal


def test_ddp_instead_of_horovod(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    methods_of_both = ["--methods", "fp16", "eden-3", "binsgdm", "--hosts", "2"]
    run(*HERE, "--controller", "ddp", *methods_of_both, "--json", "-")
    found = json.loads(capsys.readouterr().out)
    refused = {result["method"]: result.get("impossible") for result in found["results"]}
    assert refused["binsgdm"] is refused["eden-3 hierarchical"] is None
    assert found["warnings"] == []
    assert "DDP's overhead beyond the wire is as measured in the lab (--calibrate" in " ".join(
        found["assumptions"]
    )
    seconds = {"none": 0.2, "bf16": 0.1, "powersgd-2": 0.01, "eden-3": 0.02}
    own = [{"method": name, "wall_seconds": [each]} for name, each in seconds.items()]
    path = written(tmp_path, framework="ddp", controller="gloo", results=own)
    code = "state = hvq.ddp.register(ddp_model, hvq.EDEN(bits=3))   (import horovod_quant.torch as hvq)"
    run(*HERE, "--calibrate", path, "--methods", "eden-3")
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"Write:   {code}"
    assert "100 Mbit/s, 50 us, ddp" in out
    run(*HERE, "--controller", "ddp", "--methods", "fp16", "--bandwidth", "none", "--step", "10s")
    assert capsys.readouterr().out.startswith("Write:   no communication hook\n")
    run(*HERE, "--controller", "mpi", "--calibrate", path, expected=2)
    assert "Gloo, MPI and DDP differ" in capsys.readouterr().err


def test_the_nmse_that_a_user_accepts(capsys: pytest.CaptureFixture) -> None:
    taken = {}
    for limit in (["--max-nmse", "1e-6"], ["--max-nmse", "0.09"], ["--max-error", "0.3"]):
        run(*HERE, "--json", "-", *limit, "--methods", "fp16", "eden-4")
        captured = capsys.readouterr()
        taken[limit[1]] = json.loads(captured.out)["recommended"]
    assert taken == {"1e-6": "fp16", "0.09": "eden-4", "0.3": "eden-4"}
    assert "--max-error is a root; write --max-nmse 0.09, its square" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is not a rate"),
        (["--local-bandwidth", "fast"], "or one of pcie3, pcie4"),
        (["--local-bandwidth", "0gbit"], "--local-bandwidth: '0gbit' is not a rate"),
        (["--max-error", "-1"], "--max-error=-1.0: use a number from 0"),
        (["--max-nmse", "nan"], "--max-nmse=nan: use a number from 0"),
        (["--bandwidth", "10GB/s"], "--bandwidth: '10GB/s' is not a rate in bits; a byte has 8"),
        (
            ["--memory-bandwidth", "900"],
            "--memory-bandwidth: it only affects accelerators; give --controller nccl",
        ),
        (["--memory-bandwidth", "much", "--controller", "nccl"], "--memory-bandwidth: 'much': use GB/s"),
        (
            ["--calibrate", "bench.json", "--controller", "nccl"],
            "--calibrate: benchmarks run over Gloo or MPI",
        ),
        (["--controller", "ddp", "--group-bytes", "1000"], "--group-bytes: it has no effect under DDP"),
        (["--latency", "5 parsec"], "--latency: '5 parsec' is not a time"),
        (["--step", "soon"], "--step: 'soon' is not a time"),
        (["--backward", "1s"], "--backward: backward=1.0"),
        (["--workers", "0"], "--workers=0: use an integer from 1 to 8192"),
        (["--workers", "1000000"], "--workers=1000000: use an integer from 1 to 8192"),
        (["--workers", 20 * "9"], f"--workers={20 * '9'}: use an integer from 1 to 8192"),
        (["--workers", "4", "--hosts", "8"], "4 workers are not 8 hosts of 1"),
        (["--workers", "4", "--workers-per-host", "8"], "4 workers are not 1 hosts of 8"),
        (["--hosts", "4096", "--workers-per-host", "4"], "4096 hosts of 4 are more than 8192 workers"),
        (["--latency", ""], "--latency: '' is not a time"),
        (["--backward", ""], "--backward: '' is not a time"),
        (["--local-bandwidth", ""], "--local-bandwidth: '' is not a rate"),
        (["--memory-bandwidth", "", "--controller", "nccl"], "--memory-bandwidth: '': use GB/s"),
        (["--memory-bandwidth", "1e-300", "--controller", "nccl"], "--memory-bandwidth: '1e-300': use GB/s"),
        (["--json", ""], "--json: '' is no name of a file"),
        (["--json", "."], "--json: . is not a file"),
        (["--json", "nowhere/"], "--json: nowhere/ is not a file"),
        (["--plot", ""], "--plot: '' is no name of a file"),
        (["--plot", "/nowhere/advice.png"], "--plot: [Errno 2]"),
        (["--calibrate", "bench.json@"], "--calibrate: '' is not a rate"),
        (["--workers", "5", "--hosts", "2"], "5 workers are not 2 hosts of 2"),
        (["--workers", "4", "--hosts", "2", "--workers-per-host", "3"], "4 workers are not 2 hosts of 3"),
        (["--cores-per-worker", "0"], "--cores-per-worker=0.0: use a number from 0.001"),
        (["--cores-per-worker", "1e-300"], "--cores-per-worker=1e-300: use a number from 0.001"),
        (["--methods", "zip-4"], "--methods: there is no method 'zip-4'"),
        (["--calibrate", "nowhere.json"], "--calibrate: [Errno 2]"),
        (["--group-bytes", "0"], "--group-bytes=0: use an integer"),
        (["--plot", "advice.doc"], "--plot: 'advice.doc'"),
        (["--json", "/nowhere/advice.json"], "--json: [Errno 2]"),
    ],
)
def test_mistakes_are_told_in_a_line_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(advise, "measure_kernels", None)
    run(*HERE, *arguments, expected=2)
    err = capsys.readouterr().err
    assert err.startswith("horovod-quant advise: ")
    assert message in err
    assert err.count("\n") == 1


def test_gradients_without_bounds_are_refused(capsys: pytest.CaptureFixture) -> None:
    run("advise", "--shapes", "1000000x1000000x1000000", *HERE[3:], expected=2)
    assert "use 8,589,934,592 elements or fewer, not 1,000,000,000,000,000,000" in capsys.readouterr().err


def test_a_backward_pass_needs_its_step(capsys: pytest.CaptureFixture) -> None:
    run(*"advise --model resnet50 --workers 4 --bandwidth 1gbit --backward 0.1".split(), expected=2)
    assert capsys.readouterr().err == (
        "horovod-quant advise: --backward: it is a part of the step; give --step as well\n"
    )


def test_who_takes_part_has_to_be_said(capsys: pytest.CaptureFixture) -> None:
    run("advise", "--model", "tiny", "--bandwidth", "1gbit", "--step", "1", expected=2)
    assert "how many workers?" in capsys.readouterr().err


@pytest.mark.extended
def test_all_methods_are_shown_on_demand(capsys: pytest.CaptureFixture) -> None:
    run(*HERE, "--all")
    out = capsys.readouterr().out
    table = [line.split()[0] for line in out.split("\n\n")[2].splitlines()[1:]]
    impossible = [
        line.strip().partition(":")[0] for line in out.partition("Impossible here:")[2].splitlines()
    ]
    every = [member.name for family in methods.every_family() for member in family]
    assert sorted({*table, *impossible} & set(every)) == sorted(every)
    assert "(--all shows them all)" not in out
