"""Predict the time of a step with each method, and recommend one.

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
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from horovod_quant import kernels
from horovod_quant.analysis import advice
from horovod_quant.analysis.accelerators import on_accelerators
from horovod_quant.analysis.advice import Choice, Row
from horovod_quant.analysis.assumptions import assumptions
from horovod_quant.analysis.calibration import Observation, calibrate
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, measure_kernels
from horovod_quant.analysis.network import DDP, NCCL, default_software
from horovod_quant.analysis.recommendation import best_few, fallen_out, recommend
from horovod_quant.analysis.steps import Step
from horovod_quant.cli import advise_plot
from horovod_quant.cli.advise_input import (
    CORES,
    add_arguments,
    note,
    read_calibrations,
    read_choices,
    read_memory,
    read_network,
    read_shapes,
    read_step,
)
from horovod_quant.cli.advise_report import Found, as_json, text
from horovod_quant.cli.problem import Problem, check_file, check_plot, write_file
from horovod_quant.frontends import methods
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.schemes.base import Scheme, require_int, require_number

MEASURING_SECONDS = 1.5

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.json not in (None, "-"):
        check_file("--json", arguments.json)
    if arguments.plot is not None:
        check_plot("--plot", arguments.plot)
    with Problem.of(""):
        kernels.get()
        require_int("--group-bytes", arguments.group_bytes, 1, 2**62)
        if arguments.max_error is not None:
            require_number("--max-error", arguments.max_error, 0, math.inf)
            arguments.max_nmse = arguments.max_error**2
            note(f"--max-error is a root; write --max-nmse {arguments.max_nmse:g}, its square")
        require_number("--max-nmse", arguments.max_nmse, 0, math.inf)
        require_number("--cores-per-worker", arguments.cores_per_worker, *CORES)
    shapes, step = read_shapes(arguments), read_step(arguments)
    network = read_network(arguments)
    observations, warnings = read_calibrations(arguments, network)
    if observations:
        network = replace(network, controller=observations[0].network.controller)
    if network.controller == DDP and arguments.group_bytes != GROUP_BYTES:
        raise Problem("--group-bytes: it has no effect under DDP, whose buckets are the groups; leave it out")
    chosen = read_choices(arguments, network, shapes)
    if network.controller == NCCL:
        warnings.append(
            "modelled: communication between several GPUs has not been measured with this package."
        )
        setting = on_accelerators(shapes, network, read_memory(arguments), arguments.group_bytes)
    else:
        _progress("measuring kernels")
        speeds = measured(chosen, observations)
        software = default_software(network.controller)
        if observations:
            _progress("calibrating")
            software = calibrate(observations, speeds)
        setting = Setting(shapes, replace(network, software=software), speeds, arguments.group_bytes)

    rows = []
    for done, choice in enumerate(chosen):
        _progress(f"modelling: {done + 1} of {len(chosen)}")
        rows.append(advice.row_of(choice, setting, step))
    _progress("")
    found = sort_out(arguments, setting, step, rows, warnings, calibrated=bool(observations))
    written = json.dumps(as_json(found), indent=1, allow_nan=False) + "\n"
    try:  # a reader of the text may leave early, which must not cost the files
        if arguments.json not in (None, "-"):
            with Problem.of("--json"):
                write_file(arguments.json, written)
        if arguments.plot is not None:
            drawn = rows
            if len(rows) > advise_plot.MOST_CURVES:
                drawn = best_few(rows, arguments.max_nmse)[: advise_plot.MOST_CURVES]
            title = f"{arguments.model or 'own shapes'}{', modelled' if network.controller == NCCL else ''}"
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
    warnings: list[str],
    *,
    calibrated: bool,
) -> Found:
    """Return the recommendation, rows to show, and reasons against other methods."""
    limit = arguments.max_nmse
    few = {row.name for row in best_few(rows, limit)}
    named = {row.name for row in rows} if arguments.methods else few
    rows = [advice.with_limit(row, setting, step) if row.name in named else row for row in rows]
    shown, out = rows, []
    if not arguments.methods and not arguments.all:
        shown = best_few(rows, limit)
        out = fallen_out(rows, shown, limit)
    asked = [row for row in rows if row.name in named]
    assumed = assumptions(setting, step, calibrated=calibrated, rows=asked, max_nmse=limit)
    advised = recommend(rows, limit)
    return Found(arguments.model, setting, step, rows, shown, out, advised, warnings, assumed)


def measured(chosen: Sequence[Choice], observations: Sequence[Observation]) -> KernelSpeeds:
    """Measure the kernels of methods and calibrations."""
    schemes = [choice.method for choice in chosen if isinstance(choice.method, Scheme)]
    for observation in observations:
        benched = (methods.parse(name).scheme() for name in observation.bench.measured)
        schemes += [scheme for scheme in benched if scheme is not None]
    return measure_kernels(schemes, seconds=MEASURING_SECONDS)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line:60}\r{line}", end="", file=sys.stderr, flush=True)
