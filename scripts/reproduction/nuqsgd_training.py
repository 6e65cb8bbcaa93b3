"""NUQSGD (JMLR 2021): transformer loss compared with QSGD and QSGDinf.

Estimates: a training of 1,000 steps takes one to two minutes on two cores, and all of them half an hour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction import common, running, transformer
from reproduction.common import Plot, Verdict
from reproduction.transformer import LIMIT, TrainedInParts, Training, plain

TITLE = "NUQSGD: a transformer's loss, 4 bits"
SCALE = "119,000 parameters, 1,000 steps, 4 workers on 2 cores"
CLAIM = (
    "NUQSGD matches and exceeds QSGDinf in experiments, and QSGD with the l2 norm falls behind "
    "(Ramezani-Kebrya et al., JMLR 2021). The grid of the authors is 4 bits, and buckets of 8,192 and 1,024."
)
METHOD = (
    "The transformer, text, steps and seeds of `scripts/reproduce transformer`, 4 real workers, the learning rate "
    "that is best for float32. The paper's QSGD is `QSGD(norm='l2')`, its QSGDinf `QSGD()`, whose norm is the "
    "maximum. Unlike in the paper, rounding is correlated between workers, the default of this package, for all three. "
    "The last row of NUQSGD has the max norm, which the paper does not use, to choose the default norm of the package."
)

METHODS = ("qsgd-4", "qsgdinf-4", "nuqsgd-4")
BUCKETS = {1024: "-", 8192: "--"}
"""Bucket sizes, and their line styles in the plot."""


def key(method: str, bucket: int) -> str:
    return method if bucket == min(BUCKETS) else f"{method}/{bucket}"


def _training(method: str, bucket: int) -> Training:
    title = common.title(method, bucket_size=bucket)
    options = () if bucket == min(BUCKETS) else (f"--bucket-size={bucket}",)
    return Training(key(method, bucket), method, title, options, BUCKETS[bucket])


DEFAULT = "nuqsgd-4"
MAX = Training("nuqsgd-4, max", DEFAULT, common.title(DEFAULT, norm="max"), ("--norm=max",), ":")
TRAININGS = (plain("none"), *(_training(method, bucket) for bucket in BUCKETS for method in METHODS), MAX)
PARTS = tuple(each.key for each in TRAININGS)

SIZES = {
    "full": TrainedInParts(transformer.SIZES["full"].options, (0, 1, 2), 4),
    "tiny": TrainedInParts(transformer.SIZES["tiny"].options, (0,), 2),
}


def study(settings: TrainedInParts) -> dict[str, Any]:
    chosen = PARTS if settings.only is None else settings.only
    before = common.earlier("nuqsgd-training", settings).get("trainings", {})
    trainings = {}
    for each in TRAININGS:
        options = (*settings.options, *each.options)
        job = running.Job(transformer.SCRIPT, transformer.IMPORTED, each.method, options, settings.workers)
        own = transformer.trained_in_part(job, settings.seeds, each.key in chosen, before.get(each.key))
        if own:
            trainings[each.key] = own
    return {"seeds": len(settings.seeds), "trainings": trainings}


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    def whole(*keys: str) -> bool:
        return all(transformer.whole(figures, each) for each in ("none", *keys))

    found = []
    for bucket in BUCKETS:
        qsgd, qsgdinf, nuqsgd = (key(method, bucket) for method in METHODS)
        if whole(nuqsgd, qsgdinf):
            found.append(
                Verdict(
                    f"With buckets of {bucket:,} NUQSGD ends at most 1% above the loss of QSGDinf",
                    _ratio(figures, nuqsgd, qsgdinf) <= LIMIT,
                    _evidence(figures, nuqsgd, qsgdinf),
                    "NUQSGD, abstract: “matches and exceeds the empirical performance of the QSGDinf heuristic”",
                )
            )
        if whole(nuqsgd, qsgd):
            found.append(
                Verdict(
                    f"With buckets of {bucket:,} NUQSGD ends at a lower loss than QSGD with the l2 norm",
                    _ratio(figures, nuqsgd, qsgd) < 1,
                    _evidence(figures, nuqsgd, qsgd),
                    "NUQSGD, experiments: training loss",
                )
            )
    if whole(DEFAULT, MAX.key):
        found.append(
            Verdict(
                "NUQSGD with its default norm, l2, ends at most 1% above the loss with the max norm",
                _ratio(figures, DEFAULT, MAX.key) <= LIMIT,
                _evidence(figures, DEFAULT, MAX.key),
                common.PACKAGE,
            )
        )
    return found


def _ratio(figures: dict[str, Any], key: str, other: str) -> float:
    return transformer.loss_ratio(figures, key) / transformer.loss_ratio(figures, other)


def _evidence(figures: dict[str, Any], *keys: str) -> str:
    return "relative to float32: " + " and ".join(transformer.difference(figures, key) for key in keys)


def tables(figures: dict[str, Any]) -> str:
    return transformer.parts_table(
        figures, TRAININGS, {key(method, min(BUCKETS)): "transformer" for method in METHODS}
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    return transformer.draw_parts(figures, TRAININGS, folder, "nuqsgd-transformer-loss.png")
