"""The scripts of docs/ddp.md are short, stand alone, and train, in real processes and without Horovod."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT
from torchrun import torchrun

EXAMPLES = ROOT / "examples"
MINIMAL = {"minimal_ddp": 2, "minimal_fsdp": 4}
ON_TOP = ("ddp_lightning", "ddp_trainer")
LINES, LINES_ON_TOP = 40, 60

WITHOUT_HOROVOD = """\
import runpy, sys
sys.modules["horovod"] = None  # an import fails as if it were not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parallel
@pytest.mark.parametrize(("script", "workers"), MINIMAL.items())
def test_trains_without_horovod(script: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(WITHOUT_HOROVOD)
    done = torchrun(workers, [tmp_path / "driver.py", EXAMPLES / f"{script}.py", "EDEN"])
    assert done.returncode == 0, done.stdout[-3000:]
    ((accuracy, fewer),) = re.findall(r"EDEN\(.*\): accuracy (\S+)%, (\S+)x less traffic", done.stdout)
    assert float(accuracy) > 80
    assert float(fewer) > 8


@pytest.mark.parallel
def test_ddp_trains_with_binsgdm() -> None:
    done = torchrun(2, [EXAMPLES / "minimal_ddp.py", "BinSGDM"])
    assert done.returncode == 0, done.stdout[-3000:]
    ((accuracy, fewer),) = re.findall(r"BinSGDM\(.*\): accuracy (\S+)%, (\S+)x less traffic", done.stdout)
    assert float(accuracy) > 80
    assert float(fewer) > 20


@pytest.mark.parametrize("script", [*MINIMAL, *ON_TOP])
def test_is_short(script: str) -> None:
    lines = (EXAMPLES / f"{script}.py").read_text().splitlines()
    assert len(lines) <= (LINES if script in MINIMAL else LINES_ON_TOP)


@pytest.mark.parametrize("script", MINIMAL)
def test_stands_alone(script: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((EXAMPLES / f"{script}.py").read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported == {"gc", "sys", "torch", "horovod_quant"}


def test_everything_imports_without_horovod() -> None:
    program = (
        "import sys; sys.modules['horovod'] = None; import horovod_quant.torch as hvq\n"
        "for name in ('QSGD', 'GlobalQSGD', 'EDEN', 'NUQSGD', 'BinSGDM', 'Auto'): getattr(hvq, name)()\n"
        "hvq.QSGD(hierarchical=True); hvq.ddp.State, hvq.fsdp.State"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
