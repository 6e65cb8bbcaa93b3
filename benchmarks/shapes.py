"""Names and shapes of the gradients of known models, computed from their architectures."""

from __future__ import annotations

from math import prod

Shapes = dict[str, tuple[int, ...]]


def elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def resnet(stages: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> Shapes:
    """ResNet of bottleneck blocks (He et al. 2016), in the order in which its parameters are registered.

    Args:
        stages: blocks of each stage; (3, 4, 6, 3) is ResNet-50.
        width: channels of the first stage's inner convolutions.
        classes: outputs.
    """
    shapes: Shapes = {}

    def convolution(name: str, norm: str, inputs: int, outputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (outputs,)

    convolution("conv1", "bn1", 3, width, 7)
    channels = width
    for stage, blocks in enumerate(stages):
        inner = width << stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            convolution(f"{name}.conv1", f"{name}.bn1", channels, inner, 1)
            convolution(f"{name}.conv2", f"{name}.bn2", inner, inner, 3)
            convolution(f"{name}.conv3", f"{name}.bn3", inner, 4 * inner, 1)
            if block == 0:
                convolution(f"{name}.downsample.0", f"{name}.downsample.1", channels, 4 * inner, 1)
            channels = 4 * inner
    shapes["fc.weight"], shapes["fc.bias"] = (classes, channels), (classes,)
    return shapes


def bert(layers: int = 12, hidden: int = 768, vocabulary: int = 30522, positions: int = 512) -> Shapes:
    """BERT's encoder with its pooler (Devlin et al. 2019); the defaults are BERT-Base, uncased."""
    shapes: Shapes = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)

    for table, rows in {"word": vocabulary, "position": positions, "token_type": 2}.items():
        shapes[f"embeddings.{table}_embeddings.weight"] = (rows, hidden)
    norm("embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for projection in ("query", "key", "value"):
            linear(f"{name}.attention.self.{projection}", hidden, hidden)
        linear(f"{name}.attention.output.dense", hidden, hidden)
        norm(f"{name}.attention.output.LayerNorm")
        linear(f"{name}.intermediate.dense", hidden, 4 * hidden)
        linear(f"{name}.output.dense", 4 * hidden, hidden)
        norm(f"{name}.output.LayerNorm")
    linear("pooler.dense", hidden, hidden)
    return shapes


MODELS = {
    "resnet50": resnet(),
    "bert-base": bert(),
    "tiny": bert(layers=1, hidden=64, vocabulary=300, positions=32),
}

assert (len(MODELS["resnet50"]), elements(MODELS["resnet50"])) == (161, 25_557_032)
assert (len(MODELS["bert-base"]), elements(MODELS["bert-base"])) == (199, 109_482_240)
