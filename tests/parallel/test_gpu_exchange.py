"""Exchanges of gradients on a GPU, in real processes; without one, the same by Triton's interpreter on the CPU.

Once Horovod's collectives get the tensors, once they are staged through the host.
"""

from __future__ import annotations

from typing import Any

import pytest
from launching import SCENARIOS_LIMIT, Outcome, assert_passed
from plan import on_a_gpu, parametrize

pytestmark = pytest.mark.parallel

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

INTERPRETER = {"TRITON_INTERPRET": "1", "HOROVOD_QUANT_KERNELS": "triton"}
ENVIRONMENT = {"TORCH_DEVICE": "cuda"} if torch.cuda.is_available() else INTERPRETER
ALONE = torch.cuda.is_available() and torch.cuda.device_count() < 2
"""NCCL takes no two ranks on one GPU."""


def pytest_generate_tests(metafunc: Any) -> None:
    parametrize(metafunc, on_a_gpu(metafunc.config.getoption("tier"), 1 if ALONE else 2, ENVIRONMENT))


@pytest.mark.timeout(SCENARIOS_LIMIT + 60)
def test_on_every_worker(scenario: str, outcome: Outcome) -> None:
    assert_passed(scenario, outcome)
