"""The assumptions of a prediction, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_quant import kernels
from horovod_quant.analysis.accelerators import ATTAINED, MemoryBound
from horovod_quant.analysis.advice import MOST_NMSE, Row
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.network import DDP, NCCL
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import show_seconds
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of


def assumptions(
    setting: Setting, step: Step, *, calibrated: bool, rows: Sequence[Row], max_nmse: float = MOST_NMSE
) -> list[str]:
    """Return the assumptions, one sentence each."""
    network = setting.network
    cores = f"{network.cores_per_worker:g} core{'' if network.cores_per_worker == 1 else 's'}"
    found = [
        "The steps to the same loss grow by the nmse, as with a batch that much smaller: the most that theory expects. "
        "The nmse is that of gradients like white noise; heavier tails may have a larger one.",
        f"Methods with an nmse above {max_nmse:g} (--max-nmse) are not recommended, however short their steps.",
        *_kernels(setting),
        f"Each worker has {cores} (--cores-per-worker); its backward pass "
        f"{'leaves them free' if step.accelerator else 'uses them as well'}.",
        f"{'DDP' if network.controller == DDP else 'Horovod'}'s overhead beyond the wire is "
        f"{'fitted to the benchmark files' if calibrated else 'as measured in the lab (--calibrate uses yours)'}.",
        "All links have the same speed, nothing else uses them, no switch is congested, and no worker is late.",
        f"An allreduce is {'a ring or a tree' if network.controller == NCCL else 'one ring'} through all workers, "
        f"whose latencies add up.",
    ]
    if not step.backward:
        found.append("No part of the backward pass overlaps with the step communication (--backward).")
    if network.workers_per_host > 1:
        found.append(
            f"The bandwidth between two workers of a host is {1e-9 * network.local_bandwidth:g} GB/s "
            f"(--local-bandwidth)."
        )
    schemes = [inner_of(row.choice.method) for row in rows if isinstance(row.choice.method, Scheme)]
    others = dict.fromkeys(type(each).__name__ for each in schemes if not registry.is_own(type(each)))
    if others:
        found.append(f"What {', '.join(others)} may compute without this package's kernels is not counted.")
    if network.controller != DDP:
        found.append(
            f"Workers agree on a collective within {show_seconds(network.software.overhead)}, however many there are: "
            f"Horovod's coordinator was measured with 4 at most, and takes longer with thousands."
        )
    return found


def _kernels(setting: Setting) -> list[str]:
    if not isinstance(setting.speeds, MemoryBound):
        return [f"Every worker's kernels are as fast as this machine's: {kernels.describe()}."]
    return [
        f"Kernels take as long as moving their bytes at {ATTAINED:.0%} of {1e-9 * setting.speeds.memory_bandwidth:,g} "
        f"GB/s (--memory-bandwidth), or the share measured on an H200, and the host takes "
        f"{show_seconds(setting.network.software.launch)} for each launch: no measurement between several GPUs has "
        f"confirmed this model.",
        "NCCL uses both directions of a link at once.",
    ]
