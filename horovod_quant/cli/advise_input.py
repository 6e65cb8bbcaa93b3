"""Options of ``horovod-quant advise``, and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from horovod_quant.analysis import advice
from horovod_quant.analysis.advice import MOST_NMSE, Choice
from horovod_quant.analysis.calibration import Bench, Observation, observe, read_bench
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.fabrics import ACCELERATORS, GIGABYTE, INSIDE_HOST, Fabric
from horovod_quant.analysis.kernel_speeds import KernelSpeeds
from horovod_quant.analysis.models import MODELS, Shapes
from horovod_quant.analysis.network import CONTROLLERS, DDP, GLOO, LOCAL_LATENCY, MOST_WORKERS, NCCL, Network
from horovod_quant.analysis.pays import ACCELERATOR, JOBS
from horovod_quant.analysis.shapes import parse_shapes
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import parse_rate, parse_seconds, show_seconds
from horovod_quant.cli.problem import Problem, write_line
from horovod_quant.frontends import former_names, methods
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.schemes.base import require_int, require_number
from horovod_quant.schemes.inside import FLOAT32, Inside

LOCAL_BANDWIDTH = "8gbit"
NCCL_INSIDE, NCCL_MEMORY = "pcie3", "v100"
"""Slowest named link and accelerator."""

CORES, MEMORY = (1e-3, 1e6), (1e-3, 1e9)
"""Limits of cores per worker, and of memory bandwidth in GB/s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained")
    shapes = what.add_mutually_exclusive_group(required=True)
    shapes.add_argument("--model", choices=MODELS, help="the model whose gradients are averaged")
    own = "your own shapes: 1000x1000 64 ..., or a JSON file of names and sizes"
    shapes.add_argument("--shapes", nargs="+", metavar="SHAPE", help=own)
    usual = f"for {', '.join(JOBS)} by default that of an {ACCELERATOR} as in docs/pays.md"
    step = f"time per step on one worker, excluding communication; {usual}"
    what.add_argument("--step", metavar="TIME", help=step)
    backward = "time of the backward pass, a part of the step; default: 0"
    what.add_argument("--backward", metavar="TIME", help=backward)
    free = "the backward pass leaves the host's cores free"
    what.add_argument("--accelerator", action="store_true", help=free)

    where = parser.add_argument_group("where")
    where.add_argument("--workers", type=int, metavar="NUMBER")
    where.add_argument("--hosts", type=int, metavar="NUMBER")
    per_host = "default: workers / hosts, or 1"
    where.add_argument("--workers-per-host", type=int, metavar="NUMBER", help=per_host)
    bandwidth = "rate of each host's link, per direction"
    where.add_argument("--bandwidth", required=True, metavar="RATE", help=bandwidth)
    latency = "latency between hosts; default: %(default)s"
    where.add_argument("--latency", default="50us", metavar="TIME", help=latency)
    inside = f"rate between two workers of a host, as Horovod uses it; or one of {', '.join(INSIDE_HOST)}; default: "
    inside += f"{LOCAL_BANDWIDTH}, with NCCL {NCCL_INSIDE}"
    where.add_argument("--local-bandwidth", metavar="RATE", help=inside)
    cores = "CPU cores for each worker; default: %(default)g, one of them for Horovod's thread"
    where.add_argument("--cores-per-worker", type=float, default=2.0, metavar="NUMBER", help=cores)
    controller = (
        "what moves the bytes: Horovod over gloo, mpi or nccl, or PyTorch's DDP over Gloo; default: gloo, "
    )
    controller += "or the calibration's"
    where.add_argument("--controller", choices=CONTROLLERS, help=controller)
    memory = (
        f"of an accelerator's memory, with nccl; or one of {', '.join(ACCELERATORS)}; default: {NCCL_MEMORY}"
    )
    where.add_argument("--memory-bandwidth", metavar="GB/S", help=memory)

    how = parser.add_argument_group("what to compare, and how")
    which = how.add_mutually_exclusive_group()
    compared = (
        f"methods to compare: {', '.join(methods.families())}; default: all possible ones, the best few shown"
    )
    which.add_argument("--methods", nargs="+", metavar="METHOD", help=compared)
    which.add_argument("--all", action="store_true", help="show all methods, with all numbers of bits")
    how.add_argument(
        "--inside",
        type=lambda text: int(text) if text.isdecimal() else text,
        choices=get_args(Inside),
        default=FLOAT32,
        help="format of intra-node gradients in hierarchical reductions; default: %(default)s",
    )
    limit = "largest squared error of a recommended method's average, relative to its square; default: %(default)s"
    how.add_argument("--max-nmse", type=float, default=MOST_NMSE, metavar="NUMBER", help=limit)
    how.add_argument("--max-error", type=float, help=argparse.SUPPRESS)
    groups = "bytes of gradients that share collectives, as for the compressors"
    how.add_argument("--group-bytes", type=int, default=GROUP_BYTES, metavar="BYTES", help=groups)
    files = "JSON files of horovod-quant bench; @RATE if its links had another rate than --bandwidth"
    how.add_argument("--calibrate", nargs="+", default=[], metavar="FILE[@RATE]", help=files)

    out = parser.add_argument_group("output")
    file = "write everything here; with -, print only this to standard output"
    out.add_argument("--json", metavar="FILE", help=file)
    verbose = "also print why other methods were rejected, and what is assumed"
    out.add_argument("--verbose", action="store_true", help=verbose)
    plot = "draw step time against bandwidth and workers, for example to advice.png"
    out.add_argument("--plot", metavar="FILE", help=plot)


