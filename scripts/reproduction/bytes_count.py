"""Seconds to the float32 loss of a transformer of 4.8 million parameters.

The protocol was fixed before the first measurement:

1. *Learning rates*: for Adam with float32 and for BinSGDM, each the one of `RATES` with the least validation loss for
   `TUNING_SEED`, which no other training has. All methods but BinSGDM use the rate of Adam.
2. *Losses* do not depend on the link: `STEPS` steps with each method and seed, in one process with the arithmetic of
   the simulator; PowerSGD with PyTorch's hook and real workers. BinSGDM has twice the steps, as recommended.
3. *Steps*: trials of `TURN` steps with each method in rounds, 30 steps of each, between 4 hosts in each of `PLACES`:
   two rates, with all instructions of the processor and with AVX2 alone, and with accelerators that sleep. Methods
   under Horovod and those under DDP have separate launches, which alternate, `LAUNCHES` of each with `ROUNDS` rounds
   after `WARM_UP`. (In one launch, as planned at first, Horovod's steps took 10× the time beside DDP's threads.)
4. *Seconds*: the steps until the mean loss of the last `WINDOW` steps is within 1% of the final float32 loss (same
   seed, mean of the seeds), times the median step. Steps are measured under Horovod for methods under Horovod, and
   under DDP for hooks; the hooks of this package have the losses of the same method under Horovod.
5. *CPU time* of a worker's process in a step, at 1 Gbit/s with AVX2 alone, on the machine that measured those steps:
   what four workers need on the cores that they share.
6. *Check*: at each rate the fastest method of this package and the fastest of `BASELINES` train as a whole between the
   hosts, with seed 0. So does Auto, whose choice depends on the link: its losses and seconds are those of that run.

The ratio of the float32 transfer to compute with accelerators is that of 8 hosts with a GPU each at 10 Gbit/s, by
docs/pays.md: for N parameters a host sends 7 N bytes, and computes 6 N operations for each of 16,384 tokens with 40% of
312e12 a second. N cancels out: 7.1.

Estimates for two cores, from the time of a few steps: 8 trainings for the rates and 33 for the losses inside one
process, two at a time, 3 minutes each, 5 with a quantizer, 8 with BinSGDM: two hours; 6 with PowerSGD half an hour;
the steps in five places 45 minutes; the whole runs 45 minutes. Finished parts are cached, and parts can run one by one,
in the order of `PARTS`, which is that of their dependencies: ``scripts/reproduce bytes-count --only PART ...``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from horovod_quant.analysis.units import parse_rate
from horovod_quant.frontends import former_names
from horovod_quant.transports.traffic import ring_allreduce_bytes
from reproduction import common, eden, running, simulated, steps, transformer
from reproduction.common import Plot, Verdict
from reproduction.simulated import Job
from reproduction.transformer import LIMIT

TITLE = "A transformer of 4.8 million parameters: seconds to the float32 loss"
SCALE = "4.8 million parameters, 500 steps, 3 seeds, 4 hosts on 2 cores"
SOURCE = common.PACKAGE
CLAIM = (
    "The fastest method of this package gets within 1% of the float32 loss 1.3× faster at 1 Gbit/s, and 2× faster at "
    "100 Mbit/s, than the *best* of Horovod without compression and with fp16, and DDP without a hook and with those "
    "for fp16 and bf16; with AVX2 alone as with AVX-512."
)
METHOD = (
    "The protocol is in `scripts/reproduction/bytes_count.py`, and is older than the figures, except that BinSGDM "
    "under DDP, and the place where CPU time is measured, came later. A transformer of 6 layers of width 256 trains on "
    "the sources of Python's library, 4 workers with 2 sequences of 64 characters each. "
    "*Losses* do not depend on a link, and are computed once, with 3 seeds: all workers in one process, with the "
    "arithmetic of the simulator, bit-identical to real workers (PowerSGD: real workers with PyTorch's hook, after a "
    "tenth of the steps without it). *Steps* are real ones between 4 hosts of `scripts/lab` with one worker each, 30 "
    "with every method in rounds: the median of the slowest worker. Launches with Horovod's methods and with DDP's "
    "alternate. *Seconds* are the steps until the mean loss of the "
    "last {window} is within 1% of the final float32 loss, times the median step; a whole run of the fastest method "
    "and of the best baseline at each rate checks the product. Learning rates are the best of {rates} for seed {seed}, "
    "for Adam with float32 and for BinSGDM, which has twice the steps. *Accelerators*: a sleep replaces compute, so "
    "long that the float32 transfer takes {ratio:.1f}× its time, the ratio of 8 hosts with a GPU each at 10 Gbit/s "
    "([docs/pays.md](../pays.md))."
)

WORKER = Path(__file__).with_name("bytes_count_worker.py")
CPU_WORKER = WORKER.with_name("bytes_count_cpu_worker.py")
PROGRAMS = (WORKER, *(running.EXAMPLES / name for name in (transformer.SCRIPT, *transformer.IMPORTED)))

MODEL = {"layers": 6, "width": 256, "heads": 4, "context": 64}
ELEMENTS = 4_821_120
STEPS, BATCH, WORKERS = 500, 8, 4
RATES, TUNING_SEED = (0.0005, 0.001, 0.002, 0.004), 3
TURN, WARM_UP, ROUNDS, LAUNCHES = 5, 1, 3, 2
WINDOW = 50
RATIO = 7 / 10e9 * 8 / (6 * 16_384 / (0.4 * 312e12))
METHOD = METHOD.format(window=WINDOW, rates=", ".join(map(str, RATES)), seed=TUNING_SEED, ratio=RATIO)

BASELINES = ("none", "fp16", "ddp", "ddp-fp16", "ddp-bf16")
POWERSGD = ("powersgd-2", "powersgd-4")
OURS = ("global-qsgd-8", "qsgd-4", "eden-3", "eden-2", "eden-3-trellis", "eden-2-trellis")
BINSGDM, AUTO, ALONE, DDP_ALONE = "binsgdm", "auto", "alone", "ddp-alone"
FACTOR = transformer.FACTOR
HOOKS = ("global-qsgd-8", "qsgd-4", "eden-3", "eden-2", BINSGDM)
"""Methods of this package that are also measured under DDP."""

SIMULATED = ("none", "fp16", "ddp-fp16", "ddp-bf16", *OURS, BINSGDM)
TRAINED = (*SIMULATED, *POWERSGD)
MEASURED = (
    *BASELINES, *(f"ddp-{name}" for name in POWERSGD), *OURS, BINSGDM, *(f"ddp-{name}" for name in HOOKS),
)  # fmt: skip

NAMES = former_names.VERSION
"""Version of the names of methods here."""

TITLES = {
    "none": "Horovod", "fp16": "Horovod, fp16", "ddp": "DDP", "ddp-fp16": "DDP, fp16", "ddp-bf16": "DDP, bf16",
    "powersgd-2": "PowerSGD, rank 2", "powersgd-4": "PowerSGD, rank 4",
    **{name: common.title(name, version=NAMES) for name in OURS},
    BINSGDM: transformer.LONGER.title, AUTO: "Auto()",
}  # fmt: skip


LOCAL = "local"
"""Placeholder for a rate: workers on this machine, without a lab."""

# PyTorch's Gloo would otherwise look up the interface by the name of the host.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_TIMEOUT_SECONDS": "300", "PYTHONPATH": str(running.ROOT),
    **steps.VARIABLES,
}  # fmt: skip


class Place(NamedTuple):
    """Setting in which steps are measured.

    Attributes:
        title: for readers.
        rate: of the links, as scripts/lab takes it, or `LOCAL`.
        wanted: speed-up that the claim states, over the best of `BASELINES`; None for no verdict.
        variables: of the environment of the workers.
        sleeps: True if a sleep replaces compute.
    """

    title: str
    rate: str
    wanted: float | None = None
    variables: dict[str, str] = {}  # noqa: RUF012, never changed
    sleeps: bool = False

    @property
    def transfer(self) -> float:
        """Return the seconds of the float32 bytes; without links at 1 Gbit/s."""
        rate = "1gbit" if self.rate == LOCAL else self.rate
        return ring_allreduce_bytes(4 * ELEMENTS, WORKERS) / parse_rate(rate)


AVX2 = {"HOROVOD_QUANT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
PLACES = {
    "100mbit": Place("100 Mbit/s", "100mbit", 2.0),
    "1gbit": Place("1 Gbit/s", "1gbit", 1.3),
    "100mbit-avx2": Place("100 Mbit/s, AVX2 alone", "100mbit", 2.0, AVX2),
    "1gbit-avx2": Place("1 Gbit/s, AVX2 alone", "1gbit", 1.3, AVX2),
    "accelerators": Place("Accelerators that sleep", "1gbit", None, {}, True),
    LOCAL: Place("One machine, no lab", LOCAL),
}
WHOLE = ("100mbit", "1gbit")
ROLES = ("fastest", "baseline", AUTO)

PARTS = (
    *(f"rate-{rate:g}" for rate in RATES),
    *(f"loss-{key}" for key in TRAINED),
    *(f"steps-{place}" for place in PLACES),
    *(f"cpu-{place}" for place in PLACES),
    *(f"whole-{role}@{place}" for place in (*WHOLE, LOCAL) for role in ROLES),
)


class Settings(NamedTuple):
    """Settings of trainings and measurements.

    Attributes:
        model, batch, steps: see `simulated.Job`.
        seeds: of the losses.
        places: names from `PLACES` in which steps are measured.
        whole: those of them in which whole runs are made.
        counted: the one of them in which CPU time is measured.
        workers: of every training, one per host except for `LOCAL`.
        rounds: trials of each method in a launch.
        processes: trainings at a time; None for the number of cores.
        only: names from `PARTS` to run; None for all in ``places``.
    """

    model: dict[str, int]
    batch: int
    steps: int
    seeds: tuple[int, ...]
    places: tuple[str, ...]
    whole: tuple[str, ...]
    counted: str
    workers: int
    rounds: int
    processes: int | None = None
    only: tuple[str, ...] | None = None


SIZES = {
    "full": Settings(MODEL, BATCH, STEPS, (0, 1, 2), tuple(PLACES)[:-1], WHOLE, "1gbit-avx2", WORKERS, ROUNDS),
    "tiny": Settings(
        {"layers": 1, "width": 32, "heads": 2, "context": 8}, 4, 4, (0, 1), (LOCAL,), (LOCAL,), LOCAL, 2, 1, 1
    ),
}  # fmt: skip


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return None if SIZES[size].places == (LOCAL,) else running.why_no_lab()


# ---- what is run -------------------------------------------------------------------------------------------------


def study(settings: Settings) -> dict[str, Any]:
    """Run parts; return the figures of all known ones."""
    usual = [p for p in PARTS if not p.startswith("steps-") or p[len("steps-") :] in settings.places]
    usual = [p for p in usual if not p.startswith("cpu-") or p[len("cpu-") :] == settings.counted]
    usual = [p for p in usual if not p.startswith("whole-") or p.rpartition("@")[2] in settings.whole]
    chosen = usual if settings.only is None else settings.only
    figures = common.earlier("bytes-count", settings)
    kinds = {"rate": _tune, "loss": _train, "steps": _measure, "cpu": _count, "whole": _train_as_a_whole}
    for kind, run in kinds.items():
        mine = [part[len(kind) + 1 :] for part in chosen if part.startswith(f"{kind}-")]
        figures = collect(settings, figures)
        run(settings, figures, mine)
    return collect(settings, figures)


def collect(settings: Settings, before: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of cached runs, and earlier figures of others."""
    tuned = {key: dict(before.get("tuned", {}).get(key, {})) for key in ("none", BINSGDM)}
    for key, rate in ((key, rate) for key in tuned for rate in RATES):
        for run in simulated.kept(_job(settings, key, rate), (TUNING_SEED,)):
            tuned[key][f"{rate:g}"] = run["validation_loss"]
    losses = dict(before.get("losses", {}))
    for key in TRAINED:
        runs = _kept_losses(settings, key, tuned)
        if len(runs) >= len(losses.get(key, {}).get("losses", ())) and runs:
            losses[key] = {
                "losses": [[round(loss, 4) for loss in run["losses"]] for run in runs],
                "validation_losses": [run["validation_loss"] for run in runs],
                "bytes_per_step": runs[0]["bytes_per_step"],
            }
    measured, cpu, whole = (dict(before.get(name, {})) for name in ("steps", "cpu", "whole"))
    for place in PLACES:
        found = running.kept(_steps_kept_as(settings, place))
        measured.update({place: found} if found else {})
        found = running.kept(_cpu_kept_as(settings, place))
        cpu.update({place: found} if found else {})
        for role in ROLES:
            found = running.kept(_whole_kept_as(settings, role, place))
            whole.update({f"{role}@{place}": found} if found else {})
    return {
        "seeds": len(settings.seeds), "steps_of_training": settings.steps, "cores": len(os.sched_getaffinity(0)),
        "tuned": tuned, "losses": losses, "steps": measured, "cpu": cpu, "whole": whole,
    }  # fmt: skip


