"""Two workers under elastic horovodrun become three: right answers before and after with every method, no new trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import BIN, ELASTIC, ROOT, environment

pytestmark = pytest.mark.parallel

LIMIT = 400


@pytest.mark.timeout(LIMIT + 60)
def test_a_third_worker_joins(tmp_path: Path) -> None:
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
        sys.executable, str(Path(__file__).with_name("tf_elastic_worker.py")), str(logs), str(hosts),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(ELASTIC), cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    entries = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs.iterdir()]
    finished = [own[:-1] for own in entries if own and own[-1].get("finished")]
    assert len(finished) == 3, done.stdout[-4000:]
    survivors = [own for own in finished if own[0]["size"] == 2]
    assert len(survivors) == 2
    for own in survivors:
        sizes = [entry["size"] for entry in own]
        assert sizes == sorted(sizes)
        assert set(sizes) == {2, 3}
        assert all(entry["traces"] == [1, 1, 1, 1] for entry in own), "a step was traced again"
