"""Runs scenarios one after another on every worker and writes down how each ended.

    horovodrun -np 2 python worker.py RESULTS MODULE full|extra|quick|core

One launch runs many scenarios, because starting the workers takes longer than most of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable


def selected(module: Any, breadth: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A module's scenarios: ``"full"``, with ``"extra"`` those of variants, too; ``"quick"``, all these but its
    ``SLOW`` ones; or its ``CORE`` alone.
    """
    for name, scenario in module.scenarios(extra=breadth in ("extra", "quick")):
        kind = name.partition("-")[0]
        if breadth == "core" and kind not in module.CORE:
            continue
        if breadth == "quick" and kind in module.SLOW:
            continue
        yield name, scenario


def main() -> None:
    results, module_name, breadth = Path(sys.argv[1]), *sys.argv[2:]
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.import_module(module_name)
    rank = module.start()
    with open(results / f"{rank}.jsonl", "w") as log:
        for name, scenario in selected(module, breadth):
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
