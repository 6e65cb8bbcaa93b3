"""PyTorch training script with quantized gradients, to copy: replace data and model.

horovodrun -np 2 python minimal_torch.py    # append another class of hvq to use it, such as EDEN or BinSGDM
"""

import sys

import horovod.torch as hvd
import torch

import horovod_quant.torch as hvq

hvd.init()
torch.manual_seed(1)
images = torch.randn(4096, 64)
labels = (images @ torch.randn(64, 10)).argmax(1)
own_images, own_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
compression = getattr(hvq, sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD")()
if isinstance(compression, hvq.BinSGDM):  # the one method that is also an optimizer
    optimizer = hvq.optim.BinSGDM(model.parameters(), lr=0.003)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for _step in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(own_images), own_labels).backward()
    optimizer.step()

accuracy = (model(images).argmax(1) == labels).float().mean().item()
sent = compression.stats().total
if hvd.rank() == 0:
    print(f"{compression}: accuracy {accuracy:.1%}, {sent.ratio:.1f}x less traffic", flush=True)
