"""What trains by frameworks on top of PyTorch averages quantized gradients. scripts/setup does not install these;
docs/examples.md has the versions.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, horovodrun

EXAMPLES = ROOT / "examples"
LINES = 60

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

# The models of all workers after each training, compared. The examples' names are theirs when they have ended.
DRIVER = """\
import runpy, sys
import horovod.torch as hvd
import torch
script, *methods = sys.argv[1:]
for method in methods:
    sys.argv = [script, method]
    model = runpy.run_path(script, run_name="__main__")["model"]
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    everyone = hvd.allgather(flat[None], name="models")
    assert bool((everyone == flat).all()), "the workers have trained different models"
"""


def check(script: str, package: str, methods: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: docs/examples.md has the version")
    assert len((EXAMPLES / script).read_text().splitlines()) <= LINES
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    done = horovodrun("gloo", 2, [sys.executable, driver, EXAMPLES / script, *methods])
    assert done.returncode == 0, done.stdout[-3000:]
    reports = re.findall(r"(\w+)\(.*\): accuracy (\S+)%, (\S+) times fewer bytes", done.stdout)
    assert [name for name, _, _ in reports] == methods, done.stdout[-3000:]
    for name, accuracy, fewer in reports:
        assert float(accuracy) > 80, name
        assert float(fewer) > 3, name


def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    check("huggingface_trainer.py", "transformers", ["GlobalQSGD", "EDEN"], tmp_path)


def test_horovods_strategy_of_lightning(tmp_path: Path) -> None:
    check("lightning_horovod.py", "pytorch_lightning", ["GlobalQSGD", "EDEN"], tmp_path)
