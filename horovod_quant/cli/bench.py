"""Measure time, bytes and nmse of step communication with each method.

    horovodrun -np 4 -H a:1,b:1,c:1,d:1 horovod-quant bench --model resnet50
    horovodrun -np 4 -H a:1,b:1,c:1,d:1 horovod-quant bench --methods qsgd-4 eden-3 --json bench.json --plot bench.png
    horovodrun -np 2 horovod-quant bench --framework tensorflow --shapes 1000x1000 1000 3x3x64x64

    torchrun --nproc-per-node 4 --no-python horovod-quant bench --transport ddp

Step communication lasts from the start of the backward pass, which computes nothing here, until the reduced gradients
are available. Methods include none and fp16. Each round is printed and written to the file of --json, at most once a
second; Ctrl-C ends the run at once.
"""

from __future__ import annotations

import argparse
import importlib.util

from horovod_quant import kernels
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.shapes import parse_shapes
from horovod_quant.bench.command import LAUNCHERS, Plan, launch_rank, run_plan
from horovod_quant.bench.enough import PRECISION
from horovod_quant.bench.variants import DDP, DDPS_OWN, Options, Variant
from horovod_quant.cli import probe
from horovod_quant.cli.launch_context import TORCHRUN, find_launch_context
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.problem import Problem
from horovod_quant.frontends import former_names, switch
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.frontends.methods import FP16, NONE, compared, families, parse
from horovod_quant.schemes.base import require_int

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="default: the first that Horovod was built with"
    )
    parser.add_argument(
        "--transport",
        choices=("horovod", DDP),
        default="horovod",
        help="ddp: PyTorch's DistributedDataParallel with communication hooks, started by torchrun",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", choices=MODELS, help="the model whose gradients are averaged; default: resnet50"
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
        help=f"methods to compare: {', '.join(families())}; with --transport ddp also {', '.join(DDPS_OWN[2:])}; "
        f"default: {' '.join(usual)}",
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
        metavar="BYTES",
        help=f"bytes of gradients that share collectives, as for the compressors; default: {GROUP_BYTES}",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the gradients and of the random rounding"
    )
    parser.add_argument("--json", metavar="FILE", help="write all measurements here")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the times and bytes here, for example to bench.png"
    )


def _rounds(text: str) -> int | None:
    """Return a number of rounds; None for `AUTO`."""
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number, or {AUTO}") from None


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 2 if an argument is wrong."""
    return run_plan(lambda: plan(arguments))


def plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the run; raises `Problem`."""
    is_ddp = arguments.transport == DDP
    group_bytes = GROUP_BYTES if arguments.group_bytes is None else arguments.group_bytes
    if is_ddp and arguments.group_bytes is not None:
        raise Problem("--group-bytes: with DDP its buckets are the groups; leave it out")
    if is_ddp and arguments.framework not in (None, "torch"):
        raise Problem(f"--transport ddp runs only with PyTorch; leave out --framework {arguments.framework}")
    if arguments.methods is not None and launch_rank() == 0:
        former_names.warn_of_another_meaning(arguments.methods)
    variants: list[Variant] = []
    usual = compared() if arguments.methods is None else arguments.methods
    for name in [NONE, FP16, *(DDPS_OWN[2:4] if is_ddp and arguments.methods is None else ()), *usual]:
        method = None
        if not (is_ddp and name in DDPS_OWN[2:]):
            with Problem.of("--methods"):
                method = parse(name)
        variant = Variant(name if method is None else method.name, method, group_bytes, arguments.seed)
        if variant not in variants:
            variants.append(variant)
    if is_ddp and find_launch_context([TORCHRUN]).size == 0:
        raise Problem(f"--transport ddp: start it with {LAUNCHERS[True]} horovod-quant bench --transport ddp")
    with Problem.of(""):
        if arguments.rounds is not None:
            require_int("--rounds", arguments.rounds, 1, 10**6)
        require_int("--group-bytes", group_bytes, 1, 2**62)
        require_int("--seed", arguments.seed, 0, 2**63 - 1)
    model, shapes, problem = arguments.model, {}, ""
    try:  # errors that may occur on one host alone
        with Problem.of(""):
            kernels.get()
            is_off = switch.is_off()
        if is_off:
            raise Problem(f"{switch.VARIABLE}=1: every method would be measured as none; unset it")
        if arguments.shapes:
            with Problem.of("--shapes"):
                shapes = parse_shapes(arguments.shapes)
        else:
            model = model or "resnet50"
            shapes = MODELS[model]
    except Problem as found:
        problem = str(found)
    return Plan(
        framework=DDP if is_ddp else arguments.framework or default_framework(),
        model=model,
        shapes=shapes,
        variants=variants,
        options=Options(),
        rounds=arguments.rounds,
        seed=arguments.seed,
        json=arguments.json,
        plot=arguments.plot,
        problem=problem,
    )


def default_framework() -> str:
    """Return the first installed framework that Horovod supports; raises `Problem`."""
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name) and probe.horovod_library(name):
            return name
    raise Problem(
        "Horovod has no library for PyTorch or TensorFlow here; horovod-quant doctor says what to do"
    )
