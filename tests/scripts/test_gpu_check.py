"""scripts/gpu-check: what it reports of steps that pass, fail and are cut off; and a rehearsal without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from parallel.launching import ROOT, environment

SCRIPTS = ROOT / "scripts"
COMMAND = SCRIPTS / "gpu-check"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def check(*options: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, options)], capture_output=True, text=True, timeout=1400, cwd=ROOT,
        env=environment({"PYTHON": sys.executable, **variables}), stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--only", "speed", "sped"],
            "--only sped: use some of compile, bits, speed, host, exchange, ddp, training, all-bits",
        ),
        (["--limit", "3"], "--limit 3: use at least 20 seconds"),
        (["--limit", "nan"], "--limit nan: use at least 20 seconds"),
        (["--wheels", "nowhere"], "--wheels nowhere: there is no such folder; use one with nccl/*.whl"),
        (["--wheels", "docs"], "--wheels docs: nccl/ has no horovod-*.whl; put Horovod's wheel there"),
        (["--out", "setup.py"], "--out setup.py: File exists; use a folder that can be written to"),
    ],
)
def test_bad_arguments(options: list[str], message: str) -> None:
    done = check(*options)
    assert done.returncode == 2
    assert f"gpu-check: error: {message}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "python", "message"),
    [
        ([], sys.executable, "name one folder"),
        (
            ["wheels"],
            "no-such-python",
            "set PYTHON to the interpreter of an environment with PyTorch's CUDA build",
        ),
        (["wheels"], "/bin/false", "PYTHON=/bin/false does not run"),
    ],
)
def test_wheels_need_an_environment(arguments: list[str], python: str, message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPTS / "gpu-wheels", *arguments], capture_output=True, text=True, timeout=100, cwd=tmp_path,
        env=environment({"PYTHON": python}), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert f"gpu-wheels: {message}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_names_the_rehearsal(tmp_path: Path) -> None:
    done = check("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    assert "--rehearse does without one" in done.stderr


STEPS = """
import pathlib, signal, sys
from gpu_check import stop
from gpu_checks import readers, running, wheels
from gpu_checks.parts import TITLES
from gpu_checks.steps import Findings, Part, Step

signal.signal(signal.SIGTERM, stop)
out, limit = pathlib.Path(sys.argv[1]), float(sys.argv[2])
results = out / "outcomes"
results.write_text('{"tests": 3}\\n{"test": "a", "outcome": "passed", "seconds": 1}\\n{"test": "b", "outco')

def step(name, code, horovod=None, read=Findings):
    return Step(name, [sys.executable, "-c", code], 1, read, horovod)

