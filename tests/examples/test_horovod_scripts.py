"""What Horovod documents as its own checks, a synthetic benchmark and elastic training, runs with every method.

Training on digits, as on MNIST, is in test_digits.py. Every method runs in one script of each kind, PyTorch's or
TensorFlow's, and with ``--thorough`` in both.
"""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import extended
from parallel.launching import elastic, horovodrun
from test_digits import alone, driver, path

from horovod_quant.frontends.methods import BINSGDM, families, parse

BENCHMARKS = ("torch_synthetic_benchmark", "tf2_synthetic_benchmark")
TRAININGS = ("torch_digits_elastic", "tf2_digits_elastic")

SMALL = (
    "--blocks 1 --image-size 8 --batch-size 4 --num-warmup-batches 2 --num-batches-per-iter 2 --num-iters 3"
)

EPOCHS = 3
IMAGES, BATCH = 1347, 128
ELASTIC_LIMIT = 900


def methods_for(script: str, bits: int, thorough: bool) -> list[str]:
    """Every method, this package's first; or a half of them, the other being for the other script of the kind."""
    every = [_with_bits(family, bits) for family in reversed(families())]
    first = BENCHMARKS[1], TRAININGS[0]
    return every if thorough else every[0 if script in first else 1 :: 2]


def _with_bits(family: str, bits: int) -> str:
    """With so many, or the most that the method takes."""
    for fewer in range(bits, 1, -1):
        with suppress(ValueError):
            return parse(family.replace("BITS", str(fewer))).name
    raise AssertionError(f"{family} takes no bits from 2 to {bits}")


def leave_out_unless_thorough(dispensable: bool, request: pytest.FixtureRequest) -> None:
    if dispensable and request.config.getoption("tier") != "thorough":
        pytest.skip("the other script has the same code for this; --thorough runs it")


# ---- synthetic benchmarks ----------------------------------------------------------------------------------------


