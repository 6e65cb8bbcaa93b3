"""A rank that is killed in a step ends the others with an error, without a launcher that ends them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from killed_worker import STEP
from parallel.launching import ROOT, environment

WORKERS, SECONDS = 3, 60


@pytest.mark.parallel
def test_a_killed_rank_ends_the_others() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(WORKERS):
        own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank)}
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        processes.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("killed_worker.py"))],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment({**own, "WORLD_SIZE": str(WORKERS), "PYTHONPATH": paths}),
            )  # fmt: skip
        )
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[-1].returncode == -signal.SIGKILL
    for process, output in zip(processes[:-1], outputs):
        assert process.returncode == 1, output[-3000:]
        assert f"step {STEP - 1}" in output
        assert f"step {STEP}\n" not in output
        assert re.search("RuntimeError: .*(Connection|another worker has failed first)", output), output[
            -3000:
        ]
