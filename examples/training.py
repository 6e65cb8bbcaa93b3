"""Arguments and figures that the example trainings share.

It imports no framework. ``hvd`` and ``hvq`` are the modules of Horovod and of horovod_quant for the framework that the
caller trains with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from horovod_quant.transports.traffic import ring_allreduce_bytes

# The options of each method. Those not given have the method's defaults.
METHOD_OPTIONS = {
    "none": (),
    "fp16": (),
    "qsgd": ("bits", "norm", "bucket_size", "exchange"),
    "nuqsgd": ("bits", "norm", "bucket_size", "exchange"),
    "global-qsgd": ("bits", "norm", "levels", "bucket_size"),
    "eden": ("bits", "server_bits", "exchange", "trellis"),
    "binsgdm": (),
    "auto": ("max_nmse",),
}

COMPRESSORS = {
    "qsgd": "QSGD",
    "nuqsgd": "NUQSGD",
    "global-qsgd": "GlobalQSGD",
    "eden": "EDEN",
    "binsgdm": "BinSGDM",
    "auto": "Auto",
}

# Bytes of an element with Horovod's own compressions.
ELEMENT_BYTES = {"none": 4, "fp16": 2}


# ---- arguments ---------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose messages come from one worker, as all parse alike."""

    def __init__(self, hvd: Any, **options: Any) -> None:
        super().__init__(**options)
        self._hvd = hvd

    def error(self, message: str) -> NoReturn:
        if self._hvd.rank() == 0:
            print(f"{self.prog}: error: {message}", file=sys.stderr, flush=True)
        # horovodrun stops the others when the first one ends: let worker 0 print before. Horovod has no barrier for
        # TensorFlow.
        self._hvd.allgather_object(None)
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        if self._hvd.rank() == 0:
            super().print_help(file)


def make_parser(
    program: str, description: str, learning_rates: Mapping[str, float], default: str, hvd: Any
) -> Parser:
    """Return a parser with the options of every training.

    Args:
        learning_rates: of each optimizer that the training offers.
        default: the optimizer for all methods but binsgdm.
    """
    parser = Parser(hvd, prog=program, description=description)
    add = parser.add_argument
    add("--compression", choices=METHOD_OPTIONS, default="none")
    add("--bits", type=int, help="bits per element on the wire (default: that of the method)")
    add(
        "--server-bits",
        type=int,
        help="eden: bits of the second rounding (default: by the number of workers)",
    )
    add("--trellis", action="store_true", default=None, help="eden: trellis-coded quantization")
    add("--norm", choices=("max", "l2"), help="norm that scales a bucket (default: that of the method)")
    add("--levels", choices=("uniform", "exponential"), help="global-qsgd: spacing of the levels")
    add("--bucket-size", type=int, help="elements that share a scale (default: that of the method)")
    add(
        "--max-nmse",
        type=float,
        help="auto: largest nmse of the methods that it tries (default: that of Auto)",
    )
    add(
        "--exchange",
        choices=("allgather", "alltoall", "auto"),
        help="qsgd, nuqsgd, eden: collective of the codes",
    )
    add(
        "--optimizer",
        choices=learning_rates,
        help=f"default: binsgdm with --compression binsgdm, else {default}",
    )
    add("--lr", type=float, help="default: " + ", ".join(f"{v} ({k})" for k, v in learning_rates.items()))
    add("--seed", type=int, nargs="+", default=[0], metavar="SEED", help="train once with each of them (0)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file, after each seed")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def parse_arguments(
    parser: Parser, learning_rates: Mapping[str, float], default: str, hvd: Any, hvq: Any
) -> argparse.Namespace:
    """Parse the arguments, validate those of `make_parser`, and fill in defaults."""
    args = parser.parse_args()
    if args.optimizer is None:
        args.optimizer = "binsgdm" if args.compression == "binsgdm" else default
    if args.lr is None:
        args.lr = learning_rates[args.optimizer]
    for name in sorted({name for options in METHOD_OPTIONS.values() for name in options}):
        if getattr(args, name) is not None and name not in METHOD_OPTIONS[args.compression]:
            takers = ", ".join(method for method, options in METHOD_OPTIONS.items() if name in options)
            option = name.replace("_", "-")
            parser.error(f"--{option} is for {takers}; --compression {args.compression} does not accept it")
    if args.compression == "binsgdm" and args.optimizer != "binsgdm":
        parser.error(
            f"--optimizer {args.optimizer}: --compression binsgdm needs the optimizer of the same name"
        )
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: use a positive number")
    if min(args.seed) < 0:
        parser.error(f"--seed {min(args.seed)}: use 0 or more")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    try:
        compression = make_compression(args, args.seed[0], hvd, hvq)
        if args.compression in COMPRESSORS:
            compression.policy.check_workers(
                hvd.size()
            )  # as the first step would, but before anything starts
    except (NotImplementedError, ValueError) as error:
        parser.error(str(error))
    return args


