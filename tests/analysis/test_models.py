"""The models' shapes against the numbers that their authors and libraries publish."""

from __future__ import annotations

import pytest

from horovod_quant.analysis.models import MODELS, bert, elements, gpt2, resnet, vgg

# Tensors and parameters, as torchvision and transformers count them.
KNOWN = {
    "resnet50": (161, 25_557_032),
    "resnet152": (467, 60_192_808),
    "vgg16": (32, 138_357_544),
    "bert-base": (199, 109_482_240),
    "gpt2-small": (148, 124_439_808),
}


@pytest.mark.parametrize("model", KNOWN)
def test_totals_are_the_published_ones(model: str) -> None:
    assert (len(MODELS[model]), elements(MODELS[model])) == KNOWN[model]


@pytest.mark.parametrize(
    ("shapes", "total"),
    [
        (resnet((3, 4, 23, 3)), 44_549_160),
        (vgg((1, 1, 2, 2, 2)), 132_863_336),
        (vgg((2, 2, 4, 4, 4)), 143_667_240),
        (bert(layers=24, hidden=1024), 335_141_888),
        (gpt2(layers=24, hidden=1024), 354_823_168),
    ],
    ids=["resnet101", "vgg11", "vgg19", "bert-large", "gpt2-medium"],
)
def test_relatives_have_their_published_totals_too(shapes, total: int) -> None:
    assert elements(shapes) == total


@pytest.mark.parametrize(
    ("model", "parameter", "shape"),
    [
        ("resnet50", "layer4.0.downsample.0.weight", (2048, 1024, 1, 1)),
        ("resnet50", "fc.weight", (1000, 2048)),
        ("vgg16", "features.28.weight", (512, 512, 3, 3)),
        ("vgg16", "classifier.0.weight", (4096, 25088)),
        ("bert-base", "encoder.layer.11.intermediate.dense.weight", (3072, 768)),
        ("gpt2-small", "h.11.attn.c_attn.weight", (768, 2304)),
        ("gpt2-small", "wte.weight", (50257, 768)),
    ],
)
def test_known_layers(model: str, parameter: str, shape: tuple[int, ...]) -> None:
    assert MODELS[model][parameter] == shape
