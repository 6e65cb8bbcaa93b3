"""The examples train, in real processes, with every method; and say what is wrong with their arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import by_default, extended
from parallel.launching import ROOT, environment, horovodrun

EXAMPLES = ROOT / "examples"
SCRIPTS = ("torch_digits", "tf2_digits", "keras_digits")

TRAININGS = {
    "none": "--compression none",
    "adam": "--compression none --optimizer adam",
    "fp16": "--compression fp16",
    "qsgd": "--compression qsgd --norm max --bits 4 --bucket-size 1024",
    "qsgd l2": "--compression qsgd --norm l2 --bits 8",
    "nuqsgd": "--compression nuqsgd",
    "alltoall": "--compression nuqsgd --exchange alltoall --bits 6",
    "global-qsgd": "--compression global-qsgd",
    "global l2": "--compression global-qsgd --norm l2",
    "exponential": "--compression global-qsgd --levels exponential --norm l2 --bits 5",
    "eden": "--compression eden",
    "binsgdm": "--compression binsgdm",
    "binsgdm again": "--compression binsgdm",
    "auto": "--compression auto",
}
LEFT_TO_ALL = ("adam", "qsgd l2", "alltoall", "global l2")
PYTORCHS = ("auto",)
"""Of the trainings, those that TensorFlow refuses."""

# One launch for all of them: most of a launch is imports.
DRIVER = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
example = importlib.import_module(sys.argv[3])
for options in json.loads(sys.argv[2]):
    sys.argv[1:] = options
    try:
        example.main()
    except SystemExit as stop:
        print("exit status", stop)
"""


@pytest.fixture(scope="module", params=[SCRIPTS[0], *map(extended, SCRIPTS[1:])])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an example writes with --json after three epochs on 2 workers, for each training."""
    folder = tmp_path_factory.mktemp("digits")
    left_out = () if request.config.getoption("tier") in ("all", "thorough") else LEFT_TO_ALL
    left_out += () if request.param == SCRIPTS[0] else PYTORCHS
    names = [name for name in TRAININGS if name not in left_out]
    files = {name: folder / f"{index}.json" for index, name in enumerate(names)}
    arguments = [
        [*TRAININGS[name].split(), "--epochs", "3", "--quiet", "--json", str(file)]
        for name, file in files.items()
    ]
    done = horovodrun("gloo", 2, [sys.executable, *driver(request.param, arguments)])
    assert done.returncode == 0, done.stdout
    assert "exit status" not in done.stdout, done.stdout
    return {name: json.loads(file.read_text()) for name, file in files.items()}


@pytest.mark.parallel
@pytest.mark.parametrize("name", by_default({*TRAININGS} - {*LEFT_TO_ALL}, TRAININGS))
def test_trains(trained: dict[str, Any], name: str) -> None:
    if name in PYTORCHS and name not in trained:
        pytest.skip(f"{name} is PyTorch's alone")
    run = trained[name]["runs"][0]
    assert trained[name]["workers"] == 2
    assert run["steps"] == len(run["losses"]) == len(run["bytes_sent"])
    assert run["accuracy"] > 0.6
    assert run["losses"][-1] < run["losses"][0] / 2
    assert len(run["fingerprints"]) == 2
    assert len(set(run["fingerprints"])) == 1, "the workers have trained different models"


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("fp16", 2.0),
        ("qsgd", 7.195),
        ("nuqsgd", 7.195),
        ("global-qsgd", 3.812),
        ("exponential", 5.855),
        ("binsgdm", 21.904),
    ],
)
def test_sends_as_many_bytes_with_every_framework(trained: dict[str, Any], name: str, ratio: float) -> None:
    run = trained[name]["runs"][0]
    assert run["float32_bytes_per_step"] == trained["none"]["runs"][0]["bytes_per_step"]
    assert run["float32_bytes_per_step"] / run["bytes_per_step"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parallel
def test_two_workers_repeat_exactly(trained: dict[str, Any]) -> None:
    first, second = trained["binsgdm"]["runs"][0], trained["binsgdm again"]["runs"][0]
    assert first["fingerprints"] == second["fingerprints"]
    assert first["losses"] == second["losses"]


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains_under_mpi(script: str) -> None:
    done = horovodrun("mpi", 2, [sys.executable, path(script), "--compression", "qsgd", "--epochs", "1"])
    assert done.returncode == 0, done.stdout
    assert "qsgd, seed 0: test accuracy" in done.stdout


@pytest.mark.parametrize("script", by_default(SCRIPTS[:1], SCRIPTS))
def test_one_worker_needs_no_launcher(script: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--compression", "binsgdm", "--epochs", "3", "--seed", "5", "--json", str(file)]
    done = alone(path(script), *options)
    assert done.returncode == 0, done.stdout
    (run,) = json.loads(file.read_text())["runs"]
    assert run["seed"] == 5
    assert run["accuracy"] > 0.6
    assert run["bytes_per_step"] == 0


@pytest.mark.parallel
@pytest.mark.parametrize("script", ["torch_digits", extended("keras_digits")])
def test_a_wrong_argument_gives_one_message_and_fails(script: str) -> None:
    options = ["--compression", "global-qsgd", "--bits", "0"]
    done = horovodrun("gloo", 2, [sys.executable, path(script), *options])
    assert done.returncode != 0
    assert done.stdout.count(f"{script}.py: error: bits=0: use an integer from 2 to 16") == 1, done.stdout
    assert f'{script}.py", line' not in done.stdout, "a traceback of the example"


@pytest.mark.parametrize("script", ["torch_digits", extended("tf2_digits")])
def test_wrong_arguments_are_named(script: str) -> None:
    messages = {
        "--compression binsgdm --bits 4": "--bits is for qsgd, nuqsgd, global-qsgd, eden; --compression binsgdm",
        "--compression qsgd --levels uniform": "--levels is for global-qsgd",
        "--compression binsgdm --optimizer sgd": "needs the optimizer of the same name",
        "--compression zip": "invalid choice: 'zip'",
        "--compression qsgd --max-nmse 0.1": "--max-nmse is for auto",
        "--compression auto --max-nmse 0": "max_nmse=0.0: use a positive number"
        if script == "torch_digits"
        else "use the method that it recommends",
        "--lr nan": "--lr nan: use a positive number",
        "--epochs 0": "--epochs 0: use at least 1",
        "--batch-size 2000": "--batch-size 2000: use 1 (an image per worker) to 1347",
        "--seed 3 -1": "--seed -1: use 0 or more",
        "--json /no/such/folder/file": "--json /no/such/folder/file: there is no such folder",
    }
    arguments = [options.split() for options in messages]
    done = alone(*driver(script, arguments))
    for message in messages.values():
        assert message in done.stdout
    assert done.stdout.count(f"{script}.py: error: ") == len(messages)
    assert done.stdout.count("exit status 2") == len(messages)
    assert "Traceback" not in done.stdout


def path(script: str) -> str:
    return str(EXAMPLES / f"{script}.py")


def driver(script: str, arguments: list[list[str]]) -> list[str]:
    """Options of Python to run an example once with each of the arguments."""
    return ["-c", DRIVER, str(EXAMPLES), json.dumps(arguments), script]


def alone(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=600,
    )  # fmt: skip
