"""Trains under DDP; the last rank kills itself in the backward pass of a step. Started by test_killed.py."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

import horovod_quant.torch as hvq

STEP = 3


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    ddp_model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    hvq.ddp.register(ddp_model, hvq.QSGD(bits=4))
    for step in range(STEP + 1):
        if step == STEP and dist.get_rank() == dist.get_world_size() - 1:
            model[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        ddp_model.zero_grad()
        ddp_model(torch.ones(4, 64)).sum().backward()
        print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
