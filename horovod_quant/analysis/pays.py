"""The table of where compression pays: models, networks and numbers of hosts with an accelerator each.

No cell has been measured: that is what "modelled" says beside each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod_quant.analysis import advice
from horovod_quant.analysis.accelerators import on_accelerators
from horovod_quant.analysis.advice import Row
from horovod_quant.analysis.cost_model import NONE, Setting
from horovod_quant.analysis.fabrics import ACCELERATORS
from horovod_quant.analysis.kernel_speeds import KernelSpeeds
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.recommendation import recommend
from horovod_quant.analysis.steps import Step
from horovod_quant.schemes.base import Scheme

ACCELERATOR, PEAK = "a100", 312e12
"""Whose memory and operations a second (bfloat16, dense, by NVIDIA's data sheet) are assumed."""

BACKWARD = 2 / 3
"""Share of a step: the backward pass has twice the forward pass's operations."""

LATENCY = 50e-6
GIGABITS = (1, 10, 25, 100)
HOSTS = (8, 32)

TOKENS = 16_384


class Job(NamedTuple):
    """The work of one accelerator in a step.

    Attributes:
        title: of the model.
        batch: of one accelerator, for people.
        operations: floating-point operations of forward and backward pass.
        attained: share of `PEAK` that is assumed to be reached.
    """

    title: str
    batch: str
    operations: float
    attained: float

    @property
    def step(self) -> Step:
        seconds = self.operations / (self.attained * PEAK)
        return Step(seconds, BACKWARD * seconds, accelerator=True)


def _transformer(model: str, title: str) -> Job:
    """Six operations a parameter and token (Kaplan et al., 2020, "Scaling laws for neural language models")."""
    return Job(title, f"{TOKENS:,} tokens", 6.0 * elements(MODELS[model]) * TOKENS, 0.4)


JOBS = {
    # 4.1 billion multiply-adds an image (He et al., 2016); three times that with the backward pass.
    "resnet50": Job("ResNet-50", "256 images", 256 * 3 * 2 * 4.1e9, 0.2),
    "bert-base": _transformer("bert-base", "BERT-base"),
    "pythia-1b": _transformer("pythia-1b", "1B transformer"),
}


class Cell(NamedTuple):
    """The answer for a model between hosts: how many times faster to the same loss, and with what; None: not."""

    gain: float
    code: str | None

    @property
    def text(self) -> str:
        """``2.1x with EDEN(bits=4), modelled``."""
        if self.code is None:
            return "does not pay, modelled"
        return f"{self.gain:.1f}x with {self.code.removeprefix('hvq.').removeprefix('hvd.Compression.')}, modelled"


def cell(model: str, hosts: int, bandwidth: float, latency: float = LATENCY) -> Cell:
    """The cell for one of `JOBS`.

    Args:
        model: its name.
        hosts: with an accelerator each.
        bandwidth: of a host's link, bytes per second each way.
        latency: seconds of a message.
    """
    network = Network(hosts, 1, bandwidth, latency)
    where = on_accelerators(MODELS[model], network, ACCELERATORS[ACCELERATOR], KernelSpeeds({}))
    rows = modelled(where, JOBS[model].step)
    best = next(row for row in rows if row.name == recommend(rows, where).method)
    return Cell(best.gain or 1.0, None if best.name == NONE else best.choice.code)


def modelled(where: Setting, step: Step) -> Sequence[Row]:
    """A row for each method whose kernels run on the accelerator."""
    chosen = [
        choice
        for choice in advice.considered(where)
        if not isinstance(choice.method, Scheme) or choice.method.host_requirement() is None
    ]
    return [advice.row_of(choice, where, step) for choice in chosen]
