"""Trains with Accelerate, and again from a checkpoint in between. Started by test_frameworks_on_top.py."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

import horovod_quant.torch as hvq

STEPS, SAVED = 4, 2


def trained(folder: str, resumed: bool) -> tuple[torch.Tensor, Any]:
    """The weights' bits after all steps, from the checkpoint on if ``resumed``."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    state = hvq.ddp.register(model, hvq.QSGD(bits=4))
    accelerator.register_for_checkpointing(state)
    if resumed:
        accelerator.load_state(folder)
    for step in range(SAVED if resumed else 0, STEPS):
        own = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 40, generator=own)).square().mean())
        optimizer.step()
        if step == SAVED - 1:
            accelerator.save_state(folder)
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()]), state


def main() -> None:
    whole, state = trained(sys.argv[1], resumed=False)
    assert state.stats().total.ratio > 4
    resumed, state = trained(sys.argv[1], resumed=True)
    assert set(state.state_dict()["exchanges"].values()) == {STEPS}
    assert torch.equal(whole, resumed), (whole - resumed).abs().max()
    everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, whole)
    assert all(torch.equal(each, whole) for each in everyone)
    print(f"rank {dist.get_rank()} PASSED", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
