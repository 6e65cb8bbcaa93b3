"""Train a small convolutional network on handwritten digits with quantized gradients.

    horovodrun -np 4 python examples/torch_digits.py --compression global-qsgd --bits 8

The digits are those of scikit-learn. An ordinary Horovod training script: horovod_quant only appears as the argument
``compression`` of the DistributedOptimizer. Works with any number of workers, including a single one without
horovodrun.
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import horovod.torch as hvd
import torch
import training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod_quant.torch as hvq


def make_model() -> nn.Sequential:
    """Make a model of 29,000 parameters.

    98.6% of them are in tensors of at least 1,024 elements, which are quantized.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def make_optimizer(args: argparse.Namespace, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=args.lr)
    return hvq.optim.BinSGDM(model.parameters(), lr=args.lr, seed=seed)


def train(args: argparse.Namespace, seed: int, data: digits.Data) -> dict[str, Any]:
    """Train once; return the figures."""
    torch.manual_seed(seed)
    model = make_model()
    train_x, train_y, test_x, test_y = map(torch.from_numpy, data)
    train_set = TensorDataset(train_x.unsqueeze(1), train_y)
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=seed, drop_last=True
    )
    loader = DataLoader(train_set, args.batch_size // hvd.size(), sampler=sampler, drop_last=True)

    compression = training.make_compression(args, seed, hvd, hvq)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(args, model, seed), named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps = args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    with training.Record(args, seed, steps, compression, parameters, hvd) as record:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                record.step(loss.item())

    with torch.no_grad():
        accuracy = (model(test_x.unsqueeze(1)).argmax(1) == test_y).float().mean().item()
    return record.figures(
        {"accuracy": accuracy}, [parameter.detach().numpy() for parameter in model.parameters()]
    )


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    args = digits.parse_arguments("torch_digits.py", hvd, hvq)
    data = digits.load_data()
    training.train_all(args, lambda seed: train(args, seed, data), digits.describe, hvd)


if __name__ == "__main__":
    main()