def read_shapes(arguments: argparse.Namespace) -> Shapes:
    if arguments.model:
        return MODELS[arguments.model]
    with Problem.of("--shapes"):
        return parse_shapes(arguments.shapes)


def read_step(arguments: argparse.Namespace) -> Step:
    if arguments.step is None:
        if arguments.backward is not None:
            raise Problem("--backward: it is a part of the step; give --step as well")
        if arguments.model not in JOBS:
            raise Problem(
                f"--step: how long is a step on one worker? Only {', '.join(JOBS)} have a usual one"
            )
        job = JOBS[arguments.model]
        note(
            f"a step is assumed to take {show_seconds(job.step.seconds)}: {job.batch} on an {ACCELERATOR}; give --step"
        )
        return job.step
    with Problem.of("--step"):
        seconds = parse_seconds(arguments.step)
    with Problem.of("--backward"):
        elsewhere = arguments.accelerator or arguments.controller == NCCL
        backward = parse_seconds("0" if arguments.backward is None else arguments.backward)
        return Step(seconds, backward, elsewhere)


def read_choices(arguments: argparse.Namespace, network: Network, shapes: Shapes) -> list[Choice]:
    if arguments.methods:
        former_names.warn_of_another_meaning(arguments.methods)
        with Problem.of("--methods"):
            return advice.choices(arguments.methods, network, arguments.inside)
    setting = Setting(shapes, network, KernelSpeeds({}))
    return advice.considered(setting, arguments.max_nmse, everything=arguments.all, inside=arguments.inside)


def read_memory(arguments: argparse.Namespace) -> float:
    """Return the bandwidth of an accelerator's memory."""
    given = NCCL_MEMORY if arguments.memory_bandwidth is None else arguments.memory_bandwidth
    if given in ACCELERATORS:
        return ACCELERATORS[given]
    try:
        require_number("", float(given), *MEMORY)
    except ValueError:
        names = ", ".join(ACCELERATORS)
        raise Problem(f"--memory-bandwidth: {given!r}: use GB/s, such as 2039, or one of {names}") from None
    return float(given) * GIGABYTE


