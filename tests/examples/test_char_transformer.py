"""The character transformer trains, in real processes, with every method; and says what is wrong with its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import extended
from parallel.launching import ROOT, environment, horovodrun

EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "torch_char_transformer.py"
SMALL = "--layers 1 --width 32 --heads 2 --context 16 --batch-size 16 --steps 60 --quiet"
TRAININGS = {
    "none": "--compression none",
    "qsgd": "--compression qsgd --norm max --bits 4",
    "global-qsgd": "--compression global-qsgd --bits 8",
    "exponential": "--compression global-qsgd --bits 8 --levels exponential",
    "eden": "--compression eden --bits 2 --server-bits 4",
    "binsgdm": "--compression binsgdm --lr 0.005",
}

# One launch for all of them: most of a launch is imports.
DRIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch_char_transformer as example
for options in json.loads(sys.argv[2]):
    sys.argv[1:] = options
    example.main()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the example writes with --json on 2 workers, for each training."""
    folder = tmp_path_factory.mktemp("transformer")
    files = {name: folder / f"{name}.json" for name in TRAININGS}
    arguments = [
        [*options.split(), *SMALL.split(), "--json", str(files[name])] for name, options in TRAININGS.items()
    ]
    done = horovodrun("gloo", 2, [sys.executable, "-c", DRIVER, EXAMPLES, json.dumps(arguments)])
    assert done.returncode == 0, done.stdout
    return {name: json.loads(file.read_text()) for name, file in files.items()}


@pytest.mark.parallel
@pytest.mark.extended
@pytest.mark.parametrize("name", TRAININGS)
def test_trains(trained: dict[str, Any], name: str) -> None:
    run = trained[name]["runs"][0]
    assert trained[name]["workers"] == 2
    assert run["steps"] == len(run["losses"]) == 60
    assert np.mean(run["losses"][-10:]) < np.mean(run["losses"][:5]) - 0.5
    assert run["validation_loss"] == pytest.approx(np.mean(run["losses"][-10:]), abs=0.5)
    assert len(run["fingerprints"]) == 2
    assert len(set(run["fingerprints"])) == 1, "the workers have trained different models"


@pytest.mark.parallel
@pytest.mark.extended
def test_sends_fewer_bytes(trained: dict[str, Any]) -> None:
    sent = {name: trained[name]["runs"][0]["bytes_per_step"] for name in TRAININGS}
    assert sent["binsgdm"] < sent["qsgd"] < sent["global-qsgd"] < sent["none"]


def test_needs_no_launcher_and_writes_after_each_seed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = alone(*SMALL.split(), "--steps", "3", "--seed", "5", "6", "--json", str(file))
    assert done.returncode == 0, done.stdout
    runs = json.loads(file.read_text())["runs"]
    assert [run["seed"] for run in runs] == [5, 6]
    assert runs[0]["validation_loss"] != runs[1]["validation_loss"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        extended("--steps 0", "--steps 0: use at least 1"),
        extended("--batch-size 0", "--batch-size 0: use at least 1, a sequence per worker"),
        extended("--width 30 --heads 4", "--width 30: use a multiple of --heads 4"),
        ("--compression none --bits 4", "--bits is for qsgd, nuqsgd, global-qsgd, eden; --compression none"),
    ],
)
def test_wrong_arguments_are_named(options: str, message: str) -> None:
    done = alone(*options.split())
    assert done.returncode == 2
    assert f"torch_char_transformer.py: error: {message}" in done.stdout
    assert "Traceback" not in done.stdout


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = alone("--device", "cuda")
    assert done.returncode == 2
    assert "torch_char_transformer.py: error: --device cuda: PyTorch " in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_horovods_compressions_go_through_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import horovod.torch as hvd
    import torch_char_transformer

    own = getattr(hvd.Compression, name)
    compression = torch_char_transformer.ThroughHost(own)
    gradient = torch.linspace(-1, 1, 5)
    sent, context = compression.compress(gradient)
    assert sent.dtype == own.compress(gradient)[0].dtype
    assert compression.decompress(sent, context).dtype == torch.float32
    torch.testing.assert_close(compression.decompress(sent, context), gradient, atol=1e-3, rtol=0)


def test_text_is_the_same_for_all_and_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import python_text

    text = python_text.load_text()
    assert len(text.validation) == pytest.approx(0.1 * (len(text.training) + len(text.validation)), rel=1e-3)
    assert 1e6 < len(text.training) < 4e6
    for part in text:
        assert part.dtype == np.int64
        assert 0 <= part.min() <= part.max() < python_text.CHARACTERS


def alone(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=600,
    )  # fmt: skip
