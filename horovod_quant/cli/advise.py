"""Predicts a training step's time with each method, and says which one to take, and why.

    horovod-quant advise --model resnet50 --workers 32 --hosts 8 --bandwidth 10gbit --step 0.35 --backward 0.2
    horovod-quant advise --model bert-base --workers 4 --bandwidth 1gbit --step 0.9 --calibrate bench.json
    horovod-quant advise --shapes shapes.json --workers 4096 --workers-per-host 8 --bandwidth 100gbit --step 0.2 \\
        --accelerator --hierarchical --plot advice.png

Kernels are measured on this machine, for a second or two. What Horovod takes besides the wire comes from measurements
of the lab, or better from your own cluster: horovodrun ... horovod-quant bench --json bench.json, then --calibrate.
Rates are such as 100mbit, 2.5gbit or none, times such as 50us, 1ms or 0.35 (seconds). docs/advise.md tells more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from horovod_quant import methods
from horovod_quant.analysis import advice
from horovod_quant.analysis.advice import Choice
from horovod_quant.analysis.assumptions import assumptions
from horovod_quant.analysis.calibration import Observation, calibrate, observe, read_bench
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, measure_kernels
from horovod_quant.analysis.models import MODELS, Shapes
from horovod_quant.analysis.network import CONTROLLERS, GLOO, Network, Software
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import parse_rate, parse_seconds
from horovod_quant.bench.shapes import parse_shapes
from horovod_quant.cli import advise_plot
from horovod_quant.cli.advise_report import Found, as_json, text
from horovod_quant.frontend import GROUP_BYTES
from horovod_quant.schemes.base import Scheme, require_int

MEASURING_SECONDS = 1.5

PROFILE = ("step_seconds", "backward_seconds", "accelerator")


class Mistake(Exception):
    """Something in the command line, or in a file that it names, is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is trained")
    shapes = what.add_mutually_exclusive_group(required=True)
    shapes.add_argument("--model", choices=MODELS, help="whose gradients are exchanged")
    shapes.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help="own ones: 1000x1000 64 ..., or a JSON file of names and sizes"
    )  # fmt: skip
    step = what.add_mutually_exclusive_group(required=True)
    step.add_argument("--step", metavar="TIME", help="of a step on one worker, without exchange")
    step.add_argument(
        "--profile", metavar="FILE", help=f"a measured step: JSON with {', '.join(PROFILE)}; the first is needed"
    )  # fmt: skip
    what.add_argument(
        "--backward", metavar="TIME", help="part of the step that is the backward pass; default: 0"
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
        "--bandwidth", required=True, metavar="RATE", help="of each host's link, each direction"
    )
    where.add_argument("--latency", default="50us", metavar="TIME", help="default: %(default)s")
    where.add_argument(
        "--local-bandwidth", default="8gbit", metavar="RATE",
        help="between two workers of a host, as Horovod uses it; default: %(default)s",
    )  # fmt: skip
    where.add_argument(
        "--cores-per-worker",
        type=float,
        default=2.0,
        metavar="NUMBER",
        help="that it has for itself, besides an accelerator; default: %(default)g, one of them for Horovod's thread",
    )
    where.add_argument("--controller", choices=CONTROLLERS, help="default: gloo, or the calibration's")
    how = parser.add_argument_group("what to compare, and how")
    usual = methods.compared()
    how.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=usual,
        help=f"of {', '.join(methods.families())}; default: {' '.join(usual)}",
    )
    how.add_argument(
        "--hierarchical", action="store_true", help="compare the hierarchical exchange of each method, too"
    )
    how.add_argument(
        "--group-bytes", type=int, default=GROUP_BYTES, metavar="BYTES", help="as the compressors'"
    )
    how.add_argument(
        "--calibrate", nargs="+", default=[], metavar="FILE[@RATE]",
        help="JSON files of horovod-quant bench; @RATE if its links were of another rate than --bandwidth",
    )  # fmt: skip
    how.add_argument(
        "--lab",
        action="store_true",
        help="those files are from scripts/lab, whose hosts share one machine's cores",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", metavar="FILE", help="write everything here; - for standard output, and nothing else"
    )
    out.add_argument(
        "--plot", metavar="FILE", help="draw step time against bandwidth and workers, .png or the like"
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 2 if something is wrong with what was given."""
    try:
        return advise(arguments)
    except Mistake as mistake:
        print(f"horovod-quant advise: {mistake}", file=sys.stderr)
        return 2


def advise(arguments: argparse.Namespace) -> int:
    """Reads, measures, predicts, shows."""
    with _Blaming("--plot"):
        if arguments.plot:
            advise_plot.check(arguments.plot)
    shapes, step = read_shapes(arguments), read_step(arguments)
    network = read_network(arguments)
    with _Blaming("--methods"):
        chosen = advice.choices(arguments.methods, arguments.hierarchical)
    with _Blaming("--group-bytes"):
        require_int("bytes", arguments.group_bytes, 1, 2**62)
    observations = read_calibrations(arguments, network)
    speeds = measured(chosen, observations)
    software = Software()
    if observations:
        _progress("calibrating")
        software = calibrate(observations, speeds)
        _progress("")
    controller = observations[0].network.controller if observations else network.controller
    network = dataclasses.replace(network, software=software, controller=controller)
    setting = Setting(shapes, network, speeds, arguments.group_bytes)

    rows = advice.compare(chosen, setting, step)
    assumed = assumptions(setting, step, calibrated=bool(observations), rows=rows)
    found = Found(arguments.model, setting, step, rows, advice.recommend(rows, setting), assumed)
    if arguments.json != "-":
        print(text(found))
    if arguments.json:
        with _Blaming("--json"):
            _write(arguments.json, json.dumps(as_json(found), indent=1, allow_nan=False) + "\n")
    if arguments.plot:
        with _Blaming("--plot"):
            advise_plot.draw(arguments.plot, arguments.model or "own shapes", chosen, setting, step)
    return 0


# ---- reading --------------------------------------------------------------------------------------------------------


class _Blaming:
    """Turns errors of values and files into mistakes of an option."""

    def __init__(self, option: str) -> None:
        self._option = option

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, OSError)):
            raise Mistake(f"{self._option}: {error}") from error


def read_shapes(arguments: argparse.Namespace) -> Shapes:
    if arguments.model:
        return MODELS[arguments.model]
    with _Blaming("--shapes"):
        return parse_shapes(arguments.shapes)


def read_step(arguments: argparse.Namespace) -> Step:
    if arguments.profile:
        return read_profile(arguments)
    with _Blaming("--step"):
        seconds = parse_seconds(arguments.step)
    with _Blaming("--backward"):
        return Step(seconds, parse_seconds(arguments.backward or "0"), arguments.accelerator)


def read_profile(arguments: argparse.Namespace) -> Step:
    if arguments.backward or arguments.accelerator:
        raise Mistake("--profile: its file says what --backward and --accelerator would")
    with _Blaming("--profile"):
        with open(arguments.profile) as file:
            found = json.load(file)
        if not isinstance(found, dict) or "step_seconds" not in found or set(found) - set(PROFILE):
            raise ValueError(f"{arguments.profile} should hold an object of {', '.join(PROFILE)}")
        seconds, backward = found["step_seconds"], found.get("backward_seconds", 0.0)
        accelerator = found.get("accelerator", False)
        if (
            not all(type(number) in (int, float) for number in (seconds, backward))
            or type(accelerator) is not bool
        ):
            raise ValueError(f"{arguments.profile}: seconds are numbers, accelerator is true or false")
        return Step(float(seconds), float(backward), accelerator)


def read_network(arguments: argparse.Namespace) -> Network:
    hosts, per_host = read_places(arguments)
    with _Blaming("--bandwidth"):
        bandwidth = parse_rate(arguments.bandwidth)
    with _Blaming("--local-bandwidth"):
        local_bandwidth = parse_rate(arguments.local_bandwidth)
    with _Blaming("--latency"):
        latency = parse_seconds(arguments.latency)
    with _Blaming("--cores-per-worker"):
        return Network(
            hosts,
            per_host,
            bandwidth=bandwidth,
            latency=latency,
            local_bandwidth=local_bandwidth,
            cores_per_worker=arguments.cores_per_worker,
            controller=arguments.controller or GLOO,
        )


def read_places(arguments: argparse.Namespace) -> tuple[int, int]:
    """Numbers of hosts, and of workers on each: two of three numbers tell the third one."""
    workers, hosts, per_host = arguments.workers, arguments.hosts, arguments.workers_per_host
    for option, number in (("workers", workers), ("hosts", hosts), ("workers-per-host", per_host)):
        if number is not None and number < 1:
            raise Mistake(f"--{option}: {number} is too few")
    if workers is None and hosts is None:
        raise Mistake("how many workers? give --workers, and --hosts or --workers-per-host")
    if workers is None:
        return hosts, per_host or 1
    if hosts is None:
        per_host = per_host or 1
        hosts = workers // per_host
    elif per_host is None:
        per_host = workers // hosts
    if hosts * per_host != workers:
        raise Mistake(
            f"--workers: {workers} workers are not {hosts} hosts of {per_host}; all hosts have as many"
        )
    return hosts, per_host


def read_calibrations(arguments: argparse.Namespace, network: Network) -> list[Observation]:
    if arguments.lab and not arguments.calibrate:
        raise Mistake("--lab: it says something about --calibrate, which is missing")
    found = []
    for given in arguments.calibrate:
        path, _, rate = given.rpartition("@") if "@" in given else (given, "", "")
        with _Blaming("--calibrate"):
            bandwidth = parse_rate(rate) if rate else network.bandwidth
            found.append(observe(read_bench(path), bandwidth, network.latency, one_machine=arguments.lab))
    controllers = {observation.network.controller for observation in found}
    if len(controllers | ({arguments.controller} - {None})) > 1:
        raise Mistake("--calibrate: Gloo and MPI differ; take files of one, the one to be predicted")
    return found


# ---- measuring ------------------------------------------------------------------------------------------------------


def measured(chosen: Sequence[Choice], observations: Sequence[Observation]) -> KernelSpeeds:
    """The speeds of all kernels that the methods and the calibration need; shows progress on a terminal."""
    schemes = [choice.method for choice in chosen if isinstance(choice.method, Scheme)]
    for observation in observations:
        benched = (methods.parse(name).scheme() for name in observation.bench.measured)
        schemes += [scheme for scheme in benched if scheme is not None]
    speeds = measure_kernels(
        schemes,
        seconds=MEASURING_SECONDS,
        progress=lambda what, done, total: _progress(f"measuring kernels: {done + 1} of {total}"),
    )
    _progress("")
    return speeds


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line:60}\r{line}", end="", file=sys.stderr, flush=True)


def _write(path: str, written: str) -> None:
    if path == "-":
        sys.stdout.write(written)
        return
    with open(path, "w") as file:
        file.write(written)
