"""Train with 1-bit Adam or EF-SignSGD, which the package lacks. Run by `rivals`.

    horovodrun -np 4 python rivals_worker.py --rule onebit-adam
    horovodrun -np 4 python rivals_worker.py --rule ef-signsgd --lr 0.03

Other options, model, text and steps are those of examples/torch_char_transformer.py. Workers are real, and send bits as
float32: losses are those of the rule, times are not, and bytes are counted by formula.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import eden_worker
import horovod.torch as hvd
import torch
from eden_worker import example, load_text, training

from horovod_quant.transports.traffic import ring_allreduce_bytes

WARM_UP = 0.15
"""Share of float32 steps in 1-bit Adam: the tutorial of DeepSpeed advises about 15% for BERT."""


class SignAverage:
    """Average of vectors over the workers with one bit per element in each direction.

    A worker sends signs and one scale per vector, and adds the rounding error to its next vectors. Each worker reduces
    a shard of every vector: it averages the vectors that it receives, rounds the average with signs, a scale and an
    error feedback of its own, and sends it to all.

    Args:
        norm: of the scale: 1 for the mean magnitude, 2 for the root mean square.
    """

    def __init__(self, norm: int) -> None:
        self._norm = norm
        self._left_out: list[torch.Tensor] = []
        self._left_out_by_servers: list[torch.Tensor] = []

    def __call__(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._left_out:
            self._left_out, self._left_out_by_servers = (
                [torch.zeros_like(vector) for vector in vectors] for _ in range(2)
            )
        exact = _sums(vectors, self._left_out)
        sent = [self._rounded(each) for each in exact]
        self._left_out = [own - arrived for own, arrived in zip(exact, sent)]
        exact = _sums(averages(sent), self._left_out_by_servers)
        # All workers have the inputs of every reducer here: each computes all shards.
        gathered = [
            torch.cat([self._rounded(part) for part in torch.tensor_split(each, hvd.size())])
            for each in exact
        ]
        self._left_out_by_servers = [own - arrived for own, arrived in zip(exact, gathered)]
        return gathered

    def _rounded(self, vector: torch.Tensor) -> torch.Tensor:
        if not vector.numel():
            return vector
        scale = vector.abs().mean() if self._norm == 1 else vector.square().mean().sqrt()
        return torch.where(vector < 0, -scale, scale)


def _sums(vectors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [vector + other for vector, other in zip(vectors, others)]


def averages(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the averages over the workers, in float32."""
    sizes = [vector.numel() for vector in vectors]
    return list(hvd.allreduce(torch.cat(list(vectors)), name="vectors").split(sizes))


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam: variance frozen after a warm-up, momentum averaged in one bit.

    Source: Tang et al., 1-bit Adam, ICML 2021, Algorithm 1, as DeepSpeed implements it: no correction of biases, and
    the scale is a root mean square.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], lr: float, warm_up: int, betas: tuple[float, float]
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8})
        self.warm_up = warm_up
        self._average = SignAverage(norm=2)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        warming_up = self._steps <= self.warm_up
        gradients = [parameter.grad.flatten() for _, parameter in _each(self)]
        if warming_up:
            gradients = averages(gradients)
        momenta = []
        for (group, parameter), gradient in zip(_each(self), gradients):
            beta1, beta2 = group["betas"]
            state = self.state[parameter]
            if not state:
                state.update(momentum=torch.zeros_like(gradient), variance=torch.zeros_like(gradient))
            if warming_up:
                state["variance"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            momenta.append(state["momentum"].mul_(beta1).add_(gradient, alpha=1 - beta1))
        if not warming_up:
            momenta = self._average(momenta)
        for (group, parameter), momentum in zip(_each(self), momenta):
            state = self.state[parameter]
            state["momentum"].copy_(momentum)
            move = momentum / (state["variance"].sqrt() + group["eps"])
            parameter.sub_(move.view_as(parameter), alpha=group["lr"])


class EFSignSGD(torch.optim.Optimizer):
    """SGD with Nesterov momentum, averaged in one bit with error feedback.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, Algorithm 1; momentum, and error feedback of
    workers and reducers, as in Zheng et al., NeurIPS 2019, with a block per tensor.
    """

    warm_up = 0

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._average = SignAverage(norm=1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        moves = []
        for group, parameter in _each(self):
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
            moves.append((group["lr"] * (group["momentum"] * momentum + parameter.grad)).flatten())
        for (_, parameter), move in zip(_each(self), self._average(moves)):
            parameter.sub_(move.view_as(parameter))


def _each(optimizer: torch.optim.Optimizer) -> Iterable[tuple[dict[str, Any], torch.Tensor]]:
    return ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def bytes_per_step(sizes: Iterable[int], workers: int, steps: int, warm_up: int) -> float:
    """Return the mean bytes per step that a worker sends.

    Counts bits and scales to the reducers, and those of its shard to all workers.

    Args:
        sizes: elements of each tensor.
    """
    sizes = list(sizes)
    others = (workers - 1) / workers
    bits = sum(2 * others * math.ceil(size / 8) for size in sizes)
    scales = sum(4 * 2 * (workers - 1) for _ in sizes)
    warm = ring_allreduce_bytes(4 * sum(sizes), workers)
    return (warm_up * warm + (steps - warm_up) * (bits + scales)) / steps


RULES = ("onebit-adam", "ef-signsgd")


def train(args: argparse.Namespace, rule: str, seed: int, data: Any) -> dict[str, Any]:
    """Train as the example does, with another optimizer."""
    model = eden_worker.make_model(args, seed)
    optimizer: OneBitAdam | EFSignSGD
    if rule == "onebit-adam":
        optimizer = OneBitAdam(model.parameters(), args.lr, round(WARM_UP * args.steps), betas=(0.9, 0.98))
    else:
        optimizer = EFSignSGD(model.parameters(), args.lr)
    figures = eden_worker.run(args, seed, model, data, optimizer, hvd.Compression.none, model.loss)
    sizes = [parameter.numel() for parameter in model.parameters()]
    figures["bytes_per_step"] = bytes_per_step(sizes, hvd.size(), args.steps, optimizer.warm_up)
    return figures


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rule", choices=RULES, required=True)
    own, others = parser.parse_known_args()
    sys.argv[1:] = others
    args = example.parse_arguments()
    data = load_text()
    training.train_all(args, lambda seed: train(args, own.rule, seed, data), example.describe, hvd)


if __name__ == "__main__":
    main()
