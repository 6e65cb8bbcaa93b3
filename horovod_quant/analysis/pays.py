"""Table of models, networks and host numbers for which compression pays.

Hosts have one accelerator each. No cell has been measured, so each is marked "modelled".
"""

from __future__ import annotations

from typing import NamedTuple

from horovod_quant.analysis import advice
from horovod_quant.analysis.accelerators import on_accelerators
from horovod_quant.analysis.cost_model import NONE
from horovod_quant.analysis.fabrics import ACCELERATORS
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.recommendation import best_of
from horovod_quant.analysis.steps import Step

ACCELERATOR, PEAK = "a100", 312e12
"""Assumed accelerator, and its dense bfloat16 operations per second (NVIDIA's data sheet)."""

BACKWARD = 2 / 3
"""Backward pass's share of a step: it has twice the forward pass's operations."""

LATENCY = 50e-6
GIGABITS = (1, 10, 25, 100)
HOSTS = (8, 32)

TOKENS = 16_384


class Job(NamedTuple):
    """The work of one accelerator in a step.

    Attributes:
        title: the model's name for people.
        batch: text of one accelerator's batch.
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
    """Return 6 operations per parameter and token (Kaplan et al., 2020, arXiv:2001.08361)."""
    return Job(title, f"{TOKENS:,} tokens", 6.0 * elements(MODELS[model]) * TOKENS, 0.4)


JOBS = {
    # 4.1 billion multiply-adds an image (He et al., 2016); three times that with the backward pass.
    "resnet50": Job("ResNet-50", "256 images", 256 * 3 * 2 * 4.1e9, 0.2),
    "bert-base": _transformer("bert-base", "BERT-base"),
    "pythia-1b": _transformer("pythia-1b", "1B transformer"),
}


class Cell(NamedTuple):
    """Best speed-up to the same loss, and its method; None: none pays."""

    gain: float
    code: str | None

    @property
    def text(self) -> str:
        """Return text such as ``2.1x with EDEN(bits=4), modelled``."""
        if self.code is None:
            return "does not pay, modelled"
        return f"{self.gain:.1f}x with {self.code.removeprefix('hvq.').removeprefix('hvd.Compression.')}, modelled"


def cell(model: str, hosts: int, bandwidth: float) -> Cell:
    """Return the table's cell for one of `JOBS`.

    Args:
        model: name of the job.
        hosts: number of hosts with one accelerator each.
        bandwidth: bytes per second of a host's link, each way.
    """
    network = Network(hosts, 1, bandwidth, LATENCY)
    where = on_accelerators(MODELS[model], network, ACCELERATORS[ACCELERATOR])
    rows = [advice.row_of(choice, where, JOBS[model].step) for choice in advice.considered(where)]
    best = best_of(rows)
    return Cell(best.gain or 1.0, None if best.name == NONE else best.choice.code)
