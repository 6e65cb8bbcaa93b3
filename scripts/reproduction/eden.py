"""EDEN: nmse, trainings (claim of this package), and an experiment with whitening."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reproduction import common, eden_errors, embeddings, gradients, running, transformer
from reproduction.common import Plot, Verdict
from reproduction.transformer import Training, plain

TITLE = "EDEN: few bits, the same nmse for every gradient"
SCALE = (
    "nmse: 65,536 elements, up to 64 simulated workers; a transformer: 119,000 parameters, 1,000 steps, 4 workers on 2 "
    "cores; digits: 142,000 and 105,000 parameters, 120 steps; an embedding: 345,000 parameters, 1,000 steps"
)
CLAIM = (
    "After a random rotation, the levels of a Gaussian suit every gradient: the squared error depends only on the bits "
    "(Vargaftik et al., ICML 2022). This package's claim: so 3 bits train a transformer to within 0.5% of the float32 "
    "loss, and about 2 bits on the reduce-scatter side to within 1%, with the same number of steps. Trellis-coded "
    "quantization (Marcellin and Fischer, 1990) has a smaller squared error for the same bits."
)
METHOD = (
    "*nmse*: reductions among simulated workers, for distributions that have little in common. *One spike* is one "
    "element per bucket with nearly all of its energy. *Transformer*: the trainings of `scripts/reproduce "
    "transformer`, with 4 real workers, 1,000 steps, and for every method the learning rate that is best for float32. "
    "float32 was trained anew. `bits` are those on the reduce-scatter side of a reduction, `server_bits` those on the "
    "allgather side. *Whitened*: an experiment outside the package. Before EDEN rounds "
    "them, gradients are divided, element by element, by the root mean square of past averages, which all workers have "
    "decoded identically (an exponential average of about 50 steps, with a floor that was chosen with another seed); "
    "the averages are multiplied by it. The noise is then where it does not affect Adam. The condition for a feature "
    "was that whitened 2 bits end within 1% of float32 where plain 2 bits do not, or 1 bit within 2%. *SGD with "
    "momentum*: 4 simulated workers, digits, the convolutional network of `scripts/reproduce nuqsgd` and a small "
    "ResNet. *Embedding*: 4 simulated workers. A model predicts the next word of Python's library, and few rows of its "
    "embedding have a gradient in a step. Its gradients are dense, so rows of zeros share buckets with others."
)

SOURCE = common.PACKAGE

WORKER = Path(__file__).with_name("eden_worker.py")


# Floors with the least squared error relative to Adam's second moment, in the middle of a training with another seed.
FLOORS = {2: 0.1, 1: 0.3}


TRELLIS_SHADES = {3: "#A50F15", 2: "#DE2D26", 1: "#FB6A4A"}
SHADES = {4: "#3d3208", 3: "#8c6d1f", 2: "#bb9020", 1: "#dfbd5c"}
"""Lighter with fewer bits."""


def _eden(bits: int) -> Training:
    return plain(f"eden-{bits}")._replace(shade=SHADES[bits])


def _trellis(bits: int) -> Training:
    return plain(f"eden-trellis-{bits}")._replace(shade=TRELLIS_SHADES[bits])


def _gathered_with_4(method: str, shade: str) -> Training:
    """Return the trainings with 4 bits on the allgather side."""
    title = common.title(method, server_bits=4)
    return Training(f"{method}/4", method, title, ("--server-bits=4",), "--", shade=shade)


def _whitened(bits: int) -> Training:
    options = ("--whiten", f"--floor={FLOORS[bits]}")
    title = common.title(f"eden-{bits}")
    return Training(
        f"whitened-{bits}", f"eden-{bits}", f"{title}, whitened", options, ":", shade=SHADES[bits]
    )


# In the order of the page; the first is the baseline.
TRAININGS = (
    plain("none"),
    _eden(4),
    _eden(3),
    _gathered_with_4("eden-3", SHADES[3]),
    _gathered_with_4("eden-2", SHADES[2]),
    _eden(2),
    _eden(1),
    _trellis(3),
    _gathered_with_4("eden-trellis-2", TRELLIS_SHADES[2]),
    _trellis(2),
    _trellis(1),
    _whitened(2),
    _whitened(1),
    plain("qsgdinf-4"),
    plain("nuqsgd-4"),
    plain("global-qsgd-8"),
    Training("powersgd-2", "none", "PowerSGD, rank 2", ("--powersgd=2",)),
    transformer.binsgdm(),
)
_TITLES = {each.key: each.title for each in TRAININGS}
OWN = {"whitened-2", "whitened-1", "powersgd-2"}  # trained by `WORKER`
LITTLE = (
    "eden-trellis-2/4",
    "eden-2/4",
    "eden-trellis-2",
    "eden-2",
    "eden-trellis-1",
    "eden-1",
)  # at most 2.1 bits on the reduce-scatter side, scales included
SHOWN_ELSEWHERE = {
    **dict.fromkeys(("qsgdinf-4", "nuqsgd-4", "global-qsgd-8", "binsgdm"), "transformer"),
    "powersgd-2": "rivals",
}
"""Trainings whose losses another section shows: its claim by their keys."""
TRAINED_ELSEWHERE = {"binsgdm"}  # by `transformer`; the results of BinSGDM are still bit-identical

CLOSE = ("none", "eden-3", "eden-3/4", "eden-2/4", "eden-trellis-3", "eden-trellis-2/4")
"""Trainings with more seeds than the others."""

ERRORS, DIGITS, EMBEDDINGS = "errors", "digits", "embeddings"
PARTS = (*(each.key for each in TRAININGS), ERRORS, DIGITS, EMBEDDINGS)

MODELS = {"network": gradients.make_model, "ResNet": gradients.make_resnet}
WITH_SGD = ("none", "eden-4", "eden-3", "eden-2", "eden-1", "qsgdinf-4", "nuqsgd-4", "global-qsgd-8")
LIMIT_SGD = 1.1

EXCLUDED = ", embedding excluded"
WITH_EMBEDDING = (
    "none",
    *(f"eden-{bits}{excluded}" for bits in (4, 3, 2, 1) for excluded in ("", EXCLUDED)),
    "qsgdinf-4",
    "global-qsgd-8",
)
OPTIMIZERS = {"adam": "Adam", "sgd": "SGD with momentum"}


class Settings(NamedTuple):
    """Settings of the study.

    Attributes:
        options: of the example.
        seeds, workers: of every training.
        elsewhere: trainings taken from the result of `transformer`, if it exists.
        errors, embeddings: settings of these parts.
        steps: of a training on digits.
        more_seeds: additional seeds of trainings in `CLOSE`.
        only: names from `PARTS` to run; None for all.
    """

    options: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    elsewhere: frozenset[str]
    errors: eden_errors.Settings
    steps: int
    embeddings: embeddings.Settings
    more_seeds: tuple[int, ...] = ()
    only: tuple[str, ...] | None = None

    def seeds_of(self, key: str) -> tuple[int, ...]:
        return (*self.seeds, *(self.more_seeds if key in CLOSE else ()))


SIZES = {
    "full": Settings(
        transformer.SIZES["full"].options,
        (0, 1, 2),
        4,
        frozenset(TRAINED_ELSEWHERE),
        eden_errors.Settings((2, 4, 16, 64), 2**16, (0, 1, 2)),
        gradients.STEPS,
        embeddings.Settings(8192, 1000, 64, 4),
        more_seeds=(4, 5, 6, 7, 8),  # learning rates and floors were tuned with 3
    ),
    "tiny": Settings(
        transformer.SIZES["tiny"].options,
        (0, 1),
        2,
        frozenset(),
        eden_errors.Settings((2, 4), 2**14, (0, 1)),
        3,
        embeddings.Settings(1024, 3, 8, 2),
        more_seeds=(2,),
    ),
}


def study(settings: Settings) -> dict[str, Any]:
    chosen = PARTS if settings.only is None else settings.only
    jobs = {each.key: _job(settings, each) for each in TRAININGS if not _from_elsewhere(settings, each.key)}
    every = (*settings.seeds, *settings.more_seeds)
    for seed, part in itertools.product(every, chosen):  # so that early results cover all methods
        if part in jobs and seed in settings.seeds_of(part):
            running.trainings(jobs[part], (seed,))
    before = common.earlier("eden", settings)
    trainings = {}
    for each in TRAININGS:
        if each.key not in jobs:
            trainings[each.key] = _from_elsewhere(settings, each.key)
            continue
        found = transformer.trained_in_part(
            jobs[each.key], settings.seeds_of(each.key), False, before.get("trainings", {}).get(each.key)
        )
        if found:
            trainings[each.key] = found
    figures: dict[str, Any] = {
        "seeds": len(settings.seeds),
        "trainings": trainings,
        "entropies": transformer.entropies(),
    }
    for part, measure in ((ERRORS, _errors), (DIGITS, _digits), (EMBEDDINGS, _embeddings)):
        found = measure(settings, part in chosen) or before.get(part)
        if found:
            figures[part] = found
    return figures


def _job(settings: Settings, each: Training) -> running.Job:
    script, imported = transformer.SCRIPT, transformer.IMPORTED
    if each.key in OWN:
        script, imported = str(WORKER), (transformer.SCRIPT, *transformer.IMPORTED)
    return running.Job(script, imported, each.method, (*settings.options, *each.options), settings.workers)


def _from_elsewhere(settings: Settings, key: str) -> dict[str, Any] | None:
    found = common.trainings_of("transformer", settings.options) if key in settings.elsewhere else {}
    return found.get(key)


def _kept_as(part: str, name: str, settings: Any, *programs: Any) -> str:
    name = name.replace("/", "-").replace(", ", "-").replace(" ", "-")
    return f"eden-{part}-{name}-{running.key(settings, [Path(each.__file__) for each in programs])}"


def _errors(settings: Settings, run: bool) -> Any:
    name = _kept_as(ERRORS, "all", settings.errors, eden_errors)
    return running.once(name, lambda: eden_errors.measure(settings.errors)) if run else running.kept(name)


def _digits(settings: Settings, run: bool) -> Any:
    """Return losses and accuracies by model and method; None if incomplete."""
    found: dict[str, dict[str, list[Any]]] = {model: {method: [] for method in WITH_SGD} for model in MODELS}
    for seed, model, method in itertools.product(settings.seeds, MODELS, WITH_SGD):
        chosen = [settings.steps, settings.workers, model, method, seed]

        def trained(seed: int = seed, model: str = model, method: str = method) -> Any:
            scheme = None if method == "none" else common.scheme(method)
            return gradients.train(
                scheme, seed=seed, workers=settings.workers, steps=settings.steps, make=MODELS[model]
            )._asdict()

        name = _kept_as(DIGITS, f"{model}-{method}", chosen, gradients)
        found[model][method].append(running.once(name, trained) if run else running.kept(name))
    return _unless_missing(found)


def _embeddings(settings: Settings, run: bool) -> Any:
    """Return the figures by optimizer and method; None if incomplete."""
    found: dict[str, dict[str, list[Any]]] = {
        optimizer: {method: [] for method in WITH_EMBEDDING} for optimizer in OPTIMIZERS
    }
    for seed, optimizer, method in itertools.product(settings.seeds, OPTIMIZERS, WITH_EMBEDDING):
        chosen = [settings.embeddings, optimizer, method, seed]

        def trained(seed: int = seed, optimizer: str = optimizer, method: str = method) -> Any:
            compressed = method.removesuffix(EXCLUDED)
            scheme = None if method == "none" else common.scheme(compressed)
            exclude = (embeddings.EMBEDDING,) if compressed != method else ()
            return embeddings.train(scheme, optimizer, settings.embeddings, seed, exclude)

        name = _kept_as(EMBEDDINGS, f"{optimizer}-{method}", chosen, embeddings, gradients)
        found[optimizer][method].append(running.once(name, trained) if run else running.kept(name))
    return _unless_missing(found)


def _unless_missing(found: dict[str, dict[str, list[Any]]]) -> Any:
    every = itertools.chain.from_iterable(runs for own in found.values() for runs in own.values())
    return None if None in every else found


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = eden_errors.verdicts(figures[ERRORS]) if ERRORS in figures else []
    found += _loss_verdicts(figures)
    if DIGITS in figures:
        found += [_digits_verdict(figures[DIGITS], method) for method in ("eden-4", "eden-3", "eden-2")]
    if EMBEDDINGS in figures:
        found += [_embedding_verdict(figures[EMBEDDINGS], optimizer) for optimizer in OPTIMIZERS]
    return found


def _loss_verdicts(figures: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts on losses for which all trainings are there."""

    def whole(*keys: str) -> bool:
        return all(transformer.whole(figures, key) for key in keys)

    def within(key: str, limit: float) -> bool:
        return transformer.loss_ratio(figures, key) <= 1 + limit

    def shown(keys: Sequence[str]) -> str:
        return "; ".join(f"{_TITLES[key]}: {transformer.difference_and_seeds(figures, key)}" for key in keys)

    found = []
    for key in ("eden-3", "eden-3/4", "eden-trellis-3"):
        if whole("none", key):
            found.append(
                Verdict(
                    f"{_TITLES[key]} ends within 0.5% of the float32 loss",
                    within(key, 0.005),
                    transformer.difference_and_seeds(figures, key),
                )
            )
    if whole("none", *LITTLE):
        found.append(
            Verdict(
                "A setting of at most 2.1 bits on the reduce-scatter side ends within 1% of the float32 loss",
                any(within(key, 0.01) for key in LITTLE),
                shown(LITTLE),
            )
        )
    pairs = {("whitened-2", "eden-2"): 0.01, ("whitened-1", "eden-1"): 0.02}
    if whole("none", *itertools.chain(*pairs)):
        found.append(
            Verdict(
                "Whitened gradients end within 1% of the float32 loss with 2 bits where plain ones do not, or within "
                "2% with 1 bit",
                any(within(own, limit) and not within(other, limit) for (own, other), limit in pairs.items()),
                shown([*itertools.chain(*pairs)]),
            )
        )
    return found


