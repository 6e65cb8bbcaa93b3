"""Harness of the synthetic benchmarks: arguments, measurement, figures.

It is not an example itself, and imports no framework. ``hvd`` is Horovod's module for the framework that the caller
trains with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import script_options
import training

from horovod_quant.frontends.methods import BINSGDM, compared, parse

CLASSES = 10
STAGES = 3  # each of half the height and width, and twice the channels, of the one before


class Task(NamedTuple):
    """A training with one method.

    Attributes:
        step: trains on one batch, and returns when that is done.
        weights: the trained parameters.
        compression: the optimizer's or tape's argument of that name.
    """

    step: Callable[[], None]
    weights: Callable[[], list[np.ndarray]]
    compression: Any


def learning_rate(method: str) -> float:
    """Return a learning rate with which numbers stay finite.

    There is nothing to learn from random labels.
    """
    return 0.001 if method == BINSGDM else 0.01


def make_parser(program: str, hvd: Any) -> training.Parser:
    parser = training.Parser(
        hvd, prog=program, description="Measure training on synthetic images with quantized gradients."
    )
    add = parser.add_argument
    count = script_options.count
    add("--method", type=script_options.method, nargs="+", default=compared(), metavar="METHOD",
        help=f"methods to compare: {script_options.METHOD_HELP} (default: {' '.join(compared())})")  # fmt: skip
    add("--batch-size", type=count, default=32, help="images per batch and worker (32)")
    add("--num-warmup-batches", type=count, default=10, help="warm-up batches before the measurement (10)")
    add("--num-batches-per-iter", type=count, default=10, help="batches per measurement (10)")
    add("--num-iters", type=count, default=10, help="measurements (10)")
    add("--image-size", type=count, default=32, help="height and width of an image (32)")
    add("--width", type=count, default=16, help="channels of the network's first stage (16)")
    add("--blocks", type=count, default=2, help=f"residual blocks in each of the {STAGES} stages (2)")
    add("--json", type=script_options.new_file, metavar="FILE", help="write the figures to this file")
    return parser


def parse_arguments(program: str, hvd: Any) -> argparse.Namespace:
    parser = make_parser(program, hvd)
    args = parser.parse_args()
    args.method = list(dict.fromkeys(args.method))
    script_options.check_workers(parser, args.method, hvd)
    return args


def make_batch(args: argparse.Namespace, hvd: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[image, channel, row, column]`` and labels, different on each worker."""
    random = np.random.default_rng(hvd.rank())
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    return random.standard_normal(shape, np.float32), random.integers(CLASSES, size=args.batch_size)


def compare(args: argparse.Namespace, prepare: Callable[[str], Task], hvd: Any) -> None:
    """Measure one method after the other, and report each.

    Args:
        prepare: makes a fresh model, optimizer and compressor for a method.
    """
    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(
        f"Residual network of {args.blocks} blocks per stage, width {args.width}; batches of {args.batch_size} "
        f"images of {args.image_size} x {args.image_size} per worker; {hvd.size()} worker(s)",
        flush=True,
    )
    runs = []
    for name in args.method:
        task = prepare(name)
        rates = measure(args, task.step, lambda text, name=name: say(f"{name}, {text}", flush=True))
        runs.append(run := figures(args, name, task, rates, hvd))
        say(summary(run), flush=True)
        if len(set(run["fingerprints"])) > 1:
            raise SystemExit("the workers have trained different models")
        if args.json is not None and hvd.rank() == 0:
            training.write_json(args, runs, hvd.size())


def measure(args: argparse.Namespace, step: Callable[[], None], say: Callable[[str], None]) -> list[float]:
    """Measure images per second on this worker, in each iteration."""
    for _ in range(args.num_warmup_batches):
        step()
    rates = []
    for iteration in range(args.num_iters):
        begin = time.perf_counter()
        for _ in range(args.num_batches_per_iter):
            step()
        seconds = time.perf_counter() - begin
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"iteration {iteration + 1} of {args.num_iters}: {rates[-1]:.1f} images/s on this worker")
    return rates


def figures(
    args: argparse.Namespace, method: str, task: Task, rates: list[float], hvd: Any
) -> dict[str, Any]:
    """Return a method's figures, the same on every worker.

    All workers must call it together. An interval is 1.96 standard deviations of the iterations.
    """
    weights = task.weights()
    workers = hvd.allgather_object((rates, training.fingerprint(weights)))
    all_rates = np.array([worker_rates for worker_rates, _ in workers])
    totals = all_rates.sum(axis=0)
    batches = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter

    def horovods(element: int) -> float:
        return training.ring_allreduce_bytes(element * sum(array.size for array in weights), hvd.size())

    if parse(method).class_name is None:
        sent = horovods(training.ELEMENT_BYTES[method])
    else:
        sent = task.compression.stats().total.bytes_sent / batches
    return {
        "method": method,
        "images_per_second": all_rates.tolist(),
        "per_worker": all_rates.mean(),
        "per_worker_interval": 1.96 * all_rates.std(),
        "total": totals.mean(),
        "total_interval": 1.96 * totals.std(),
        "bytes_per_batch": sent,
        "float32_bytes_per_batch": horovods(4),
        "fingerprints": [fingerprint for _, fingerprint in workers],
    }


def summary(run: dict[str, Any]) -> str:
    workers, sent = len(run["fingerprints"]), run["bytes_per_batch"]
    ratio = run["float32_bytes_per_batch"] / sent if sent else 1.0
    return (
        f"{run['method']}: {run['per_worker']:.1f} +- {run['per_worker_interval']:.1f} images/s per worker, "
        f"{run['total']:.1f} +- {run['total_interval']:.1f} images/s on {workers} worker(s), "
        f"{sent:,.0f} bytes sent per batch ({ratio:.1f}x less than float32)"
    )
