"""The progress thread under what scripts do to a process, in real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import progress_worker
import pytest
from launching import horovodrun
from test_misuse import run_until_horovod_comes_up_again

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", ["steps", "threads", "fork", "again", "unnamed"])
def test_training_goes_on(case: str, tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).with_name("progress_worker.py"), tmp_path, case]
    done = run_until_horovod_comes_up_again(command)
    assert done.stdout.count("FINISHED") == 2, done.stdout[-3000:]


@pytest.mark.parametrize(("case", "status"), [("exit", progress_worker.STATUS), ("raise", 1), ("end", 0)])
def test_a_process_ends_in_the_middle_of_a_step(case: str, status: int, tmp_path: Path) -> None:
    """At once, with its own status, and without a crash of the interpreter's."""
    command = [sys.executable, Path(__file__).with_name("progress_worker.py"), tmp_path, case]
    done = horovodrun("gloo", 2, command)
    assert (done.returncode == 0) == (status == 0), done.stdout[-3000:]
    if status:
        assert f"Process 0 exit with status code {status}." in done.stdout, done.stdout[-3000:]
    for crash in ("Fatal Python error", "terminate called", "exception not rethrown", "Segmentation"):
        assert crash not in done.stdout, done.stdout[-3000:]


def test_a_trace_names_what_computes_and_what_waits(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "trace.py"
    done = horovodrun(
        "gloo", 2, [sys.executable, program, "--late", "0.1", "--json", tmp_path / "trace.json"]
    )
    assert done.returncode == 0, done.stdout[-3000:]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {
        what: {event["tid"] for event in events if event.get("name", "").startswith(f"horovod_quant.{what}")}
        for what in ("encode", "compute", "decode", "wait")
    }
    assert len(threads["wait"]) == len(threads["encode"]) == 1
    assert threads["encode"] == threads["compute"] == threads["decode"] != threads["wait"]
    assert "horovod_quant.encode 0.weight.0 EDEN stage 0" in done.stdout, done.stdout[-3000:]
