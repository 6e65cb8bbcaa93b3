"""Checks what is installed, which kernels run and whether Horovod's collectives are exact; says what to do about it.

    horovod-quant doctor                          all that can be checked without starting Horovod
    horovodrun -np 2 horovod-quant doctor         also the collectives: controller, exactness of integer allreduces
    horovod-quant doctor --model bert-base        also Horovod's settings for this model

Each finding is one line: ok, warning (works, but slowly or only in part) or problem. The exit status is 1 if there is a
problem. Under horovodrun rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod_quant.analysis.models import MODELS
from horovod_quant.cli import probe, report
from horovod_quant.cli.findings import installed, kernels, settings, workers
from horovod_quant.cli.launch_context import LaunchContext, find_launch_context
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.problem import Problem
from horovod_quant.cli.report import PROBLEM, Section
from horovod_quant.schemes.base import require_number

TIMEOUTS = (1.0, 1e6)
"""Seconds, from and to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, help="judge the settings for the gradients of this model")
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        help="check only this one (under MPI only one per run can be tested)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for each framework; default: %(default)g",
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 1 if there is a problem."""
    place = find_launch_context(os.environ)
    with Problem.of(""):
        require_number("--timeout", arguments.timeout, *TIMEOUTS)
    wanted = [arguments.framework] if arguments.framework else list(FRAMEWORKS)
    facts = gather_facts(wanted, place, arguments.timeout)
    if place.rank > 0:
        return 0
    usable = [name for name in facts if installed.is_usable(facts[name])]
    sections = [
        Section("Installed", installed.findings(facts)),
        Section("Kernels", kernels.findings(facts)),
        Section(
            f"Horovod's settings{f' for {arguments.model}' if arguments.model else ''}",
            settings.findings(os.environ, arguments.model, usable or wanted),
        ),
    ]
    if place.size:
        sections.append(Section(f"This run of {place.size}", workers.findings(facts, place)))
    report.show(sections, hints(arguments, place, bool(usable)), plain=place.size > 0)
    return int(any(finding.mark == PROBLEM for section in sections for finding in section.findings))


def hints(arguments: argparse.Namespace, place: LaunchContext, usable: bool) -> list[str]:
    found = []
    if usable and not place.size:
        found.append("To test the collectives: horovodrun -np 2 horovod-quant doctor")
    if arguments.model is None:
        found.append(f"To judge the settings for a model: --model {'|'.join(MODELS)}")
    return found


def gather_facts(wanted: list[str], place: LaunchContext, timeout: float) -> dict[str, dict[str, Any]]:
    """Facts of each framework.

    Under Gloo every framework is tested, one after another: when an allreduce is done, all workers have left the
    rendezvous that the next one needs. MPI starts once in a launched process and its children: the first framework
    that Horovod has a library for is tested.
    """
    testable = [name for name in wanted if place.size and probe.horovod_library(name)]
    tested = testable if place.gloo else testable[:1]
    facts: dict[str, dict[str, Any]] = {}
    for name in tested:
        facts[name] = probe.ask(name, True, timeout)
        if "error" in facts[name]:
            break  # the workers may no longer be at the same point
    if place.rank == 0:
        rest = [name for name in wanted if name not in facts]
        with ThreadPoolExecutor() as pool:
            facts.update(zip(rest, pool.map(lambda name: probe.ask(name, False, timeout), rest)))
    return {name: facts[name] for name in wanted if name in facts}