def _digits_verdict(figures: dict[str, Any], method: str) -> Verdict:
    ratios = {
        model: common.loss_ratios(*([run["losses"] for run in own[key]] for key in (method, "none")))
        for model, own in figures.items()
    }
    return Verdict(
        f"With SGD with momentum {common.title(method)} trains as well as float32: at most {LIMIT_SGD} times its "
        "mean loss",
        all(common.mean(own) <= LIMIT_SGD for own in ratios.values()),
        ", ".join(f"{model}: {common.ratio(own)} times" for model, own in ratios.items()),
    )


def _embedding_ratio(figures: dict[str, Any], method: str) -> float:
    own, other = (common.mean(run["validation_loss"] for run in figures[key]) for key in (method, "none"))
    return own / other


def _embedding_verdict(figures: dict[str, Any], optimizer: str) -> Verdict:
    ratio, without = (
        _embedding_ratio(figures[optimizer], f"eden-3{excluded}") for excluded in ("", EXCLUDED)
    )
    return Verdict(
        f"Rows of zeros of an embedding do no harm with {OPTIMIZERS[optimizer]}: "
        f"{common.title('eden-3')} ends within 1% of the float32 loss",
        ratio <= 1.01,
        f"{ratio - 1:+.2%}; without the embedding {without - 1:+.2%}",
    )


