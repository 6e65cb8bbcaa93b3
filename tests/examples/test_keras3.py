"""The examples for Keras 3 train, in real processes, with every method: scripts/test --latest."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import has_keras_3
from parallel.launching import ROOT, horovodrun

from horovod_quant.schemes import registry

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(not has_keras_3(), reason="Keras 3 is not here: scripts/test --latest"),
]

EXAMPLES = ROOT / "examples"
METHODS = [kind.__name__ for kind in registry.own()]
DRIVER = """
import json, runpy, sys
sys.path.insert(0, {folder!r})
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    runpy.run_path({path!r}, run_name="__main__")
"""


def launched(script: str, runs: list[list[str]], tmp_path: Path) -> str:
    """What a script prints, run with each list of arguments in one launch: most of a launch is imports."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(folder=str(EXAMPLES), path=str(EXAMPLES / f"{script}.py")))
    done = horovodrun("gloo", 2, [sys.executable, driver, json.dumps(runs)])
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_the_minimal_script(tmp_path: Path) -> None:
    output = launched("minimal_keras3", [[method] for method in METHODS], tmp_path)
    reports = re.findall(r"(\w+)\(.*\): accuracy (\S+)%, (\S+)x less traffic", output)
    assert [name for name, _, _ in reports] == METHODS, output[-3000:]
    for name, accuracy, fewer in reports:
        assert float(accuracy) > 80, name
        assert float(fewer) > 3, name


def test_digits(tmp_path: Path) -> None:
    names = ["none", "fp16", "qsgd", "global-qsgd", "eden", "binsgdm"]
    files = {name: tmp_path / f"{name}.json" for name in names}
    launched(
        "keras3_digits",
        [["--compression", name, "--epochs", "3", "--quiet", "--json", str(files[name])] for name in names],
        tmp_path,
    )
    for name, file in files.items():
        (run,) = json.loads(file.read_text())["runs"]
        assert run["accuracy"] > 0.6, name
        assert run["losses"][-1] < run["losses"][0] / 2, name
        assert len(set(run["fingerprints"])) == 1, f"{name}: the workers have trained different models"
