"""Training that was saved with two workers and goes on with three.

Its bits cannot be those of a run without an interruption: there are other workers with other gradients. What can be
checked is: everything that was saved arrives on every worker, exactly; the next step computes what the simulator does
with that state, close to the average and without a bias; and training ends where it would have ended.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resume_data
from helpers import assert_mean, extended
from launching import horovodrun
from oracle import assert_average
from resume_data import (
    BY_DEFAULT,
    HIERARCHICAL_BINSGDM,
    RESUMING,
    SAVED_AFTER,
    SAVING,
    TRAINED,
    Arrays,
    method_of,
)

from horovod_quant import simulator
from horovod_quant.frontends.arguments import MIN_ELEMENTS
from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from horovod_quant.frontends.methods import FP16
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import BinaryState, Scheme, Workers

pytestmark = pytest.mark.parallel

CASES = [(framework, method) for framework, methods in TRAINED.items() for method in methods]


class Outcome:
    """What the workers of one method have written down."""

    def __init__(self, folder: Path, framework: str, method: str) -> None:
        read = partial(self._read, folder, framework, method)
        self.method = method
        self.saved = read("saved", SAVING)
        self.resumed = read("resumed", RESUMING)
        self.scheme = _scheme(method)

    @staticmethod
    def _read(folder: Path, framework: str, method: str, what: str, workers: int) -> list[Arrays]:
        files = (resume_data.file_of(folder, framework, method, what, rank) for rank in range(workers))
        return [resume_data.read(file) for file in files]

    def quantized(self) -> list[str]:
        """The names of the gradients that the method itself exchanges."""
        gradients = self.resumed[0]["reduced"]
        return [name for name, g in gradients.items() if self.scheme is not None and g.size >= MIN_ELEMENTS]

    def gradients(self, name: str) -> list[np.ndarray]:
        """The workers' own in the first step after resuming."""
        return [own["raw"][name].reshape(-1) for own in self.resumed]

    def reduced(self, name: str) -> np.ndarray:
        everyone = [own["reduced"][name] for own in self.resumed]
        assert all(np.array_equal(other, everyone[0]) for other in everyone), f"{name} differs between ranks"
        return everyone[0].reshape(-1)


def _scheme(method: str) -> Scheme | None:
    scheme = method_of(method)[0].scheme()
    return Hierarchical(scheme) if method == HIERARCHICAL_BINSGDM else scheme


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: Any) -> dict[str, Path]:
    """The folders of the frameworks' results so far."""
    return {}


@pytest.fixture
def outcome(case: tuple[str, str], outcomes: dict[str, Path], tmp_path: Path) -> Outcome:
    framework, method = case
    if framework not in outcomes:
        outcomes[framework] = tmp_path
        for controller, task, workers in (("gloo", "save", SAVING), ("mpi", "resume", RESUMING)):
            program = [
                sys.executable,
                Path(__file__).with_name("resume_worker.py"),
                framework,
                task,
                tmp_path,
            ]
            done = horovodrun(controller, workers, program)
            assert done.returncode == 0, done.stdout[-4000:]
    return Outcome(outcomes[framework], framework, method)


every_case = pytest.mark.parametrize(
    "case",
    [case if case[0] == "torch" and case[1] in BY_DEFAULT else extended(case) for case in CASES],
    ids=["-".join(case).replace(" ", "-") for case in CASES],
)


@every_case
def test_everything_that_was_saved_arrives(outcome: Outcome) -> None:
    saved = outcome.saved[0]
    kinds = set(saved) - {"loss"}
    for rank, own in enumerate(outcome.resumed):
        assert set(own) == kinds | {"raw", "reduced", "loss"}
        for kind in kinds:
            assert set(own[kind]) == set(saved[kind])
            for name, value in saved[kind].items():
                assert np.array_equal(own[kind][name], value), f"rank {rank}: {kind} of {name}"
    if outcome.scheme is not None:
        exchanges = saved.get("exchanges", {})
        counts = {int(count) for name, count in exchanges.items() if name in outcome.quantized()}
        steps = {int(count) for count in saved.get("step", {}).values()}
        assert counts | steps == {SAVED_AFTER}


@every_case
def test_the_next_step_goes_on_from_there(outcome: Outcome) -> None:
    quantized, binary = outcome.quantized(), "step" in outcome.saved[0]
    for name in outcome.resumed[0]["reduced"]:
        gradients, reduced = outcome.gradients(name), outcome.reduced(name)
        exact = np.mean(gradients, axis=0, dtype=np.float64)
        if outcome.method == FP16:
            assert np.abs(reduced - exact).max() <= 2**-9 * np.abs(gradients).max()
        elif name not in quantized:
            assert_average(None, gradients, reduced, name, is_binsgdm=False)
        else:
            assert np.array_equal(reduced, _simulated(outcome, name)), (
                f"{name} is not what the state leads to"
            )
            if binary:
                exact = np.mean([state.momentum / state.scale for state in _states(outcome, name)], axis=0)
            else:
                assert_average(outcome.scheme, gradients, reduced, name, is_binsgdm=False)
            for errors in (reduced - exact, np.sign(exact) * (reduced - exact)):
                assert_mean(errors, 0.0)


def _simulated(outcome: Outcome, name: str) -> np.ndarray:
    """The reduced gradient, by the simulator, from what was saved and the workers' gradients."""
    saved, gradients = outcome.saved[0], outcome.gradients(name)
    local_size = RESUMING if isinstance(outcome.scheme, Hierarchical) else 1
    if "step" not in saved:
        step, states = saved["exchanges"][name], None
    else:
        step, states = saved["step"][name], []
        for rank in range(RESUMING):
            workers = Workers(rank, RESUMING, local_size=local_size)
            start, stop = outcome.scheme.owned(name, gradients[0].size, workers)
            momentum, scale = (
                saved[kind][name].reshape(-1)[start:stop].copy() for kind in ("momentum", "scale")
            )
            states.append([BinaryState(momentum, scale, DEFAULT_BETA)])
    result = simulator.run(
        outcome.scheme, gradients, names=[name], step=int(step), states=states, local_size=local_size
    )
    return result.decoded[0][0]


def _states(outcome: Outcome, name: str) -> list[BinaryState]:
    """Momentum and scale after the step, whose odds the bits have: each worker's, or, on one node, that of all."""
    momentum, scale = (outcome.saved[0][kind][name].reshape(-1) for kind in ("momentum", "scale"))
    gradients = outcome.gradients(name)
    if isinstance(outcome.scheme, Hierarchical):
        gradients = [np.mean(gradients, axis=0)]
    return [
        BinaryState(
            DEFAULT_BETA * momentum + (1 - DEFAULT_BETA) * g,
            DEFAULT_BETA * scale + (1 - DEFAULT_BETA) * np.abs(g),
            DEFAULT_BETA,
        )
        for g in gradients
    ]


@every_case
def test_training_ends_where_it_would_have_ended(outcome: Outcome) -> None:
    losses = outcome.saved[0]["loss"]
    uninterrupted, resumed = float(losses["last"]), float(outcome.resumed[0]["loss"]["last"])
    assert uninterrupted < 0.8 * float(losses["saved"]), "the rest of the training makes no difference"
    assert abs(resumed - uninterrupted) < 0.2 * uninterrupted