@pytest.mark.parallel
@pytest.mark.parametrize("script", [BENCHMARKS[0], extended(BENCHMARKS[1])])
def test_benchmark_measures_every_method(script: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    methods = methods_for(script, 4, request.config.getoption("tier") == "thorough")
    file = tmp_path / "figures.json"
    options = ["--method", *methods, *SMALL.split(), "--json", file]
    done = horovodrun("gloo", 2, [sys.executable, path(script), *options])
    assert done.returncode == 0, done.stdout
    runs = json.loads(file.read_text())["runs"]
    assert [run["method"] for run in runs] == methods
    for run in runs:
        check_rates(run, done.stdout)
        check_bytes(run, run["bytes_per_batch"], run["float32_bytes_per_batch"])
        check_weights(run, workers=2)


def check_rates(run: dict[str, Any], printed: str) -> None:
    """Worker 0 has printed its rate in each iteration, and what follows from all of them, which is right."""
    name, rates = re.escape(run["method"]), np.array(run["images_per_second"])
    assert rates.shape == (2, 3)
    assert (rates > 0).all()
    iterations = re.findall(rf">:{name}, iteration (\d) of 3: ([\d.]+) images/s", printed)
    assert [int(number) for number, _ in iterations] == [1, 2, 3]
    shown = [float(rate) for _, rate in iterations]
    np.testing.assert_allclose(shown, rates[0], atol=0.051)
    totals = rates[0] + rates[1]
    expected = [rates.mean(), 1.96 * rates.std(), totals.mean(), 1.96 * totals.std()]
    number = r"([\d.]+)"
    summary = (
        rf">:{name}: {number} \+- {number} images/s per worker, {number} \+- {number} images/s on 2 worker"
    )
    (found,) = re.findall(summary, printed)
    np.testing.assert_allclose([float(text) for text in found], expected, atol=0.051)


@pytest.mark.parametrize("script", BENCHMARKS)
def test_benchmark_needs_no_launcher_and_names_wrong_arguments(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    leave_out_unless_thorough(script == BENCHMARKS[1], request)
    file = tmp_path / "figures.json"
    small = f"--method {BINSGDM} {SMALL}"
    messages = {
        "--method none zip": "argument --method: there is no method 'zip'; use none, fp16, ",
        "--method qsgd": "argument --method: 'qsgd' lacks the number of bits; use qsgd-4",
        "--num-iters 0": "argument --num-iters: 0: use at least 1",
        "--batch-size ten": "argument --batch-size: invalid count value: 'ten'",
        "--json /no/such/folder/file": "argument --json: /no/such/folder/file: there is no such folder",
    }
    check_alone(script, f"{small} --json {file}", messages)
    (run,) = json.loads(file.read_text())["runs"]
    assert np.shape(run["images_per_second"]) == (1, 3)
    assert run["bytes_per_batch"] == 0


# ---- elastic training --------------------------------------------------------------------------------------------


@pytest.mark.parallel
@pytest.mark.timeout(ELASTIC_LIMIT + 60)
@pytest.mark.parametrize("script", TRAININGS)
@pytest.mark.extended
def test_every_method_trains_while_workers_come_and_go(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    thorough = request.config.getoption("tier") == "thorough"
    methods = methods_for(script, 8, thorough)
    resized = len(methods) if thorough else 2
    options = f"--epochs {EPOCHS} --batch-size {BATCH}".split()
    arguments = [
        ["--method", method, *options, "--json", str(tmp_path / f"{method}.json")] for method in methods
    ]
    plan = {"example": script, "trainings": arguments, "resized": resized}
    (tmp_path / "trainings.json").write_text(json.dumps(plan))
    entries, printed = elastic("digits_elastic_worker.py", tmp_path, ELASTIC_LIMIT)

    workers = 2
    for number, method in enumerate(methods):
        before, workers = workers, 5 - workers if number < resized else workers
        epochs = re.findall(
            rf">:{re.escape(method)}: epoch (\d) of {EPOCHS}, (\d) worker\S+ test accuracy ([\d.]+)%", printed
        )
        assert [int(epoch) for epoch, *_ in epochs] == list(range(1, EPOCHS + 1)), printed[-6000:]
        assert [int(size) for _, size, _ in epochs] == [before] + (EPOCHS - 1) * [workers]
        (run,) = json.loads((tmp_path / f"{method}.json").read_text())["runs"]
        assert run["batches"] == EPOCHS * math.ceil(IMAGES / BATCH), "images were left out, or taken twice"
        assert run["accuracy"] > 0.8, method
        assert float(epochs[-1][2]) == pytest.approx(100 * run["accuracy"], abs=0.0051)
        assert f">:{method}: final test accuracy {run['accuracy']:.2%}" in printed
        check_weights(run, workers)
        if parse(method).class_name is not None:
            check_bytes({"method": method}, run["bytes_sent"], run["float32_bytes"])

    finished = [own for own in entries if own and own[-1].get("finished")]
    assert len(finished) == workers
    whole = [own for own in finished if len(own) == len(methods) + 1]
    assert len(whole) == 2, "the first two workers have been in every training"


@pytest.mark.extended
@pytest.mark.parametrize("script", TRAININGS)
def test_elastic_training_needs_no_launcher_and_names_wrong_arguments(
    script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    leave_out_unless_thorough(script == TRAININGS[1], request)
    file = tmp_path / "figures.json"
    messages = {
        "--method zip": "argument --method: there is no method 'zip'; use none, fp16, ",
        "--method global-qsgd-17": "argument --method: 'global-qsgd-17': bits=17: use an integer from 2 to 16",
        "--epochs 0": "argument --epochs: 0: use at least 1",
        "--lr nan": "argument --lr: nan: use a positive number",
        "--json /no/such/folder/file": "argument --json: /no/such/folder/file: there is no such folder",
    }
    check_alone(script, f"--method qsgd-8 --epochs 3 --json {file}", messages)
    (run,) = json.loads(file.read_text())["runs"]
    assert run["accuracy"] > 0.8


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("script", [TRAININGS[0], BENCHMARKS[0]])
def test_too_few_bits_for_the_workers_are_one_message(script: str, request: pytest.FixtureRequest) -> None:
    leave_out_unless_thorough(script == BENCHMARKS[0], request)
    done = horovodrun("gloo", 2, [sys.executable, path(script), "--method", "global-qsgd-2"])
    assert done.returncode != 0
    message = f"{script}.py: error: argument --method: global-qsgd-2: bits=2: the sum of 2 workers' integers"
    assert done.stdout.count(message) == 1, done.stdout
    assert f'{script}.py", line' not in done.stdout, "a traceback of the example"


# ---- what both check ---------------------------------------------------------------------------------------------


def check_weights(run: dict[str, Any], workers: int) -> None:
    assert len(run["fingerprints"]) == workers
    assert len(set(run["fingerprints"])) == 1, "the workers have trained different models"


def check_bytes(run: dict[str, Any], sent: float, float32: float) -> None:
    """Compare the ratio with that of the bits, less what scales and small tensors take."""
    ideal = {"none": 1.0, "fp16": 2.0, BINSGDM: 32.0}
    name = run["method"]
    fewer = ideal[name] if name in ideal else 32 / parse(name).arguments["bits"]
    assert 0.5 * fewer < float32 / sent <= fewer, name


def check_alone(script: str, arguments: str, messages: dict[str, str]) -> None:
    """In one process: the script runs with the first arguments, and says what is wrong with the others."""
    done = alone(*driver(script, [arguments.split(), *(options.split() for options in messages)]))
    for message in messages.values():
        assert f"{script}.py: error: {message}" in done.stdout, done.stdout
    assert done.stdout.count(f"{script}.py: error: ") == len(messages)
    assert done.stdout.count("exit status 2") == len(messages)
    assert "Traceback" not in done.stdout
