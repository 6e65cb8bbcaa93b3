"""Exchanges of gradients on a GPU, in real processes; without one, the same by Triton's interpreter on the CPU.

Once Horovod's collectives get the tensors, once they are staged through the host.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed, scenarios
from worker import selected

pytestmark = pytest.mark.parallel

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

MODULE = "torch_gpu_scenarios"
INTERPRETER = {"TRITON_INTERPRET": "1", "HOROVOD_QUANT_KERNELS": "triton"}
ENVIRONMENT = {"TORCH_DEVICE": "cuda"} if torch.cuda.is_available() else INTERPRETER
STAGING = {"0": "core", "1": "full"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of the launches so far."""
    return {}


def pytest_generate_tests(metafunc: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        module = importlib.import_module(MODULE)
    thorough = metafunc.config.getoption("--thorough")
    cases = [
        pytest.param(staging, breadth, name, id=f"{'staged' if staging == '1' else 'direct'}-{name}")
        for staging, usual in STAGING.items()
        for breadth in ["extra" if thorough else usual]
        for name, _ in selected(module, breadth)
    ]
    metafunc.parametrize(("staging", "breadth", "scenario"), cases)


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(
    staging: str, breadth: str, scenario: str, outcomes: dict[str, Outcome], tmp_path: Path
) -> None:
    if staging not in outcomes:
        # NCCL takes no two ranks on one GPU.
        alone = staging == "0" and torch.cuda.is_available() and torch.cuda.device_count() < 2
        environment = {**ENVIRONMENT, "HOROVOD_QUANT_STAGING": staging}
        outcomes[staging] = scenarios("gloo", 1 if alone else 2, [], tmp_path, environment, MODULE, breadth)
    assert_passed(scenario, outcomes[staging])
