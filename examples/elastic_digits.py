"""Harness of the elastic trainings: arguments and figures.

It is not an example itself, and imports no framework. ``hvd`` is Horovod's module for the framework that the caller
trains with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import digits
import numpy as np
import script_options
import training

from horovod_quant.frontends.methods import BINSGDM


def make_parser(program: str, hvd: Any) -> training.Parser:
    parser = training.Parser(
        hvd,
        prog=program,
        description="Train on digits with quantized gradients while workers join and leave.",
    )
    add = parser.add_argument
    count = script_options.count
    add("--method", type=script_options.method, default="global-qsgd-8",
        help=f"{script_options.METHOD_HELP} (global-qsgd-8)")  # fmt: skip
    add("--epochs", type=count, default=12, help="(12)")
    add("--batch-size", type=count, default=128,
        help="images per step, over all workers, for any number of them (128)")  # fmt: skip
    add("--batches-per-commit", type=count, default=4,
        help="batches between commits: the most that a lost worker costs (4)")  # fmt: skip
    add("--lr", type=float, help=f"default: {rate_of(BINSGDM)} with binsgdm, else {rate_of('sgd')}")
    add("--json", type=script_options.new_file, metavar="FILE", help="write the figures to this file")
    return parser


def parse_arguments(program: str, hvd: Any) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the arguments; return them and their parser.

    To be called after ``hvd.init()``. The number of workers may change later: see `check_workers`.
    """
    parser = make_parser(program, hvd)
    args = parser.parse_args()
    args.optimizer = BINSGDM if args.method == BINSGDM else "sgd"
    args.lr = rate_of(args.optimizer) if args.lr is None else args.lr
    if not 0 < args.lr < math.inf:
        parser.error(f"argument --lr: {args.lr}: use a positive number")
    check_workers(parser, args, hvd)
    return parser, args


def rate_of(optimizer: str) -> float:
    return digits.LEARNING_RATES[optimizer]


def check_workers(parser: argparse.ArgumentParser, args: argparse.Namespace, hvd: Any) -> None:
    """End the job if the current number of workers cannot train.

    All workers must call it together.
    """
    script_options.check_workers(parser, [args.method], hvd)
    if args.batch_size < hvd.size():
        parser.error(
            f"argument --batch-size: {args.batch_size}: use at least {hvd.size()}, one image per worker"
        )


def report_epoch(args: argparse.Namespace, epoch: int, accuracy: float, hvd: Any) -> None:
    if hvd.rank() == 0:
        print(
            f"{args.method}: epoch {epoch} of {args.epochs}, {hvd.size()} worker(s), test accuracy {accuracy:.2%}",
            flush=True,
        )


def report(
    args: argparse.Namespace,
    batches: int,
    accuracy: float,
    weights: Sequence[np.ndarray],
    compression: Any,
    hvd: Any,
) -> None:
    """Report the end of a training; all workers must call it together."""
    fingerprints = hvd.allgather_object(training.fingerprint(weights))
    run = {"batches": batches, "accuracy": accuracy, "fingerprints": fingerprints}
    text = f"{args.method}: final test accuracy {accuracy:.2%} after {batches} batches"
    if hasattr(compression, "stats"):  # of this worker alone, since it joined
        sent = compression.stats().total
        run.update(sent._asdict())
        text += (
            f"; worker 0 has sent {sent.bytes_sent:,.0f} bytes, float32 would be {sent.float32_bytes:,.0f}"
        )
    if hvd.rank() == 0:
        print(text, flush=True)
    if len(set(fingerprints)) > 1:
        raise SystemExit("the workers have trained different models")
    if args.json is not None and hvd.rank() == 0:
        training.write_json(args, [run], hvd.size())