def make_compression(args: argparse.Namespace, seed: int, hvd: Any, hvq: Any) -> Any:
    """Return the argument ``compression`` of Horovod's optimizer or tape."""
    if args.compression not in COMPRESSORS:
        return getattr(hvd.Compression, args.compression)
    given = {name: getattr(args, name) for name in METHOD_OPTIONS[args.compression]}
    return getattr(hvq, COMPRESSORS[args.compression])(
        seed=seed, **{name: value for name, value in given.items() if value is not None}
    )


# ---- figures -----------------------------------------------------------------------------------------------------


class Record:
    """The figures of one training, and its progress bar.

    Args:
        parameters: number of the model's parameters.
        others: see `make_compression`.
    """

    def __init__(
        self, args: argparse.Namespace, seed: int, steps: int, compression: Any, parameters: int, hvd: Any
    ) -> None:
        self._args, self._seed, self._steps, self._hvd = args, seed, steps, hvd
        self._compression, self._parameters = compression, parameters
        self._losses: list[float] = []
        self._bytes_sent: list[float] = []
        self._ends: list[float] = []
        # horovodrun shows a progress bar, but through a pipe: only without it can tqdm detect a terminal.
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
        """Record the loss of the step that has ended."""
        self._losses.append(loss)
        self._ends.append(time.perf_counter() - self._begin)
        self._bytes_sent.append(self._bytes_so_far())
        self._bar.update()

    def _bytes_so_far(self) -> float:
        """Return the bytes that this worker has sent for gradients."""
        if self._args.compression in COMPRESSORS:
            return self._compression.stats().total.bytes_sent
        return len(self._losses) * self._uncompressed_bytes(ELEMENT_BYTES[self._args.compression])

    def _uncompressed_bytes(self, element: int) -> float:
        return ring_allreduce_bytes(element * self._parameters, self._hvd.size())

    def figures(self, quality: Mapping[str, float], weights: Sequence[np.ndarray]) -> dict[str, Any]:
        """Return the figures; all workers must call it together.

        They are the same on all workers that have trained the same model.

        Args:
            quality: of the trained model, by the name of the measure.
        """
        workers = self._hvd.allgather_object((self._losses, fingerprint(weights)))
        losses, fingerprints = zip(*workers)
        chosen = {"chosen": str(self._compression.report())} if self._args.compression == "auto" else {}
        return {
            "seed": self._seed,
            **chosen,
            **{name: float(value) for name, value in quality.items()},
            "seconds": self._seconds,
            "steps": self._steps,
            "bytes_per_step": self._bytes_sent[-1] / self._steps,
            "float32_bytes_per_step": self._uncompressed_bytes(4),
            "losses": np.mean(losses, axis=0).tolist(),
            "bytes_sent": self._bytes_sent,
            "ends": self._ends,
            "fingerprints": fingerprints,
        }


def fingerprint(weights: Sequence[np.ndarray]) -> str:
    """Return a hash of the weights, equal for equal models."""
    digest = hashlib.sha256()
    for array in weights:
        digest.update(array.tobytes())
    return digest.hexdigest()


def train_all(
    args: argparse.Namespace,
    train: Callable[[int], dict[str, Any]],
    describe: Callable[[dict[str, Any]], str],
    hvd: Any,
) -> None:
    """Call ``train`` with each seed, and report the figures that it returns.

    Args:
        describe: summarizes the quality of a model from its figures.
    """
    runs = []
    for seed in args.seed:
        runs.append(run := train(seed))
        if hvd.rank() == 0:
            ratio = run["float32_bytes_per_step"] / run["bytes_per_step"] if run["bytes_per_step"] else 1.0
            print(
                f"{args.compression}, seed {seed}: {describe(run)}, {run['steps']} steps of "
                f"{run['bytes_per_step']:,.0f} bytes sent ({ratio:.1f}x less than float32), "
                f"{run['seconds']:.1f} s" + (f"; took {run['chosen']}" if "chosen" in run else ""),
                flush=True,
            )
        if len(set(run["fingerprints"])) > 1:
            raise SystemExit("the workers have trained different models")
        if args.json is not None and hvd.rank() == 0:
            write_json(args, runs, hvd.size())


def write_json(args: argparse.Namespace, runs: Sequence[dict[str, Any]], workers: int) -> None:
    """Write the file as a whole: an interruption leaves the runs before."""
    options = {name: value for name, value in vars(args).items() if name not in ("json", "quiet")}
    partial = args.json.with_name(args.json.name + ".partial")
    partial.write_text(json.dumps({**options, "workers": workers, "runs": runs}))
    partial.replace(args.json)
