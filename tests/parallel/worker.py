"""Runs scenarios one after another on every worker and writes down how each ended.

    horovodrun -np 2 python worker.py RESULTS MODULE [--extra]

One launch runs many scenarios, because starting the workers takes longer than most of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path


def main() -> None:
    results, module_name = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.import_module(module_name)
    rank = module.start()
    with open(results / f"{rank}.jsonl", "w") as log:
        for name, scenario in module.scenarios(extra="--extra" in sys.argv):
            failure, begin = "", time.monotonic()
            try:
                scenario()
            except Exception:
                failure = traceback.format_exc()
            module.clean()
            log.write(
                json.dumps({"scenario": name, "failure": failure, "seconds": time.monotonic() - begin}) + "\n"
            )
            log.flush()
    module.finish()


if __name__ == "__main__":
    main()
