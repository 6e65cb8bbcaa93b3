"""The same training as torch_digits.py, while workers join and leave.

    horovodrun --gloo -np 2 --min-np 2 --max-np 4 --host-discovery-script ./discover_hosts.sh \\
        python examples/torch_digits_elastic.py --method global-qsgd-8

The discovery script prints lines such as ``localhost:2``; when its output changes, Horovod starts or stops workers.
The learning rate need not change then: the images of a batch are divided among the current workers.
"""

from __future__ import annotations

import math

import digits
import elastic_digits
import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_digits import make_model, make_optimizer

import horovod_quant.torch as hvq
from horovod_quant.frontends.methods import parse


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    parser, args = elastic_digits.parse_arguments("torch_digits_elastic.py", hvd)
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = map(torch.from_numpy, digits.load_data())
    train_set = TensorDataset(train_x.unsqueeze(1), train_y)
    model = make_model()
    compression = parse(args.method).compression(hvd, hvq)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(args, model, seed=0),
        named_parameters=model.named_parameters(),
        compression=compression,
    )

    @torch.no_grad()
    def test_accuracy() -> float:
        return (model(test_x.unsqueeze(1)).argmax(1) == test_y).float().mean().item()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        """Train from the agreed state; begins anew whenever the workers change."""
        elastic_digits.check_workers(parser, args, hvd)
        state.sampler.reset()  # Horovod itself does not when workers have only been removed
        while state.epoch < args.epochs:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * (1 + math.cos(math.pi * state.epoch / args.epochs)) / 2
            for images, labels in DataLoader(train_set, args.batch_size // hvd.size(), sampler=state.sampler):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                state.sampler.record_batch(state.batch, len(images))
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            elastic_digits.report_epoch(args, state.epoch, test_accuracy(), hvd)

    sampler = hvd.elastic.ElasticSampler(train_set)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    train(state)

    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    elastic_digits.report(args, state.batch, test_accuracy(), weights, compression, hvd)


if __name__ == "__main__":
    main()
