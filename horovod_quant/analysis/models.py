"""Names and shapes of known models' gradients, computed from their architectures.

They are in the order of registration, about the reverse of that of a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shapes = dict[str, tuple[int, ...]]
"""Shapes of gradients by parameter name, in the order of registration."""


def elements(shapes: Shapes) -> int:
    """Return the number of elements of all gradients."""
    return sum(map(prod, shapes.values()))


def resnet(stages: Sequence[int]) -> Shapes:
    """ResNet of bottleneck blocks (He et al. 2016), named as in torchvision.

    Args:
        stages: blocks of each stage; (3, 4, 6, 3) is ResNet-50.
    """
    shapes: Shapes = {}

    def convolution(name: str, norm: str, inputs: int, outputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (outputs,)

    convolution("conv1", "bn1", 3, 64, 7)
    channels = 64
    for stage, blocks in enumerate(stages):
        inner = 64 << stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            convolution(f"{name}.conv1", f"{name}.bn1", channels, inner, 1)
            convolution(f"{name}.conv2", f"{name}.bn2", inner, inner, 3)
            convolution(f"{name}.conv3", f"{name}.bn3", inner, 4 * inner, 1)
            if block == 0:
                convolution(f"{name}.downsample.0", f"{name}.downsample.1", channels, 4 * inner, 1)
            channels = 4 * inner
    _linear(shapes, "fc", channels, 1000)
    return shapes


def vgg(stages: Sequence[int]) -> Shapes:
    """VGG for 224x224 images (Simonyan and Zisserman 2015), named as in torchvision.

    Args:
        stages: convolutions of each stage; (2, 2, 3, 3, 3) is VGG-16, configuration D.
    """
    shapes: Shapes = {}
    position, channels = 0, 3
    for stage, convolutions in enumerate(stages):
        outputs = 64 << min(stage, 3)
        for _ in range(convolutions):
            shapes[f"features.{position}.weight"] = (outputs, channels, 3, 3)
            shapes[f"features.{position}.bias"] = (outputs,)
            position += 2  # a ReLU follows
            channels = outputs
        position += 1  # pooling
    _linear(shapes, "classifier.0", channels * 7 * 7, 4096)
    _linear(shapes, "classifier.3", 4096, 4096)
    _linear(shapes, "classifier.6", 4096, 1000)
    return shapes


def bert(layers: int = 12, hidden: int = 768, vocabulary: int = 30522, positions: int = 512) -> Shapes:
    """BERT's encoder with its pooler (Devlin et al. 2019).

    The defaults are BERT-Base, uncased.
    """
    shapes: Shapes = {}
    for table, rows in {"word": vocabulary, "position": positions, "token_type": 2}.items():
        shapes[f"embeddings.{table}_embeddings.weight"] = (rows, hidden)
    _norm(shapes, "embeddings.LayerNorm", hidden)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for projection in ("query", "key", "value"):
            _linear(shapes, f"{name}.attention.self.{projection}", hidden, hidden)
        _linear(shapes, f"{name}.attention.output.dense", hidden, hidden)
        _norm(shapes, f"{name}.attention.output.LayerNorm", hidden)
        _linear(shapes, f"{name}.intermediate.dense", hidden, 4 * hidden)
        _linear(shapes, f"{name}.output.dense", 4 * hidden, hidden)
        _norm(shapes, f"{name}.output.LayerNorm", hidden)
    _linear(shapes, "pooler.dense", hidden, hidden)
    return shapes


def gpt2(layers: int = 12, hidden: int = 768) -> Shapes:
    """GPT-2 (Radford et al. 2019), whose output shares the embedding's weights.

    Its linear layers keep their weights as (inputs, outputs). The defaults are the small model.
    """
    shapes: Shapes = {"wte.weight": (50257, hidden), "wpe.weight": (1024, hidden)}
    for layer in range(layers):
        name = f"h.{layer}"
        _norm(shapes, f"{name}.ln_1", hidden)
        _transposed_linear(shapes, f"{name}.attn.c_attn", hidden, 3 * hidden)
        _transposed_linear(shapes, f"{name}.attn.c_proj", hidden, hidden)
        _norm(shapes, f"{name}.ln_2", hidden)
        _transposed_linear(shapes, f"{name}.mlp.c_fc", hidden, 4 * hidden)
        _transposed_linear(shapes, f"{name}.mlp.c_proj", 4 * hidden, hidden)
    _norm(shapes, "ln_f", hidden)
    return shapes


def pythia_1b() -> Shapes:
    """Pythia-1B (Biderman et al. 2023): GPT-NeoX, with separate output weights."""
    hidden, vocabulary = 2048, 50304
    shapes: Shapes = {"embed_in.weight": (vocabulary, hidden)}
    for layer in range(16):
        name = f"layers.{layer}"
        _norm(shapes, f"{name}.input_layernorm", hidden)
        _norm(shapes, f"{name}.post_attention_layernorm", hidden)
        _linear(shapes, f"{name}.attention.query_key_value", hidden, 3 * hidden)
        _linear(shapes, f"{name}.attention.dense", hidden, hidden)
        _linear(shapes, f"{name}.mlp.dense_h_to_4h", hidden, 4 * hidden)
        _linear(shapes, f"{name}.mlp.dense_4h_to_h", 4 * hidden, hidden)
    _norm(shapes, "final_layer_norm", hidden)
    return {**shapes, "embed_out.weight": (vocabulary, hidden)}


def _linear(shapes: Shapes, name: str, inputs: int, outputs: int) -> None:
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)


def _transposed_linear(shapes: Shapes, name: str, inputs: int, outputs: int) -> None:
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (inputs, outputs), (outputs,)


def _norm(shapes: Shapes, name: str, features: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (features,)


MODELS = {
    "resnet50": resnet((3, 4, 6, 3)),
    "resnet152": resnet((3, 8, 36, 3)),
    "vgg16": vgg((2, 2, 3, 3, 3)),
    "bert-base": bert(),
    "gpt2-small": gpt2(),
    "pythia-1b": pythia_1b(),
    "tiny": bert(layers=1, hidden=64, vocabulary=300, positions=32),
}
