"""BinSGDM at its best beta and learning rate; causes of its loss.

Estimates: a training of 1,000 steps takes one to two minutes on two cores, one with 8× the batch several times that,
and all of them three hours. Parts can run one by one, on any machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from reproduction import common, running, transformer
from reproduction.common import Plot, Verdict
from reproduction.transformer import LIMIT, STEPS, TrainedInParts, Training, plain

TITLE = "BinSGDM: its best setting, and where its loss comes from"
SCALE = "119,000 parameters, 1,000 and 2,000 steps (500 of larger batches), 4 workers on 2 cores"
CLAIM = (
    "With one bit per element in each direction an optimizer ends at a loss comparable to Adam's after the same number "
    "of steps (Peng et al., ICLR 2023 submission; NeurIPS 2023)."
)
BETAS, RATES, TUNING_SEED = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95), (0.003, 0.005, 0.008), 3
METHOD = (
    "The transformer, text and workers of `scripts/reproduce transformer`. *Tuning*: for each beta of "
    f"{', '.join(map(str, BETAS))} the best learning rate of {', '.join(map(str, RATES))} for seed {TUNING_SEED}, "
    "which no other training has; then each beta with its rate and the usual seeds. The best pair of the tuning "
    "is used for everything else. *Roundings*: the same rule with the bits of the workers, whose mean is not rounded "
    "again (with 4 workers that is a count, of 3 bits), and without bits. *`server_bits=3`*: the optimizer of the "
    "package with an option that is not in the paper, by which the reducers return that count. *More steps*: 2× the "
    "steps, also for Adam. *Larger batches*: 8× the sequences per step, half the steps. Learning rates rise in the "
    "first tenth of the steps and fall to 0 by half a cosine in all trainings. Adam has a learning rate of its own, "
    "halved for twice the steps."
)

WORKER = Path(__file__).with_name("binsgdm_worker.py")

MORE, LARGE = (f"--steps={2 * STEPS}",), (f"--steps={STEPS // 2}", "--batch-size=256")
ADAM, ADAM_MORE, ADAM_LARGE = "none", "none, more steps", "none, larger batches"
OURS, OURS_MORE, OURS_LARGE = "tuned", "tuned, more steps", "tuned, larger batches"
SERVED, COUNTED, EXACT = "server bits", "workers' bits alone", "no bits"


def _of_adam(key: str, title: str, options: tuple[str, ...]) -> Training:
    return Training(key, "none", title, options)


def _tuned(key: str, title: str, options: tuple[str, ...] = (), rounding: str = "both") -> Training:
    method = "binsgdm" if rounding == "both" else "none"
    return Training(key, method, title, (*options, f"--rounding={rounding}"), shade=common.COLORS["binsgdm"])


# In the order of the page.
TRAININGS = (
    plain(ADAM)._replace(title="Adam"),
    _tuned(OURS, "BinSGDM()"),
    _tuned(SERVED, "BinSGDM(server_bits=3)", ("--server-bits=3",)),
    _tuned(COUNTED, "its rule, only bits of workers", (), "workers"),
    _tuned(EXACT, "its rule, no bits", (), "none"),
    _of_adam(ADAM_MORE, "Adam, twice the steps", (*MORE, "--lr=0.003")),
    _tuned(OURS_MORE, "BinSGDM(), twice the steps", MORE),
    _of_adam(ADAM_LARGE, "Adam, batches 8× as large", LARGE),
    _tuned(OURS_LARGE, "BinSGDM(), batches 8× as large", LARGE),
)
COMPARED = {
    **dict.fromkeys((OURS, SERVED, COUNTED, EXACT), ADAM),
    OURS_MORE: ADAM_MORE,
    OURS_LARGE: ADAM_LARGE,
}
"""Each training with BinSGDM, and that with Adam of the same number of steps and sequences."""


def tuning_part(beta: float) -> str:
    return f"tune beta {beta:g}"


def beta_part(beta: float) -> str:
    return f"beta {beta:g}"


PARTS = (*map(tuning_part, BETAS), *map(beta_part, BETAS), *(each.key for each in TRAININGS))


SIZES = {
    "full": TrainedInParts((f"--steps={STEPS}",), (0, 1, 2), 4),
    "tiny": TrainedInParts(transformer.SIZES["tiny"].options, (0,), 2),
}


class Pair(NamedTuple):
    beta: float
    rate: float


def study(settings: TrainedInParts) -> dict[str, Any]:
    chosen = PARTS if settings.only is None else settings.only
    before = common.earlier("binsgdm-tuning", settings)
    tuned = {**before.get("tuned", {}), **_tune(settings, chosen)}
    found: dict[str, Any] = {}
    best = best_pair(tuned)
    jobs = {
        beta_part(beta): _job(settings, _tuned("", ""), pair)
        for beta in BETAS
        if (pair := best_of(tuned, beta))
    }
    for each in TRAININGS:
        if each.key not in COMPARED:
            jobs[each.key] = _job(settings, each, None)
        elif best is not None:
            jobs[each.key] = _job(settings, each, best)
    for key, job in jobs.items():
        own = transformer.trained_in_part(
            job, settings.seeds, key in chosen, before.get("trainings", {}).get(key)
        )
        if own:
            found[key] = own
    return {"seeds": len(settings.seeds), "tuned": tuned, "trainings": found}


def _tune(settings: TrainedInParts, chosen: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return validation losses of finished tuning runs, by beta and learning rate."""
    found: dict[str, dict[str, float]] = {}
    for beta in BETAS:
        for rate in RATES:
            job = _job(settings, _tuned("", ""), Pair(beta, rate))
            if tuning_part(beta) in chosen:
                running.trainings(job, (TUNING_SEED,))
            for run in running.kept_trainings(job, (TUNING_SEED,)):
                found.setdefault(f"{beta:g}", {})[f"{rate:g}"] = run["validation_loss"]
    return found


