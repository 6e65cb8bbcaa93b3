"""Compile the kernels of scripts/gpu-check's parts into Triton's cache.

Needs no GPU.

TRITON_CACHE_DIR=FOLDER python scripts/compile_kernels.py --capability 90
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("resnet50", "bert-base")
METHODS = ("global-qsgd-8", "qsgd-4", "eden-3", "binsgdm")


def variants(models: Sequence[str], methods: Sequence[str], elements: int) -> list[Any]:
    """List the kernels to compile, without running any.

    Those that steps of the models and benchmarks/kernels.py launch.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import cuda_kernels
    import gpu_host
    import torch
    from gpu_checks import ahead

    from horovod_quant.kernels.triton import launching, rotated

    rotated.IN_REGISTERS = 1  # as on a GPU
    found = {}

    def record(kernel: Any, jobs: Any, constants: Any) -> None:
        variant = ahead.variant_of(kernel, constants)
        found[repr(variant)] = variant

    launching.Kernel.__call__ = record
    for model in models:
        for method in methods:
            for size in gpu_host.SIZES:
                gpu_host.measure(method, model, size, 1, Nothing())
    for case in cuda_kernels.cases(elements, 1024, torch.device("cpu")) if elements else ():
        case.call()
    return list(found.values())


class Nothing:
    """A replacement of `gpu_host.Counter` that counts nothing."""

    def __init__(self) -> None:
        self.launches = self.uploads = 2

    def reset(self) -> None:
        pass


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--processes", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods, and nothing else")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    if arguments.list:
        print(
            json.dumps(variants(arguments.models, arguments.only or METHODS, 0 if arguments.only else 4096))
        )
        return 0
    begin = time.perf_counter()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--list"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(ROOT)]
    from gpu_checks import ahead

    listed = [
        ahead.Variant(module, name, tuple(map(tuple, constants)), tuple(map(tuple, options)))
        for module, name, constants, options in json.loads(done.stdout.splitlines()[-1])
    ]
    found = time.perf_counter() - begin
    seconds = ahead.compile_all(listed, arguments.capability, arguments.processes)
    print(
        f"{len(listed)} kernels found in {found:.1f} s; compiled in {time.perf_counter() - begin - found:.1f} s,"
        f" the longest in {max(seconds):.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
