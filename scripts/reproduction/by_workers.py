"""Speed-up of Global-QSGD over QSGD, between 2 to 16 hosts.

Estimates: with 16 hosts at 100 Mbit/s, float32 takes 2.5 s for 4.2 million elements, QSGD with 8 bits 2× that time, and
Global-QSGD 0.6 s; the whole study takes a few minutes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from horovod_quant.analysis.calibration import calibrate, observe, predict, read_bench
from horovod_quant.analysis.kernel_speeds import measure_kernels
from horovod_quant.analysis.network import Network
from horovod_quant.analysis.units import parse_rate
from horovod_quant.frontends import methods
from reproduction import common, running
from reproduction.common import Plot, Verdict

TITLE = "Global-QSGD and QSGD in time, by the number of workers"
SCALE = "4.2 million elements, 2 to 16 hosts on 2 cores, no training"
CLAIM = (
    "QSGD gathers the codes of every worker, whose bytes grow with the number of workers; an allreduce can add the "
    "integers of Global-QSGD, and its bytes hardly grow. So the time that it saves grows with the number of workers "
    "(Xin, Canini, Richtárik, Horváth, 2023; ECAI 2025)."
)
METHOD = (
    "`horovod-quant bench` reduces 4.2 million gradients, in 4 tensors, between hosts of `scripts/lab` with one worker "
    "each, over Gloo at 100 Mbit/s, all methods in each round. **All workers share the cores of one machine**: where "
    "16 of them share two, QSGD takes 8× the time to decode 16 workers' codes that it takes with a core for each. "
    "*Predicted*: the model of `advise`, calibrated with the measurements between 2 and 4 hosts; it knows the number "
    "of workers that share the cores. The paper's QSGD is "
    "`QSGD(norm='l2', bucket_size=1024, exchange='allgather')`. EDEN had `server_bits=3` between 4 and 8 hosts."
)

NONE, QSGD, GLOBAL = "none", "qsgd-8", "global-qsgd-8"
METHODS = (NONE, QSGD, "qsgdinf-4", "qsgdinf-alltoall-4", GLOBAL, "eden-3")
CALIBRATING = 2
"""Number of clusters, those with the fewest hosts, that calibrate the model."""

LOCAL = "local"
LATENCY = 1e-4  # docs/lab.md: a round trip takes 0.2 ms


class Settings(NamedTuple):
    """Settings of the measurements.

    Attributes:
        hosts: of each cluster, or workers without a lab.
        shapes: of the gradients, as `horovod-quant bench` takes them.
        rate: of the links, as scripts/lab takes it, or `LOCAL`: workers on this machine.
        rounds: measurements of each method.
        kernel_seconds: time to measure kernels, for the model.
        only: clusters from `PARTS` to measure; None for all.
    """

    hosts: tuple[int, ...]
    shapes: tuple[str, ...]
    rate: str
    rounds: int
    kernel_seconds: float
    only: tuple[str, ...] | None = None


SIZES = {
    "full": Settings((2, 4, 8, 16), ("1024x1024",) * 4, "100mbit", 5, 5.0),
    "tiny": Settings((2, 3), ("64x64",), LOCAL, 2, 0.2),
}
PARTS = tuple(map(str, SIZES["full"].hosts))


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return None if SIZES[size].rate == LOCAL else running.why_no_lab()


def study(settings: Settings) -> dict[str, Any]:
    measured = {}
    for hosts in settings.hosts:
        name = f"by-workers-{hosts}-{running.key([settings[1:4], present(hosts)], [])}"
        if settings.only is None or str(hosts) in settings.only:
            running.once(name, lambda hosts=hosts: bench(settings, hosts))
        found = running.kept(name)
        if found is not None:
            measured[str(hosts)] = found
    before = common.earlier("by-workers", settings)
    clusters = {
        **before.get("clusters", {}),
        **{hosts: times(found, int(hosts)) for hosts, found in measured.items()},
    }
    return {
        "rate": settings.rate,
        "shapes": list(settings.shapes),
        "cores": next((found["cores"] for found in measured.values()), before.get("cores")),
        "clusters": {hosts: clusters[hosts] for hosts in map(str, settings.hosts) if hosts in clusters},
        "predicted": {**before.get("predicted", {}), **predictions(settings, measured)},
    }


def times(found: dict[str, Any], hosts: int) -> dict[str, dict[str, Any]]:
    """Return the seconds and bytes of a benchmark, by method."""
    own = by_method(found, hosts)
    return {
        "seconds": {name: each["wall_seconds"] for name, each in own.items()},
        "bytes": {name: each["bytes_sent"] for name, each in own.items()},
    }


def bench(settings: Settings, hosts: int) -> dict[str, Any]:
    """Run `horovod-quant bench`; return its JSON.

    Raises:
        running.RunFailed: a worker or the lab failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [str(Path(sys.executable).with_name("horovod-quant")), "bench", "--framework", "torch"]
        command += [
            "--shapes",
            *settings.shapes,
            "--methods",
            *present(hosts),
            "--rounds",
            str(settings.rounds),
        ]
        command += ["--json", str(file)]
        if settings.rate == LOCAL:
            running.horovodrun(command, hosts, running.TIME_LIMIT)
        else:
            with running.lab(hosts, settings.rate) as lab:
                lab.horovodrun(command, 1, {})
        return json.loads(file.read_text())


