"""DDP's and FSDP2's scenarios, in real processes under torchrun, over Gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torchrun import HERE, ON_A_GPU, run_scenarios, scenarios_of

sys.path.append(str(HERE.parent / "parallel"))

from parallel.launching import Outcome, assert_passed  # noqa: E402

pytestmark = pytest.mark.parallel

LIMIT = 600
WORKERS = {"ddp_scenarios": (2, 3, 4), "fsdp_scenarios": (2, 3, 4)}
IN_EVERY_TIER = {
    ("ddp_scenarios", 3): ["every_method_has_the_simulators_bits", "models_of_subgroups_that_overlap"],
    ("ddp_scenarios", 4): [
        "every_method_has_the_simulators_bits",
        "nodes_average_first",
        "a_method_that_sends_more_than_float32",
    ],
    ("fsdp_scenarios", 3): [],
    ("fsdp_scenarios", 4): [
        "between_nodes_every_method_has_the_simulators_bits",
        "inside_a_mesh_gradients_are_rounded_once",
        "tensor_parallel_parameters_need_the_group",
    ],
}
"""Of the launches that are left to --all: with two workers all scenarios run."""

DEVICES = {"host": {}, "gpu": {"TRITON_INTERPRET": "1", "HOROVOD_QUANT_KERNELS": "triton"}}
"""Variables. Triton's interpreter takes the place of a GPU; scripts/gpu-check runs the same on one."""
ON_A_GPU_IN_EVERY_TIER = ["two_models_at_once"]


def _parameters() -> list[Any]:
    found = []
    for module, counts in WORKERS.items():
        for workers in counts:
            for name in scenarios_of(module):
                always = name in IN_EVERY_TIER.get((module, workers), [name])
                marks = [] if always else [pytest.mark.extended]
                found.append(
                    pytest.param(module, workers, "host", name, marks=marks, id=f"{module}-{workers}-{name}")
                )
    for name in ON_A_GPU:
        marks = [] if name in ON_A_GPU_IN_EVERY_TIER else [pytest.mark.extended]
        found.append(pytest.param("ddp_scenarios", 2, "gpu", name, marks=marks, id=f"gpu-{name}"))
    return found


@pytest.fixture(scope="session")
def outcomes() -> dict[tuple[str, int, str], Outcome]:
    return {}


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("module", "workers", "device", "name"), _parameters())
def test_on_every_worker(
    module: str,
    workers: int,
    device: str,
    name: str,
    outcomes: dict,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    if device == "gpu":
        pytest.importorskip("triton")
    key = module, workers, device
    if key not in outcomes:
        wanted = [
            item.callspec.params["name"]
            for item in request.session.items
            if getattr(item, "function", None) is request.function
            and tuple(item.callspec.params[each] for each in ("module", "workers", "device")) == key
        ]
        outcomes[key] = run_scenarios(module, workers, wanted, tmp_path, LIMIT, DEVICES[device])
    assert_passed(name, outcomes[key])
