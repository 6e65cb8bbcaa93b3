"""Train with whitening or PowerSGD, which the package lacks. Run by `eden`.

    horovodrun -np 4 python eden_worker.py --whiten --compression eden --bits 2
    horovodrun -np 4 python eden_worker.py --powersgd 2

Other options, model, text and steps are those of examples/torch_char_transformer.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Callable

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_quant.frontends.arguments import MIN_ELEMENTS
from horovod_quant.torch.caller import identify
from horovod_quant.transports.traffic import ring_allreduce_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch_char_transformer as example
import training
from python_text import load_text

BEGINNING = 0.1  # share of the steps without PowerSGD, as PyTorch's documentation advises


class Whitened:
    """Compression of gradients divided by the root mean square of past averages.

    Divides element by element, and multiplies averages by the same divisors. All workers have decoded the same
    averages, so their divisors agree without communication.

    Args:
        compression: of this package, for the quotients.
        memory: decay of the mean square per step.
        floor: the smallest divisor of a tensor, relative to the root of its mean square.
    """

    def __init__(self, compression: Any, memory: float, floor: float) -> None:
        self._compression, self._memory, self._floor = compression, memory, floor
        self._squares: dict[str, torch.Tensor] = {}  # exponential averages
        self._steps: dict[str, int] = {}
        self.stats = compression.stats

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        name = identify(gradient).name
        if gradient.numel() < MIN_ELEMENTS:  # not compressed
            name, divisor = None, None
        else:
            divisor = self._divisor(name)
            if divisor is not None:
                gradient.div_(divisor)  # in place: the average is decoded into this tensor
        sent, context = self._compression.compress(gradient)
        return sent, (context, name, divisor)

    def decompress(self, reduced: torch.Tensor, context: Any) -> torch.Tensor:
        own, name, divisor = context
        average = self._compression.decompress(reduced, own)
        if name is None:
            return average
        if divisor is not None:
            average.mul_(divisor)
        squares = self._squares.setdefault(name, torch.zeros_like(average))
        squares.mul_(self._memory).addcmul_(average, average, value=1 - self._memory)
        self._steps[name] = self._steps.get(name, 0) + 1
        return average

    def _divisor(self, name: str) -> torch.Tensor | None:
        """Return the divisor of a gradient; None while its averages are zero or missing."""
        steps = self._steps.get(name, 0)
        if not steps:
            return None
        roots = (self._squares[name] / (1 - self._memory**steps)).sqrt_()
        typical = float(roots.square().mean().sqrt())
        return roots.clamp_(min=self._floor * typical) if typical > 0 else None


class Loss(nn.Module):
    """Module whose output is the loss, as DistributedDataParallel requires."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.model.loss(windows)


def connect() -> None:
    """Create PyTorch's process group for workers on one machine."""
    store = dist.TCPStore("127.0.0.1", 0, hvd.size(), is_master=True, wait_for_workers=False)
    port = hvd.broadcast_object(store.port, root_rank=0)
    if hvd.rank() > 0:
        store = dist.TCPStore("127.0.0.1", port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def train(args: argparse.Namespace, own: argparse.Namespace, seed: int, data: Any) -> dict[str, Any]:
    """Train as the example does, with another reduction of gradients."""
    model = make_model(args, seed)
    compression = example.make_compression(args, seed)
    if own.whiten:
        compression = Whitened(compression, own.memory, own.floor)
    optimizer = example.make_optimizer(args, model, seed)
    loss_of: Callable[[torch.Tensor], torch.Tensor] = model.loss
    state = None
    if own.powersgd:
        state = powerSGD_hook.PowerSGDState(
            None, own.powersgd, start_powerSGD_iter=max(2, round(BEGINNING * args.steps))
        )
        # Its collectives start in callbacks, which for several buckets run in another order on each worker.
        ddp = DistributedDataParallel(Loss(model), bucket_cap_mb=1000)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        loss_of = ddp
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    figures = run(args, seed, model, data, optimizer, compression, loss_of)
    if state is not None and state.total_numel_before_compression:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        sent = parameters * state.total_numel_after_compression / state.total_numel_before_compression
        figures["bytes_per_step"] = ring_allreduce_bytes(4 * sent, hvd.size())
    return figures


def make_model(args: argparse.Namespace, seed: int) -> Any:
    """Return the model of the example, identical on all workers."""
    torch.manual_seed(seed)
    model = example.CharTransformer(args.layers, args.width, args.heads, args.context)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def run(
    args: argparse.Namespace,
    seed: int,
    model: Any,
    data: Any,
    optimizer: torch.optim.Optimizer,
    compression: Any,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, Any]:
    """Run the steps of the example on its data; return its figures."""
    train_text, validation_text = (torch.from_numpy(text) for text in data)
    sampling = torch.Generator().manual_seed(hvd.size() * seed + hvd.rank())
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: example.schedule((step + 1) / args.steps)
    )

    parameters = sum(parameter.numel() for parameter in model.parameters())
    with training.Record(args, seed, args.steps, compression, parameters, hvd) as record:
        for _ in range(args.steps):
            starts = torch.randint(
                len(train_text) - args.context, (args.batch_size // hvd.size(),), generator=sampling
            )
            optimizer.zero_grad()
            loss = loss_of(example.windows_at(train_text, starts, args.context))
            loss.backward()
            optimizer.step()
            rate.step()
            record.step(loss.item())

    quality = {"validation_loss": example.validate(model, validation_text, args.context)}
    return record.figures(quality, [parameter.detach().numpy() for parameter in model.parameters()])


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--whiten", action="store_true")
    parser.add_argument("--memory", type=float, default=0.98)
    parser.add_argument("--floor", type=float, default=0.1)
    parser.add_argument("--powersgd", type=int, metavar="RANK")
    own, others = parser.parse_known_args()
    sys.argv[1:] = others
    args = example.parse_arguments()
    if own.powersgd:
        connect()
    data = load_text()
    training.train_all(args, lambda seed: train(args, own, seed, data), example.describe, hvd)


if __name__ == "__main__":
    main()