def best_of(tuned: dict[str, dict[str, float]], beta: float) -> Pair | None:
    """Return a beta with its best learning rate.

    None until all learning rates were tried.
    """
    losses = tuned.get(f"{beta:g}", {})
    if len(losses) < len(RATES):
        return None
    return Pair(beta, float(min(losses, key=lambda rate: losses[rate])))


def best_pair(tuned: dict[str, dict[str, float]]) -> Pair | None:
    """Return the best beta and learning rate; None until all were tried."""
    pairs = [pair for beta in BETAS if (pair := best_of(tuned, beta))]
    if len(pairs) < len(BETAS):
        return None
    return min(pairs, key=lambda pair: tuned[f"{pair.beta:g}"][f"{pair.rate:g}"])


def _job(settings: TrainedInParts, each: Training, pair: Pair | None) -> running.Job:
    options = (*settings.options, *each.options)
    if pair is None:
        script, imported = transformer.SCRIPT, transformer.IMPORTED
        return running.Job(script, imported, each.method, options, settings.workers)
    options = (*options, f"--beta={pair.beta}", f"--lr={pair.rate}")
    imported = (str(WORKER.with_name("eden_worker.py")), transformer.SCRIPT, *transformer.IMPORTED)
    return running.Job(str(WORKER), imported, each.method, options, settings.workers)


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    paper = "BinSGDM (Birder), abstract: “comparable” to Adam"
    found = [
        Verdict(f"{when} BinSGDM ends within 1% of Adam's validation loss", ratio(figures, key) <= LIMIT,
                difference(figures, key), source)
        for key, when, source in (
            (OURS, "At its best setting, after the same number of steps,", paper),
            (OURS_MORE, f"After {2 * STEPS:,} steps, the same number as Adam,", paper),
            (OURS_LARGE, "With batches 8× as large, after the same number of steps,", paper),
        )
        if _whole(figures, key)
    ]  # fmt: skip
    if _whole(figures, OURS) and _whole(figures, OURS_LARGE):
        found.append(
            Verdict(
                "Larger batches bring the loss of BinSGDM closer to Adam's",
                ratio(figures, OURS_LARGE) < ratio(figures, OURS),
                f"{difference(figures, OURS_LARGE)} and {difference(figures, OURS)}",
                common.OURS,
            )
        )
    if _whole(figures, OURS) and _whole(figures, COUNTED):
        found.append(
            Verdict(
                "Without the rounding by reducers the loss of BinSGDM is at most two thirds as far above Adam's",
                ratio(figures, COUNTED) - 1 <= 2 / 3 * (ratio(figures, OURS) - 1),
                f"{difference(figures, COUNTED)} and {difference(figures, OURS)}",
                common.OURS,
            )
        )
    return found


