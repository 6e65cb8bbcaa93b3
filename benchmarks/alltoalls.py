"""Compare ways to send shards between all pairs of workers.

All use Horovod's collectives; with --rate the table shows how close each comes to the time of its bytes.

    horovodrun -np 4 python benchmarks/alltoalls.py --rate 100mbit

Within one alltoall over Gloo the two directions of a pair take turns, because a receiver's readiness waits behind the
data that it sends. The others try to send in one direction of a pair at a time, or through sums:

- one call: what the package does;
- shifts: n - 1 calls; in the i-th, worker r sends to worker r + i alone;
- oriented: two calls; in the first every pair sends in one direction, in the second in the other;
- split: as one call, in four parts one after the other;
- pairwise sums: every pair adds its two shards over a separate process set, and subtracts its local one; no worker has
  to wait for a third;
- gather: an allgather of everything, n× the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from typing import Any, Callable

import horovod.torch as hvd
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from horovod_quant.analysis.units import parse_rate

Way = Callable[[torch.Tensor, str], torch.Tensor]
"""Function of a row per receiver and a name that returns a row per sender."""

PARTS = 4


def one_call(rows: torch.Tensor, name: str) -> torch.Tensor:
    return _send_to(rows, range(hvd.size()), name).reshape(rows.shape)


def split(rows: torch.Tensor, name: str) -> torch.Tensor:
    parts = rows.tensor_split(PARTS, dim=1)
    return torch.cat([one_call(part.contiguous(), f"{name}.{i}") for i, part in enumerate(parts)], dim=1)


def shifts(rows: torch.Tensor, name: str) -> torch.Tensor:
    received = rows.clone()
    for shift in range(1, hvd.size()):
        receiver, sender = ((hvd.rank() + sign * shift) % hvd.size() for sign in (1, -1))
        received[sender] = _send_to(rows, [receiver], f"{name}.{shift}")
    return received


def oriented(rows: torch.Tensor, name: str) -> torch.Tensor:
    received = rows.clone()
    for forward in (True, False):
        others = [other for other in range(hvd.size()) if other != hvd.rank()]
        receivers = [other for other in others if _sends_first(hvd.rank(), other) == forward]
        senders = [other for other in others if _sends_first(other, hvd.rank()) == forward]
        arrived = _send_to(rows, receivers, f"{name}.{forward}")
        received[senders] = arrived.reshape(len(senders), rows.shape[1])
    return received


def _sends_first(worker: int, other: int) -> bool:
    """True if the worker sends to the other in the first call.

    One worker of each pair does, and all workers have the same number of such receivers, within one.
    """
    distance = (other - worker) % hvd.size()
    return 2 * distance < hvd.size() or (2 * distance == hvd.size() and worker < other)


def _send_to(rows: torch.Tensor, receivers: Any, name: str) -> torch.Tensor:
    """Send rows to the receivers; return what arrives, ordered by sender."""
    lengths = [rows.shape[1] if other in receivers else 0 for other in range(hvd.size())]
    splits = torch.tensor(lengths, dtype=torch.int32)
    arrived, _ = hvd.alltoall(rows[list(receivers)].reshape(-1), splits, name)
    return arrived


def rounds_of_pairs(workers: int) -> list[list[tuple[int, int]]]:
    """List rounds in which every pair of workers meets once.

    No worker has two pairs in a round. By the circle method for tournaments.
    """
    seats = workers + workers % 2  # with an odd number one seat is empty, and its partner rests
    circle = list(range(1, seats))
    rounds = []
    for turn in range(seats - 1):
        table = [0, *circle[turn:], *circle[:turn]]
        met = zip(table[: seats // 2], reversed(table[seats // 2 :]))
        rounds.append([(min(pair), max(pair)) for pair in met if max(pair) < workers])
    return rounds


def pairwise_sums(pairs: dict[tuple[int, ...], Any]) -> Way:
    def exchange(rows: torch.Tensor, name: str) -> torch.Tensor:
        numbers = rows.view(torch.int32)
        handles = {
            other: hvd.allreduce_async(numbers[other], op=hvd.Sum, name=f"{name}.{pair}", process_set=process_set)
            for pair, process_set in pairs.items()
            if hvd.rank() in pair
            for other in pair
            if other != hvd.rank()
        }  # fmt: skip
        received = rows.clone()
        for other, handle in handles.items():
            received[other] = (hvd.synchronize(handle) - numbers[other]).view(torch.uint8)
        return received

    return exchange


def gather(rows: torch.Tensor, name: str) -> torch.Tensor:
    everything = hvd.allgather(rows.reshape(1, *rows.shape), name)
    return everything[:, hvd.rank()]


def measure(way: Way, rows: torch.Tensor, expected: torch.Tensor, name: str) -> float:
    """Return the seconds that the slowest worker takes."""
    hvd.allreduce(torch.zeros(1), name="begin")
    begin = time.monotonic()
    received = way(rows, name)
    taken = time.monotonic() - begin
    if not torch.equal(received, expected):
        raise RuntimeError(f"{name}: what arrived is not what was sent")
    return float(hvd.allreduce(torch.tensor([taken], dtype=torch.float64), op=hvd.Max, name="taken"))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--bytes", type=int, default=2_400_000, help="size of a shard, a multiple of 4 (2,400,000)")
    add("--rounds", type=int, default=7, help="measurements of each way (7)")
    add("--json", metavar="FILE", help="also write the seconds of all rounds here")
    add("--rate", help="rate of a host's link, such as 100mbit: also compare with the time of the bytes")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.bytes < 4 or args.bytes % 4:
        parser.error(f"--bytes {args.bytes}: use a positive multiple of 4")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: use at least 1")
    try:
        rate = parse_rate(args.rate) if args.rate else None
    except ValueError as error:
        parser.error(f"--rate: {error}")
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    if hvd.size() < 2:
        parser.error("one worker has no peer to exchange with: use horovodrun -np 2 or more")
    pairs = {}
    for pair in itertools.chain.from_iterable(rounds_of_pairs(hvd.size())):
        pairs[pair] = hvd.add_process_set(pair) if hvd.size() > 2 else hvd.global_process_set
    ways = {
        "one call": one_call,
        "shifts": shifts,
        "oriented": oriented,
        f"split, {PARTS} calls": split,
        "pairwise sums": pairwise_sums(pairs),
        "gather": gather,
    }
    torch.set_num_threads(1)
    numbers = torch.arange(args.bytes, dtype=torch.int32)
    rows, expected = (
        torch.stack([(numbers + 7 * (hvd.size() * a + b)).to(torch.uint8) for a, b in chosen])
        for chosen in (
            [(hvd.rank(), other) for other in range(hvd.size())],
            [(other, hvd.rank()) for other in range(hvd.size())],
        )
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            taken = measure(way, rows, expected, name)
            if number > 0:
                seconds[name].append(taken)
    if hvd.rank() == 0:
        sent = (hvd.size() - 1) * args.bytes
        report(seconds, sent, rate)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"seconds": seconds, "sent": sent, "rate": rate}, file, indent=1)


def report(seconds: dict[str, list[float]], sent: int, rate: float | None) -> None:
    """Print a table of the measured times.

    Args:
        sent: bytes that leave a worker, except with `gather`.
        rate: of a host's link, bytes per second.
    """
    title = f"{hvd.size()} workers, {sent:,} bytes from each"
    columns = ("way", "ms", "range", "of one call's time", *(["of its bytes' time"] if rate else []))
    table = Table(*columns, title=title, box=box.MARKDOWN)
    first = next(iter(seconds.values()))
    for name, own in seconds.items():
        row = [name, f"{1e3 * statistics.median(own):,.1f}", f"{1e3 * min(own):,.1f}-{1e3 * max(own):,.1f}"]
        row.append(f"{statistics.median(a / b for a, b in zip(own, first)):.2f}")
        if rate:
            row.append(f"{statistics.median(own) * rate / sent:.2f}")
        table.add_row(*row)
    Console(width=100, color_system=None).print(table)


if __name__ == "__main__":
    main()