# ---- tables ------------------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    parts = []
    if ERRORS in figures:
        parts += ["### nmse", eden_errors.table(figures[ERRORS])]
    if figures["trainings"]:
        parts += ["### A transformer, with Adam", _loss_table(figures)]
    if DIGITS in figures:
        parts += ["### Digits, with SGD with momentum", _digits_table(figures[DIGITS])]
    if EMBEDDINGS in figures:
        parts += ["### A large embedding", _embedding_table(figures[EMBEDDINGS])]
    return "\n\n".join(parts)


def _loss_table(figures: dict[str, Any]) -> str:
    header = [
        "",
        "seeds",
        "validation loss",
        "relative to float32",
        "MB sent per step",
        "N× less than float32",
    ]
    rows = []
    for each in TRAININGS:
        training = figures["trainings"].get(each.key)
        if training is None or each.key in SHOWN_ELSEWHERE:
            continue
        seeds = len(training["validation_losses"])
        compared = each.key != "none" and "none" in figures["trainings"]
        rows.append(
            [
                each.title,
                seeds if seeds >= figures["seeds"] else f"**{seeds} of {figures['seeds']}**",
                common.spread(training["validation_losses"], 4),
                transformer.difference(figures, each.key) if compared else "",
                f"{training['bytes_per_step'] / 1e6:.3f}",
                f"{training['float32_bytes_per_step'] / training['bytes_per_step']:.1f}",
            ]
        )
    missing = [each.title for each in TRAININGS if each.key not in figures["trainings"]]
    note = (
        "Losses are in nats per character, as in `scripts/reproduce transformer`. Differences are between means over "
        "the seeds that both have, ± the standard error over the seeds."
    )
    more = len(figures["trainings"].get(CLOSE[0], {}).get("validation_losses", ())) > figures["seeds"]
    if more:
        note += " Trainings too close to their limits for three seeds have more."
    if missing:
        note += f" **Not trained yet: {', '.join(missing)}.**"
    return "\n\n".join(
        (common.table(header, rows), note, transformer.shown_elsewhere(TRAININGS, SHOWN_ELSEWHERE))
    )