parts = [
    Part("bits", [step("slow", "import time; print('begun'); time.sleep(600)",
                       read=lambda: readers.outcomes(results, "slow"))]),
    Part("speed", [step("good", "pass"), step("bad", "raise SystemExit('not so')")]),
    Part("host", [step("without", "pass", "nccl")]),
    Part("exchange", [step("unreadable", "pass", read=lambda: readers.speed(results, []))]),
    Part("training", [step("last", "pass", "host", lambda: Findings([{"a": 1.5, "b": None}], "well"))]),
]
(out / "work").mkdir()
runner = running.Runner(out, out / "work", limit, rehearse=False)
runner.run(parts, {"nccl": wheels.Horovod(None, "no wheel"), "host": wheels.Horovod(out)})
raise SystemExit(runner.finish())
"""


def start(folder: Path, limit: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", STEPS, str(folder), str(limit)],
        env=environment({"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(ROOT / "tests")])}),
    )


def test_a_part_that_fails_or_is_cut_off_leaves_the_others(tmp_path: Path) -> None:
    assert start(tmp_path, 46).wait(120) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert {name: part["state"] for name, part in parts.items()} == {
        "bits": "cut off", "speed": "failed", "host": "left out", "exchange": "failed", "training": "passed"
    }  # fmt: skip
    assert parts["bits"]["table"] == [{"tests": "slow", "all": 3, "passed": 1, "failed": 0, "skipped": 0}]
    assert parts["bits"]["steps"][0]["summary"].startswith("1 of 3 passed, 0 failed")
    assert [step["state"] for step in parts["speed"]["steps"]] == ["passed", "failed"]
    assert "exit status 1: " in parts["speed"]["steps"][1]["failed"][0]
    assert "not so" in parts["speed"]["steps"][1]["failed"][0]
    assert parts["host"]["steps"][0]["summary"] == "no wheel"
    assert "cannot be read" in parts["exchange"]["steps"][0]["failed"][0]
    page = (tmp_path / "report.md").read_text()
    assert "- last: **passed**" in page
    assert "| a | b |\n| --- | --- |\n| 1.5000 |  |" in page
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        log = archive.extractfile("logs/bits-0.log")
        assert log is not None
        assert b"begun" in log.read()


def test_a_run_that_is_stopped_leaves_its_report(tmp_path: Path) -> None:
    process = start(tmp_path, 1000)
    log = tmp_path / "work" / "logs" / "bits-0.log"
    while not (log.exists() and log.read_text().endswith("begun\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stopped"] == "by SIGTERM"
    assert [part["state"] for part in report["parts"]] == ["cut off", *["not run"] * 4]


def test_carried_wheels_are_there_for_all_steps(tmp_path: Path) -> None:
    from gpu_checks import wheels

    folder, target, environment = tmp_path / "wheels", tmp_path / "all", {"PYTHONPATH": "here"}
    folder.mkdir()
    assert wheels.install_for_all(folder, target, environment) == ""
    assert environment == {"PYTHONPATH": "here"}
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr(
            "carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
        )
        wheel.writestr(
            "carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    assert wheels.install_for_all(folder, target, environment) == ""
    assert environment == {"PYTHONPATH": f"here{os.pathsep}{target}"}
    assert (target / "carried.py").exists()
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    assert "pip could not install broken-1.0" in wheels.install_for_all(
        folder, tmp_path / "other", environment
    )


def test_scenarios_that_did_not_end_are_named(tmp_path: Path) -> None:
    from gpu_checks import readers

    entries = [{"scenario": "a", "failure": ""}, {"scenario": "b", "failure": "AssertionError: 3"}]
    for rank in range(2):
        lines = [json.dumps(entry) for entry in entries[: 2 - rank]]
        (tmp_path / f"{rank}.jsonl").write_text("\n".join(lines) + "\n")
    found = readers.scenarios(tmp_path, "two", ["a", "b", "c"], 2)
    assert found.rows == [{"scenarios": "two", "all": 3, "ran": 1, "passed": 1}]
    assert found.summary == "1 of 3 passed; the first that did not end is b"
    assert found.failed == ["b, rank 0: AssertionError: 3"]


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.timeout(1500)
def test_a_rehearsal(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = check("--rehearse", "--limit", 1200, "--out", tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, page
    from gpu_checks.parts import TITLES

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rehearsal"]
    assert {part["name"]: part["state"] for part in report["parts"]} == dict.fromkeys(TITLES, "passed")
    tables = {part["name"]: part["table"] for part in report["parts"]}
    assert tables["bits"][0]["passed"] == tables["bits"][0]["all"] > 30
    assert tables["all-bits"][0]["passed"] == tables["all-bits"][0]["all"] > tables["bits"][0]["all"]
    assert {"bucket_maxima", "encode_rotated, 4 bits", "vote, n = 4"} <= {
        row["kernel"] for row in tables["speed"]
    }
    alone = {row["method"]: row for row in tables["host"] if "one worker" in row["exchange"]}
    assert alone["none"]["launches"] == 0 < alone["global-qsgd-8"]["launches"]
    assert [row["all"] - row["passed"] for part in ("exchange", "ddp") for row in tables[part]] == [0] * 4
    assert [row["training"] for row in tables["training"]] == ["none", "GlobalQSGD-8", "EDEN-3", "BinSGDM"]
