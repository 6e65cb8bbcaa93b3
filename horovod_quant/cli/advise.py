"""Predicts the time of a training step with each method, and says which method to use and why.

    horovod-quant advise --model bert-base --hosts 8 --bandwidth 10gbit
    horovod-quant advise --model resnet50 --workers 32 --hosts 8 --bandwidth 10gbit --step 0.35 --backward 0.2
    horovod-quant advise --model bert-base --workers 4 --bandwidth 1gbit --step 0.9 --calibrate bench.json
    horovod-quant advise --model bert-base --workers 64 --hosts 8 --controller nccl --bandwidth 25gbe \\
        --local-bandwidth nvlink3 --memory-bandwidth a100 --step 0.35 --backward 0.23 --plot advice.png

Every method that works with these workers is considered; the one that reaches the same loss first is recommended.
Kernels are measured on this machine, for a second or two. Horovod's own overhead comes from measurements in the lab or,
better, on your cluster: run horovodrun ... horovod-quant bench --json bench.json, then use --calibrate. Rates look like
100mbit, 2.5gbit, 10Gbps, none or the name of a link; times like 50us, 1ms or 0.35 (seconds). docs/advise.md has the
details.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from horovod_quant import kernels
from horovod_quant.analysis import advice
from horovod_quant.analysis.accelerators import on_accelerators
from horovod_quant.analysis.advice import MOST_NMSE, Choice, Row
from horovod_quant.analysis.assumptions import assumptions
from horovod_quant.analysis.calibration import Bench, Observation, calibrate, observe, read_bench
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.fabrics import ACCELERATORS, BETWEEN_HOSTS, GIGABYTE, INSIDE_HOST, Fabric
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, measure_kernels, sufficient
from horovod_quant.analysis.models import MODELS, Shapes
from horovod_quant.analysis.network import CONTROLLERS, GLOO, MOST_WORKERS, NCCL, Network, Software
from horovod_quant.analysis.pays import ACCELERATOR, JOBS
from horovod_quant.analysis.recommendation import best_few, fallen_out, recommend
from horovod_quant.analysis.shapes import parse_shapes
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import parse_rate, parse_seconds, show_seconds
from horovod_quant.cli import advise_plot
from horovod_quant.cli.advise_report import Found, as_json, text
from horovod_quant.cli.problem import Problem, check_file, write_file, write_line
from horovod_quant.frontends import methods
from horovod_quant.frontends.frontend import GROUP_BYTES
from horovod_quant.schemes.base import Scheme, require_int, require_number
from horovod_quant.schemes.inside import FLOAT32, Inside

MEASURING_SECONDS = 1.5

LATENCY, LOCAL_BANDWIDTH = "50us", "8gbit"
NCCL_INSIDE, NCCL_MEMORY = "pcie3", "v100"
"""The slowest that there are names for."""

CORES, MEMORY = (1e-3, 1e6), (1e-3, 1e9)
"""For a worker, and GB/s: from and to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained")
    shapes = what.add_mutually_exclusive_group(required=True)
    shapes.add_argument("--model", choices=MODELS, help="the model whose gradients are exchanged")
    shapes.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="your own shapes: 1000x1000 64 ..., or a JSON file of names and sizes",
    )
    what.add_argument(
        "--step", metavar="TIME",
        help=f"time per step on one worker, excluding the exchange; for {', '.join(JOBS)} by default that of an "
        f"{ACCELERATOR} as in docs/pays.md",
    )  # fmt: skip
    what.add_argument(
        "--backward", metavar="TIME", help="time of the backward pass, a part of the step; default: 0"
    )
    what.add_argument(
        "--accelerator", action="store_true", help="the backward pass leaves the host's cores free"
    )
    where = parser.add_argument_group("where")
    where.add_argument("--workers", type=int, metavar="NUMBER")
    where.add_argument("--hosts", type=int, metavar="NUMBER")
    where.add_argument(
        "--workers-per-host", type=int, metavar="NUMBER", help="default: workers / hosts, or 1"
    )
    where.add_argument(
        "--bandwidth", required=True, metavar="RATE",
        help=f"rate of each host's link, per direction; or one of {', '.join(BETWEEN_HOSTS)}",
    )  # fmt: skip
    where.add_argument(
        "--latency", metavar="TIME", help=f"latency between hosts; default: the named link's, or {LATENCY}"
    )
    where.add_argument(
        "--local-bandwidth", metavar="RATE",
        help=f"rate between two workers of a host, as Horovod uses it; or one of {', '.join(INSIDE_HOST)}; default: "
        f"{LOCAL_BANDWIDTH}, with NCCL {NCCL_INSIDE}",
    )  # fmt: skip
    where.add_argument(
        "--cores-per-worker",
        type=float,
        default=2.0,
        metavar="NUMBER",
        help="CPU cores for each worker; default: %(default)g, one of them for Horovod's thread",
    )
    where.add_argument(
        "--controller", choices=CONTROLLERS, help="what moves the bytes; default: gloo, or the calibration's"
    )
    where.add_argument(
        "--memory-bandwidth", metavar="GB/S",
        help=f"of an accelerator's memory, with nccl; or one of {', '.join(ACCELERATORS)}; default: {NCCL_MEMORY}",
    )  # fmt: skip
    how = parser.add_argument_group("what to compare, and how")
    which = how.add_mutually_exclusive_group()
    which.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"methods to compare: {', '.join(methods.families())}; default: all possible ones, the best few shown",
    )
    which.add_argument("--all", action="store_true", help="show all methods, with all numbers of bits")
    how.add_argument(
        "--hierarchical",
        action="store_true",
        help="with --methods: also compare the hierarchical exchange of each method",
    )
    how.add_argument(
        "--inside",
        type=lambda text: int(text) if text.isdecimal() else text,
        choices=get_args(Inside),
        default=FLOAT32,
        help="how gradients travel inside a host in hierarchical exchanges; default: %(default)s",
    )
    how.add_argument(
        "--max-nmse",
        type=float,
        default=MOST_NMSE,
        metavar="NUMBER",
        help="largest squared error of a recommended method's average, relative to its square; default: %(default)s",
    )
    how.add_argument("--max-error", type=float, help=argparse.SUPPRESS)
    how.add_argument(
        "--group-bytes",
        type=int,
        default=GROUP_BYTES,
        metavar="BYTES",
        help="bytes of gradients that share collectives, as for the compressors",
    )
    how.add_argument(
        "--calibrate", nargs="+", default=[], metavar="FILE[@RATE]",
        help="JSON files of horovod-quant bench; @RATE if its links had another rate than --bandwidth",
    )  # fmt: skip
    how.add_argument(
        "--lab",
        action="store_true",
        help="the files come from scripts/lab, whose hosts share the cores of one machine",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="write everything here; with -, print only this to standard output"
    )
    out.add_argument(
        "--verbose", action="store_true", help="also print why other methods fell out, and what is assumed"
    )
    out.add_argument(
        "--plot",
        metavar="FILE",
        help="draw step time against bandwidth and workers, for example to advice.png",
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: reads, measures, predicts, shows."""
    if arguments.json not in (None, "-"):
        check_file("--json", arguments.json)
    if arguments.plot is not None:
        check_file("--plot", arguments.plot)
        with Problem.of("--plot"):
            advise_plot.check(arguments.plot)
    with Problem.of(""):
        kernels.get()
        require_int("--group-bytes", arguments.group_bytes, 1, 2**62)
        if arguments.max_error is not None:
            require_number("--max-error", arguments.max_error, 0, math.inf)
            arguments.max_nmse = arguments.max_error**2
            _note(f"--max-error is a root; write --max-nmse {arguments.max_nmse:g}, its square")
        require_number("--max-nmse", arguments.max_nmse, 0, math.inf)
        require_number("--cores-per-worker", arguments.cores_per_worker, *CORES)
    shapes, step = read_shapes(arguments), read_step(arguments)
    network, sources = read_network(arguments)
    chosen = read_choices(arguments, network, shapes)
    observations, warnings = read_calibrations(arguments, network)
    if network.controller == NCCL:
        warnings.append("modelled: nobody has measured exchanges between several GPUs with this package.")
    speeds = measured(chosen, observations)
    software = Software()
    if observations:
        _progress("calibrating")
        software = calibrate(observations, speeds)
        _progress("")
    setting = read_setting(arguments, shapes, network, speeds, software, observations)

    rows = []
    for done, choice in enumerate(chosen):
        _progress(f"modelling: {done + 1} of {len(chosen)}")
        rows += advice.compare([choice], setting, step, limits=False)
    _progress("")
    found = sort_out(arguments, setting, step, rows, sources, warnings, calibrated=bool(observations))
    written = json.dumps(as_json(found), indent=1, allow_nan=False) + "\n"
    try:  # a reader of the text may leave early, which must not cost the files
        if arguments.json not in (None, "-"):
            with Problem.of("--json"):
                write_file(arguments.json, written)
        if arguments.plot is not None:
            drawn = rows
            if len(rows) > advise_plot.MOST_CURVES:
                drawn = best_few(rows, found.advised.method, arguments.max_nmse)[: advise_plot.MOST_CURVES]
            title = arguments.model or "own shapes"
            with Problem.of("--plot"):
                advise_plot.draw(arguments.plot, title, [row.choice for row in drawn], setting, step)
    finally:
        sys.stdout.write(written if arguments.json == "-" else text(found, arguments.verbose) + "\n")
    return 0


def sort_out(
    arguments: argparse.Namespace,
    setting: Setting,
    step: Step,
    rows: list[Row],
    sources: list[str],
    warnings: list[str],
    *,
    calibrated: bool,
) -> Found:
    """What to take, what to show, and why not the others."""
    limit = arguments.max_nmse
    best = recommend(rows, setting, limit).method
    few = {row.name for row in best_few(rows, best, limit)}
    named = {row.name for row in rows} if arguments.methods else few
    rows = [advice.with_limit(row, setting, step) if row.name in named else row for row in rows]
    advised = recommend(rows, setting, limit)
    shown, out = rows, []
    if not arguments.methods and not arguments.all:
        shown = [row for row in rows if row.name in few]
        shown.sort(key=lambda row: (row.name != methods.NONE, row.to_loss))
        out = fallen_out(rows, shown, best, limit)
    asked = [row for row in rows if row.name in named]
    assumed = assumptions(setting, step, calibrated=calibrated, rows=asked, max_nmse=limit) + sources
    return Found(arguments.model, setting, step, rows, shown, out, advised, warnings, assumed)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_shapes(arguments: argparse.Namespace) -> Shapes:
    if arguments.model:
        return MODELS[arguments.model]
    with Problem.of("--shapes"):
        return parse_shapes(arguments.shapes)


def read_step(arguments: argparse.Namespace) -> Step:
    if arguments.step is None:
        if arguments.model not in JOBS or arguments.backward is not None:
            raise Problem(
                f"--step: how long is a step on one worker? Only {', '.join(JOBS)} have a usual one"
            )
        job = JOBS[arguments.model]
        _note(
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
        with Problem.of("--methods"):
            return advice.choices(arguments.methods, arguments.hierarchical, arguments.inside)
    if arguments.hierarchical:
        raise Problem(
            "--hierarchical: it only affects --methods; without --methods both kinds are considered"
        )
    setting = Setting(shapes, network, KernelSpeeds({}))
    return advice.considered(setting, arguments.max_nmse, everything=arguments.all, inside=arguments.inside)


def read_setting(
    arguments: argparse.Namespace,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    software: Software,
    observations: Sequence[Observation],
) -> Setting:
    if network.controller == NCCL:
        return on_accelerators(shapes, network, read_memory(arguments)[0], speeds, arguments.group_bytes)
    controller = observations[0].network.controller if observations else network.controller
    network = dataclasses.replace(network, software=software, controller=controller)
    return Setting(shapes, network, speeds, arguments.group_bytes)


def read_memory(arguments: argparse.Namespace) -> tuple[float, str]:
    """An accelerator's bandwidth, and what a sentence says of it."""
    given = NCCL_MEMORY if arguments.memory_bandwidth is None else arguments.memory_bandwidth
    if given in ACCELERATORS:
        bandwidth, source = ACCELERATORS[given]
        return bandwidth, f"{given}: {1e-9 * bandwidth:,g} GB/s; {source}."
    try:
        require_number("", float(given), *MEMORY)
    except ValueError:
        names = ", ".join(ACCELERATORS)
        raise Problem(f"--memory-bandwidth: {given!r}: use GB/s, such as 2039, or one of {names}") from None
    return float(given) * GIGABYTE, ""


def read_network(arguments: argparse.Namespace) -> tuple[Network, list[str]]:
    """The network, and where the numbers of named links are from."""
    hosts, per_host = read_places(arguments)
    controller = arguments.controller or GLOO
    if arguments.memory_bandwidth is not None and controller != NCCL:
        raise Problem("--memory-bandwidth: it only affects accelerators; give --controller nccl as well")
    with Problem.of("--bandwidth"):
        outside = read_link(arguments.bandwidth, BETWEEN_HOSTS, LATENCY)
    local = arguments.local_bandwidth
    if local is None:
        local = NCCL_INSIDE if controller == NCCL else LOCAL_BANDWIDTH
    with Problem.of("--local-bandwidth"):
        inside = read_link(local, INSIDE_HOST, "10us")
    with Problem.of("--latency"):
        latency = outside.latency if arguments.latency is None else parse_seconds(arguments.latency)
    sources = [
        f"{name}: {1e-9 * link.bandwidth:g} GB/s each way; {link.source}."
        for name, link, counts in ((arguments.bandwidth, outside, hosts > 1), (local, inside, per_host > 1))
        if link.source and counts
    ]
    if controller == NCCL:
        sources += [source for source in (read_memory(arguments)[1],) if source]
    network = Network(
        hosts,
        per_host,
        bandwidth=outside.bandwidth,
        latency=latency,
        local_bandwidth=inside.bandwidth,
        local_latency=inside.latency,
        cores_per_worker=arguments.cores_per_worker,
        controller=controller,
    )
    return network, sources


def read_link(given: str, known: Mapping[str, Fabric], latency: str) -> Fabric:
    """A link by its name or its rate; the latter has that latency, and no source.

    Raises:
        ValueError: it is neither.
    """
    if given.lower() in known:
        return known[given.lower()]
    try:
        return Fabric(parse_rate(given), parse_seconds(latency), "")
    except ValueError as error:
        raise ValueError(f"{error}; or one of {', '.join(known)}") from None


def read_places(arguments: argparse.Namespace) -> tuple[int, int]:
    """Numbers of hosts, and of workers on each: two of three numbers tell the third one."""
    workers, hosts, per_host = arguments.workers, arguments.hosts, arguments.workers_per_host
    with Problem.of(""):
        for option, number in (("workers", workers), ("hosts", hosts), ("workers-per-host", per_host)):
            if number is not None:
                require_int(f"--{option}", number, 1, MOST_WORKERS)
    if workers is None and hosts is None:
        raise Problem("how many workers? give --workers, and --hosts or --workers-per-host")
    if workers is None:
        per_host = per_host or 1
        if hosts * per_host > MOST_WORKERS:
            raise Problem(
                f"--hosts: {hosts} hosts of {per_host} are more than {MOST_WORKERS} workers; use fewer"
            )
        return hosts, per_host
    for option, number in (("hosts", hosts), ("workers-per-host", per_host)):
        if number is not None and number > workers:
            raise Problem(f"--{option}: {number} is more than there are workers; use {workers} or fewer")
    if hosts is None:
        per_host = per_host or 1
        hosts = workers // per_host
    elif per_host is None:
        per_host = workers // hosts
    if hosts * per_host != workers:
        raise Problem(
            f"--workers: {workers} workers are not {hosts} hosts of {per_host}; all hosts must have the same number"
        )
    return hosts, per_host


def read_calibrations(arguments: argparse.Namespace, network: Network) -> tuple[list[Observation], list[str]]:
    """What was measured where, and what makes it a doubtful basis."""
    if arguments.lab and not arguments.calibrate:
        raise Problem("--lab: it only affects --calibrate, which is missing")
    if arguments.calibrate and arguments.controller == NCCL:
        raise Problem(
            "--calibrate: benchmarks run over Gloo or MPI, and say nothing about NCCL; leave it out"
        )
    found: list[Observation] = []
    warnings: list[str] = []
    for given in arguments.calibrate:
        path, at, rate = given.rpartition("@") if "@" in given else (given, "", "")
        with Problem.of("--calibrate"):
            bandwidth = parse_rate(rate) if at else network.bandwidth
            bench = read_bench(path)
            found.append(observe(bench, bandwidth, network.latency, one_machine=arguments.lab))
        warnings += doubts(path, bench, network)
    controllers = {observation.network.controller for observation in found}
    if len(controllers | ({arguments.controller} - {None})) > 1:
        raise Problem("--calibrate: Gloo and MPI differ; use only files of the one to be predicted")
    return found, warnings


def doubts(path: str, bench: Bench, network: Network) -> Iterator[str]:
    """Why a calibration may mislead."""
    if bench.hosts == 1 and network.hosts > 1:
        yield (
            f"{path} was measured on one host, over its loopback interface; measure between hosts: "
            f"horovodrun -np 2 -H host1:1,host2:1 horovod-quant bench"
        )
    elif bench.hosts < network.hosts:
        yield (
            f"{path} was measured between {bench.hosts} hosts, and this predicts for {network.hosts}; measure between "
            f"more if you can"
        )


# ---- measuring ------------------------------------------------------------------------------------------------------


def measured(chosen: Sequence[Choice], observations: Sequence[Observation]) -> KernelSpeeds:
    """The speeds of all kernels that the methods and the calibration need; shows progress on a terminal."""
    schemes = [choice.method for choice in chosen if isinstance(choice.method, Scheme)]
    for observation in observations:
        schemes += [scheme for scheme in observation.bench.schemes.values() if scheme is not None]
    speeds = measure_kernels(
        sufficient(schemes),
        seconds=MEASURING_SECONDS,
        progress=lambda what, done, total: _progress(f"measuring kernels: {done + 1} of {total}"),
    )
    _progress("")
    return speeds


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line:60}\r{line}", end="", file=sys.stderr, flush=True)


def _note(line: str) -> None:
    write_line(f"horovod-quant advise: {line}", sys.stderr)
