"""1-bit Adam, EF-SignSGD and PowerSGD compared with this package, at equal steps.

The learning rate of EF-SignSGD is tuned on another seed: the parts ``"rate 0.03"`` and so on. A training takes one to
two minutes on two cores, all of them 20.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction import common, eden, running, transformer
from reproduction.common import Plot, Verdict
from reproduction.transformer import LIMIT, TrainedInParts, Training, plain

TITLE = "Rivals: 1-bit Adam, EF-SignSGD and PowerSGD"
SCALE = "119,000 parameters, 1,000 steps, 4 workers on 2 cores"
CLAIM = (
    "Other methods for slow networks send as little, and end at the float32 loss after the same number of steps. The "
    "methods of this package, which keep the optimizer of the user, are shown for comparison."
)
METHOD = (
    "The transformer, text, steps and seeds of `scripts/reproduce transformer`, 4 real workers. *1-bit Adam*: float32 "
    "for 15% of the steps, then Adam's variance stays as it is, and momentum is averaged with one bit per element in "
    "each direction; the rounding error is added in the next step. Learning rate and betas are those of Adam. "
    "*EF-SignSGD*: the same for whole steps of SGD with Nesterov momentum; its learning rate is the best of {rates} "
    "for seed {seed}, which no other training has. Both are small implementations in the script, after the papers and "
    "DeepSpeed; bits are sent as float32, and bytes are counted by formula. *PowerSGD*: PyTorch's hook, rank 2, under "
    "DistributedDataParallel over Gloo, with float32 in the first tenth of the steps, as PyTorch's documentation "
    "advises; bytes are those of a later step."
)

WORKER = Path(__file__).with_name("rivals_worker.py")
RATES, TUNING_SEED = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), 3
METHOD = METHOD.format(rates=", ".join(map(str, RATES)), seed=TUNING_SEED)

ADAM = Training("onebit-adam", "none", "1-bit Adam", ("--rule=onebit-adam",), shade="#56B4E9")
SIGNS = Training("ef-signsgd", "none", "EF-SignSGD", ("--rule=ef-signsgd",), shade="#CC79A7")
OWN = (ADAM, SIGNS)
ELSEWHERE = {"none": "transformer", "eden-3": "eden", "powersgd-2": "eden", "binsgdm": "transformer"}
"""Trainings of other sections: the claim by the key of the training."""

TRAININGS = (
    plain("none"),
    ADAM,
    SIGNS,
    next(each for each in eden.TRAININGS if each.key == "powersgd-2"),
    plain("eden-3"),
    transformer.binsgdm(),
)


def rate_part(rate: float) -> str:
    return f"rate {rate:g}"


PARTS = (*map(rate_part, RATES), *(each.key for each in OWN))


SIZES = {
    size: TrainedInParts(own.options, own.seeds, own.workers)
    for size, own in ((size, eden.SIZES[size]) for size in ("full", "tiny"))
}


def study(settings: TrainedInParts) -> dict[str, Any]:
    chosen = PARTS if settings.only is None else settings.only
    before = common.earlier("rivals", settings)
    tuned = {**before.get("tuned", {}), **_tuned(settings, chosen)}
    trainings = {}
    for each in TRAININGS:
        if each.key in ELSEWHERE:
            found = common.trainings_of(ELSEWHERE[each.key], settings.options).get(each.key)
        else:
            found = _trained(
                settings, each, tuned, each.key in chosen, before.get("trainings", {}).get(each.key)
            )
        if found:
            trainings[each.key] = found
    return {"seeds": len(settings.seeds), "tuned": tuned, "trainings": trainings}


def _tuned(settings: TrainedInParts, chosen: tuple[str, ...]) -> dict[str, float]:
    """Return EF-SignSGD's validation loss for each learning rate tried so far."""
    losses = {}
    for rate in RATES:
        job = _job(settings, SIGNS, rate)
        if rate_part(rate) in chosen:
            running.trainings(job, (TUNING_SEED,))
        for run in running.kept_trainings(job, (TUNING_SEED,)):
            losses[f"{rate:g}"] = run["validation_loss"]
    return losses


def _trained(
    settings: TrainedInParts,
    each: Training,
    tuned: dict[str, float],
    run: bool,
    before: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the trainings of a method.

    They are earlier ones until its learning rate is tuned.
    """
    rate = None
    if each is SIGNS:
        if len(tuned) < len(RATES):
            return before
        rate = float(min(tuned, key=lambda key: tuned[key]))
    return transformer.trained_in_part(_job(settings, each, rate), settings.seeds, run, before)


def _job(settings: TrainedInParts, each: Training, rate: float | None = None) -> running.Job:
    options = (*settings.options, *each.options, *([] if rate is None else [f"--lr={rate}"]))
    imported = (str(eden.WORKER), transformer.SCRIPT, *transformer.IMPORTED)
    return running.Job(str(WORKER), imported, each.method, options, settings.workers)


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found: list[Verdict] = []
    if not transformer.whole(figures, "none"):
        return []
    if transformer.whole(figures, ADAM.key):
        found.append(
            Verdict(
                "1-bit Adam ends within 1% of Adam's loss after the same number of steps",
                transformer.loss_ratio(figures, ADAM.key) <= LIMIT,
                transformer.difference(figures, ADAM.key),
                "1-bit Adam, abstract: “the same convergence speed as uncompressed Adam”",
            )
        )
    rivals = [key for key in (ADAM.key, SIGNS.key, "powersgd-2") if transformer.whole(figures, key)]
    if rivals and transformer.whole(figures, "eden-3"):
        titles = {each.key: each.title for each in TRAININGS}
        own = transformer.loss_ratio(figures, "eden-3")
        found.append(
            Verdict(
                f"{titles['eden-3']} ends at a lower loss than {'; '.join(titles[key] for key in rivals)}",
                all(own < transformer.loss_ratio(figures, key) for key in rivals),
                "; ".join(
                    f"{titles[key]}: {transformer.difference_and_seeds(figures, key)}"
                    for key in ("eden-3", *rivals)
                ),
                common.PACKAGE,
            )
        )
    return found


def tables(figures: dict[str, Any]) -> str:
    shown = {key: claim for key, claim in ELSEWHERE.items() if key in ("eden-3", "binsgdm")}
    parts = [transformer.parts_table(figures, TRAININGS, shown)]
    if figures["tuned"]:
        tried = "; ".join(f"{rate}: {loss:.4f}" for rate, loss in figures["tuned"].items())
        parts.append(f"Losses of EF-SignSGD by learning rate, seed {TUNING_SEED}: {tried}.")
    return "\n\n".join(parts)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    return transformer.draw_parts(figures, TRAININGS, folder, "rivals-loss.png")