def present(hosts: int) -> dict[str, str]:
    """Return `METHODS` by their current names, those of `horovod-quant bench`."""
    return {running.present_name(name, hosts): name for name in METHODS}


def by_method(found: dict[str, Any], hosts: int) -> dict[str, dict[str, Any]]:
    """Return the results of a benchmark for `METHODS`."""
    names = present(hosts)
    return {names[each["method"]]: each for each in found["results"] if each["method"] in names}


def predictions(settings: Settings, measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Predict the seconds of a reduction, by hosts and method.

    Returns:
        Empty until the clusters that calibrate the model are measured.
    """
    rate = float("inf") if settings.rate == LOCAL else parse_rate(settings.rate)
    first = [str(hosts) for hosts in sorted(settings.hosts)[:CALIBRATING]]
    if not all(hosts in measured for hosts in first):
        return {}
    observed = {}
    with tempfile.TemporaryDirectory() as folder:
        for hosts, found in measured.items():
            file = Path(folder) / "bench.json"
            file.write_text(json.dumps(found))
            observed[hosts] = observe(read_bench(file), Network(1, 1, rate, LATENCY), one_machine=True)
    names = {name: None for hosts in measured for name in present(int(hosts))}
    schemes = [scheme for scheme in (methods.parse(name).scheme() for name in names) if scheme is not None]
    speeds = measure_kernels(schemes, seconds=settings.kernel_seconds)
    software = calibrate([observed[hosts] for hosts in first], speeds)
    return {
        hosts: {
            present(int(hosts))[method]: round(seconds, 5)
            for method, seconds in predict(each, speeds, software).items()
            if method in present(int(hosts))
        }
        for hosts, each in observed.items()
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


def advantage(figures: dict[str, Any], hosts: str, method: str = GLOBAL, over: str = QSGD) -> float:
    """Return the speed-up of a method over another.

    It is the median of the ratios within rounds.
    """
    own = figures["clusters"][hosts]["seconds"]
    return statistics.median(a / b for a, b in zip(own[over], own[method]))


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    every = list(figures["clusters"])
    if len(every) < 2:
        return []
    ratios = [advantage(figures, hosts) for hosts in every]
    shown = ", ".join(f"{ratio:.2f}× faster with {hosts}" for hosts, ratio in zip(every, ratios))
    found = [
        Verdict(
            "The time that Global-QSGD saves compared with QSGD (8 bits each) grows with the number of workers",
            all(a < b for a, b in zip(ratios, ratios[1:])),
            shown,
            "Global-QSGD (2023), abstract: “Allreduce-compatible”, and the compression ratio that grows with n",
        )
    ]
    last = every[-1]
    ratio = advantage(figures, last, GLOBAL, NONE)
    found.append(
        Verdict(
            f"Between {last} hosts Global-QSGD with 8 bits is faster than float32",
            ratio > 1,
            f"{ratio:.2f}× faster; speed-up of QSGD with 8 bits: {advantage(figures, last, QSGD, NONE):.2f}",
            common.OURS,
        )
    )
    off = errors(figures)
    if off:
        good = sum(abs(each) <= 0.2 for each in off)
        found.append(
            Verdict(
                "`advise`, calibrated with few hosts, predicts 9 of 10 reductions among more hosts within 20%",
                good >= 0.9 * len(off),
                f"{good} of {len(off)}",
                common.PACKAGE,
            )
        )
    return found


def errors(figures: dict[str, Any]) -> list[float]:
    """Return the relative errors of the model's predictions.

    The clusters that calibrate the model do not count.
    """
    return [
        seconds / statistics.median(figures["clusters"][hosts]["seconds"][method]) - 1
        for hosts in list(figures["clusters"])[CALIBRATING:]
        for method, seconds in figures["predicted"].get(hosts, {}).items()
    ]


def in_short(figures: dict[str, Any]) -> str:
    parts = [f"{advantage(figures, hosts):.2f} with {hosts}" for hosts in figures["clusters"]]
    return f"Speed-up over QSGD, 8 bits each, by hosts: {', '.join(parts)}."


def tables(figures: dict[str, Any]) -> str:
    measured = (times for own in figures["clusters"].values() for times in own["seconds"].values())
    note = (
        "Milliseconds of a reduction: measured (median), in brackets predicted. *Bytes*: the time of the bytes that a "
        f"worker sends on a link that is never idle. {figures['cores']} cores for all workers. The reductions took "
        f"{sum(map(sum, measured)) / 60:.1f} minutes, without launches and warm-up."
    )
    missing = [hosts for hosts in PARTS if hosts not in figures["clusters"]]
    if missing:
        note += f" **Not measured yet: {', '.join(missing)} hosts.**"
    header, rows = ["ms"], [[title(method)] for method in METHODS]
    for hosts in figures["clusters"]:
        header += [f"{hosts} hosts", "bytes"]
        for row, method in zip(rows, METHODS):
            row += cells(figures, hosts, method)
    return f"{note}\n\n{common.table(header, rows)}"


def cells(figures: dict[str, Any], hosts: str, method: str) -> list[str]:
    """Return the milliseconds of a reduction, and of its bytes, as text."""
    own = figures["clusters"][hosts]
    if method not in own["seconds"]:
        return ["impossible", ""]
    predicted = figures["predicted"].get(hosts, {}).get(method)
    shown = f"{1e3 * statistics.median(own['seconds'][method]):,.0f}"
    shown += "" if predicted is None else f" ({1e3 * predicted:,.0f})"
    rate = figures["rate"]
    return [shown, "" if rate == LOCAL else f"{1e3 * own['bytes'][method] / parse_rate(rate):,.0f}"]


def title(method: str) -> str:
    return common.title(method, workers=SIZES["full"].hosts)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    if len(figures["clusters"]) < 2:
        return []
    plot = Plot(
        "by-workers.png",
        "Milliseconds of a reduction by the number of hosts. Dotted: predicted from the first two.",
    )
    hosts = list(figures["clusters"])
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for method in METHODS:
        known = [each for each in hosts if method in figures["clusters"][each]["seconds"]]
        if not known:
            continue
        alltoall = "alltoall" in method
        color = common.COLORS["qsgdinf" if alltoall else common.kind(method)]
        measured = [1e3 * statistics.median(figures["clusters"][each]["seconds"][method]) for each in known]
        axes.plot(
            list(map(int, known)), measured, "o" + "-" * (1 + alltoall), color=color, label=title(method)
        )
        modelled = {int(each): own[method] for each, own in figures["predicted"].items() if method in own}
        axes.plot(list(modelled), [1e3 * seconds for seconds in modelled.values()], ":", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(map(int, hosts)), hosts)
    axes.set_xlabel("hosts, one worker each")
    axes.set_ylabel("milliseconds per reduction")
    common.finish(figure, [axes], folder / plot.file)
    return [plot]
