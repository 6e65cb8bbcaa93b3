"""Speed-ups of the papers, with real communication and accelerators that sleep.

Estimates: float32 takes 1.2 s for ResNet-50 and 5.3 s for BERT-Base between 4 hosts at 1 Gbit/s, so a round of all
methods takes up to 20 s. The whole study takes half an hour.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.analysis.units import parse_rate
from horovod_quant.transports.traffic import ring_allreduce_bytes
from reproduction import common, running
from reproduction.common import Plot, Verdict

TITLE = "The papers' speed-ups, with emulated accelerators"
SCALE = (
    "gradients of ResNet-50, ResNet-152 and BERT-Base, compute emulated by sleep, 4 hosts of 1 worker, 2 and 4 hosts "
    "of 2 workers, on 2 cores"
)
CLAIM = (
    "Between hosts with links of 10 Gbit/s BinSGDM trains ResNet-50 up to 2.47× and BERT-Base up to 6.26× faster than "
    "full precision (Peng et al., NeurIPS 2023); with QSGD ResNet-152 trains 1.8× faster on 16 GPUs (Alistarh et al., "
    "NeurIPS 2017)."
)
METHOD = (
    "**Nothing is computed**: a sleep replaces the work of an accelerator. A third of the compute time is the forward "
    "pass, two thirds the backward pass, in which the gradients of the real model become ready one after the other, "
    "each after its share. Communication is real: `benchmarks/exchange.py` between hosts of `scripts/lab` over Gloo at "
    "1 Gbit/s, default arguments, with groups reduced during the backward pass. A speed-up depends on the *ratio*: the "
    "time of the float32 bytes on a link that is never idle, divided by the compute time. Neither paper states it, but "
    "its speed-up bounds it: a speed-up of S needs a ratio of at least S - 1 if compute and the float32 transfer do "
    "not overlap, and of at least S if they overlap completely. The tables have both, and for BinSGDM a third: between "
    "the 8 hosts of 8 A100 GPUs of the paper, joined by Ethernet of 10 Gbit/s (its experiments), the float32 bytes "
    "take 0.16 s (ResNet-50) and 0.69 s (BERT-Base); we assume 40 and 60 ms of compute, for 32 images and for 4 "
    "sequences of SQuAD per GPU. ResNet-152 has 4 workers instead of the 16 of the paper, which would share two cores "
    "here. Hosts of 2 workers have ratio 4, and also run at 100 Mbit/s."
)

BENCHMARK = running.ROOT / "benchmarks" / "exchange.py"
BACKWARD = 2 / 3
"""Share of the backward pass in compute time."""

NONE = "none"
NOTHING = "no exchange"
NESTED = " hierarchical"
"""Suffix of the name of a method in the benchmark."""

PARTS = ("resnet50", "bert-base", "resnet152", "hosts of 2")


class Case(NamedTuple):
    """Model and cluster of a measurement.

    Attributes:
        part: one of `PARTS`.
        model: a name of `horovod_quant.analysis.models`.
        methods: names of `horovod_quant.frontends.methods`.
        ratio: of the time of the float32 bytes to the compute time.
        hosts, per_host: hosts, and workers on each; with several the methods are also measured with hierarchy.
        rate: of the links, as scripts/lab takes it; "local" for workers on this machine, without a lab.
        rounds: measurements of each method.
    """

    part: str
    model: str
    methods: tuple[str, ...]
    ratio: float
    hosts: int = 4
    per_host: int = 1
    rate: str = "1gbit"
    rounds: int = 5

    @property
    def workers(self) -> int:
        return self.hosts * self.per_host

    @property
    def transfer(self) -> float:
        """Return the seconds of the float32 bytes on a host's link."""
        rate = parse_rate("1gbit" if self.rate == LOCAL else self.rate)
        return ring_allreduce_bytes(4 * elements(MODELS[self.model]), self.workers) / rate

    @property
    def computing(self) -> float:
        """Return the seconds of compute."""
        return self.transfer / self.ratio


LOCAL = "local"
OF_BINSGDM = (NONE, "global-qsgd-8", "eden-3", "binsgdm")
OF_QSGD = (NONE, "qsgd-8", "qsgdinf-4", "qsgdinf-alltoall-4")


class Headline(NamedTuple):
    """Speed-up that a paper states.

    Attributes:
        part: one of `PARTS`.
        title: of the model.
        methods: of which one must reach it.
        times: the speed-up.
        ratios: at which it is tested; the last one decides.
        basis: of the last ratio.
        source: section of the paper.
    """

    part: str
    title: str
    methods: tuple[str, ...]
    times: float
    ratios: tuple[float, ...]
    basis: str
    source: str


