"""Statistics, warnings and the switch, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = pytest.mark.parallel

WORKER = Path(__file__).with_name("operator_worker.py")
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "tensorflow"])


def passes(workers: int, framework: str, *parts: str, **env: str) -> None:
    done = horovodrun("gloo", workers, [sys.executable, WORKER, framework, *parts], env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("PASSED") == workers, done.stdout[-3000:]


@FRAMEWORKS
def test_a_method_that_sends_more_than_float32_warns_once_with_what_mends_it(framework: str) -> None:
    passes(4, framework, "sends_more")


@FRAMEWORKS
def test_statistics_states_that_are_loaded_late_and_a_lone_optimizer(framework: str) -> None:
    passes(2, framework, "sparse", "loaded_late", "without_its_compressor")


@FRAMEWORKS
def test_the_switch_leaves_everything_to_horovod(framework: str) -> None:
    passes(2, framework, "switched_off", HOROVOD_QUANT_DISABLE="1")


DIFFERING = [
    *(
        (framework, part)
        for framework in ("torch", "tensorflow")
        for part in ("switched_off_on_one", "switched_off_on_one_in_steps")
    ),
    ("torch", "switched_off_on_one_with_auto"),
]


@pytest.mark.parametrize(("framework", "part"), DIFFERING)
def test_a_switch_that_differs_between_workers_is_an_error(framework: str, part: str) -> None:
    passes(2, framework, part)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_error_of_ones_own_gradients_is_measured(workers: int) -> None:
    passes(workers, "torch", "measures")


def test_the_nmse_of_a_training_is_near_what_the_scheme_states() -> None:
    passes(4, "torch", "measures_what_is_expected")
