"""Trains some steps under Horovod or DDP, from a checkpoint if there is one, and prints losses to the bit.

python from_horovod_worker.py horovod|ddp CHECKPOINT FIRST_STEP STEPS eden|binsgdm
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

import horovod_quant.torch as hvq

door, checkpoint, first, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
own = hvq.optim.BinSGDM(model.parameters(), lr=0.01) if sys.argv[5] == "binsgdm" else None
optimizer = own or torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
compression = hvq.EDEN(bits=2) if own is None else hvq.BinSGDM()
saved = torch.load(checkpoint) if checkpoint.exists() else None
if saved:
    model.load_state_dict(saved["model"])
    compression.load_state_dict(saved["compression"])
if door == "horovod":
    import horovod.torch as hvd

    hvd.init()
    rank, trained, state = hvd.rank(), model, compression
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
else:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, trained = dist.get_rank(), DistributedDataParallel(model)
    state = hvq.ddp.register(trained, compression, own)
if saved:
    optimizer.load_state_dict(saved["optimizer"])  # after Horovod has wrapped it, which forgets the state
for step in range(first, first + steps):
    optimizer.zero_grad()
    data = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (trained(data) - data[:, :30]).square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item().hex()}.", flush=True)
if rank == 0:
    contents = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": state.state_dict(),
    }
    torch.save(contents, checkpoint)
if door == "ddp":
    dist.barrier()
    del trained
    gc.collect()
    dist.destroy_process_group()
