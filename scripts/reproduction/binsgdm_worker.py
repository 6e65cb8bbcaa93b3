"""Train with the rule of BinSGDM without some roundings. Run by `binsgdm_tuning`.

    horovodrun -np 4 python binsgdm_worker.py --beta 0.8 --rounding both --compression binsgdm
    horovodrun -np 4 python binsgdm_worker.py --beta 0.8 --rounding none

With ``both`` it is the optimizer of the package, where ``--server-bits`` above 1 leaves out the second rounding.
Otherwise workers average float32 values: with ``workers`` their bits, whose mean a reducer has before it rounds; with
``none`` the values before the first rounding. Other options, model, text and steps are those of
examples/torch_char_transformer.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import eden_worker
import horovod.torch as hvd
import torch
from eden_worker import example, load_text, training

import horovod_quant.torch as hvq

ROUNDINGS = ("both", "workers", "none")


class Rule(torch.optim.Optimizer):
    """Update rule of BinSGDM without the rounding by a reducer.

    Momentum divided by the mean magnitude, averaged over the workers.

    Source: Peng et al., NeurIPS 2023, Algorithm 1.

    Args:
        bits: True if each worker rounds its quotient to one bit at random, without bias.
        seed: of the bits, which differ between workers.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], lr: float, beta: float, bits: bool, seed: int
    ) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})
        self._bits = bits
        self._random = torch.Generator().manual_seed(hvd.size() * seed + hvd.rank())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        handles = []
        for number, (group, parameter) in enumerate(self._each()):
            state = self.state[parameter]
            if not state:
                state.update(momentum=torch.zeros_like(parameter), scale=torch.zeros_like(parameter))
            beta, gradient = group["beta"], parameter.grad
            momentum = state["momentum"].mul_(beta).add_(gradient, alpha=1 - beta)
            scale = state["scale"].mul_(beta).add_(gradient.abs(), alpha=1 - beta)
            update = torch.where(scale > 0, momentum / scale, torch.zeros_like(scale))
            if self._bits:
                drawn = torch.rand(update.shape, generator=self._random)
                update = torch.where(drawn < (1 + update) / 2, 1.0, -1.0)
            handles.append(hvd.allreduce_async(update, name=f"update.{number}"))
        for handle, (group, parameter) in zip(handles, self._each()):
            parameter.sub_(hvd.synchronize(handle), alpha=group["lr"])

    def _each(self) -> Iterable[tuple[dict[str, Any], torch.Tensor]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])


def train(args: argparse.Namespace, own: argparse.Namespace, seed: int, data: Any) -> dict[str, Any]:
    """Train as the example does, with another optimizer."""
    model = eden_worker.make_model(args, seed)
    compression: Any
    optimizer: torch.optim.Optimizer
    if own.rounding == "both":
        compression = hvq.BinSGDM(server_bits=own.server_bits, seed=seed)
        optimizer = hvd.DistributedOptimizer(
            hvq.optim.BinSGDM(model.parameters(), lr=args.lr, beta=own.beta, seed=seed),
            named_parameters=model.named_parameters(),
            compression=compression,
        )
    else:
        compression = example.make_compression(args, seed)
        optimizer = Rule(model.parameters(), args.lr, own.beta, own.rounding == "workers", seed)
    return eden_worker.run(args, seed, model, data, optimizer, compression, model.loss)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--rounding", choices=ROUNDINGS, required=True)
    parser.add_argument("--server-bits", type=int, default=1, help="of hvq.BinSGDM, with both roundings")
    own, others = parser.parse_known_args()
    sys.argv[1:] = others
    args = example.parse_arguments()
    data = load_text()
    training.train_all(args, lambda seed: train(args, own, seed, data), example.describe, hvd)


if __name__ == "__main__":
    main()
