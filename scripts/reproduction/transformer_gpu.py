"""Trainings of the transformer on one GPU (claim of this package)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from reproduction import common, transformer
from reproduction.common import Plot, Verdict

TITLE = "A transformer on a GPU: the loss with each method"
SCALE = "25 million parameters, 1,000 steps, 2 workers on one GPU"
SOURCE = common.PACKAGE
CLAIM = (
    "With every method at its recommended settings, a character-level transformer that is trained on a GPU ends within "
    "1% of the float32 loss."
)
METHOD = (
    "`examples/torch_char_transformer.py --device cuda` trains a transformer of 25 million parameters on the sources "
    "of Python's library with 2 real workers (`horovodrun`, over Gloo), which share the GPU if there is only one, and "
    "then validates it on text that it has not seen. All methods have the same learning rate; BinSGDM, which is an "
    "optimizer, has another, and twice the steps at its recommended setting."
)

# Enough compute for a GPU: 16,384 characters per step.
MODEL = ("--layers=8", "--width=512", "--heads=8", "--context=256", "--batch-size=64")
LEARNING_RATES = {"adam": "--lr=0.0006", "binsgdm": "--lr=0.0005"}
LONGER = (f"--steps={transformer.FACTOR * transformer.STEPS}", "--lr=0.0003")


class Settings(NamedTuple):
    """Settings of trainings; ``needs_gpu`` is True if they require a GPU."""

    trainings: transformer.Settings
    needs_gpu: bool


SIZES = {
    "full": Settings(
        transformer.Settings((*MODEL, f"--steps={transformer.STEPS}"), LONGER, (0, 1, 2), 2), True
    ),
    "tiny": Settings(transformer.SIZES["tiny"], False),
}


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return gpu_problem() if SIZES[size].needs_gpu else None


def gpu_problem() -> str | None:
    from horovod_quant.bench import devices

    found = devices.gpu_problem()
    return f"{found}; --size tiny does without" if found else None


def study(settings: Settings) -> dict[str, Any]:
    device = "cpu" if gpu_problem() else "cuda"
    trainings = {}
    for each in transformer.TRAININGS:
        rate = LEARNING_RATES["binsgdm" if each.method == "binsgdm" else "adam"]
        trainings[each.key] = transformer.trained(settings.trainings, each, (f"--device={device}", rate))
    return {"trainings": trainings, "entropies": transformer.entropies(), "gpu": gpu_name(device)}


def gpu_name(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    return torch.cuda.get_device_name()


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    return transformer.verdicts(figures)


def tables(figures: dict[str, Any]) -> str:
    rows = []
    for each in transformer.TRAININGS:
        training = figures["trainings"][each.key]
        steps = len(training["losses"][0])
        rows.append([each.title, common.spread([1e3 * seconds / steps for seconds in training["seconds"]])])
    times = common.table(["", "ms per step"], rows)
    where = (
        f"Trained on {figures['gpu']}."
        if figures["gpu"]
        else "**No GPU was used: this does not test the claim.**"
    )
    return f"{where}\n\n{transformer.tables(figures)}\n\n{times}"


# ---- plots -------------------------------------------------------------------------------------------------------


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plot = Plot(
        "transformer-gpu-loss.png",
        transformer.LOSS_CAPTION,
    )
    transformer.draw_losses(figures["trainings"], transformer.TRAININGS, folder / plot.file)
    return [plot]
