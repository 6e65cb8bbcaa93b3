"""Runs an elastic example with one method after the other, while a worker comes and goes.

horovodrun --min-np 2 ... python digits_elastic_worker.py LOG_FOLDER HOSTS_FILE

The file trainings.json beside HOSTS_FILE names the example, the arguments of each training, and in how many of them,
from the first on, the number of workers changes in the middle: from two to three, then from three to two.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from horovod.common.elastic import notification_manager

ROOT = Path(__file__).resolve().parents[2]
NOTICE_LIMIT = 120


def replace(file: Path, text: str) -> None:
    """Writes a file so that nobody can read half of it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


class Onlooker:
    """Standard output of an example, and somebody who reads it and changes the hosts when the first epoch is over."""

    def __init__(self, stdout: Any, hosts: Path) -> None:
        self._stdout, self._hosts = stdout, hosts
        self._noticed = threading.Event()
        self.may_change = False
        notification_manager.register_listener(self)

    def write(self, text: str) -> int:
        if self.may_change and "epoch 1 of" in text:
            self._change({"localhost:2": "localhost:3"}.get(self._hosts.read_text().strip(), "localhost:2"))
        return self._stdout.write(text)

    def flush(self) -> None:
        self._stdout.flush()

    def _change(self, hosts: str) -> None:
        self._noticed.clear()
        replace(self._hosts, hosts + "\n")
        # So that the change is in the middle of this training, however fast it is. The others wait for rank 0.
        assert self._noticed.wait(NOTICE_LIMIT), "Horovod has told nothing of the change"

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Called by Horovod, in a thread of its own."""
        self._noticed.set()


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads(hosts.with_name("trainings.json").read_text())
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module(plan["example"])
    current = hosts.with_name("current")
    log = open(folder / f"{os.getpid()}.jsonl", "w")
    # A worker that comes later waits here until the others do so, too: in the middle of the current training.
    example.hvd.init()
    first = int(current.read_text()) if current.exists() else 0
    onlooker = Onlooker(sys.stdout, hosts)
    with contextlib.redirect_stdout(onlooker):
        for number, arguments in list(enumerate(plan["trainings"]))[first:]:
            if example.hvd.rank() == 0:
                replace(current, str(number))
            onlooker.may_change = number < plan["resized"]
            sys.argv[1:] = arguments
            example.main()
            log.write(json.dumps({"training": number}) + "\n")
            log.flush()
    log.write(json.dumps({"finished": True}) + "\n")
    log.close()


if __name__ == "__main__":
    main()
