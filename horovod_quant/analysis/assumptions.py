"""What a prediction rests on, in sentences for whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_quant import kernels
from horovod_quant.analysis.accelerators import ATTAINED, MemoryBound
from horovod_quant.analysis.advice import MOST_ERROR, Row
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.network import NCCL, float32_allreduce, latency_seconds, messages
from horovod_quant.analysis.recommendation import shares_levels
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import show_seconds
from horovod_quant.schemes import Hierarchical, registry
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of

MANY = 64
"""Workers from which on what the lab cannot show is said in full."""


def assumptions(
    setting: Setting, step: Step, *, calibrated: bool, rows: Sequence[Row], max_error: float = MOST_ERROR
) -> list[str]:
    """One sentence each; more of them from `MANY` workers on."""
    network = setting.network
    cores = f"{network.cores_per_worker:g} core{'' if network.cores_per_worker == 1 else 's'}"
    found = [
        "With an error e, reaching the same loss takes 1 + e^2 times as many steps, as with a batch that much smaller: "
        "the most that theory expects. The error is that of gradients like white noise; it may be larger for heavier "
        "tails.",
        f"Methods with errors above {max_error:g} (--max-error) are not recommended, however short their steps.",
        *_kernels(setting, rows),
        f"Each worker has {cores} (--cores-per-worker); "
        + (
            "its backward pass leaves them free."
            if step.accelerator
            else "its backward pass uses them as well."
        ),
        "Horovod's overhead beyond the wire is "
        + (
            "fitted to the benchmark files."
            if calibrated
            else "as measured in the lab"
            + (" (--calibrate uses yours)." if network.controller != NCCL else ".")
        ),
        "All links have the same speed, nothing else uses them, no switch is congested, and no worker is late.",
    ]
    if not step.backward:
        found.append("No part of the backward pass overlaps with the exchange (--backward).")
    if network.workers_per_host > 1:
        found.append(
            f"Workers of a host exchange {1e-9 * network.local_bandwidth:g} GB/s with each other (--local-bandwidth)."
        )
    schemes = [inner_of(row.choice.method) for row in rows if isinstance(row.choice.method, Scheme)]
    others = dict.fromkeys(type(each).__name__ for each in schemes if not registry.is_own(type(each)))
    if others:
        found.append(f"What {', '.join(others)} may compute without this package's kernels is not counted.")
    if network.workers >= MANY:
        found += _of_many(setting, rows)
    return found


def _kernels(setting: Setting, rows: Sequence[Row]) -> list[str]:
    here = f"as fast as this machine's: {kernels.describe()}."
    if not isinstance(setting.speeds, MemoryBound):
        return [f"Every worker's kernels are {here}"]
    found = [
        f"Kernels take as long as moving their bytes at {ATTAINED:.0%} of {1e-9 * setting.speeds.memory_bandwidth:,g} "
        f"GB/s (--memory-bandwidth): a model that no GPU has confirmed.",
        "NCCL uses rings, or trees where they are faster, and both directions of a link at once; none of this was "
        "measured here.",
    ]
    staged = [
        row.choice.family
        for row in rows
        if isinstance(row.choice.method, Scheme) and row.choice.method.host_requirement() is not None
    ]
    if staged and setting.host is not None:
        names = ", ".join(dict.fromkeys(staged))
        found.append(
            f"Gradients are copied to the host and back for {names}, whose kernels run on the CPU, {here} Horovod "
            f"exchanges these over {setting.host.network.controller}."
        )
    return found


def _of_many(setting: Setting, rows: Sequence[Row]) -> list[str]:
    network = setting.network
    steps = messages(float32_allreduce(1), network.workers)
    found = [
        f"Latencies alone add {show_seconds(latency_seconds(float32_allreduce(1), network))} to an allreduce."
        if network.controller == NCCL
        else f"An allreduce is one ring through all {network.workers:,} workers: {steps:,} messages, one after "
        f"another, whose latencies alone take {show_seconds(steps * network.latency)}. Trees, as in NCCL, would "
        "take less.",
        f"Workers agree on a collective within {show_seconds(network.software.overhead)}, however many there are: "
        f"Horovod's coordinator was measured with 4 at most, and takes longer with thousands.",
        "An allgather's bytes, and the time to decode them, grow with the number of workers; those of an allreduce and "
        "an alltoall do not.",
    ]
    chosen = [row.choice.method for row in rows if isinstance(row.choice.method, Scheme)]
    flat = [scheme for scheme in chosen if not isinstance(scheme, Hierarchical)]
    inside = [scheme.inner for scheme in chosen if isinstance(scheme, Hierarchical)]
    for kind, number, schemes in (("workers", network.workers, flat), ("hosts", network.hosts, inside)):
        left: dict[str, list[str]] = {}
        for scheme in dict.fromkeys(schemes):
            if shares_levels(scheme, number):
                width = f"{scheme.bits} bits" if hasattr(scheme, "bits") else str(scheme)
                text = f"{width} {scheme.levels_left(number, number) or 'none'}"
                left.setdefault(type(scheme).__name__, []).append(text)
        found += [
            f"{name}'s sums over {number:,} {kind} leave this many levels: {', '.join(texts)}."
            for name, texts in left.items()
        ]
    return found