def best_rate(tuned: dict[str, dict[str, float]], key: str) -> float | None:
    """Return the learning rate of a method; None until all were tried."""
    tried = tuned[BINSGDM if key == BINSGDM else "none"]
    return float(min(tried, key=lambda rate: tried[rate])) if len(tried) == len(RATES) else None


def _job(settings: Settings, key: str, rate: float) -> Job:
    steps = settings.steps * (FACTOR if key == BINSGDM else 1)
    return Job("bytes-count", key, settings.workers, settings.batch, settings.model, steps, rate)


def _powersgd_job(settings: Settings, key: str, rate: float) -> running.Job:
    model = [f"--{name}={value}" for name, value in settings.model.items()]
    options = (f"--steps={settings.steps}", f"--batch-size={settings.batch}", f"--lr={rate}", *model)
    options = (*options, f"--powersgd={key.rpartition('-')[2]}")
    imported = (transformer.SCRIPT, *transformer.IMPORTED)
    return running.Job(str(eden.WORKER), imported, "none", options, settings.workers)


def _kept_losses(settings: Settings, key: str, tuned: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    rate = best_rate(tuned, key)
    if rate is None:
        return []
    if key in POWERSGD:
        return running.kept_trainings(_powersgd_job(settings, key, rate), settings.seeds)
    return simulated.kept(_job(settings, key, rate), settings.seeds)


def _tune(settings: Settings, figures: dict[str, Any], rates: Iterable[str]) -> None:
    jobs = [_job(settings, key, float(rate)) for rate in rates for key in ("none", BINSGDM)]
    simulated.trainings([(job, TUNING_SEED) for job in jobs], settings.processes)


def _train(settings: Settings, figures: dict[str, Any], keys: Sequence[str]) -> None:
    jobs = {key: _needed(best_rate(figures["tuned"], key), "rate") for key in keys}
    ours = [_job(settings, key, rate) for key, rate in jobs.items() if key not in POWERSGD]
    simulated.trainings([(job, seed) for job in ours for seed in settings.seeds], settings.processes)
    for key in (key for key in keys if key in POWERSGD):
        running.trainings(_powersgd_job(settings, key, jobs[key]), settings.seeds)


def _needed(value: Any, kind: str) -> Any:
    if value is None:
        raise running.RunFailed(f"run the parts {kind}-... first: this part depends on them")
    return value


def _measure(settings: Settings, figures: dict[str, Any], places: Iterable[str]) -> None:
    for place in places:
        running.once(_steps_kept_as(settings, place), lambda place=place: alternate(settings, place))


def _count(settings: Settings, figures: dict[str, Any], places: Iterable[str]) -> None:
    for place in places:
        running.once(
            _cpu_kept_as(settings, place), lambda place=place: alternate(settings, place, CPU_WORKER, 1)
        )


def alternate(
    settings: Settings, place: str, worker: Path = WORKER, launches: int = LAUNCHES
) -> dict[str, Any]:
    """Measure steps in launches with Horovod and with DDP by turns."""
    rates = {"adam": RATES[0], BINSGDM: RATES[0]}  # times do not depend on them
    both = ([ALONE], [DDP_ALONE])
    for name in MEASURED:
        both[name.startswith("ddp")].append(name)
    runs = [
        launch(settings, place, names, rates, WARM_UP, settings.rounds, TURN, worker)
        for names in both * launches
    ]
    seconds: dict[str, list[float]] = {name: [] for names in both for name in names}
    for run in runs:
        for name, own in run["seconds"].items():
            seconds[name] += own
    threads = {name: own for run in runs for name, own in run.get("threads", {}).items()}
    found = {"seconds": seconds, "processor": common.processor()}
    found.update({key: runs[0][key] for key in ("load", "kernels", "torch")})
    return {**found, "threads": threads} if threads else found


def _train_as_a_whole(settings: Settings, figures: dict[str, Any], parts: Iterable[str]) -> None:
    for part in parts:
        role, _, place = part.partition("@")
        if running.kept(_whole_kept_as(settings, role, place)) is not None:
            continue
        rates = {
            name: _needed(best_rate(figures["tuned"], key), "rate")
            for name, key in (("adam", "none"), (BINSGDM, BINSGDM))
        }
        candidates = {"fastest": ours(), "baseline": BASELINES}
        method = AUTO if role == AUTO else fastest(figures, place, candidates[role])
        method = _needed(method, "loss-... and steps")
        steps = settings.steps * (FACTOR if curve_of(method) == BINSGDM else 1)
        run = launch(settings, place, (method,), rates, 0, 1, steps)
        running.keep(_whole_kept_as(settings, role, place), {"method": method, **run})


def _steps_kept_as(settings: Settings, place: str) -> str:
    chosen = [
        settings.model,
        settings.batch,
        settings.workers,
        settings.rounds,
        LAUNCHES,
        list(PLACES[place]),
        MEASURED,
    ]
    return f"bytes-count-steps-{place}-{running.key(chosen, PROGRAMS)}"


def _cpu_kept_as(settings: Settings, place: str) -> str:
    digest = _steps_kept_as(settings, place).rpartition("-")[2]
    return f"bytes-count-cpu-{place}-{running.key(digest, [CPU_WORKER])}"


def _whole_kept_as(settings: Settings, role: str, place: str) -> str:
    chosen = [settings.model, settings.batch, settings.workers, settings.steps]
    return f"bytes-count-whole-{role}-{place}-{running.key(chosen, PROGRAMS)}"


def launch(
    settings: Settings,
    place: str,
    methods: Sequence[str],
    rates: dict[str, float],
    warm_up: int,
    rounds: int,
    turn: int,
    worker: Path = WORKER,
) -> dict[str, Any]:
    """Run the worker and return its figures.

    They have the ``load`` of the machine before the run. See `bytes_count_worker`.

    Raises:
        running.RunFailed: a worker or the lab failed.
    """
    where = PLACES[place]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        given = {
            "model": settings.model, "batch": settings.batch, "steps": settings.steps, "lr": rates,
            "methods": list(methods), "warm_up": warm_up, "rounds": rounds, "turn": turn,
            "computing": where.transfer / RATIO if where.sleeps else 0,
        }  # fmt: skip
        command = [sys.executable, str(worker), json.dumps(given), str(file)]
        load = os.getloadavg()[0]
        if where.rate == LOCAL:
            running.horovodrun(command, settings.workers, running.TIME_LIMIT)
        else:
            with running.lab(settings.workers, where.rate) as lab:
                lab.horovodrun(command, 1, {**VARIABLES, **where.variables})
        return {"load": round(load, 2), **json.loads(file.read_text())}


# ---- verdicts ----------------------------------------------------------------------------------------------------


def ours() -> tuple[str, ...]:
    """Return the methods of this package in `MEASURED`."""
    return tuple(name for name in MEASURED if name not in BASELINES and not is_powersgd(name))


def is_powersgd(name: str) -> bool:
    return name.startswith("ddp-powersgd-")


def curve_of(name: str) -> str:
    """Return the method in `TRAINED` whose losses a measured method has."""
    if name == "ddp":
        return "none"
    return name if name in TRAINED else name[len("ddp-") :]


def title(name: str) -> str:
    return TITLES.get(name) or f"{TITLES[curve_of(name)]}, DDP"


def difference(figures: dict[str, Any], key: str) -> str:
    return transformer.difference({"trainings": figures["losses"]}, key)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the moving average of losses over `WINDOW` steps."""
    window = min(WINDOW, len(losses))
    return [common.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def arrival(losses: Sequence[float], reference: Sequence[float]) -> int | None:
    """Return the first step within 1% of the reference's final loss."""
    target = LIMIT * smoothed(reference)[-1]
    window = min(WINDOW, len(losses))
    return next((place + window for place, loss in enumerate(smoothed(losses)) if loss <= target), None)


def steps_needed(figures: dict[str, Any], key: str) -> float | None:
    """Return the mean steps to the float32 loss.

    None if not all seeds arrive.
    """
    own, reference = (figures["losses"].get(each, {}).get("losses", []) for each in (key, "none"))
    found = [arrival(*pair) for pair in zip(own, reference)]
    whole = len(found) == figures["seeds"] and None not in found
    return common.mean(step for step in found if step is not None) if whole else None


def step_seconds(figures: dict[str, Any], place: str, name: str) -> float:
    return statistics.median(figures["steps"][place]["seconds"][name])


def seconds_needed(figures: dict[str, Any], place: str, name: str) -> float | None:
    """Return the seconds to the float32 loss, within 1%; None if unknown."""
    needed = steps_needed(figures, curve_of(name))
    known = name in figures["steps"].get(place, {}).get("seconds", {})
    return needed * step_seconds(figures, place, name) if known and needed is not None else None


def fastest(figures: dict[str, Any], place: str, names: Iterable[str]) -> str | None:
    known = {name: seconds_needed(figures, place, name) for name in names}
    there = {name: time for name, time in known.items() if time is not None}
    return min(there, key=lambda name: there[name]) if there else None


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = []
    for place, where in PLACES.items():
        best, other = (fastest(figures, place, names) for names in (ours(), BASELINES))
        if where.wanted is None or best is None or other is None:
            continue
        times = {name: seconds_needed(figures, place, name) or 0.0 for name in (best, other)}
        ratio = times[other] / times[best]
        found.append(
            Verdict(
                f"{where.title}: at least {where.wanted:g}× faster to within 1% of the float32 loss than the best of "
                "Horovod and DDP with 32 and 16 bits",
                ratio >= where.wanted,
                f"speed-up {ratio:.2f}: {title(best)} {times[best]:.0f} s, {title(other)} {times[other]:.0f} s",
            )
        )
    checked = {run: off for run in figures["whole"] if (off := product_error(figures, run)) is not None}
    if checked:
        found.append(
            Verdict(
                "Whole runs take the time of their steps times the median step, within 10%",
                max(map(abs, checked.values())) <= 0.1,
                ", ".join(f"{whole_title(figures, run)} {off:+.1%}" for run, off in checked.items()),
            )
        )
    return found


def product_error(figures: dict[str, Any], run: str) -> float | None:
    """Compare the time of a whole run with its prediction.

    The prediction is the run's number of steps times the median time of a step.
    """
    place, own = run.rpartition("@")[2], figures["whole"][run]
    if own["method"] == AUTO or own["method"] not in figures["steps"].get(place, {}).get("seconds", {}):
        return None
    took = own["seconds"][own["method"]]
    return sum(took) / (len(took) * step_seconds(figures, place, own["method"])) - 1


def whole_title(figures: dict[str, Any], run: str) -> str:
    return f"{title(figures['whole'][run]['method'])} at {PLACES[run.rpartition('@')[2]].title}"


# ---- tables and plots --------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    parts = [losses_table(figures)] if figures["losses"] else []
    for place, own in figures["steps"].items():
        parts += [f"### {PLACES[place].title}", ratio_of_computing(figures, place), table(figures, place)]
        parts[-2] += (
            f" {own['processor']}; load before: {own['load']:g}. {own['kernels']}; PyTorch: {own['torch']}."
        )
    if figures["whole"]:
        parts += ["### Whole runs", whole_table(figures)]
    return "\n\n".join(parts)


def losses_table(figures: dict[str, Any]) -> str:
    rows = []
    for key, own in figures["losses"].items():
        needed = steps_needed(figures, key)
        rows.append(
            [
                TITLES.get(key, key),
                len(own["losses"]),
                f"{len(own['losses'][0]):,}",
                common.spread(own["validation_losses"], 4),
                difference(figures, key) if key != "none" and "none" in figures["losses"] else "",
                f"{own['bytes_per_step'] / 1e6:.2f}",
                "" if "none" not in figures["losses"] else "never" if needed is None else f"{needed:.0f}",
            ]
        )
    header = [
        "",
        "seeds",
        "steps",
        "validation loss",
        "relative to float32",
        "MB sent per step",
        "steps to 1%",
    ]
    rates = {TITLES[key]: best_rate(figures["tuned"], key) for key in ("none", BINSGDM)}
    chosen = ", ".join(f"{name}: {rate}" for name, rate in rates.items())
    return f"{common.table(header, rows)}\n\nLearning rates: {chosen}."


def ratio_of_computing(figures: dict[str, Any], place: str) -> str:
    where = PLACES[place]
    computing, of_ddp = (step_seconds(figures, place, name) for name in (ALONE, DDP_ALONE))
    text = f"A step without communication takes {1e3 * computing:.0f} ms ({1e3 * of_ddp:.0f} ms in DDP's launches)"
    if where.rate == LOCAL:
        return text + "."
    text += (
        f", all {figures['cores']} cores shared by {WORKERS} hosts; the float32 bytes need "
        f"{1e3 * where.transfer:.0f} ms on a link that is never idle: {where.transfer / computing:.2f}× that time."
    )
    return text + cpu_bound(figures, place)


def cpu_bound(figures: dict[str, Any], place: str) -> str:
    """Return the share of CPU time in steps, if it was measured."""
    cpu = figures["cpu"].get(place, {}).get("seconds")
    best, other = (fastest(figures, place, names) for names in (ours(), BASELINES))
    if cpu is None or best not in cpu or other not in cpu:
        return ""
    workers = WORKERS / figures["cores"]
    busy = {name: workers * statistics.median(cpu[name]) for name in (best, other, DDP_ALONE)}
    shares = " and ".join(
        f"{1e3 * busy[name]:.0f} of {1e3 * step_seconds(figures, place, name):.0f} ms with {title(name)}"
        for name in (other, best)
    )
    return (
        f" A step needs about {workers:g}× the CPU time of a worker, which other launches measured: {shares}. Without "
        f"communication that is {1e3 * busy[DDP_ALONE]:.0f} ms, so nothing can be more than about "
        f"{step_seconds(figures, place, other) / busy[DDP_ALONE]:.1f}× as fast as {title(other)} here."
    )


CPU_HEADS = ("ms of CPU per worker", "in the script's thread", "in this package's", "in libraries' threads")


def cpu_cells(cpu: dict[str, Any], name: str) -> list[str]:
    total, (script, package) = statistics.median(cpu["seconds"][name]), cpu["threads"][name]
    return [f"{1e3 * each:.0f}" for each in (total, script, package, max(0.0, total - script - package))]


def table(figures: dict[str, Any], place: str) -> str:
    best = fastest(figures, place, BASELINES)
    cpu = figures["cpu"].get(place)
    rows = []
    for name in (each for each in MEASURED if each in figures["steps"][place]["seconds"]):
        own = seconds_needed(figures, place, name)
        times = seconds_needed(figures, place, best) if best else None
        rows.append(
            [
                title(name),
                f"{1e3 * step_seconds(figures, place, name):.0f}",
                *((cpu_cells(cpu, name) if name in cpu["seconds"] else [""] * len(CPU_HEADS)) if cpu else []),
                "" if own is None else f"{own:.0f}",
                "" if own is None or times is None else f"{times / own:.2f}",
            ]
        )
    header = [
        "",
        "ms per step",
        *(CPU_HEADS if cpu else []),
        "s to 1% of the float32 loss",
        "speed-up over the best without this package",
    ]
    return common.table(header, rows)


def whole_table(figures: dict[str, Any]) -> str:
    rows = []
    for run, own in figures["whole"].items():
        took, losses = own["seconds"][own["method"]], own["losses"][own["method"]]
        reference = figures["losses"].get("none", {}).get("losses", [])
        needed = arrival(losses, reference[0]) if reference else None
        off = product_error(figures, run)
        rows.append(
            [
                whole_title(figures, run) + "".join(f" ({chosen})" for chosen in own["chosen"].values()),
                f"{sum(took):.0f}",
                "" if off is None else f"{off:+.1%}",
                "never" if needed is None else f"{sum(took[:needed]):.0f}",
                f"{own['load']:g}",
            ]
        )
    return common.table(["seed 0", "s", "to the product", "s to 1% of the float32 loss", "load before"], rows)


SHOWN = (
    *BASELINES, "ddp-powersgd-4", "global-qsgd-8", "qsgd-4", "eden-3", "eden-2-trellis", BINSGDM, "ddp-eden-2",
    "ddp-binsgdm",
)  # fmt: skip
COLORS = {
    "ddp": "black", "ddp-fp16": "#999999", "ddp-bf16": "#BBBBBB", "ddp-powersgd-4": common.COLORS["powersgd"],
    "eden-2-trellis": common.COLORS["eden-trellis"], "ddp-eden-2": common.COLORS["eden"],
    "ddp-binsgdm": common.COLORS[BINSGDM],
}  # fmt: skip


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    shown = [
        place for place in figures["steps"] if any(curve_of(name) in figures["losses"] for name in SHOWN)
    ]
    if not shown:
        return []
    plot = Plot(
        "bytes-count.png",
        "Training loss, mean of the seeds and of 50 steps, against steps times the median step. Dashed: under DDP.",
    )
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4 * len(shown), 4.2), layout="constrained", squeeze=False, sharey=True
    )
    for axes, place in zip(panels[0], shown):
        for name in SHOWN:
            own = figures["losses"].get(curve_of(name))
            if own is None or name not in figures["steps"][place]["seconds"]:
                continue
            means = smoothed([common.mean(step) for step in zip(*own["losses"])])
            first = len(own["losses"][0]) - len(means) + 1
            each = step_seconds(figures, place, name)
            color = COLORS.get(name) or common.COLORS[common.kind(name)]
            style = "--" if name.startswith("ddp") else "-"
            x = [each * (first + number) for number in range(len(means))]
            axes.plot(x, means, style, color=color, label=title(name), linewidth=1.2)
        axes.set(title=PLACES[place].title, xlabel="seconds", xscale="log")
    panels[0][0].set_ylabel("training loss, nats per character")
    common.finish(figure, panels[0], folder / plot.file)
    return [plot]
