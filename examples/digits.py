"""Harness of the digits examples: arguments and data.

It is not an example itself, and imports no framework. ``hvd`` and ``hvq`` are the modules of Horovod and of
horovod_quant for the framework that the caller trains with.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
import training
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TRAINING_IMAGES, TEST_IMAGES = 1347, 450

# Chosen for float32 gradients, and the same for every compression. That of BinSGDM is the step of every element.
LEARNING_RATES = {"sgd": 0.05, "adam": 0.005, "binsgdm": 0.004}


def make_parser(program: str, hvd: Any) -> training.Parser:
    parser = training.make_parser(
        program, "Train on digits with quantized gradients.", LEARNING_RATES, "sgd", hvd
    )
    add = parser.add_argument
    add("--epochs", type=int, default=12, help="(12)")
    add("--batch-size", type=int, default=128, help="images per step, over all workers (128)")
    return parser


def parse_arguments(program: str, hvd: Any, hvq: Any) -> argparse.Namespace:
    parser = make_parser(program, hvd)
    args = training.parse_arguments(parser, LEARNING_RATES, "sgd", hvd, hvq)
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: use at least 1")
    if not hvd.size() <= args.batch_size <= TRAINING_IMAGES:
        parser.error(
            f"--batch-size {args.batch_size}: use {hvd.size()} (an image per worker) to {TRAINING_IMAGES}"
        )
    return args


def describe(run: dict[str, Any]) -> str:
    return f"test accuracy {run['accuracy']:.2%}"


class Data(NamedTuple):
    """Images, float32 of 8 x 8, and labels 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_data() -> Data:
    """Load the images, always with the same split.

    Each digit has the same share of the images to train and to test with.
    """
    images, labels = load_digits(return_X_y=True)
    # Pixels are 0 to 16, 5 on average with a standard deviation of 6.
    images = (images.astype(np.float32).reshape(-1, 8, 8) - 5) / 6
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0
    )
    return Data(train_x, train_y, test_x, test_y)
