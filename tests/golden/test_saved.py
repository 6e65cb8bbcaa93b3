"""What earlier versions have saved can still be read: `save.py` says how it was made."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import save

import horovod_quant.torch as hvq
from horovod_quant.analysis.calibration import read_bench
from horovod_quant.cli.main import main
from horovod_quant.torch.tuning_session import TuningSession

SAVED = Path(__file__).parent / "saved"


def _json(name: str) -> Any:
    return json.loads((SAVED / name).read_text())


def test_a_compressors_state() -> None:
    state = _json("compressor.json")
    assert state == {"exchanges": {"0.weight": 3, "2.weight": 3}}
    compressor = hvq.QSGD(bits=4, seed=7)
    compressor.load_state_dict(state)
    assert compressor.state_dict() == state


def test_a_checkpoint_of_binsgdm() -> None:
    state = torch.load(SAVED / "binsgdm.pt")
    optimizer = hvq.optim.BinSGDM(save.model().parameters(), lr=1.0)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        held, saved = optimizer.state[parameter], state["state"][number]
        assert held["step"] == 3
        assert all(
            torch.equal(held[name], saved[name]) and saved[name].any() for name in ("momentum", "scale")
        )


def test_a_choice_of_auto() -> None:
    auto = hvq.Auto(methods=[save.METHOD])
    auto.load_state_dict(_json("auto.json"))
    elements = {name: parameter.numel() for name, parameter in save.model().named_parameters()}
    session = TuningSession(auto, min(elements), elements)
    assert auto.known_choice(session, 2) == save.METHOD
    assert auto.known_choice(session, 3) is None


@pytest.mark.parametrize("name", list(save.compressors()))
def test_a_pickled_compressor(name: str) -> None:
    compressor = pickle.loads((SAVED / f"{name}.pickle").read_bytes())
    expected = save.compressors()[name]
    assert type(compressor) is type(expected)
    assert repr(compressor) == repr(expected)


def test_a_measurement_and_what_is_calibrated_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    bench = read_bench(SAVED / "bench.json")
    assert (bench.workers, bench.controller, dict(bench.shapes)["gradient0"]) == (2, "gloo", (64, 64))
    assert {"none", "fp16", "eden-3"} == set(bench.measured)
    job = "advise --model resnet50 --workers 4 --hosts 4 --bandwidth 1gbit --step 0.35 --methods none eden-3"
    assert main([*job.split(), "--calibrate", str(SAVED / "bench.json")]) == 0
    assert "eden-3" in capsys.readouterr().out
