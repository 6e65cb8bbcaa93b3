"""What the digits examples share: arguments, data, figures. It imports no framework.

``hvd`` and ``hvq`` are the modules of Horovod and of horovod_quant for the framework that the caller trains with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

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

COMPRESSORS = {"qsgd": "QSGD", "nuqsgd": "NUQSGD", "global-qsgd": "GlobalQSGD", "binsgdm": "BinSGDM"}

# Bytes of an element with Horovod's own compressions.
ELEMENT_BYTES = {"none": 4, "fp16": 2}

TRAINING_IMAGES, TEST_IMAGES = 1347, 450

# Chosen for float32 gradients, and the same for every compression. BinSGDM's is the step of every element.
LEARNING_RATES = {"sgd": 0.05, "adam": 0.005, "binsgdm": 0.004}


# ---- arguments ---------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Every worker parses the same arguments; one message is enough."""

    def __init__(self, hvd: Any, **options: Any) -> None:
        super().__init__(**options)
        self._hvd = hvd

    def error(self, message: str) -> NoReturn:
        if self._hvd.rank() == 0:
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        # horovodrun stops the others when the first one ends: let worker 0 speak before. Horovod has no barrier for
        # TensorFlow.
        self._hvd.allgather_object(None)
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        if self._hvd.rank() == 0:
            super().print_help(file)


def make_parser(program: str, hvd: Any) -> Parser:
    parser = Parser(hvd, prog=program, description="Trains on digits with quantized gradients.")
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


def parse_arguments(program: str, hvd: Any, hvq: Any) -> argparse.Namespace:
    parser = make_parser(program, hvd)
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
        compression = make_compression(args, args.seed[0], hvd, hvq)
        if args.compression in COMPRESSORS:
            compression.policy.check_workers(hvd.size())  # the first step would, but here nothing has started
    except ValueError as error:
        parser.error(str(error))
    return args


def make_compression(args: argparse.Namespace, seed: int, hvd: Any, hvq: Any) -> Any:
    """What goes into ``compression=`` of Horovod's optimizer or tape."""
    if args.compression not in COMPRESSORS:
        return getattr(hvd.Compression, args.compression)
    given = {name: getattr(args, name) for name in METHOD_OPTIONS[args.compression]}
    return getattr(hvq, COMPRESSORS[args.compression])(
        seed=seed, **{name: value for name, value in given.items() if value is not None}
    )


# ---- data --------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Images, float32 of 8 x 8, and labels 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_data() -> Data:
    """Images to train and to test with, always the same ones, with each digit as often in both."""
    images, labels = load_digits(return_X_y=True)
    # Pixels are 0 to 16, 5 on average with a standard deviation of 6.
    images = (images.astype(np.float32).reshape(-1, 8, 8) - 5) / 6
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=TEST_IMAGES, stratify=labels, random_state=0
    )
    return Data(train_x, train_y, test_x, test_y)


# ---- figures -----------------------------------------------------------------------------------------------------


class Record:
    """Takes the figures of one training, and shows its progress.

    Args:
        parameters: how many the model has.
        others: see `make_compression`.
    """

    def __init__(
        self, args: argparse.Namespace, seed: int, steps: int, compression: Any, parameters: int, hvd: Any
    ) -> None:
        self._args, self._seed, self._steps, self._hvd = args, seed, steps, hvd
        self._compression, self._parameters = compression, parameters
        self._losses: list[float] = []
        self._bytes_sent: list[float] = []
        # horovodrun shows a progress bar, but through a pipe: only without it can tqdm tell whether anybody looks.
        hidden = None if hvd.size() == 1 else False
        self._bar = tqdm(
            total=steps, desc=f"seed {seed}", leave=False, disable=args.quiet or hvd.rank() > 0 or hidden
        )

    def __enter__(self) -> Record:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds = time.perf_counter() - self._begin
        self._bar.close()

    def step(self, loss: float) -> None:
        """Takes the loss of the step that has ended."""
        self._losses.append(loss)
        self._bytes_sent.append(self._bytes_so_far())
        self._bar.update()

    def _bytes_so_far(self) -> float:
        """Bytes that this worker has sent for gradients."""
        if self._args.compression in COMPRESSORS:
            return self._compression.stats().total.bytes_sent
        return len(self._losses) * self._uncompressed_bytes(ELEMENT_BYTES[self._args.compression])

    def _uncompressed_bytes(self, element: int) -> float:
        return ring_allreduce_bytes(element * self._parameters, self._hvd.size())

    def figures(self, accuracy: float, weights: Sequence[np.ndarray]) -> dict[str, Any]:
        """The same on every worker, if they have trained the same model; all must ask for them."""
        workers = self._hvd.allgather_object((self._losses, fingerprint(weights)))
        losses, fingerprints = zip(*workers)
        return {
            "seed": self._seed,
            "accuracy": float(accuracy),
            "seconds": self._seconds,
            "steps": self._steps,
            "bytes_per_step": self._bytes_sent[-1] / self._steps,
            "float32_bytes_per_step": self._uncompressed_bytes(4),
            "losses": np.mean(losses, axis=0).tolist(),
            "bytes_sent": self._bytes_sent,
            "fingerprints": fingerprints,
        }


def fingerprint(weights: Sequence[np.ndarray]) -> str:
    """Equal on all workers if they have trained the same model."""
    digest = hashlib.sha256()
    for array in weights:
        digest.update(array.tobytes())
    return digest.hexdigest()


def train_all(args: argparse.Namespace, train: Callable[[int], dict[str, Any]], hvd: Any) -> None:
    """Calls ``train`` with each seed, and reports the figures that it returns."""
    runs = []
    for seed in args.seed:
        runs.append(run := train(seed))
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
