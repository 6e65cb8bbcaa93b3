"""Fit the performance model's `Software` to JSON files of ``horovod-quant bench``.

A weighted least-squares fit of the logarithms of step communication times. A prior pulls each parameter to its
default, so one file is enough, and a parameter that no file determines stays at its default.

Units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.analysis.cost_model import Setting, exchange_cost
from horovod_quant.analysis.json_file import read_json
from horovod_quant.analysis.kernel_speeds import KernelSpeeds
from horovod_quant.analysis.models import Shapes
from horovod_quant.analysis.network import DDP, MEASURED, MOST_WORKERS, Network, Software, default_software
from horovod_quant.analysis.shapes import shapes_of
from horovod_quant.analysis.units import TIMES
from horovod_quant.frontends import former_names, methods
from horovod_quant.schemes.base import require_int, require_number

UNCERTAINTY = {
    "overhead": 1.0,
    "gradient": 1.0,
    "copy": 0.7,
    "stream": 0.7,
    "half_sum": 0.5,
    "kernels": 0.4,
    "contention": 0.2,
    "allreduce": 0.2,
    "allgather": 0.2,
    "alltoall": 0.2,
}
"""Prior standard deviations, in logarithms, of parameters from the defaults of `Software`."""

NOISE = 0.15
"""Standard deviation of measured step communication from the model, as a logarithm."""

_ROUNDS = 30
_CONVERGED = 1e-3


class Bench(NamedTuple):
    """A measurement of ``horovod-quant bench``.

    Attributes:
        controller: the file's name of the controller, or ``"ddp"``.
        measured: seconds of step communication, the median of the rounds, by the method's name.
        cores: number of cores that the workers of one host may use.
        others: the file's keys of these names.
    """

    shapes: Shapes
    workers: int
    hosts: int
    workers_per_host: int
    controller: str
    cores: int
    group_bytes: int
    measured: dict[str, float]


class Observation(NamedTuple):
    """A bench and its network, whose ``software`` is ignored."""

    bench: Bench
    network: Network


NOT_MODELLED = ("bf16", "powersgd-1", "powersgd-2")
"""Hooks of PyTorch that ``bench --transport ddp`` measures."""

VERSIONS = (1, 2)
"""Versions of the files of ``horovod-quant bench`` that can be read."""


def read_bench(path: str | Path) -> Bench:
    """Return the measurement in a JSON file of ``horovod-quant bench``.

    Raises:
        ValueError: it is no such file, of another version, or has nothing to calibrate by.
        OSError: it cannot be read.
    """
    try:
        found = read_json(path)
        version, framework = found["version"], found["framework"]
        bench = _bench(path, found) if version in VERSIONS else None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a file that horovod-quant bench --json writes ({type(error).__name__}: {error})"
        ) from None
    if bench is None:
        raise ValueError(
            f"{path}: version {version}; this program reads versions {' and '.join(map(str, VERSIONS))}"
        )
    if framework not in ("torch", DDP):
        raise ValueError(
            f"{path}: measured with {framework}; the model describes PyTorch under Horovod or DDP"
        )
    if framework != DDP and bench.controller not in MEASURED:
        raise ValueError(f"{path}: controller {bench.controller!r} is not one of {', '.join(MEASURED)}")
    if bench.hosts * bench.workers_per_host != bench.workers:
        raise ValueError(
            f"{path}: {bench.hosts} hosts of {bench.workers_per_host} are not {bench.workers} workers"
        )
    if bench.workers < 2:
        raise ValueError(f"{path}: one worker sends nothing; run horovod-quant bench with two or more")
    if not bench.measured:
        raise ValueError(f"{path}: it contains no measurement")
    for name, seconds in bench.measured.items():
        methods.parse(name, version=former_names.VERSION)
        if not seconds > 0:
            raise ValueError(f"{path}: {name} takes {seconds!r} seconds")
    return bench


def _bench(path: str | Path, found: Any) -> Bench:
    """Return the validated values of a file: calibrating would accept wrong ones."""
    counts = {"workers": MOST_WORKERS, "hosts": MOST_WORKERS, "workers_per_host": MOST_WORKERS}
    for name, most in {**counts, "cores": 10**6, "group_bytes": 2**62}.items():
        require_int(name, found[name], 1, most)
    measured = {}
    for result in found["results"]:
        for seconds in result["wall_seconds"]:
            require_number("wall_seconds", seconds, *TIMES)
        name = str(result["method"])
        if result["wall_seconds"] and not (found["framework"] == DDP and name in NOT_MODELLED):
            # Version 1 has the names of 0.1.0: the methods measured have the meaning of that version.
            name = former_names.present(name, found["version"], found["workers"]) or name
            measured[name] = statistics.median(result["wall_seconds"])
    return Bench(
        shapes_of(path, found["shapes"]),
        found["workers"],
        found["hosts"],
        found["workers_per_host"],
        DDP if found["framework"] == DDP else found["controller"],
        found["cores"],
        found["group_bytes"],
        measured,
    )


def observe(bench: Bench, links: Network, *, one_machine: bool = False) -> Observation:
    """Combine a bench with the links of its network.

    Args:
        bench: the measurement.
        links: any network with the same links.
        one_machine: whether all hosts share the cores of one machine, as in a lab.
    """
    network = dataclasses.replace(
        links,
        hosts=bench.hosts,
        workers_per_host=bench.workers_per_host,
        cores_per_worker=bench.cores / (bench.workers if one_machine else bench.workers_per_host),
        controller=bench.controller,
    )
    return Observation(bench, network)


def predict(observation: Observation, speeds: KernelSpeeds, software: Software) -> dict[str, float]:
    """Return each method's modelled seconds of step communication.

    Args:
        observation: the bench and its network.
        speeds: speeds of the kernels of all its methods.
        software: the network's software costs.
    """
    bench = observation.bench
    network = dataclasses.replace(observation.network, software=software)
    setting = Setting(bench.shapes, network, speeds, bench.group_bytes)
    return {
        name: exchange_cost(methods.parse(name).scheme() or name, setting).exposed for name in bench.measured
    }


def calibrate(observations: Sequence[Observation], speeds: KernelSpeeds) -> Software:
    """Return the `Software` that fits the measured times best.

    Gauss-Newton on logarithms, with steps halved while they make it worse.

    Args:
        observations: the benches and their networks.
        speeds: speeds of the kernels of all their methods.
    """
    start = default_software(observations[0].network.controller)
    prior = np.log([getattr(start, name) for name in UNCERTAINTY])
    strength = 1 / np.array(list(UNCERTAINTY.values()))

    def residuals(point: np.ndarray) -> np.ndarray:
        software = _software(point)
        found = []
        for observation in observations:
            predicted = predict(observation, speeds, software)
            found += [np.log(predicted[name] / seconds) / NOISE
                      for name, seconds in observation.bench.measured.items()]  # fmt: skip
        return np.concatenate([found, strength * (point - prior)])

    point = prior
    now = residuals(point)
    for _ in range(_ROUNDS):
        shift = 1e-4
        columns = [(residuals(point + shift * unit) - now) / shift for unit in np.eye(len(point))]
        step = -np.linalg.lstsq(np.stack(columns, axis=1), now, rcond=None)[0]
        step *= min(1.0, 1.0 / max(np.abs(step).max(), 1e-12))
        while np.abs(step).max() > _CONVERGED:
            then = residuals(point + step)
            if then @ then < now @ now:
                break
            step /= 2
        else:
            break
        point, now = point + step, then
    return _software(point)


def _software(point: np.ndarray) -> Software:
    return Software(**dict(zip(UNCERTAINTY, np.exp(point).tolist())))
