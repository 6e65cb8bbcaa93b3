"""Time the computation of schemes for many small gradients.

Thread CPU time of rank 0, without any transport. Workers run in lockstep in one process, 2 nodes of 2, and only the
steps of rank 0 are timed. Schemes are interleaved, so that all see the same state of the machine; the table shows the
median over the rounds.

    python benchmarks/schemes.py                                  # 1,000 gradients of 4,096 elements
    python benchmarks/schemes.py --tensors 200 --elements 160000 --rounds 5 --json schemes.json
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from horovod_quant import kernels as kernel_backends
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme, Workers
from horovod_quant.transports.simulator import _answers

NODES, LOCAL_SIZE = 2, 2
WORKERS = NODES * LOCAL_SIZE

FLAT: dict[str, Scheme] = {
    "QSGD": QSGD(),
    "QSGD, alltoall": QSGD(exchange="alltoall"),
    "NUQSGD": NUQSGD(),
    "GlobalQSGD": GlobalQSGD(),
    "GlobalQSGD, l2": GlobalQSGD(norm="l2"),
    "GlobalQSGD, exponential": GlobalQSGD(4, levels="exponential"),
    "EDEN": EDEN(),
    "EDEN, server_bits=3": EDEN(server_bits=3),
    "EDEN, server_bits=3, trellis": EDEN(server_bits=3, trellis=True),
    "BinSGDM": BinSGDM(),
    "BinSGDM, server_bits=3": BinSGDM(3),
}


def variants(inside: Sequence[Any]) -> dict[str, tuple[Scheme, int]]:
    """Return each scheme flat, and hierarchical with each of ``inside``.

    With the number of workers of a node.
    """
    found: dict[str, tuple[Scheme, int]] = {}
    for name, scheme in FLAT.items():
        found[name] = (scheme, 1)
        for each in inside:
            found[f"{name}, inside {each}"] = (Hierarchical(scheme, each), LOCAL_SIZE)
    return found


class Exchange:
    """Steps of a scheme among the workers.

    Args:
        scheme: the scheme to time.
        local_size: number of workers of a node.
        groups: each worker's gradients.
        kernels: the backend.
    """

    def __init__(
        self, scheme: Scheme, local_size: int, groups: Sequence[list[np.ndarray]], kernels: Any
    ) -> None:
        self._workers = [Workers(rank, WORKERS, local_size=local_size) for rank in range(WORKERS)]
        self._scheme = scheme.for_workers(self._workers[0])
        self._kernels, self._local_size, self._groups = kernels, local_size, groups
        self._chains = [RngKey(0, f"layer.{i}.weight") for i in range(len(groups[0]))]
        self._outs = [np.empty_like(each) for each in groups[0]]
        has_state = isinstance(getattr(scheme, "inner", scheme), BinSGDM)
        self._states = [self._made_states(worker) if has_state else None for worker in self._workers]

    def _made_states(self, worker: Workers) -> list[BinaryState]:
        found = []
        for chain, values in zip(self._chains, self._groups[0]):
            start, stop = self._scheme.owned(chain.name, len(values), worker)
            found.append(
                BinaryState(np.zeros(stop - start, np.float32), np.zeros(stop - start, np.float32), 0.9)
            )
        return found

    def step(self, number: int) -> float:
        """Run a step; return rank 0's CPU seconds."""
        seconds = 0.0
        exchanges = []
        for worker, values, states in zip(self._workers, self._groups, self._states):
            gradients = [
                Gradient(each, chain, number, state)
                for each, chain, state in zip(values, self._chains, states or [None] * len(values))
            ]
            exchanges.append(self._scheme.begin(gradients, worker, self._kernels))
        answers: list[Any] = [None] * WORKERS
        results: list[Any] = [None] * WORKERS
        while results[0] is None:
            requests: list[Any] = []
            for rank, exchange in enumerate(exchanges):
                begin = time.thread_time()
                try:
                    requests.append(exchange.send(answers[rank]))
                except StopIteration as stop:
                    results[rank] = stop.value
                if rank == 0:
                    seconds += time.thread_time() - begin
            if requests:
                answers = _answers(requests, self._local_size, None)
        begin = time.thread_time()
        results[0].decode(range(len(self._outs)), 1.0 / WORKERS, self._outs)
        return seconds + time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=4096, help="number of elements of each tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", default="native", choices=sorted(kernel_backends.BACKENDS))
    parser.add_argument("--inside", nargs="*", default=["float32", "8"], choices=["float32", "float16", "8"])
    parser.add_argument("--only", nargs="*", help="substrings of names")
    parser.add_argument("--json", help="also write the microseconds per gradient here")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    groups = [
        [rng.standard_normal(args.elements, np.float32) for _ in range(args.tensors)] for _ in range(WORKERS)
    ]
    inside = [int(each) if each.isdigit() else each for each in args.inside]
    backend = kernel_backends.get(args.kernels)
    exchanges = {
        name: Exchange(scheme, local_size, groups, backend)
        for name, (scheme, local_size) in variants(inside).items()
        if not args.only or any(each in name for each in args.only)
    }
    gc.freeze()  # else collections of all schemes' objects fall into the steps of some
    seconds: dict[str, list[float]] = {name: [] for name in exchanges}
    for number in range(args.rounds + 1):
        for name, exchange in exchanges.items():
            seconds[name].append(exchange.step(number))
    found = {name: 1e6 * median(times[1:]) / args.tensors for name, times in seconds.items()}

    table = Table(
        title=f"{args.tensors} gradients of {args.elements} elements, {NODES} x {LOCAL_SIZE} workers"
    )
    table.add_column("scheme")
    table.add_column("us per gradient", justify="right")
    table.add_column("x flat", justify="right")
    for name, value in found.items():
        flat = found.get(name.split(", inside")[0], value)
        table.add_row(name, f"{value:.1f}", f"{value / flat:.2f}")
    Console().print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