def _digits_table(figures: dict[str, Any]) -> str:
    header = ["", *(f"{model}: {column}" for model in figures for column in common.TRAINING_HEADER)]
    rows = []
    for method in WITH_SGD:
        row = [common.title(method)]
        for own in figures.values():
            runs = own[method]
            row += common.training_columns([run["losses"] for run in runs], [run["accuracy"] for run in runs])
        rows.append(row)
    return common.table(header, rows)


def _embedding_table(figures: dict[str, Any]) -> str:
    header = [""]
    for title in OPTIMIZERS.values():
        header += [f"{title}: validation loss", "relative to float32", "untouched rows moved"]
    rows = []
    for method in WITH_EMBEDDING:
        row = [common.title(method.removesuffix(EXCLUDED)) + (EXCLUDED if EXCLUDED in method else "")]
        for own in figures.values():
            row += [
                common.spread([run["validation_loss"] for run in own[method]], 4),
                f"{_embedding_ratio(own, method) - 1:+.2%}" if method != "none" else "",
                f"{common.mean(run['moved'] for run in own[method]):.2g}",
            ]
        rows.append(row)
    untouched = common.mean(run["untouched"] for run in next(iter(figures.values()))["none"])
    note = (
        f"*Untouched*: {untouched:.0%} of the rows, which no example used; their moves are relative to those of the "
        "others (root mean squares). The rounding of QSGD and Global-QSGD keeps zeros; rotations do not."
    )
    return f"{common.table(header, rows)}\n\n{note}"


# ---- plots -------------------------------------------------------------------------------------------------------


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plots = []
    if ERRORS in figures:
        plots.append(eden_errors.draw(figures[ERRORS], folder))
    plots += transformer.draw_parts(figures, TRAININGS, folder, "eden-loss.png", CLOSE)
    return plots
