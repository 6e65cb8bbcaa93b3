"""Measures whole exchanges of a model's gradients with each method, none and fp16: time, bytes and error.

    horovodrun -np 4 horovod-quant bench --model resnet50
    horovodrun -np 4 horovod-quant bench --methods global-qsgd-8 qsgd-4 --rounds 7 --json bench.json --plot bench.png
    horovodrun -np 2 horovod-quant bench --framework tensorflow --shapes 1000x1000 1000 3x3x64x64

An exchange lasts from the start of the backward pass, which computes nothing here, until the synchronized gradients
have arrived. Ctrl-C stops the run; the rounds finished so far are reported and written.
"""

from __future__ import annotations

import argparse
import importlib.util

from horovod_quant import kernels
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.shapes import parse_shapes
from horovod_quant.bench.command import Plan, run_plan
from horovod_quant.bench.enough import PRECISION
from horovod_quant.bench.variants import Options, Variant
from horovod_quant.cli import probe
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.problem import Problem
from horovod_quant.frontends.frontend import GROUP_BYTES
from horovod_quant.frontends.methods import FP16, NONE, compared, families, parse
from horovod_quant.schemes.base import require_int

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="default: the first that Horovod was built with"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", choices=MODELS, help="the model whose gradients are exchanged; default: resnet50"
    )
    what.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="your own shapes: 1000x1000 64 ..., or a JSON file of names and sizes",
    )
    usual = compared()
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=usual,
        help=f"methods to compare: {', '.join(families())}; default: {' '.join(usual)}",
    )
    parser.add_argument(
        "--rounds",
        type=_rounds,
        default=7,
        metavar="COUNT",
        help=f"measurements of each method; auto: until every speed-up is known to {PRECISION:.0%}%; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--group-bytes",
        type=int,
        default=GROUP_BYTES,
        metavar="BYTES",
        help="bytes of gradients that share collectives, as for the compressors; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the gradients and of the random rounding"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements here")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the times and bytes here, for example to bench.png"
    )


def _rounds(text: str) -> int | str:
    """A number, or `AUTO`."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number, or {AUTO}") from None


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 2 if an argument is wrong."""
    return run_plan(lambda: plan(arguments))


def plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the run; raises `Problem`."""
    chosen = []
    for name in [NONE, FP16, *arguments.methods]:
        with Problem.of("--methods"):
            method = parse(name)
        if method not in chosen:
            chosen.append(method)
    with Problem.of(""):
        if arguments.rounds != AUTO:
            require_int("--rounds", arguments.rounds, 1, 10**6)
        require_int("--group-bytes", arguments.group_bytes, 1, 2**62)
        require_int("--seed", arguments.seed, 0, 2**63 - 1)
    model, shapes, problem = arguments.model, {}, ""
    try:  # what may be wrong on one host alone
        with Problem.of(""):
            kernels.get()
        if arguments.shapes:
            with Problem.of("--shapes"):
                shapes = parse_shapes(arguments.shapes)
        else:
            model = model or "resnet50"
            shapes = MODELS[model]
    except Problem as found:
        problem = str(found)
    return Plan(
        framework=arguments.framework or default_framework(),
        model=model,
        shapes=shapes,
        variants=[Variant(method.name, method, arguments.group_bytes, arguments.seed) for method in chosen],
        options=Options(),
        rounds=None if arguments.rounds == AUTO else arguments.rounds,
        seed=arguments.seed,
        json=arguments.json,
        plot=arguments.plot,
        problem=problem,
    )


def default_framework() -> str:
    """The first framework that is installed and that Horovod has a library for; raises `Problem`."""
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name) and probe.horovod_library(name):
            return name
    raise Problem(
        "Horovod has no library for PyTorch or TensorFlow here; horovod-quant doctor says what to do"
    )
