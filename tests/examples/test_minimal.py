"""The scripts that people copy are short, stand alone, and train, in real processes, with every method."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from helpers import extended
from parallel.launching import ROOT, horovodrun

from horovod_quant.schemes import registry

EXAMPLES = ROOT / "examples"
SCRIPTS = {"minimal_torch": "torch", "minimal_keras": "tensorflow", "minimal_tensorflow": "tensorflow"}
LINES = 40
ON_TOP = ("huggingface_trainer", "lightning_horovod", "ray_run", "spark_run", "spark_estimator")
LINES_ON_TOP = 60


def methods_of(script: str) -> list[str]:
    """The classes of methods that a script can be given."""
    with_optimizer = script != "minimal_tensorflow"
    own = [kind.__name__ for kind in registry.own() if with_optimizer or kind.own_optimizer is None]
    return [*own, *(["Auto"] if script == "minimal_torch" else [])]


def check_reports(output: str, methods: list[str]) -> None:
    reports = re.findall(r"(\w+)\(.*\): accuracy (\S+)%, (\S+)x less traffic", output)
    assert [name for name, _, _ in reports] == methods, output[-3000:]
    for name, accuracy, fewer in reports:
        assert float(accuracy) > 80, name
        assert float(fewer) > (0.9 if name == "Auto" else 3), name


@pytest.mark.parallel
@pytest.mark.parametrize("script", ["minimal_torch", *map(extended, list(SCRIPTS)[1:])])
def test_trains(script: str) -> None:
    done = horovodrun("gloo", 2, [sys.executable, EXAMPLES / f"{script}.py"])
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, ["GlobalQSGD"])


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains_with_every_method(script: str, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"  # one launch for all methods: most of a launch is imports
    path = str(EXAMPLES / f"{script}.py")
    driver.write_text(
        f"import runpy, sys\nfor method in sys.argv[1:]:\n    sys.argv[1:] = [method]\n"
        f"    runpy.run_path({path!r}, run_name='__main__')\n"
    )
    done = horovodrun("gloo", 2, [sys.executable, driver, *methods_of(script)])
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, methods_of(script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_stands_alone(script: str) -> None:
    """It imports nothing of examples/, and nothing that a user of Horovod and this package does not have."""
    text = (EXAMPLES / f"{script}.py").read_text()
    assert len(text.splitlines()) <= LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        assert not isinstance(node, ast.ImportFrom)
    assert imported == {"sys", "horovod", "horovod_quant", SCRIPTS[script]}


@pytest.mark.parametrize("script", ON_TOP)
def test_examples_with_frameworks_on_top_are_short(script: str) -> None:
    assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) <= LINES_ON_TOP
