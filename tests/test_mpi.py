"""Real processes over mpi4py against the simulator."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import by_default, gaussian, same_bits, simulate
from mpi_worker import Case, cases, gradients, states

FOLDER = Path(__file__).parent


def launch(size: int, path: Path) -> list:
    """What each rank got in each case: decoded tensors, merges, states."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpirun = shutil.which("mpirun", path=search)
    assert mpirun, "mpi4py is installed, but there is no mpirun"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [mpirun, "-np", str(size), "--oversubscribe", "--bind-to", "none", sys.executable]
    # -W error: nothing that numpy or MPI warns about.
    command += ["-W", "error", str(FOLDER / "mpi_worker.py"), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module", params=by_default((3,), range(1, 6)))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list:
    return launch(request.param, tmp_path_factory.mktemp("mpi") / "results")


@pytest.mark.parametrize("name", cases())
def test_real_processes_decode_the_simulators_bits(ranks: list, name: str) -> None:
    case: Case = cases()[name]
    size = len(ranks)
    expected_states = [states(case, rank, size) for rank in range(size)]
    _, merges, *_ = ranks[0][name]
    expected = simulate(
        case.scheme,
        [gradients(case, rank) for rank in range(size)],
        custom_reduction=case.custom_reduction,
        merges=merges or None,
        states=expected_states if expected_states[0] else None,
        local_size=case.local_size(size),
        **case.arguments,
    )
    for rank in range(size):
        decoded, own_merges, own_states, again = ranks[rank][name]
        assert [len(tensor) for tensor in decoded] == list(case.lengths)
        assert all(map(same_bits, decoded, expected.decoded[rank]))
        assert own_merges == merges
        if case.cancel:
            assert again == expected.exchanged_again
            assert (again > 0) == (size > 1)
        for own, other in zip(own_states or [], expected_states[rank] or []):
            assert same_bits(own.momentum, other.momentum)
            assert same_bits(own.scale, other.scale)


@pytest.mark.parametrize("name", [name for name, case in cases().items() if case.custom_reduction])
def test_a_reduction_joins_every_neighbour_once(ranks: list, name: str) -> None:
    _, merges, *_ = ranks[0][name]
    assert sorted(middle for _, middle, _ in merges) == list(range(1, len(ranks)))
    sums = {(rank, rank + 1) for rank in range(len(ranks))}
    for low, middle, high in merges:
        sums -= {(low, middle), (middle, high)}
        sums.add((low, high))
    assert sums == {(0, len(ranks))}


def test_exchanges_without_a_reduction_of_their_own_report_no_merges(ranks: list) -> None:
    for name, case in cases().items():
        if not case.custom_reduction:
            assert ranks[0][name][1] == []


def test_nodes_that_the_ranks_do_not_fill_are_refused(ranks: list) -> None:
    size = len(ranks)
    messages = [
        "local_size=0: use an integer from 1 to 2147483648",
        "local_size=-2: use an integer from 1 to 2147483648",
        f"hierarchical: {size} workers cannot form nodes of 6; start the same number on every node",
    ]
    assert all(rank["refused"] == 2 * messages for rank in ranks)


def test_hosts_may_have_any_ranks(ranks: list) -> None:
    if len(ranks) == 4:
        exact = np.mean([gaussian(rank, 5000) for rank in range(4)], axis=0)
        for (found,) in (rank["hosts of any ranks"] for rank in ranks):
            assert np.sum((found - exact) ** 2) < 0.2 * np.sum(exact**2)
