"""Findings about a run under horovodrun: controller, workers and exact collectives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from horovod_quant.cli.launch_context import LaunchContext
from horovod_quant.cli.probe import FRAMEWORKS
from horovod_quant.cli.report import NOTE, OK, PROBLEM, WARNING, Finding
from horovod_quant.frontends.methods import examples
from horovod_quant.transports.split_sums import group_of_sums


def findings(facts: Mapping[str, Mapping[str, Any]], place: LaunchContext) -> list[Finding]:
    found: list[Finding] = []
    started = next((own["run"] for own in facts.values() if "run" in own), None)
    if started is not None:
        found += [controller_finding(started, place), *worker_findings(facts)]
    for name, own in facts.items():
        if own.get("library") and "built" in own:
            found.append(exactness_finding(name, own))
    if not found:
        found.append(
            Finding(PROBLEM, "no framework that Horovod could be started with", "see the findings above")
        )
    return found


def controller_finding(started: Mapping[str, Any], place: LaunchContext) -> Finding:
    controller = "Gloo" if started["gloo"] and not started["mpi"] else "MPI"
    if started["gloo"] and started["mpi"]:
        controller = "MPI, with Gloo for the collectives or the controller"
    if started["size"] != place.size:
        return Finding(
            PROBLEM,
            f"the controller is {controller}, and Horovod sees {started['size']} workers, not {place.size}",
            "start with horovodrun --gloo, or an mpirun of the MPI that Horovod was built with",
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = (
        f"the controller is {controller}; {started['local_size']} of {started['size']} workers on this host, "
        f"which has {cores} core{'s' if cores > 1 else ''}"
    )
    if started["size"] == 1:
        return Finding(WARNING, f"{text}: one worker sends nothing", "start at least two")
    if cores < started["local_size"]:
        return Finding(
            WARNING,
            f"{text}: their times say nothing about a cluster",
            "start no more workers than cores where time matters",
        )
    return Finding(OK, text)


def worker_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return findings about differences between the workers."""
    workers = next((own["run"]["workers"] for own in facts.values() if "workers" in own.get("run", {})), None)
    if workers is None:
        return []
    findings = []
    for item in workers[0]:
        if item in ("host", "wrong"):
            continue
        values = {str(worker[item]) for worker in workers}
        if len(values) > 1:
            ranks = [rank for rank, worker in enumerate(workers) if worker[item] != workers[0][item]]
            odd = workers[ranks[0]]
            findings.append(
                Finding(
                    WARNING if item == "kernels" else PROBLEM,
                    f"{item} of worker {ranks[0]} on {odd['host']} ({len(ranks)} such): {odd[item]}, "
                    f"not {workers[0][item]} as on worker 0",
                    "install the same everywhere: the slowest worker sets the pace"
                    if item == "kernels"
                    else "install the same",
                )
            )
    if not findings:
        hosts = len({worker["host"] for worker in workers})
        findings.append(
            Finding(OK, f"the same versions and kernels on {hosts} host{'s' if hosts > 1 else ''}")
        )
    return findings


def exactness_finding(name: str, facts: Mapping[str, Any]) -> Finding:
    shown = FRAMEWORKS[name]
    what = f"allreduce of int32 and int64, Sum and Max, through {shown}"
    workers = facts.get("run", {}).get("workers")
    if workers is None and facts.get("stage") == "run":
        return Finding(
            PROBLEM,
            f"{what}: failed ({facts.get('error')})",
            "run horovod-quant doctor without horovodrun on every host; if all is well there, look at the network",
        )
    if workers is None:
        return Finding(NOTE, f"{what}: not tested in this run", f"--framework {name} tests it")
    wrong = {rank: worker["wrong"] for rank, worker in enumerate(workers) if worker["wrong"]}
    if wrong:
        rank, operations = next(iter(wrong.items()))
        summing, others = _by_sums()
        return Finding(
            PROBLEM,
            f"{what}: not exact on {len(wrong)} of {len(workers)} workers (worker {rank}: {', '.join(operations)})",
            f"{', '.join(summing)} cannot be used here; try the other controller, or {' or '.join(others)}",
        )
    return Finding(OK, f"{what}: exact, sums wrap around modulo 2^32 and 2^64")


def _by_sums() -> tuple[list[str], list[str]]:
    """Return the schemes that need exact integer sums, and the others."""
    schemes = examples().values()
    summing = {type(scheme).__name__: None for scheme in schemes if group_of_sums(scheme) is not None}
    others = {type(scheme).__name__: None for scheme in schemes}
    return list(summing), [name for name in others if name not in summing]
