"""Loss with 16 and 32 workers, all in one process.

A training takes 4 minutes on one core, all 30 an hour on two. Finished trainings are cached.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from horovod_quant.frontends import former_names
from reproduction import common, simulated, transformer
from reproduction.common import Plot, Verdict
from reproduction.simulated import Job
from reproduction.transformer import LIMIT, Training

TITLE = "A transformer: the loss with 16 and 32 workers"
SCALE = "119,000 parameters, 1,000 steps, 16 and 32 simulated workers"
SOURCE = common.PACKAGE
CLAIM = "With 16 and with 32 workers each of these settings ends within 1% of the float32 loss."
METHOD = (
    "The transformer, text, steps, learning rate and batch of `scripts/reproduce transformer`: 16 or 32 workers share "
    "the 32 sequences of a step. All workers are in one process, which computes what each would receive with the "
    "arithmetic of the simulator, bit-identical to real workers. Each method has the same seeds and text as float32 "
    "with the same number of workers. Arguments not in the name are the defaults; QSGD uses an alltoall, which rounds "
    "twice, its default with 16 and 32 workers."
)

MODEL = {"layers": 2, "width": 64, "heads": 4, "context": 32}  # as in the example
BATCH, RATE = 32, 0.006
SIZES_OF_CLUSTERS = (16, 32)
NAMES = former_names.VERSION
"""Version of the names of methods here."""

METHODS = ("none", "global-qsgd-8", "global-qsgd-8-rotate", "qsgd-4-alltoall", "eden-3")
COLORS = {
    "global-qsgd-8-rotate": common.COLORS["global-qsgd-rotated"],
    "qsgd-4-alltoall": common.COLORS["qsgd"],
}
TRAININGS = tuple(
    Training(
        key,
        key,
        common.title(key, version=NAMES, workers=SIZES_OF_CLUSTERS),
        shade=COLORS.get(key, ""),
    )
    for key in METHODS
)
PARTS = tuple(f"{key}@{workers}" for workers in SIZES_OF_CLUSTERS for key in METHODS)


class Settings(NamedTuple):
    """Settings of the trainings.

    Attributes:
        workers: of each cluster.
        model, batch, steps: see `simulated.Job`.
        seeds: of every training.
        processes: trainings at a time; None for the number of cores.
        only: names from `PARTS` to run; None for all.
    """

    workers: tuple[int, ...]
    model: dict[str, int]
    batch: int
    steps: int
    seeds: tuple[int, ...]
    processes: int | None = None
    only: tuple[str, ...] | None = None


SIZES = {
    "full": Settings(SIZES_OF_CLUSTERS, MODEL, BATCH, transformer.STEPS, (0, 1, 2)),
    "tiny": Settings((16,), {"layers": 1, "width": 32, "heads": 2, "context": 8}, 16, 3, (0, 1), 1),
}


def study(settings: Settings) -> dict[str, Any]:
    jobs = {
        (str(workers), key): Job(
            "more-workers", key, workers, settings.batch, settings.model, settings.steps, RATE
        )
        for workers in settings.workers
        for key in METHODS
    }
    chosen = [
        job
        for (workers, key), job in jobs.items()
        if settings.only is None or f"{key}@{workers}" in settings.only
    ]
    simulated.trainings([(job, seed) for seed in settings.seeds for job in chosen], settings.processes)
    before = common.earlier("more-workers", settings).get("clusters", {})
    clusters: dict[str, dict[str, Any]] = {}
    for (workers, key), job in jobs.items():
        runs = simulated.kept(job, settings.seeds)
        found = summary(runs) if runs else None
        known = before.get(workers, {}).get("trainings", {}).get(key)
        if known and len(known["losses"]) > len(runs):
            found = known
        if found:
            own = clusters.setdefault(workers, {"seeds": len(settings.seeds), "trainings": {}})
            own["trainings"][key] = found
    return {"clusters": clusters}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "losses": [[round(loss, 4) for loss in run["losses"]] for run in runs],
        "validation_losses": [run["validation_loss"] for run in runs],
        "bytes_per_step": runs[0]["bytes_per_step"],
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    return [
        Verdict(
            f"{workers} workers: {each.title} ends within 1% of the float32 loss",
            transformer.loss_ratio(own, each.key) <= LIMIT,
            transformer.difference(own, each.key),
        )
        for workers, own in figures["clusters"].items()
        for each in TRAININGS[1:]
        if transformer.whole(own, "none") and transformer.whole(own, each.key)
    ]


def tables(figures: dict[str, Any]) -> str:
    return "\n\n".join(
        f"### {workers} workers\n\n{transformer.parts_table(own, TRAININGS)}"
        for workers, own in figures["clusters"].items()
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    return [
        plot
        for workers, own in figures["clusters"].items()
        for plot in transformer.draw_parts(own, TRAININGS, folder, f"more-workers-{workers}.png")
    ]