def read_network(arguments: argparse.Namespace) -> Network:
    """Return the network, with the defaults of its controller."""
    hosts, per_host = read_places(arguments)
    controller = arguments.controller or GLOO
    if arguments.memory_bandwidth is not None and controller != NCCL:
        raise Problem("--memory-bandwidth: it only affects accelerators; give --controller nccl as well")
    read_memory(arguments)  # finds a mistake before anything is measured
    with Problem.of("--bandwidth"):
        bandwidth = parse_rate(arguments.bandwidth)
    local = arguments.local_bandwidth
    if local is None:
        local = NCCL_INSIDE if controller == NCCL else LOCAL_BANDWIDTH
    with Problem.of("--local-bandwidth"):
        inside = read_link(local)
    with Problem.of("--latency"):
        latency = parse_seconds(arguments.latency)
    return Network(
        hosts,
        per_host,
        bandwidth,
        latency,
        local_bandwidth=inside.bandwidth,
        local_latency=inside.latency,
        cores_per_worker=arguments.cores_per_worker,
        controller=controller,
    )


def read_link(given: str) -> Fabric:
    """Return an intra-node link by its name or its rate.

    Raises:
        ValueError: ``given`` is neither.
    """
    if given.lower() in INSIDE_HOST:
        return INSIDE_HOST[given.lower()]
    try:
        return Fabric(parse_rate(given), LOCAL_LATENCY)
    except ValueError as error:
        raise ValueError(f"{error}; or one of {', '.join(INSIDE_HOST)}") from None


def read_places(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of hosts and of workers per host."""
    workers, hosts, per_host = arguments.workers, arguments.hosts, arguments.workers_per_host
    with Problem.of(""):
        for option, number in (("workers", workers), ("hosts", hosts), ("workers-per-host", per_host)):
            if number is not None:
                require_int(f"--{option}", number, 1, MOST_WORKERS)
    if workers is None and hosts is None:
        raise Problem("how many workers? give --workers, and --hosts or --workers-per-host")
    if per_host is None:
        per_host = max(workers // hosts, 1) if workers and hosts else 1
    if hosts is None:
        hosts = max(workers // per_host, 1)
    if hosts * per_host > MOST_WORKERS:
        raise Problem(f"--hosts: {hosts} hosts of {per_host} are more than {MOST_WORKERS} workers; use fewer")
    if workers not in (None, hosts * per_host):
        raise Problem(
            f"--workers: {workers} workers are not {hosts} hosts of {per_host}; all hosts must have the same number"
        )
    return hosts, per_host


def read_calibrations(arguments: argparse.Namespace, network: Network) -> tuple[list[Observation], list[str]]:
    """Return the measurements with their networks, and reasons to doubt them."""
    if arguments.calibrate and arguments.controller == NCCL:
        raise Problem(
            "--calibrate: benchmarks run over Gloo or MPI, and say nothing about NCCL; leave it out"
        )
    found: list[Observation] = []
    warnings: list[str] = []
    for given in arguments.calibrate:
        path, at, rate = given.rpartition("@") if "@" in given else (given, "", "")
        with Problem.of("--calibrate"):
            links = replace(network, bandwidth=parse_rate(rate)) if at else network
            bench = read_bench(path)
            found.append(observe(bench, links))
        warnings += doubts(path, bench, network)
    controllers = {observation.network.controller for observation in found}
    if len(controllers | ({arguments.controller} - {None})) > 1:
        raise Problem("--calibrate: Gloo, MPI and DDP differ; use only files of the one to be predicted")
    return found, warnings


def doubts(path: str, bench: Bench, network: Network) -> Iterator[str]:
    """Yield reasons why a calibration may mislead."""
    start = "horovodrun -np 2 -H host1:1,host2:1 horovod-quant bench"
    if bench.controller == DDP:
        start = "torchrun --nnodes 2 ... --no-python horovod-quant bench --transport ddp"
    if bench.hosts == 1 and network.hosts > 1:
        yield (
            f"{path} was measured on one host, over its loopback interface; measure between hosts: {start}"
        )
    elif bench.hosts < network.hosts:
        yield (
            f"{path} was measured between {bench.hosts} hosts, and this predicts for {network.hosts}; measure between "
            f"more if you can"
        )


def note(line: str) -> None:
    """Write a line to standard error."""
    write_line(f"horovod-quant advise: {line}", sys.stderr)
