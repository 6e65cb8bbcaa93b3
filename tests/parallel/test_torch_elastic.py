"""Elastic training: workers are added, killed in the middle of a backward pass, and removed, several times in one run.

Every step checks, on every worker and with every method, that the gradients are the average of what all workers have at
that time, that parameters are equal, and that BinSGDM's state has survived.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import BIN, ELASTIC, ROOT, environment

pytestmark = pytest.mark.parallel

LIMIT = 500


@pytest.mark.timeout(LIMIT + 60)
def test_workers_come_are_killed_and_go(tmp_path: Path) -> None:
    hosts, discover = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("localhost:2\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    logs = tmp_path / "logs"
    logs.mkdir()
    command = [
        "timeout", "-k", "10", str(LIMIT),
        str(BIN / "horovodrun"), "--gloo", "-np", "2", "--min-np", "2", "--max-np", "3", "--network-interface", "lo",
        "--host-discovery-script", str(discover),
        sys.executable, str(Path(__file__).with_name("torch_elastic_worker.py")), str(logs), str(hosts),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(ELASTIC), cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    entries = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs.iterdir()]
    finished = [own[:-1] for own in entries if own and own[-1].get("finished")]
    assert len(finished) == 2, done.stdout[-6000:]
    killed = [own for own in entries if own and not own[-1].get("finished")]
    assert len(killed) >= 2, "nobody was killed"
    for own in finished:
        sizes = [entry["size"] for entry in own]
        changes = [size for size, before in zip(sizes, [0, *sizes]) if size != before]
        assert changes == [2, 3, 2, 3, 2, 3, 2], sizes
        assert [entry["step"] for entry in own] == list(range(1, len(own) + 1)), "a step was lost or repeated"
