"""What trains by frameworks on top of Horovod averages quantized gradients. scripts/setup does not install them;
docs/examples.md has the versions.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment, horovodrun

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


def require(script: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: docs/examples.md has the version")
    assert len((EXAMPLES / script).read_text().splitlines()) <= LINES


def check_reports(output: str, methods: list[str]) -> None:
    reports = re.findall(r"(\w+)\(.*\): accuracy (\S+)%, (\S+) times fewer bytes", output)
    assert [name for name, _, _ in reports] == methods, output[-3000:]
    for name, accuracy, fewer in reports:
        assert float(accuracy) > 80, name
        assert float(fewer) > 3, name


def check_models(script: str, methods: list[str], folder: Path) -> None:
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    done = horovodrun("gloo", 2, [sys.executable, driver, EXAMPLES / script, *methods])
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, methods)


def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    script = "huggingface_trainer.py"
    require(script, "transformers", "accelerate")
    check_models(script, ["GlobalQSGD", "EDEN"], tmp_path)


def test_horovods_strategy_of_lightning(tmp_path: Path) -> None:
    script = "lightning_horovod.py"
    require(script, "pytorch_lightning")
    check_models(script, ["GlobalQSGD", "EDEN"], tmp_path)


def test_run_of_horovod_spark() -> None:
    """The script itself compares the workers' models."""
    script = "spark_run.py"
    require(script, "pyspark", "pyarrow")
    if shutil.which("java") is None:
        pytest.skip("there is no Java")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "EDEN"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, ["EDEN"])
