"""Check that compression works, on the fast path, and pays; suggest remedies.

    horovod-quant doctor                                                all that can be checked without Horovod
    horovodrun -np 2 -H host1:1,host2:1 horovod-quant doctor            also the workers, and the network between them
    horovod-quant doctor --model bert-base                              for this model

Each finding is one line: ok, note, warning (works, but slowly or only in part) or problem. The exit status is 1 if
there is a problem. Under horovodrun rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod_quant.analysis.models import MODELS
from horovod_quant.cli import probe, report
from horovod_quant.cli.findings import installed, kernels, network, settings, workers
from horovod_quant.cli.launch_context import LaunchContext, find_launch_context
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.problem import Problem
from horovod_quant.cli.report import PROBLEM, Section
from horovod_quant.schemes.base import require_number

TIMEOUTS = (1.0, 1e6)
"""Minimum and maximum of ``--timeout``, in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="answer for the gradients of this model")
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        help="check only this one; under horovodrun the first that Horovod has a library for is tested",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for each framework; default: %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if there is a problem."""
    place = find_launch_context()
    with Problem.of(""):
        require_number("--timeout", arguments.timeout, *TIMEOUTS)
    wanted = [arguments.framework] if arguments.framework else list(FRAMEWORKS)
    facts = gather_facts(wanted, place, arguments.timeout)
    if place.rank > 0:
        return 0
    usable = [name for name in facts if installed.is_usable(facts[name])]
    model, launched = arguments.model, place.size > 0
    sections = [
        Section(
            "Will it run?",
            installed.findings(facts) + (workers.findings(facts, place) if launched else []),
        ),
        Section(
            "Is it the fast path?",
            [*kernels.findings(facts), *settings.findings(os.environ, model, usable or wanted)],
        ),
        Section("Will it pay here?", network.findings(facts, model)),
    ]
    hints = [] if model else [f"For one model: --model {'|'.join(MODELS)}"]
    report.show(sections, hints, plain=launched)
    return int(any(finding.mark == PROBLEM for section in sections for finding in section.findings))


def gather_facts(wanted: list[str], place: LaunchContext, timeout: float) -> dict[str, dict[str, Any]]:
    """Return the facts of each framework.

    All workers start the first framework that Horovod has a library for, and test Horovod's collectives through it. The
    first worker alone examines the others.
    """
    tested = [name for name in wanted if place.size and probe.horovod_library(name)][:1]
    facts = {name: probe.ask(name, True, timeout) for name in tested}
    if place.rank == 0:
        rest = [name for name in wanted if name not in facts]
        with ThreadPoolExecutor() as pool:
            facts.update(zip(rest, pool.map(lambda name: probe.ask(name, False, timeout), rest)))
    return {name: facts[name] for name in wanted if name in facts}
