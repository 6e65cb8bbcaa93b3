"""What a communication hook costs under DDP: wall and CPU time of whole steps, each method beside DDP's own.

    torchrun --nproc-per-node 4 benchmarks/ddp.py --tensors 1000 --elements 4096

The methods take turns in one process, each with a model of its own, so a change of the machine's speed meets all of
them. A step is a backward pass that hands out gradients made beforehand. ``--json`` writes what rank 0 measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq

DDPS_OWN = ("none", "fp16", "bf16", "powersgd")


class HandOut(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class Model(torch.nn.Module):
    """Parameters of the same size, and a loss that gives each its gradient."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        side = max(1, elements // 64)
        self.tensors = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(side, elements // side)) for _ in range(tensors)
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return HandOut.apply(gradients, *self.tensors)


def trained(method: str, arguments: argparse.Namespace) -> DistributedDataParallel:
    """A model under DDP with a method's hook."""
    ddp = DistributedDataParallel(Model(arguments.tensors, arguments.elements), gradient_as_bucket_view=True)
    if method == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "bf16":
        # PyTorch's own of this name refuses to run on a CPU.
        ddp.register_comm_hook(None, lambda state, bucket: _narrow(bucket, torch.bfloat16))
    elif method == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != "none":
        hvq.ddp.register(ddp, hvq.Compressor(method))
    return ddp


def _narrow(bucket: Any, dtype: torch.dtype) -> Any:
    buffer = bucket.buffer()
    narrow = buffer.to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=4096, help="of each")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each method, taking turns")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[*DDPS_OWN, "global-qsgd-8", "qsgdinf-4", "qsgdinf-alltoall-4", "eden-3"],
    )
    parser.add_argument("--json", help="file for the times")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    models = {method: trained(method, arguments) for method in arguments.methods}
    like = next(iter(models.values())).module
    gradients = [torch.randn_like(each) for each in like.tensors]
    wall: dict[str, list[float]] = {method: [] for method in models}
    cpu: dict[str, list[float]] = {method: [] for method in models}
    for turn in range(arguments.rounds + 3):  # the first ones build buckets
        for method, ddp in models.items():
            ddp.zero_grad()
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            ddp(gradients).backward()
            taken = torch.tensor([time.perf_counter() - begin, time.process_time() - begin_cpu])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn >= 3:
                wall[method].append(taken[0].item())
                cpu[method].append(taken[1].item())
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} workers, {arguments.tensors} gradients of {arguments.elements}; medians, ms"
        )
        print(f"{'method':22} {'wall':>8} {'by none':>8} {'CPU':>8} {'by none':>8}")
        for method in models:
            line = f"{method:22}"
            for times in (wall, cpu):
                median = statistics.median(times[method])
                line += f" {1e3 * median:8.1f}"
                line += f" {median / statistics.median(times['none']):8.2f}" if "none" in times else " " * 9
            print(line, flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"arguments": vars(arguments), "wall": wall, "cpu": cpu}, file, indent=1)
    models.clear()
    del ddp
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
