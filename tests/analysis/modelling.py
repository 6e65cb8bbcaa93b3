"""What the tests of the performance model share: networks and kernels of round numbers."""

from __future__ import annotations

from typing import Any

from horovod_quant.analysis.cost_model import Cost, Method, Setting, exchange_cost
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, Speed
from horovod_quant.analysis.models import Shapes
from horovod_quant.analysis.network import PAYLOAD_SHARE, Network, Software
from horovod_quant.analysis.work import KERNELS as NAMES
from horovod_quant.analysis.work import WITH_TRELLIS
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD

METHODS = {
    "global-qsgd": GlobalQSGD(8),
    "exponential": GlobalQSGD(4, levels="exponential"),
    "qsgd": QSGD(4),
    "nuqsgd": NUQSGD(4, norm="max"),
    "eden": EDEN(),
    "binsgdm": BinSGDM(),
}

TRELLIS_KERNELS = [name + WITH_TRELLIS for name in ("encode_rotated", "decode_rotated", "add_rotated")]

# Every kernel takes 1 ns an element, decoding and voting 0.5 ns more for each further worker.
KERNELS = {
    (kernel, bits): Speed(
        1e-9,
        5e-10
        if kernel.removesuffix(WITH_TRELLIS)
        in ("decode_uniform_codes", "decode_exponential", "add_rotated", "vote", "mean")
        else 0,
    )
    for kernel in (*NAMES, *TRELLIS_KERNELS)
    for bits in range(17)
}
SPEEDS = KernelSpeeds(KERNELS, half=(1e-9, 1e-9))
FREE = KernelSpeeds({key: Speed(0.0) for key in KERNELS}, half=(0.0, 0.0))

LAYERS = {f"layer{i}": (1024, 1024) for i in range(8)}
"""2^20 elements and 4 MiB each."""


def wires(
    hosts: int,
    workers_per_host: int = 1,
    *,
    payload: float = 1e9,
    latency: float = 0.0,
    overhead: float = 0.0,
    half_sum: float = 0.0,
    **more: Any,
) -> Network:
    """A network without software but what is given, whose links carry ``payload`` bytes per second beside headers."""
    software = Software(overhead, 0, 0, 0, half_sum, kernels=1, contention=1)
    local = {"local_latency": 0.0, **more}
    return Network(
        hosts, workers_per_host, payload / PAYLOAD_SHARE, latency, **{"software": software, **local}
    )


def cost(
    method: Method,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds = SPEEDS,
    *,
    backward: float = 0.0,
    accelerator: bool = False,
    **options: Any,
) -> Cost:
    """`exchange_cost` without a setting of its own."""
    setting = Setting(shapes, network, speeds, **options)
    return exchange_cost(method, setting, backward=backward, accelerator=accelerator)


def total(found: Cost) -> float:
    """Seconds of an exchange without any overlap."""
    return found.kernels + found.frontend + found.network
