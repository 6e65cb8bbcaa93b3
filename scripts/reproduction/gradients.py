"""Small training with simulated workers in one process.

It yields real gradients and loss curves. The model classifies scikit-learn's handwritten digits, as in
examples/torch_digits.py, but has a larger layer (131,072 elements), so that most gradients have many buckets of 8,192.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from horovod_quant import simulator

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import digits

BATCH = 128  # images per step, over all workers
LEARNING_RATE = 0.1  # of 0.05, 0.1, 0.2 and 0.3, float32 converges fastest with the middle two
STEPS = 120  # per training: 12 epochs, as in the example
MIN_ELEMENTS = 1024  # smaller gradients are averaged in float32, as by the compressors


class Training(NamedTuple):
    """Loss of each step, and the test accuracy.

    Losses are None after one became nonfinite.
    """

    losses: list[float | None]
    accuracy: float


def make_model(seed: int) -> nn.Sequential:
    """Make a convolutional network of 142,000 parameters; 99.8% of them are quantized."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(images + self.norms[1](self.second(inner)))


def make_resnet(seed: int) -> nn.Sequential:
    """Make a small ResNet of 105,000 parameters; 99% of them are quantized.

    It converges fastest with the same learning rates.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        Residual(24),
        nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        Residual(48),
        Residual(48),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def batches(seed: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over images and labels of each step, shuffled in each epoch."""
    data = digits.load_data()
    images, labels = torch.from_numpy(data.train_images).unsqueeze(1), torch.from_numpy(data.train_labels)
    random = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order = random.permutation(len(labels)).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        yield images[chosen], labels[chosen]


def backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, list[np.ndarray]]:
    """Return the loss, and a copy of each parameter's gradient.

    The copies are flat, in float32.
    """
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss.item(), [p.grad.numpy().reshape(-1).copy() for p in model.parameters()]


def train(
    scheme: Any,
    *,
    seed: int,
    workers: int,
    steps: int,
    learning_rate: float = LEARNING_RATE,
    watch: Any = None,
    make: Callable[[int], nn.Module] = make_model,
) -> Training:
    """Train with simulated workers.

    Args:
        scheme: one of `horovod_quant.schemes`, or None for float32.
        seed: of the weights, of the order of images and of the rounding.
        workers: number that share a batch.
        steps: of SGD with momentum.
        learning_rate: of the first step; it falls to zero along a cosine.
        watch: called as ``watch(step, gradients)`` before each step, with the gradients of one worker that are large
            enough to be quantized.
        make: function that makes the model from a seed.
    """
    torch.set_num_threads(1)
    model = make(seed)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    large = [i for i, p in enumerate(parameters) if p.numel() >= MIN_ELEMENTS]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[float | None] = []
    for step, (images, labels) in enumerate(batches(seed, steps)):
        shares = [backward(model, images[i::workers], labels[i::workers]) for i in range(workers)]
        loss = float(np.mean([own for own, _ in shares]))
        if not np.isfinite(loss):
            losses += [None] * (steps - step)
            break
        losses.append(loss)
        gradients = [own for _, own in shares]
        if watch is not None:
            watch(step, [gradients[0][i] for i in large])
        averages = exchanged(scheme, gradients, names, large, seed=seed, step=step)
        for parameter, average in zip(parameters, averages):
            parameter.grad = torch.from_numpy(average).reshape(parameter.shape)
        optimizer.step()
        schedule.step()
    return Training(losses, accuracy(model))


def exchanged(
    scheme: Any,
    gradients: Sequence[Sequence[np.ndarray]],
    names: Sequence[str],
    compressed: Sequence[int],
    *,
    seed: int,
    step: int,
) -> list[np.ndarray]:
    """Return the averages of the gradients of simulated workers.

    Args:
        scheme: None for float32.
        gradients: by worker and parameter.
        names: of the parameters.
        compressed: indices of parameters with compressed gradients; the others are averaged in float32.
    """
    averages = [np.mean(own, axis=0) for own in zip(*gradients)]
    if scheme is None:
        return averages
    done = simulator.run(
        scheme,
        [[own[i] for i in compressed] for own in gradients],
        names=[names[i] for i in compressed],
        seed=seed,
        step=step,
    )
    for i, decoded in zip(compressed, done.decoded[0]):
        averages[i] = decoded
    return averages


def accuracy(model: nn.Module) -> float:
    """Return the test accuracy of a model."""
    data = digits.load_data()
    model.eval()
    with torch.no_grad():
        classes = model(torch.from_numpy(data.test_images).unsqueeze(1)).argmax(1)
    return float((classes == torch.from_numpy(data.test_labels)).float().mean())


def worker_gradients(*, seed: int, workers: int, steps: int, images_each: int, elements: int) -> np.ndarray:
    """Return gradients of many workers for the same weights, float32[workers, elements].

    Trains in float32 for ``steps`` steps; then each worker takes ``images_each`` images at random. The gradients are
    the first elements of the second convolution.
    """
    torch.set_num_threads(1)
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for images, labels in batches(seed, steps):
        backward(model, images, labels)
        optimizer.step()
    data = digits.load_data()
    random = np.random.default_rng(seed)
    result = np.empty((workers, elements), np.float32)
    for worker in range(workers):
        chosen = random.choice(len(data.train_labels), images_each, replace=False)
        images = torch.from_numpy(data.train_images[chosen]).unsqueeze(1)
        _, gradients = backward(model, images, torch.from_numpy(data.train_labels[chosen]))
        result[worker] = gradients[2][:elements]
    return result
