"""Trains a small convolutional network on scikit-learn's handwritten digits with quantized gradients.

    horovodrun -np 4 python examples/torch_digits.py --compression global-qsgd --bits 8

A training script as one writes it for Horovod; horovod_quant is the argument ``compression`` of the
DistributedOptimizer, and nothing else. Works with any number of workers, one without horovodrun included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import horovod_quant.torch as hvq
from horovod_quant.traffic import ring_allreduce_bytes

# Which of --bits, --norm and --levels a method takes. Not given, the method's own defaults count.
METHOD_OPTIONS = {
    "none": (),
    "fp16": (),
    "qsgd": ("bits", "norm"),
    "nuqsgd": ("bits", "norm"),
    "global-qsgd": ("bits", "norm", "levels"),
    "binsgdm": (),
}

TRAINING_IMAGES, TEST_IMAGES = 1347, 450

# Chosen for float32 gradients, and the same for every compression. BinSGDM's is the step of every element.
LEARNING_RATES = {"sgd": 0.05, "adam": 0.005, "binsgdm": 0.004}


class Parser(argparse.ArgumentParser):
    """Every worker parses the same arguments; one message is enough."""

    def error(self, message: str) -> NoReturn:
        if hvd.rank() == 0:
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        hvd.barrier()  # horovodrun stops the other workers when the first one ends: let worker 0 speak before
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        if hvd.rank() == 0:
            super().print_help(file)


def make_parser() -> Parser:
    parser = Parser(prog="torch_digits.py", description="Trains on digits with quantized gradients.")
    add = parser.add_argument
    add("--compression", choices=METHOD_OPTIONS, default="none")
    add("--bits", type=int, help="bits an element on the wire (default: the method's)")
    add("--norm", choices=("max", "l2"), help="what a bucket is scaled by (default: the method's)")
    add("--levels", choices=("uniform", "exponential"), help="global-qsgd: spacing of the levels")
    add("--optimizer", choices=LEARNING_RATES, help="default: binsgdm with --compression binsgdm, else sgd")
    add("--lr", type=float, help="default: " + ", ".join(f"{v} ({k})" for k, v in LEARNING_RATES.items()))
    add("--epochs", type=int, default=12, help="(12)")
    add("--batch-size", type=int, default=128, help="images in a step, of all workers together (128)")
    add("--seed", type=int, nargs="+", default=[0], metavar="SEED", help="train once with each of them (0)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.optimizer is None:
        args.optimizer = "binsgdm" if args.compression == "binsgdm" else "sgd"
    if args.lr is None:
        args.lr = LEARNING_RATES[args.optimizer]
    for name in ("bits", "norm", "levels"):
        if getattr(args, name) is not None and name not in METHOD_OPTIONS[args.compression]:
            takers = ", ".join(method for method, options in METHOD_OPTIONS.items() if name in options)
            parser.error(f"--{name} is for {takers}; --compression {args.compression} does not take it")
    if args.compression == "binsgdm" and args.optimizer != "binsgdm":
        parser.error(
            f"--optimizer {args.optimizer}: --compression binsgdm needs the optimizer of the same name"
        )
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: use a positive number")
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: use at least 1")
    if not hvd.size() <= args.batch_size <= TRAINING_IMAGES:
        parser.error(
            f"--batch-size {args.batch_size}: use {hvd.size()} (an image a worker) to {TRAINING_IMAGES}"
        )
    if min(args.seed) < 0:
        parser.error(f"--seed {min(args.seed)}: use 0 or more")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    try:
        compression = make_compression(args, seed=args.seed[0])
        if isinstance(compression, hvq.Compressor):
            compression.policy.check_workers(hvd.size())  # the first step would, but here nothing has started
    except ValueError as error:
        parser.error(str(error))
    return args


def make_compression(args: argparse.Namespace, seed: int) -> Any:
    if args.compression == "none":
        return hvd.Compression.none
    if args.compression == "fp16":
        return hvd.Compression.fp16
    methods = {"qsgd": hvq.QSGD, "nuqsgd": hvq.NUQSGD, "global-qsgd": hvq.GlobalQSGD, "binsgdm": hvq.BinSGDM}
    given = {name: getattr(args, name) for name in METHOD_OPTIONS[args.compression]}
    return methods[args.compression](
        seed=seed, **{name: value for name, value in given.items() if value is not None}
    )


def make_optimizer(args: argparse.Namespace, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr)
    return hvq.optim.BinSGDM(model.parameters(), lr=args.lr, seed=seed)


def make_model() -> nn.Sequential:
    """29,000 parameters; 98.6% of them in tensors of at least 1,024 elements, which are those that are quantized."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images to train and to test with, always the same ones, with each digit as often in both."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0)
    # Pixels are 0 to 16, 5 on average with a standard deviation of 6.
    train_x, test_x = ((torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) - 5) / 6 for x in split[:2])
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def train(
    args: argparse.Namespace, seed: int, train_set: TensorDataset, test_set: TensorDataset
) -> dict[str, Any]:
    """One training; returns its figures, which are the same on every worker."""
    torch.manual_seed(seed)
    model = make_model()
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed)
    loader = DataLoader(train_set, args.batch_size // hvd.size(), sampler=sampler, drop_last=True)

    compression = make_compression(args, seed)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(args, model, seed), named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    losses: list[float] = []
    bytes_sent: list[float] = []
    # horovodrun shows a progress bar, but through a pipe: only without it can tqdm tell whether anybody looks.
    hidden = None if hvd.size() == 1 else False
    begin = time.perf_counter()
    with tqdm(
        total=steps, desc=f"seed {seed}", leave=False, disable=args.quiet or hvd.rank() > 0 or hidden
    ) as progress:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bytes_sent.append(bytes_so_far(compression, model, steps=len(losses)))
                progress.update()
    seconds = time.perf_counter() - begin

    with torch.no_grad():
        images, labels = test_set.tensors
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return {
        "seed": seed,
        "accuracy": accuracy,
        "seconds": seconds,
        "steps": steps,
        "bytes_per_step": bytes_sent[-1] / steps,
        "float32_bytes_per_step": ring_allreduce_bytes(4 * count_parameters(model), hvd.size()),
        "losses": hvd.allreduce(torch.tensor(losses), name="losses").tolist(),  # averaged over the workers
        "bytes_sent": bytes_sent,
        "fingerprints": hvd.allgather_object(fingerprint(model)),
    }


def bytes_so_far(compression: Any, model: nn.Module, steps: int) -> float:
    """Bytes that this worker has sent for gradients."""
    if isinstance(compression, hvq.Compressor):
        return compression.stats().total.bytes_sent
    element = 2 if compression is hvd.Compression.fp16 else 4
    return steps * ring_allreduce_bytes(element * count_parameters(model), hvd.size())


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def fingerprint(model: nn.Module) -> str:
    """Equal on all workers if they have trained the same model."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    args = parse_arguments()
    train_set, test_set = load_data()
    runs = []
    for seed in args.seed:
        runs.append(run := train(args, seed, train_set, test_set))
        if hvd.rank() == 0:
            ratio = run["float32_bytes_per_step"] / run["bytes_per_step"] if run["bytes_per_step"] else 1.0
            print(
                f"{args.compression}, seed {seed}: test accuracy {run['accuracy']:.2%}, {run['steps']} steps of "
                f"{run['bytes_per_step']:,.0f} bytes sent ({ratio:.1f} times fewer than float32), "
                f"{run['seconds']:.1f} s",
                flush=True,
            )
        if len(set(run["fingerprints"])) > 1:
            raise SystemExit("the workers have trained different models")
    if args.json is not None and hvd.rank() == 0:
        options = {name: value for name, value in vars(args).items() if name not in ("json", "quiet")}
        args.json.write_text(json.dumps({**options, "workers": hvd.size(), "runs": runs}))


if __name__ == "__main__":
    main()
