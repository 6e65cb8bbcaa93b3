"""Runs scenarios one after another on every worker and writes down how each ended.

    horovodrun -np 2 python worker.py FOLDER MODULE

FOLDER/names has the scenarios' names, a line each. One launch runs many, because starting the workers takes longer than
most of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable

import turns
from scenario_table import TABLES, problems, split


def scenario(module: Any, name: str) -> Callable[[], None]:
    """What to call. A feature's function is in the module, or in another one that the table names."""
    feature, method = split(name)
    table = TABLES[module.__name__]
    modules = [module, *map(importlib.import_module, (*table.also, *table.borrows))]
    function = next(getattr(each, feature) for each in modules if hasattr(each, feature))
    return functools.partial(function, module.MAKERS[method]) if method else function


def check_table(module: Any) -> None:
    """The module and its table have the same scenarios and methods: nothing is left out because nobody named it."""
    found = list(problems(module.__name__, Path(__file__).parent))
    methods = {method for part in TABLES[module.__name__].parts for method in part.methods}
    for method in methods.symmetric_difference(module.MAKERS):
        found.append(
            f"{module.__name__}: the method {method!r} is in scenario_table.py or in MAKERS, not in both"
        )
    if found:
        raise SystemExit("\n".join(found))


def main() -> None:
    folder, module_name = Path(sys.argv[1]), sys.argv[2]
    module = importlib.import_module(module_name)
    check_table(module)
    scenarios = {name: scenario(module, name) for name in (folder / "names").read_text().split()}
    features = [feature for part in TABLES[module_name].parts for feature in part.features]
    rank = module.start()
    with open(folder / f"{rank}.jsonl", "w") as log:
        for name, run in scenarios.items():
            turns.begin(name, list(module.MAKERS), features)
            failure, begin = "", time.monotonic()
            try:
                run()
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
