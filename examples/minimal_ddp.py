"""DistributedDataParallel training script with quantized gradients, to copy: replace data and model.

torchrun --nproc-per-node 2 minimal_ddp.py    # append another class of hvq to use it, such as EDEN or BinSGDM
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
images = torch.randn(4096, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
own_images, own_labels = images[rank::size], labels[rank::size]

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
ddp_model = DistributedDataParallel(model)
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None
if isinstance(compression, hvq.BinSGDM):  # the one method that is also an optimizer
    optimizer = own = hvq.optim.BinSGDM(model.parameters(), lr=0.003)
state = hvq.ddp.register(ddp_model, compression, own)

for _step in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(ddp_model(own_images), own_labels).backward()
    optimizer.step()

accuracy = (model(images).argmax(1) == labels).float().mean().item()
if rank == 0:
    ratio = state.stats().total.ratio
    print(f"{compression}: accuracy {accuracy:.1%}, {ratio:.1f}x less traffic", flush=True)
gc.collect()  # PyTorch with Gloo may abort at exit without it
dist.destroy_process_group()
