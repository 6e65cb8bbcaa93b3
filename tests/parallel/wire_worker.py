"""Measures what crosses the loopback interface while a large gradient is exchanged. Run by test_wire.py."""

from __future__ import annotations

import json
from typing import Any

import horovod.torch as hvd
import torch
from torch_harness import METHODS, VARIANTS, base_optimizer

STEPS = 8


def loopback_bytes() -> int:
    """Sent over the loopback interface of this process's network namespace (/sys would show the first one's)."""
    with open("/proc/self/net/dev") as counters:
        line = next(line for line in counters if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(make: Any) -> dict[str, float]:
    """Bytes that all workers send in STEPS steps: by their own account, and by the interface's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000)
    compressor = make()
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    torch.manual_seed(hvd.rank())
    counted, wire = 0.0, 0
    for step in range(STEPS + 1):
        if step == 1:  # the first step also negotiates
            hvd.barrier()
            counted, wire = compressor.stats().total.bytes_sent, loopback_bytes()
        optimizer.zero_grad()
        model(torch.randn(4, 1000)).pow(2).mean().backward()
        optimizer.step()
    hvd.barrier()
    wire = loopback_bytes() - wire
    counted = compressor.stats().total.bytes_sent - counted
    total = hvd.allreduce(torch.tensor([counted], dtype=torch.float64), op=hvd.Sum, name="counted")
    return {"counted": total.item(), "wire": wire}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    for method, make in {**METHODS, **VARIANTS}.items():
        figures = measure(make)
        if hvd.rank() == 0:
            print("\nFIGURES", json.dumps({"method": method, **figures}), flush=True)


if __name__ == "__main__":
    main()