ASSUMED = "the compute time on the cluster of the paper is our assumption"
IMPLIED = "the ratio is the least at which the speed-up of the paper is possible if everything overlaps"

HEADLINES = (
    Headline(
        "resnet50", "ResNet-50", ("binsgdm",), 2.47, (1.47, 2.47, 4.0), ASSUMED,
        "BinSGDM (Birder), abstract and experiments: up to 2.47×",
    ),
    Headline(
        "bert-base", "BERT-Base", ("binsgdm",), 6.26, (5.26, 6.26, 11.5), ASSUMED,
        "BinSGDM (Birder), abstract and experiments: up to 6.26×",
    ),
    Headline(
        "resnet152", "ResNet-152", OF_QSGD[1:], 1.8, (0.8, 1.8), IMPLIED,
        "QSGD, abstract: 1.8× faster",
    ),
)  # fmt: skip


class Settings(NamedTuple):
    """Cases to measure, and names from `PARTS` to run; None for all."""

    cases: tuple[Case, ...]
    only: tuple[str, ...] | None = None


def _full() -> tuple[Case, ...]:
    methods = {"resnet152": OF_QSGD}
    cases = [
        Case(each.part, each.part, methods.get(each.part, OF_BINSGDM), ratio, rounds=3 if big else 7)
        for each in HEADLINES
        for big in (each.part != "resnet50",)
        for ratio in each.ratios
    ]
    nested = [
        Case("hosts of 2", "resnet50", (NONE, "global-qsgd-8", "binsgdm"), 4.0, hosts, 2, rate, rounds)
        for rate, rounds in (("1gbit", 7), ("100mbit", 3))
        for hosts in (2, 4)
    ]
    return (*cases, *nested)


SIZES = {
    "full": Settings(_full()),
    "tiny": Settings(
        (
            Case("resnet50", "tiny", OF_BINSGDM, 4.0, 2, 1, LOCAL, 2),
            Case("hosts of 2", "tiny", (NONE, "binsgdm"), 4.0, 2, 1, LOCAL, 2),
        )
    ),
}


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return None if all(case.rate == LOCAL for case in SIZES[size].cases) else running.why_no_lab()


def study(settings: Settings) -> dict[str, Any]:
    before = {
        Case._make(each[name] for name in Case._fields)._replace(methods=tuple(each["methods"])): each
        for each in common.earlier("emulated", settings).get("cases", ())
    }
    found = []
    for case in settings.cases:
        if settings.only is None or case.part in settings.only:
            running.once(kept_as(case), lambda case=case: measure(case))
        measured = running.kept(kept_as(case))
        if measured is not None:
            found.append({**case._asdict(), "steps": steps(case, measured)})
        elif case in before:
            found.append(before[case])
    return {"cases": found}


def kept_as(case: Case) -> str:
    return f"emulated-{case.model}-{case.hosts}x{case.per_host}-{running.key(list(case), [BENCHMARK])}"


def measure(case: Case) -> dict[str, Any]:
    """Measure seconds of backward pass and communication in each round, by method.

    Raises:
        running.RunFailed: a worker or the lab failed.
    """
    present = {running.present_name(name, case.workers): name for name in case.methods}
    nested_names = {name + NESTED: former + NESTED for name, former in present.items()}
    former = {NOTHING: NOTHING, **present, **nested_names}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(BENCHMARK), "--model", case.model, "--methods", *present]
        command += ["--backward", str(BACKWARD * case.computing), "--rounds", str(case.rounds)]
        command += ["--json", str(file)]
        if case.rate == LOCAL:
            running.horovodrun(command, case.workers, running.TIME_LIMIT)
        else:
            nested = case.per_host > 1
            variables = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if nested else {}
            with running.lab(case.hosts, case.rate) as lab:
                lab.horovodrun([*command, *["--also-hierarchical"] * nested], case.per_host, variables)
        results = json.loads(file.read_text())["results"]
    return {former[result["method"]]: result["wall_seconds"] for result in results}


