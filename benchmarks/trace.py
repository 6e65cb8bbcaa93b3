"""Trace one training step in which another worker is late.

    horovodrun -np 2 python benchmarks/trace.py
    horovodrun -np 2 python benchmarks/trace.py --late 0 --json trace.json

Prints what this package did on rank 0, by ``torch.profiler``: when each range began, how long it took, and on which
thread. The JSON file is for Perfetto (https://ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

import argparse
import os
import time

import horovod.torch as hvd
import torch
from torch.profiler import ProfilerActivity, profile

import horovod_quant.torch as hvq

WARM_UP = 3
PREFIX = "horovod_quant."


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace one step.")
    parser.add_argument("--late", type=float, default=0.1, help="seconds by which the last rank is late")
    parser.add_argument("--json", help="also write the trace here")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        compression=hvq.EDEN(group_bytes=2**23),
    )
    x = torch.randn(64, 1024)

    def step(late: float = 0.0) -> None:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        if hvd.rank() == hvd.size() - 1:
            time.sleep(late)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    hvd.barrier()
    # Without it PyTorch records only the calling thread.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
        begin = time.perf_counter()
        step(arguments.late)
        seconds = time.perf_counter() - begin
    if hvd.rank() == 0:
        ranges = [event for event in found.events() if event.name.startswith(PREFIX)]
        ranges.sort(key=lambda event: event.time_range.start)
        first = ranges[0].time_range.start
        threads = {event.thread for event in ranges if event.name.startswith(f"{PREFIX}wait")}
        print(f"a step of {1e3 * seconds:.1f} ms on rank 0; begin and length of ranges, ms:")
        for event in ranges:
            span = event.time_range
            thread = "script  " if event.thread in threads else "progress"
            print(f"{(span.start - first) / 1e3:8.2f} {span.elapsed_us() / 1e3:8.2f}  {thread}  {event.name}")
        if arguments.json:
            found.export_chrome_trace(os.path.abspath(arguments.json))
    hvd.barrier()


if __name__ == "__main__":
    main()
