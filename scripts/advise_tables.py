"""Write the tables that the performance model computes.

Where compression pays, recommendations for 12 clusters, predictions beside figures from elsewhere. The kernels' speeds
are kept beside the page, so that they are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import kept_speeds
from pages import insert

from horovod_quant import kernels
from horovod_quant.analysis import advice, pays
from horovod_quant.analysis.accelerators import MemoryBound, on_accelerators
from horovod_quant.analysis.advice import Row
from horovod_quant.analysis.cost_model import NONE, Method, Setting, exchange_cost
from horovod_quant.analysis.fabrics import ACCELERATORS, GIGABIT, INSIDE_HOST
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, measure_kernels
from horovod_quant.analysis.models import MODELS, Shapes, elements
from horovod_quant.analysis.network import GLOO, NCCL, Network, Software, nccl_software
from horovod_quant.analysis.recommendation import best_few, best_of, is_fine
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import parse_rate, show_seconds
from horovod_quant.bench.command import processor
from horovod_quant.schemes import GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.inside import FLOAT32

ROOT = Path(__file__).resolve().parent.parent
PAGE, EVIDENCE = ROOT / "docs" / "advise.md", ROOT / "docs" / "model.md"
PAYS, README = ROOT / "docs" / "pays.md", ROOT / "README.md"
HIERARCHICAL = ROOT / "docs" / "hierarchical.md"
SPEEDS = ROOT / "docs" / "results" / "kernel-speeds.json"

BEATEN = 1.1
"""Limit of the speed-up over a recommendation, with no larger nmse."""


# ---- clusters -------------------------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """A model and the cluster that trains it.

    Attributes:
        inside: link between workers of a host; one of `INSIDE_HOST` means GPUs with NCCL.
    """

    model: str
    hosts: int
    per_host: int
    rate: str
    inside: str = "8gbit"

    @property
    def controller(self) -> str:
        return NCCL if self.inside in INSIDE_HOST else GLOO

    @property
    def title(self) -> str:
        workers = self.hosts * self.per_host
        inside = f", {self.inside} inside" if self.inside in INSIDE_HOST else ""
        return f"{self.model}, {workers} on {self.hosts}, {self.rate}, {self.controller}{inside}"


STEPS = {"resnet50": Step(0.35, 0.2, True), "bert-base": Step(0.35, 0.23, True)}

CLUSTERS = (
    Cluster("resnet50", 2, 1, "1gbit"),
    Cluster("resnet50", 4, 1, "1gbit"),
    Cluster("bert-base", 8, 1, "10gbit"),
    Cluster("resnet50", 16, 1, "10gbit"),
    Cluster("resnet50", 64, 1, "1gbit"),
    Cluster("bert-base", 64, 1, "25gbit"),
    Cluster("resnet50", 256, 1, "10gbit"),
    Cluster("bert-base", 2, 8, "10gbit"),
    Cluster("bert-base", 8, 8, "25gbit"),
    Cluster("bert-base", 2, 8, "10gbe", "pcie3"),
    Cluster("bert-base", 8, 8, "25gbe", "nvlink3"),
    Cluster("resnet50", 32, 8, "100gbe", "nvlink3"),
)


def setting(cluster: Cluster, speeds: KernelSpeeds) -> Setting:
    """Return the setting that `horovod-quant advise` makes of the same names."""
    shapes = MODELS[cluster.model]
    network = Network(cluster.hosts, cluster.per_host, parse_rate(cluster.rate))
    if cluster.controller == GLOO:
        return Setting(shapes, replace(network, local_bandwidth=parse_rate(cluster.inside)), speeds)
    local = INSIDE_HOST[cluster.inside]
    network = replace(network, local_bandwidth=local.bandwidth, local_latency=local.latency)
    return on_accelerators(shapes, network, ACCELERATORS["a100"])


def modelled(cluster: Cluster, speeds: KernelSpeeds, *, everything: bool = False) -> list[Row]:
    """Return a row for each method, as ``advise`` or ``advise --all``."""
    where = setting(cluster, speeds)
    chosen = advice.considered(where, everything=everything)
    return [advice.row_of(choice, where, STEPS[cluster.model]) for choice in chosen]


def beaten_by(best: Row, rows: Sequence[Row]) -> list[str]:
    """Return methods with no larger nmse whose steps are much shorter."""
    fine = [row for row in rows if is_fine(row, best.nmse or 0.0)]
    return [row.name for row in fine if BEATEN * row.step < best.step]


def cluster_line(cluster: Cluster, rows: Sequence[Row]) -> str:
    best = best_of(rows)
    shown = [row for row in best_few(rows) if row.name not in (best.name, NONE)]
    optimizers = [row for row in rows if row.own_optimizer is not None and row.refusal is None]
    quickest = min(optimizers, key=lambda row: row.step)
    cells = [
        f"{cluster.title}",
        show_seconds(rows[0].step),
        f"**{best.name}**" + ("" if best.name == NONE else f": {_figures(best)}"),
        "; ".join(f"{row.name}: {_figures(row)}" for row in shown[:3]),
        f"{quickest.speed_up:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _figures(row: Row) -> str:
    return f"{row.speed_up:.2f} ({row.gain:.2f}), {row.nmse:.2g}"


def cluster_table(speeds: KernelSpeeds) -> str:
    lines = [
        "| model, workers on hosts, links | step with none | use: speed-up per step (to the same loss), nmse "
        "| next | binsgdm: speed-up per step |",
        "| --- | ---: | --- | --- | ---: |",
    ]
    for cluster in CLUSTERS:
        rows = modelled(cluster, speeds)
        lines.append(cluster_line(cluster, rows))
        beaten = beaten_by(best_of(rows), modelled(cluster, speeds, everything=True))
        if beaten:
            raise SystemExit(f"{cluster.title}: the recommendation is beaten by {', '.join(beaten)}")
        print(lines[-1], flush=True)
    return "\n".join(lines)


# ---- flat and hierarchical ------------------------------------------------------------------------------------------

EIGHT_BY_EIGHT = "bert-base", 8, 8
RATES = (10, 25, 100)
COMPARED = ("fp16", "global-qsgd-8", "qsgd-4", "qsgd-4-allgather", "binsgdm")


def hierarchical_table(speeds: KernelSpeeds) -> str:
    """Return a table of methods without and with a hierarchical reduction."""
    heads = " | ".join(f"ms per step, {rate} Gbit/s" for rate in RATES)
    lines = [f"| method | nmse | MB sent by a worker | MB leaving a host | {heads} |"]
    lines.append("| --- | ---: | ---: | ---: |" + " ---: |" * len(RATES))
    settings = [setting(Cluster(*EIGHT_BY_EIGHT, f"{rate}gbit", "100gbit"), speeds) for rate in RATES]
    flat, in_8_bits = (advice.choices(COMPARED, settings[0].network, inside) for inside in (FLOAT32, 8))
    for choice, other in zip(flat, in_8_bits):
        named = {choice.name: choice}
        if isinstance(choice.method, Hierarchical):
            named[f"{choice.name}, inside=8"] = other
        for name, each in named.items():
            rows = [advice.row_of(each, where, STEPS[EIGHT_BY_EIGHT[0]]) for where in settings]
            cost = rows[0].cost
            assert cost is not None
            cells = [
                name,
                "" if rows[0].nmse is None else f"{rows[0].nmse:.2g}",
                f"{cost.bytes_sent / 1e6:,.0f}",
                f"{cost.host_bytes / 1e6:,.0f}",
                *(f"{1e3 * row.step:,.0f}" for row in rows),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- figures from elsewhere -----------------------------------------------------------------------------------------


class Logged(NamedTuple):
    """Times that the authors of Global-QSGD published of 4 A100.

    The GPUs are on one board.

    Attributes:
        steps: number of steps in those times; None where the logs do not say.
        nvlink, host_memory: seconds with float32 and with 8 bits; the latter with NCCL_P2P_DISABLE=1.
    """

    model: str
    elements: int
    steps: int | None
    nvlink: tuple[float, float]
    host_memory: tuple[float, float]


LOGGED = (
    Logged("DeepLight, an epoch", 607_959_302, None, (39.32, 22.81), (440.6, 123.1)),
    Logged("ResNet-101 (wide), a step", 126_886_696, 1, (0.097, 0.081), (0.547, 0.187)),
    Logged("Transformer-XL, a step", 191_950_298, 1, (0.632, 0.603), (1.372, 0.787)),
)
"""Read from github.com/sands-lab/global-qsgd, models/*/logs_P2P and logs_SHM, in November 2026.

The second epoch; the median of the steps that are shown, after the first ones; and 49,152 tokens per step divided by
the throughput at the end.
"""

TREE = Software(0, 0, 0, 0, 0, 1, 1, allreduce=4 / 1.5)
"""The wire alone, with the bytes of their allreduce relative to a ring's.

Their sums go up and down a tree of depth two, a whole array each time; a ring of four sends 1.5 of an array.
"""


class Predicted(NamedTuple):
    float32: float
    quantized: float

    @property
    def ratio(self) -> float:
        return self.float32 / self.quantized


def shapes_of(elements: int, largest: int = 2**23) -> Shapes:
    whole, rest = divmod(elements, largest)
    return {f"p{i}": (size,) for i, size in enumerate([largest] * whole + [rest] * bool(rest))}


def exchanges(elements: int, fabric: str, software: Software) -> Predicted:
    """Predict the seconds of communication among four workers, without overlap."""
    link, memory = INSIDE_HOST[fabric], ACCELERATORS["a100"]
    network = Network(
        1, 4, local_bandwidth=link.bandwidth, local_latency=link.latency, controller=NCCL, software=software
    )
    where = Setting(shapes_of(elements), network, MemoryBound(memory))
    methods: tuple[Method, Method] = (NONE, GlobalQSGD(bits=8))
    return Predicted(*(exchange_cost(method, where).exposed for method in methods))


def predictions(logged: Logged, software: Software, pair: str) -> tuple[dict[str, Predicted], float]:
    """Predict times by link, and return the number of steps.

    Computing takes what float32 communication leaves of the time measured through NVLink. Where the logs do not say how
    many steps there are, the 8-bit time through NVLink implies it, and is no prediction then.
    """
    theirs = exchanges(logged.elements, "nvlink3-pair", TREE)
    steps = float(logged.steps or (logged.nvlink[0] - logged.nvlink[1]) / (theirs.float32 - theirs.quantized))
    computing = logged.nvlink[0] / steps - theirs.float32
    found = {}
    for name, fabric in (("NVLink", pair), ("host's memory", "host-memory")):
        exchange = exchanges(logged.elements, fabric, software)
        found[name] = Predicted(*(steps * (computing + seconds) for seconds in exchange))
    return found, steps


def logged_table() -> str:
    lines = [
        "| | measured: float32, 8 bits, speed-up | their tree, modelled | this package, by `advise` |",
        "| --- | --- | --- | --- |",
    ]
    ring = nccl_software(ACCELERATORS["a100"])
    for logged in LOGGED:
        (theirs, _), (ours, _) = (
            predictions(logged, TREE, "nvlink3-pair"),
            predictions(logged, ring, "nvlink3"),
        )
        for name, seconds in (("host's memory", logged.host_memory), ("NVLink", logged.nvlink)):
            cells = [f"{logged.model}, {name}", *map(_shown, (Predicted(*seconds), theirs[name], ours[name]))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(seconds: Predicted) -> str:
    return f"{show_seconds(seconds.float32)}, {show_seconds(seconds.quantized)}, {seconds.ratio:.2f}"


# ---- where it pays -----------------------------------------------------------------------------------------------


def pays_table(hosts_of_rows: Sequence[int] = pays.HOSTS) -> str:
    lines = [
        "| model, hosts with an accelerator each | "
        + " | ".join(f"{rate} Gbit/s" for rate in pays.GIGABITS)
        + " |",
        "| --- |" + " --- |" * len(pays.GIGABITS),
    ]
    for name, job in pays.JOBS.items():
        for hosts in hosts_of_rows:
            cells = (pays.cell(name, hosts, rate * GIGABIT).text for rate in pays.GIGABITS)
            lines.append(f"| {job.title}, {hosts} hosts | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def jobs_table() -> str:
    lines = [
        "| model | parameters | batch of an accelerator | operations a step | share of the peak | step |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for name, job in pays.JOBS.items():
        million = 1e-6 * elements(MODELS[name])
        lines.append(
            f"| {job.title} (`{name}`) | {million:,.0f} million | {job.batch} | {1e-12 * job.operations:,.1f}e12 | "
            f"{job.attained:.0%} | {show_seconds(job.step.seconds)} |"
        )
    return "\n".join(lines)


# ---- the page -------------------------------------------------------------------------------------------------------


def kernel_speeds(measure: bool) -> KernelSpeeds:
    if measure:
        choices = advice.considered(Setting({}, Network(2, 2), KernelSpeeds({})), everything=True)
        schemes = [choice.method for choice in choices if isinstance(choice.method, Scheme)]
        measured_on = f"{processor()}, {kernels.describe()}, load before: {os.getloadavg()[0]:.2f}"
        measured = kept_speeds.as_json(measure_kernels(schemes, seconds=20.0))
        SPEEDS.write_text(json.dumps({"measured_on": measured_on, **measured}) + "\n")
    return kept_speeds.from_json(json.loads(SPEEDS.read_text()))


def with_machine(table: str) -> str:
    """Return a table, and what the kernels' speeds were measured on."""
    return f"{table}\n\nKernel speeds: {json.loads(SPEEDS.read_text())['measured_on']}."


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measure", action="store_true", help="first measure the kernels' speeds on this machine"
    )
    return parser


def main() -> None:
    speeds = kernel_speeds(make_parser().parse_args().measure)
    for page, mark, text in (
        (PAYS, "pays", pays_table()),
        (PAYS, "steps", jobs_table()),
        (README, "pays", pays_table(pays.HOSTS[:1])),
        (PAGE, "clusters", with_machine(cluster_table(speeds))),
        (EVIDENCE, "global-qsgd", logged_table()),
        (HIERARCHICAL, "eight", with_machine(hierarchical_table(speeds))),
    ):
        page.write_text(insert(page.read_text(), mark, "advise-tables", text))


if __name__ == "__main__":
    main()
