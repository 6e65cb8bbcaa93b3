"""Compare the nmse with independent and with correlated rounding.

By method, workers, and how much their gradients have in common. Simulated, with Gaussian gradients: that of a worker is
``sqrt(rho) common + sqrt(1 - rho) local``. The nmse is ``||average - exact||^2 / ||exact||^2``.

    python benchmarks/correlated_rounding.py
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import numpy as np

from horovod_quant import simulator
from horovod_quant.frontends import methods

METHODS = (
    "global-qsgd-8",
    "qsgd-4-bucket1024-allgather",
    "nuqsgd-4-allgather",
    "qsgd-4-bucket1024-alltoall",
    "global-qsgd-4-exponential",
)
SIZES = (2, 3, 4, 5, 8, 16)
CORRELATIONS = (0.0, 0.5, 1.0)


def gradients(size: int, rho: float, elements: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    local = rng.standard_normal((size, elements))
    return math.sqrt(rho) * rng.standard_normal(elements) + math.sqrt(1 - rho) * local


def errors(method: str, size: int, rho: float, elements: int) -> tuple[float, float]:
    """Return the nmse with independent and with correlated rounding."""
    scheme: Any = methods.parse(method).scheme()
    given = gradients(size, rho, elements)
    independent, correlated = (
        simulator.run(replace(scheme, rounding=rounding), given).nmse
        for rounding in ("independent", "correlated")
    )
    return independent, correlated


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare the nmse with independent and with correlated rounding."
    )
    parser.add_argument("--elements", type=int, default=2**17, help="number of elements per gradient")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    print("| method | " + " | ".join(f"n = {size}" for size in SIZES) + " |")
    print("| --- |" + " --- |" * len(SIZES))
    for method in METHODS:
        for rho in CORRELATIONS:
            cells = []
            for size in SIZES:
                independent, correlated = errors(method, size, rho, arguments.elements)
                cells.append(f"{independent:.2g}, {correlated:.2g}")
            print(f"| `{method}`, {rho:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