def steps(case: Case, walls: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the seconds of whole steps in each round, by method."""
    forward = (1 - BACKWARD) * case.computing
    return {method: [round(forward + wall, 5) for wall in own] for method, own in walls.items()}


# ---- verdicts ----------------------------------------------------------------------------------------------------


def case_of(figures: dict[str, Any]) -> Case:
    return Case(**{name: value for name, value in figures.items() if name != "steps"})


def times_as_fast(figures: dict[str, Any], method: str) -> float:
    """Return the speed-up over float32: median of the ratios within rounds."""
    own = figures["steps"]
    return statistics.median(a / b for a, b in zip(own[NONE], own[method]))


def limit(figures: dict[str, Any]) -> float:
    """Return the speed-up over float32 of steps without communication."""
    return statistics.median(figures["steps"][NONE]) / case_of(figures).computing


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = []
    for headline in HEADLINES:
        own = [each for each in figures["cases"] if each["part"] == headline.part]
        if not own:
            continue
        best = {
            each["ratio"]: max((times_as_fast(each, method), method) for method in headline.methods)
            for each in own
        }
        reached = best[max(best)][0]
        shown = ", ".join(
            f"speed-up {times:.2f} with {title(method)} at {ratio:g}"
            for ratio, (times, method) in sorted(best.items())
        )
        found.append(
            Verdict(
                f"{headline.title}: steps are at least {headline.times:g}× faster than with float32 if the float32 "
                f"transfer takes {max(best):g}× the compute time",
                reached >= headline.times,
                f"emulated; {headline.basis}; {shown}",
                headline.source,
            )
        )
    for each in figures["cases"]:
        if "binsgdm" + NESTED in each["steps"]:
            nested, flat = (times_as_fast(each, f"binsgdm{suffix}") for suffix in (NESTED, ""))
            found.append(
                Verdict(
                    f"Between {each['hosts']} hosts of {each['per_host']} workers, at {each['rate']}, the hierarchical "
                    "reduction of BinSGDM is faster than its flat one",
                    nested > flat,
                    f"emulated; {nested:.2f}× and {flat:.2f}× faster than float32",
                    common.OURS,
                )
            )
    return found


def tables(figures: dict[str, Any]) -> str:
    note = (
        "**Emulated**: all workers share the cores of one machine, where they quantize and run TCP, but compute "
        "nothing. *Limit* is a step without communication. Speed-ups are medians of ratios within a round."
    )
    return "\n\n".join([note, *(f"### {heading(part)}\n\n{table(own)}" for part, own in by_part(figures))])


def by_part(figures: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    parts = [(part, [each for each in figures["cases"] if each["part"] == part]) for part in PARTS]
    return [(part, own) for part, own in parts if own]


def heading(part: str) -> str:
    titles = {headline.part: f"{headline.title}, 4 hosts" for headline in HEADLINES}
    return titles.get(part, "ResNet-50, hosts of 2 workers")


def table(cases: Sequence[dict[str, Any]]) -> str:
    header, rows = ["emulated steps, ms (speed-up over float32)"], []
    for each in cases:
        case = case_of(each)
        where = f"{case.hosts} hosts, {case.rate}" if case.per_host > 1 else f"ratio {case.ratio:g}"
        header.append(f"{where}: {1e3 * case.computing:,.0f} ms of compute")
    for method in cases[0]["steps"]:
        if method != NOTHING:
            rows.append((title(method), *(cell(each, method) for each in cases)))
    limits = (f"{1e3 * case_of(each).computing:,.0f} ({limit(each):.2f})" for each in cases)
    return common.table(header, [*rows, ("limit", *limits)])


def cell(figures: dict[str, Any], method: str) -> str:
    seconds = statistics.median(figures["steps"][method])
    return f"{1e3 * seconds:,.0f} ({times_as_fast(figures, method):.2f})"


def title(method: str) -> str:
    flat = method[: -len(NESTED)] if method.endswith(NESTED) else method
    return common.title(flat) + (", hierarchical" if flat != method else "")


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    """Draw the speed-up by ratio, one panel for each headline with results."""
    tested = [(headline, dict(by_part(figures)).get(headline.part)) for headline in HEADLINES]
    shown = [(headline, cases) for headline, cases in tested if cases]
    if not shown:
        return []
    plot = Plot(
        "emulated-speed.png",
        "Emulated accelerators: speed-up of a step over float32, by the ratio of the float32 transfer to compute. "
        "Dotted: the speed-up of the paper. Grey: without communication.",
    )
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4 * len(shown), 4), layout="constrained", squeeze=False
    )
    for axes, (headline, cases) in zip(panels[0], shown):
        ratios = [each["ratio"] for each in cases]
        for method in cases[0]["steps"]:
            if method not in (NONE, NOTHING):
                times = [times_as_fast(each, method) for each in cases]
                dashed = "--" if "alltoall" in method else "-"
                axes.plot(ratios, times, "o" + dashed, color=color(method), label=title(method))
        axes.plot(ratios, [limit(each) for each in cases], color="#BBBBBB", label="without communication")
        axes.axhline(headline.times, color="black", linestyle=":")
        axes.set_title(f"{headline.title} (emulated)")
        axes.set_xlabel("float32 transfer / compute")
        axes.set_ylabel("speed-up over float32")
        axes.set_ylim(bottom=0)
    common.finish(figure, panels[0], folder / plot.file)
    return [plot]


def color(method: str) -> str:
    return common.COLORS["qsgdinf" if "alltoall" in method else common.kind(method)]
