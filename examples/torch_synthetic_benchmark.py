"""Measure images per second of a training with quantized gradients.

    horovodrun -np 4 python examples/torch_synthetic_benchmark.py --method none fp16 global-qsgd-8

Synthetic images, a residual network. Several methods are measured one after the other, each with a fresh model. Works
with any number of workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import horovod.torch as hvd
import synthetic
import torch
from torch import nn

import horovod_quant.torch as hvq
from horovod_quant.frontends.methods import BINSGDM, parse


class Block(nn.Module):
    """Two convolutions, and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(images) + self.shortcut(images))


def make_model(args: argparse.Namespace) -> nn.Sequential:
    def layers() -> Iterator[nn.Module]:
        yield nn.Conv2d(3, args.width, 3, padding=1, bias=False)
        before = args.width
        for stage in range(synthetic.STAGES):
            after = args.width * 2**stage
            for block in range(args.blocks):
                yield Block(before, after, stride=2 if stage and not block else 1)
                before = after
        yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, synthetic.CLASSES))

    return nn.Sequential(*layers())


def prepare(args: argparse.Namespace, method: str) -> synthetic.Task:
    torch.manual_seed(0)
    model = make_model(args)
    images, labels = map(torch.from_numpy, synthetic.make_batch(args, hvd))
    optimizer_class = hvq.optim.BinSGDM if method == BINSGDM else torch.optim.SGD
    compression = parse(method).compression(hvd, hvq)
    optimizer = hvd.DistributedOptimizer(
        optimizer_class(model.parameters(), lr=synthetic.learning_rate(method)),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def weights() -> list:
        return [parameter.detach().numpy() for parameter in model.parameters()]

    return synthetic.Task(step, weights, compression)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    args = synthetic.parse_arguments("torch_synthetic_benchmark.py", hvd)
    synthetic.compare(args, lambda method: prepare(args, method), hvd)


if __name__ == "__main__":
    main()
