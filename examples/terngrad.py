"""TernGrad, a scheme outside the package, trains on handwritten digits.

    horovodrun -np 4 python examples/terngrad.py

docs/new-scheme.md explains the scheme step by step. It needs no framework: PyTorch and Horovod are imported where the
training begins. The digits are those of scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import horovod_quant
from horovod_quant.codecs.shared_scale import SharedScaleSums
from horovod_quant.kernels.layout import WHOLE_TENSOR
from horovod_quant.reductions.integer_allreduce import IntegerAllreduce
from horovod_quant.schemes.base import Exchange, Gradient, Scheme, Workers


@horovod_quant.register
@dataclass(frozen=True)
class TernGrad(Scheme):
    """TernGrad: -1, 0 or 1 per element, and one scale per tensor.

    Wen, Xu, Yan, Wu, Wang, Chen, Li. TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning. NeurIPS 2017. With the scales shared among the workers, as in its section on scaler sharing.

    1. elements beyond ``clip`` standard deviations of their tensor are cut down to that;
    2. the largest magnitude that is left, over all workers, is the tensor's scale (an allreduce);
    3. an element x becomes sign(x) with probability |x| / scale, and 0 otherwise;
    4. the sum of the workers' integers (an allreduce), times scale / n, is the average.

    Args:
        clip: in standard deviations; None clips nothing, and leaves the average unbiased.

    Raises:
        ValueError: ``clip`` is not a positive number.
    """

    clip: float | None = 2.5

    presets = {"terngrad": {}}
    unbiased = False
    bucket_size = WHOLE_TENSOR

    def __post_init__(self) -> None:
        if self.clip is None:
            return
        is_number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool)
        if not is_number or not 0 < self.clip < math.inf:
            raise ValueError(f"clip={self.clip!r}: use a positive number, for example 2.5, or None")

    def check_workers(self, size: int) -> None:
        if bits_of_sums(size) > 16:
            raise ValueError(f"{size} workers: TernGrad can add the integers of at most 32767 workers")

    def reduction(self, workers: Workers) -> IntegerAllreduce:
        bits = bits_of_sums(workers.size)
        return IntegerAllreduce(SharedScaleSums(bits, levels=1, norm="max", bucket_size=WHOLE_TENSOR))

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        clipped = [gradient.replaced(self.clipped(gradient.values, kernels)) for gradient in gradients]
        return super().begin(clipped, workers, kernels)

    def clipped(self, x: Any, kernels: Any) -> Any:
        if self.clip is None:
            return x
        deviation = kernels.tensor_deviation(x)
        most = kernels.scale([deviation], self.clip, kernels.empty(1))
        least = kernels.scale([deviation], -self.clip, kernels.empty(1))
        return kernels.where(kernels.less(x, least), least, kernels.minimum(x, most))

    def levels_left(self, workers: int, hosts: int) -> int:
        return 1

    def expected_nmse(self, workers: int, hosts: int) -> float | None:
        if self.clip is None:
            return None  # the scale depends on how many elements a tensor has
        x = np.abs(np.random.default_rng(0).standard_normal(2**16))
        kept = np.minimum(x, self.clip)
        rounding, clipping = (self.clip * kept - kept**2).mean(), ((x - kept) ** 2).mean()
        return float((rounding + clipping) / (x**2).mean())


def bits_of_sums(workers: int) -> int:
    """Return the bits of a sum: -1, 0 or 1 per worker."""
    return workers.bit_length() + 1


# ---- a training --------------------------------------------------------------------------------------------------


def make_parser(hvd: Any) -> Any:
    import training

    parser = training.Parser(
        hvd, prog="terngrad.py", description="Train on digits with TernGrad's gradients."
    )
    parser.add_argument(
        "--clip", type=float, default=2.5, help="where to clip gradients, in standard deviations (2.5)"
    )
    parser.add_argument("--no-clip", dest="clip", action="store_const", const=None, help="do not clip")
    parser.add_argument("--lr", type=float, default=0.05, help="(0.05)")
    parser.add_argument("--steps", type=int, default=200, help="(200)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, over all workers (128)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    return parser


def main() -> None:
    import digits
    import horovod.torch as hvd
    import torch
    import training
    from torch_digits import make_model

    import horovod_quant.torch as hvq

    hvd.init()
    torch.set_num_threads(1)  # several workers share a machine
    parser = make_parser(hvd)
    args = parser.parse_args()
    if args.steps < 1 or args.batch_size < hvd.size() or not 0 < args.lr < math.inf:
        parser.error(
            f"use at least 1 for --steps, at least {hvd.size()} for --batch-size, and a positive --lr"
        )
    try:
        compression = hvq.TernGrad(args.clip, seed=args.seed)
    except ValueError as error:
        parser.error(str(error))

    torch.manual_seed(args.seed)
    model = make_model()
    train_x, train_y, test_x, test_y = map(torch.from_numpy, digits.load_data())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    for step in range(args.steps):
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(args.seed + step))
        own = order[: args.batch_size][hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train_x[own].unsqueeze(1)), train_y[own])
        loss.backward()
        optimizer.step()
        schedule.step()

    with torch.no_grad():
        accuracy = (model(test_x.unsqueeze(1)).argmax(1) == test_y).float().mean().item()
    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    if len(set(hvd.allgather_object(training.fingerprint(weights)))) > 1:
        raise SystemExit("the workers have trained different models")
    if hvd.rank() == 0:
        sent = compression.stats().total
        ratio = sent.float32_bytes / sent.bytes_sent if sent.bytes_sent else 1.0
        print(
            f"{compression.policy.scheme}: test accuracy {accuracy:.2%} after {args.steps} steps, "
            f"{ratio:.1f}x less traffic than float32"
        )


if __name__ == "__main__":
    main()
