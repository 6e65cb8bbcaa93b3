"""Training of a model with a large embedding, by simulated workers.

It is a part of `eden`. Most rows of the embedding have no gradient in a step. The model predicts the next word of
Python's library from the words before it. Rows are in alphabetical order, so that rows of frequent words, which have
most gradients, are among those of rare words.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from reproduction import gradients, running

CONTEXT = 4
WIDTH, HIDDEN = 32, 128
ANSWERS = 512  # classes: the most frequent words, and one for all others
EMBEDDING = "0.weight"
LEARNING_RATES = {"adam": 0.006, "sgd": 0.2}  # the best for float32, tuned with another seed


class Settings(NamedTuple):
    vocabulary: int
    steps: int
    batch: int  # examples per step, over all workers
    workers: int


class Words(NamedTuple):
    """Text as word numbers, and the classes of words.

    Numbers are in alphabetical order, 0 for unknown words.
    """

    training: np.ndarray
    validation: np.ndarray
    answers: np.ndarray  # class of each word number


@functools.lru_cache(1)
def load_words(vocabulary: int) -> Words:
    text = running.import_example("python_text").load_text()
    words = [
        re.findall(r"\w+|[^\w\s]", numbers.astype(np.uint8).tobytes().decode("ascii")) for numbers in text
    ]
    frequent = [word for word, _ in Counter(words[0]).most_common(vocabulary - 1)]
    numbers = {word: i + 1 for i, word in enumerate(sorted(frequent))}
    answers = np.zeros(vocabulary, np.int64)
    for answer, word in enumerate(frequent[: ANSWERS - 1]):
        answers[numbers[word]] = answer + 1
    training, validation = (np.array([numbers.get(word, 0) for word in part]) for part in words)
    return Words(training, validation, answers)


def make_model(seed: int, vocabulary: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(vocabulary, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, ANSWERS),
    )


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), LEARNING_RATES[name])
    return torch.optim.SGD(model.parameters(), LEARNING_RATES[name], momentum=0.9)


def train(
    scheme: Any, optimizer_name: str, settings: Settings, seed: int, exclude: tuple[str, ...]
) -> dict[str, Any]:
    """Train once with simulated workers.

    Args:
        scheme: see `gradients.exchanged`.
        exclude: names of parameters whose gradients are averaged in float32.

    Returns:
        ``validation_loss``; ``untouched``, the share of embedding rows that no example used; and ``moved``, the root
        mean square of the moves of their elements, relative to that of the other rows.
    """
    torch.set_num_threads(1)
    words = load_words(settings.vocabulary)
    model = make_model(seed, settings.vocabulary)
    optimizer = make_optimizer(optimizer_name, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    names, parameters = zip(*model.named_parameters())
    compressed = [
        i
        for i, parameter in enumerate(parameters)
        if parameter.numel() >= gradients.MIN_ELEMENTS and names[i] not in exclude
    ]
    before = parameters[0].detach().clone()
    touched = np.zeros(settings.vocabulary, bool)
    random = np.random.default_rng(seed)
    for step in range(settings.steps):
        starts = random.integers(len(words.training) - CONTEXT, size=settings.batch)
        shares = []
        for own in np.array_split(starts, settings.workers):
            inputs, answers = _examples(words.training, words.answers, own)
            touched[inputs] = True
            model.zero_grad()
            _loss(model, inputs, answers).backward()
            shares.append([parameter.grad.numpy().reshape(-1).copy() for parameter in parameters])
        averages = gradients.exchanged(scheme, shares, names, compressed, seed=seed, step=step)
        for parameter, average in zip(parameters, averages):
            parameter.grad = torch.from_numpy(average).reshape(parameter.shape)
        optimizer.step()
        schedule.step()
    moved = (parameters[0].detach() - before).square().mean(dim=1).numpy()
    starts = np.linspace(0, len(words.validation) - CONTEXT - 1, 20000).astype(int)
    with torch.no_grad():
        loss = float(_loss(model, *_examples(words.validation, words.answers, starts)))
    return {
        "validation_loss": loss,
        "untouched": float((~touched).mean()),
        "moved": float(np.sqrt(moved[~touched].mean() / moved[touched].mean())) if not touched.all() else 0.0,
    }


def _examples(words: np.ndarray, answers: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return words[starts[:, None] + np.arange(CONTEXT)], answers[words[starts + CONTEXT]]


def _loss(model: nn.Module, inputs: np.ndarray, answers: np.ndarray) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.from_numpy(inputs)), torch.from_numpy(answers))
