"""Trains a model of 1,000 tensors: nearly as many names as Horovod's response cache holds. Run by test_cache.py."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from torch_harness import METHODS, VARIANTS, base_optimizer

TENSORS = 1000


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(TENSORS)]
    compressor = {**METHODS, **VARIANTS}[sys.argv[1]](group_bytes=1)
    optimizer = hvd.DistributedOptimizer(
        base_optimizer(compressor, parameters),
        [(f"layer{i}.weight", parameter) for i, parameter in enumerate(parameters)],
        compression=compressor,
    )
    for step in range(5):
        optimizer.zero_grad()
        sum((parameter * (hvd.rank() + step)).sum() for parameter in parameters).backward()
        optimizer.step()
    print("TRAINED", flush=True)


if __name__ == "__main__":
    main()