def _whole(figures: dict[str, Any], key: str) -> bool:
    """True if two compared trainings have every seed.

    They are a training and the one that it is compared with.
    """
    return all(transformer.whole(figures, each) for each in (key, COMPARED[key]))


def _as_float32(figures: dict[str, Any], key: str, other: str) -> dict[str, Any]:
    """Return figures of two trainings under the names that `transformer` expects."""
    trainings = figures["trainings"]
    return {"trainings": {key: trainings[key], "none": trainings[other]}}


def ratio(figures: dict[str, Any], key: str, other: str | None = None) -> float:
    """Return the ratio of the mean validation loss to Adam's."""
    return transformer.loss_ratio(_as_float32(figures, key, other or COMPARED[key]), key)


def difference(figures: dict[str, Any], key: str, other: str | None = None) -> str:
    return transformer.difference(_as_float32(figures, key, other or COMPARED[key]), key)


def in_short(figures: dict[str, Any]) -> str:
    """Compare the default beta with Adam; empty until all are trained."""
    if not all(key in figures["trainings"] for key in (OURS_MORE, ADAM_MORE, ADAM)):
        return ""
    return (
        f"`BinSGDM()`, whose beta is {DEFAULT_BETA}, after {2 * STEPS:,} steps: {difference(figures, OURS_MORE)} "
        f"relative to Adam after the same number of steps, {difference(figures, OURS_MORE, ADAM)} relative to Adam "
        f"after {STEPS:,} steps."
    )


def tables(figures: dict[str, Any]) -> str:
    trainings = figures["trainings"]
    rows = []
    for each in TRAININGS:
        own = trainings.get(each.key)
        if own is None:
            continue
        compared = COMPARED.get(each.key) in trainings
        rows.append(
            (
                each.title,
                f"{len(own['losses'][0]):,}",
                len(own["validation_losses"]),
                common.spread(own["validation_losses"], 4),
                difference(figures, each.key) if compared else "",
            )
        )
    parts = (
        [common.table(("", "steps", "seeds", "validation loss", "relative to Adam, same steps"), rows)]
        if rows
        else []
    )
    missing = [each.title for each in TRAININGS if each.key not in trainings]
    if missing:
        parts.append(f"**Not trained yet: {', '.join(missing)}.**")
    if figures["tuned"]:
        parts.append(_tuning_table(figures))
    return "\n\n".join(parts)


def _tuning_table(figures: dict[str, Any]) -> str:
    header = ("beta", *(f"rate {rate:g}, seed {TUNING_SEED}" for rate in RATES), "best rate, the usual seeds")
    rows = []
    for beta in BETAS:
        losses = figures["tuned"].get(f"{beta:g}", {})
        cells = [f"{losses[f'{rate:g}']:.4f}" if f"{rate:g}" in losses else "" for rate in RATES]
        key, shown = beta_part(beta), ""
        if key in figures["trainings"]:
            shown = common.spread(figures["trainings"][key]["validation_losses"], 4)
            if ADAM in figures["trainings"]:
                shown += f" ({difference(figures, key, ADAM)})"
        rows.append((f"{beta:g}", *cells, shown))
    best = best_pair(figures["tuned"])
    chosen = f" Best: beta {best.beta:g} with rate {best.rate:g}." if best else ""
    return f"Validation losses of the tuning.{chosen}\n\n{common.table(header, rows)}"


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    shades = {OURS: "#D55E00", SERVED: "#009E73", COUNTED: "#E69F00", EXACT: "#0072B2"}
    chosen = [each._replace(shade=shades.get(each.key, each.shade)) for each in TRAININGS[:5]]
    return transformer.draw_parts(figures, chosen, folder, "binsgdm-tuning-loss.png")
