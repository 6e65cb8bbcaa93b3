"""FSDP2 training script with quantized gradients, to copy: replace data and model.

torchrun --nproc-per-node 4 minimal_fsdp.py    # as two nodes; append another class of hvq to use it
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import horovod_quant.torch as hvq

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("node", "worker"))["worker"]
torch.manual_seed(1)
images = torch.randn(4096, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
fully_shard(model, mesh=mesh)
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
state = hvq.fsdp.register(model, compression)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _step in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[rank::size]), labels[rank::size]).backward()
    optimizer.step()

accuracy = (model(images).argmax(1) == labels).float().mean().item()
if rank == 0:
    print(
        f"{compression}: accuracy {accuracy:.1%}, {state.stats().total.ratio:.1f}x less traffic",
        flush=True,
    )
gc.collect()  # PyTorch with Gloo may abort at exit without it
dist.destroy_process_group()
