"""Measure a step's communication like `horovod-quant bench`, in more detail.

Adds CPU times and several group sizes.

    horovodrun -np 2 python benchmarks/exchange.py --model resnet50
    horovodrun -np 4 python benchmarks/exchange.py --methods none fp16 global-qsgd-8 --json exchange.json
    horovodrun -np 2 python benchmarks/exchange.py --methods global-qsgd-4 --group-bytes 1 4 16 64
    horovodrun -np 2 python benchmarks/exchange.py --framework tensorflow
    horovodrun -np 2 python benchmarks/exchange.py --device cuda --model bert-base
    python benchmarks/exchange.py --device interpreter --many-small 8
    horovodrun -np 2 python benchmarks/exchange.py --many-small
    horovodrun -np 4 -H host1:2,host2:2 python benchmarks/exchange.py --methods binsgdm --also-hierarchical
    torchrun --nproc-per-node 4 benchmarks/exchange.py --framework ddp --many-small --methods none powersgd-1 eden-3

The first row of the table, without step communication, is the cost of the backward pass itself. The second table has
CPU times, also as ratios to fp16 within the same round.

With ``--framework ddp``, under ``torchrun``, the methods are communication hooks. They include those of PyTorch: fp16,
bf16, powersgd-1 and powersgd-2.

With ``--device cuda`` the gradients are on a GPU, which the workers of a host share if there are not enough. The last
table then shows the time in Horovod's hooks and in total, beside none and fp16 where Horovod can reduce tensors of a
GPU. One worker is enough there: it shows whether the path works, and counts launches and copies of a step. With
``--device interpreter`` Triton's interpreter does the same on the CPU: a rehearsal, whose times mean nothing.

With ``--many-small`` 1,000 gradients of 4,096 elements replace those of a model, so that the cost of a gradient of any
size dominates. The last table shows that cost: in Horovod's hooks, on the calling thread, and in total.

With ``--also-hierarchical`` each of this package's methods is measured hierarchically as well. Horovod must be allowed
to add process sets: HOROVOD_DYNAMIC_PROCESS_SETS=1. With ``--also-nmse`` each is measured with ``nmse_every=1`` as
well, and the last table shows what that adds to a step; ``nmse_every=100`` adds it to every hundredth step.

The JSON file is like that of `horovod-quant bench`, with more values for each method.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from horovod_quant.analysis.models import MODELS, Shapes
from horovod_quant.bench.command import Plan, Run, run_plan
from horovod_quant.bench.report import shown
from horovod_quant.bench.variants import DDP, DDPS_OWN, Options, Variant
from horovod_quant.cli.problem import Problem
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.frontends.methods import FP16, compared, families, parse

NOTHING = "no exchange"
MIB = 2**20
MANY, SMALL = 1000, 4096
INTERPRETER = "interpreter"


class Nested(Variant):
    """A hierarchical method: workers of a host average among themselves first."""

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        return super().compression(hvd, hvq, hierarchical=True, **options)

    def refusal(self, size: int) -> str | None:
        return None  # it depends on the number of hosts, and the compressor checks it


NMSE = " nmse"
"""End of the label of a `Sampled` method, after that of the method itself."""


class Sampled(Variant):
    """A method that measures the nmse in every step."""

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        return super().compression(hvd, hvq, nmse_every=1, **options)


class ExchangeRun(Run):
    program = "benchmarks/exchange.py"

    def results(self) -> list[dict[str, Any]]:
        results = super().results()
        fp16 = next((result for result in results if result["method"] == FP16), None)
        for variant, result in zip(self.variants, results):
            result["group_bytes"] = variant.group_bytes if variant.ours else None
            for name in ("wall", "cpu"):
                result[f"{name}_times_fp16"] = (
                    None if fp16 is None else ratio(result, fp16, f"{name}_seconds")
                )
        return results

    def tables(self, results: list[dict[str, Any]]) -> list[Any]:
        tables = [*super().tables(results), cpu_table(results)]
        named = {result["method"]: result for result in results}
        sampled = [variant.label for variant in self.variants if isinstance(variant, Sampled)]
        if sampled:
            pairs = [(named[label.removesuffix(NMSE)], named[label]) for label in sampled]
            tables.append(nmse_table(pairs))
        return tables


class HooksRun(ExchangeRun):
    """A run that also measures the time in Horovod's hooks."""

    ratios: tuple[str, ...] = ("hook", "cpu", "wall")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.trials: list[Any] = []

    def make_trial(self, variant: Variant) -> Any:
        self.trials.append(self.make_timed_trial(variant))
        return self.trials[-1]

    def make_timed_trial(self, variant: Variant) -> Any:
        return hooks().Trial(variant, self.gradients, self.plan.options)

    def more(self) -> None:
        rounds = len(self.found.rounds)
        local = [trial.spent[-rounds:] for trial in self.trials]
        means = self.bench.gather(np.ravel(local).tolist()).mean(axis=0)
        by_round = means.reshape(len(local), rounds, -1)
        labels = [trial.variant.label for trial in self.trials]
        self.spent = dict(zip(labels, by_round.transpose(0, 2, 1).tolist()))
        super().more()

    def results(self) -> list[dict[str, Any]]:
        results = super().results()
        if results and hasattr(self, "spent"):
            for result in results:
                for name, seconds in zip(hooks().Spent._fields, self.spent.get(result["method"], ())):
                    result[f"{name}_seconds"] = seconds
            hooks().add_ratios([result for result in results if "hook_seconds" in result], self.ratios)
        return results

    def tables(self, results: list[dict[str, Any]]) -> list[Any]:
        tables = super().tables(results)
        if hasattr(self, "spent"):
            measured = [result for result in results if "hook_seconds" in result]
            tables.append(self.hooks_table(measured))
        return tables

    def hooks_table(self, results: list[dict[str, Any]]) -> Table:
        return hooks().per_gradient_table(results, len(self.plan.shapes))


class CudaRun(HooksRun):
    """A run with gradients on a GPU."""

    fewest_workers = 1
    ratios = ("hook", "wall")

    @property
    def _interpreted(self) -> bool:
        return self.plan.options.device == INTERPRETER

    def refusal(self, variant: Variant) -> str | None:
        found = super().refusal(variant)
        if found or variant.method is None or variant.ours or self._interpreted:
            return found
        problems = self.bench.gather_texts(devices().reduction_problem(self.framework.workers) or "")
        return next(filter(None, problems), None)

    def make_gradients(self, values: list[np.ndarray]) -> Any:
        import exchange_cuda

        if not self._interpreted:
            devices().take_gpu(self.framework.workers)
        return self.framework.Gradients(self.plan.shapes, values, exchange_cuda.DEVICE)

    def make_timed_trial(self, variant: Variant) -> Any:
        import exchange_cuda

        if self.bench.size == 1:
            os.environ["HOROVOD_ELASTIC"] = "1"  # or Horovod's optimizer skips what one worker need not do
        return exchange_cuda.Trial(variant, self.gradients, self.plan.options)

    def more(self) -> None:
        import exchange_launches

        super().more()
        if self.bench.size == 1:
            self.counts = {trial.variant.label: exchange_launches.count(trial) for trial in self.trials}

    def results(self) -> list[dict[str, Any]]:
        results = super().results()
        for result in results:
            result["counts"] = getattr(self, "counts", {}).get(result["method"])
        return results

    def hooks_table(self, results: list[dict[str, Any]]) -> Table:
        import exchange_cuda

        return exchange_cuda.table(results)


def devices() -> Any:
    """Import the module for GPUs, which needs PyTorch."""
    from horovod_quant.bench import devices

    return devices


def hooks() -> Any:
    """Import the module for the time in hooks, which needs PyTorch."""
    import exchange_hooks

    return exchange_hooks


def ratio(result: dict[str, Any], other: dict[str, Any], name: str) -> float:
    return float(np.median(np.array(result[name]) / np.array(other[name])))


def cpu_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="CPU time per worker, ms", box=box.MARKDOWN,
                  caption="Horovod: the share of its threads")  # fmt: skip
    table.add_column("method")
    for column in ("all threads", "x fp16", "Horovod", "system", "page faults"):
        table.add_column(column, justify="right")
    for result in results:
        cpu, horovod, system = (
            f"{1e3 * np.median(result[f'{name}_seconds']):,.1f}"
            for name in ("cpu", "horovod_cpu", "system_cpu")
        )
        ratio = shown(result["cpu_times_fp16"], 2)
        table.add_row(result["method"], cpu, ratio, horovod, system, f"{result['page_faults']:,.0f}")
    return table


def nmse_table(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    """Return the cost of measuring, from results without and with it."""
    table = Table(title="What nmse_every=1 adds to a step", box=box.MARKDOWN,
                  caption="of the step's time without it, in the same rounds")  # fmt: skip
    table.add_column("method")
    for column in ("ms", "share of a step"):
        table.add_column(column, justify="right")
    for plain, sampled in pairs:
        added = np.array(sampled["wall_seconds"]) - np.array(plain["wall_seconds"])
        share = ratio(sampled, plain, "wall_seconds") - 1
        table.add_row(plain["method"], f"{1e3 * np.median(added):+,.1f}", f"{share:+.1%}")
    return table


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time a step's communication of a model's gradients.")
    parser.add_argument("--framework", default="torch", choices=["torch", "tensorflow", DDP])
    parser.add_argument(
        "--model", default="resnet50", choices=MODELS, help="the model whose gradients are averaged"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=compared(),
        metavar="METHOD",
        help=f"what to measure: {', '.join(families())}; with DDP also {', '.join(DDPS_OWN[2:])}",
    )
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each method")
    parser.add_argument("--group-bytes", nargs="+", type=float, default=[GROUP_BYTES / MIB], metavar="MIB",
                        help="size of this package's groups in MiB; several are compared")  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the gradients and of the random rounding"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--plot", metavar="FILE", help="also plot the results here")
    torch = parser.add_argument_group("PyTorch only")
    torch.add_argument("--device", default="cpu", choices=["cpu", "cuda", INTERPRETER],
                       help="device of the gradients")  # fmt: skip
    torch.add_argument("--many-small", nargs="?", type=int, const=MANY, metavar="GRADIENTS",
                       help=f"{MANY:,} gradients of {SMALL:,} elements, or the given number")  # fmt: skip
    torch.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True,
                       help="let communication start during the backward pass")  # fmt: skip
    torch.add_argument("--backward", type=float, default=0.0, metavar="SECONDS",
                       help="let the backward pass sleep this long, as if an accelerator computed it")  # fmt: skip
    torch.add_argument("--also-hierarchical", action="store_true",
                       help="measure this package's methods hierarchically as well")  # fmt: skip
    torch.add_argument("--also-nmse", action="store_true",
                       help="measure this package's methods with nmse_every=1 as well")  # fmt: skip
    tensorflow = parser.add_argument_group("TensorFlow only")
    tensorflow.add_argument("--groups", type=int, metavar="NUMBER",
                            help="number of groups in which Horovod reduces the gradients")  # fmt: skip
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.framework != "tensorflow" and arguments.groups:
        parser.error("--groups is for TensorFlow")
    if arguments.many_small is not None and arguments.many_small < 1:
        parser.error(f"--many-small {arguments.many_small}: use at least one gradient")
    if arguments.device == INTERPRETER:
        os.environ.update(TRITON_INTERPRET="1", HOROVOD_QUANT_KERNELS="triton")
    if arguments.device != "cpu":
        if arguments.framework != "torch":
            parser.error(f"--device {arguments.device}: it is for PyTorch; use --framework torch")
    if arguments.framework == "tensorflow":
        if arguments.many_small is not None:
            parser.error("--many-small is for PyTorch")
        torch_only = (
            arguments.backward, arguments.also_hierarchical, arguments.also_nmse, not arguments.overlap
        )  # fmt: skip
        if any(torch_only):
            parser.error("--backward, --also-hierarchical, --also-nmse and --no-overlap are for PyTorch")
    return arguments


def plan(arguments: argparse.Namespace) -> Plan:
    sizes = [int(size * MIB) for size in arguments.group_bytes]
    is_ddp = arguments.framework == DDP
    variants = [] if is_ddp else [Variant(NOTHING, None, sizes[0])]
    for name in dict.fromkeys(arguments.methods):
        if is_ddp and name in DDPS_OWN[2:]:
            variants.append(Variant(name, None, sizes[0]))
            continue
        with Problem.of("--methods"):
            method = parse(name)
        several = len(sizes) > 1 and method.scheme() is not None
        for size in sizes if several else sizes[:1]:
            label = f"{method.name}, {round(size / MIB, 2):g} MiB" if several else method.name
            variants.append(Variant(label, method, size, arguments.seed))
            if arguments.also_hierarchical and variants[-1].ours:
                variants.append(Nested(f"{label} hierarchical", method, size, arguments.seed))
            if arguments.also_nmse and variants[-1].ours and variants[-1].averages:
                variants.append(Sampled(f"{label}{NMSE}", method, size, arguments.seed))
    return Plan(
        framework=arguments.framework,
        model="many-small" if arguments.many_small else arguments.model,
        shapes=many_small(arguments.many_small) if arguments.many_small else MODELS[arguments.model],
        variants=variants,
        options=Options(arguments.backward, arguments.overlap, arguments.groups, arguments.device),
        rounds=arguments.rounds,
        seed=arguments.seed,
        json=arguments.json,
        plot=arguments.plot,
        problem=device_problem(arguments.device),
    )


def many_small(count: int) -> Shapes:
    return {f"small.{number}": (SMALL,) for number in range(count)}


def device_problem(device: str) -> str:
    """Explain why this worker cannot use the device; empty if it can."""
    if device != "cuda":
        return ""
    with Problem.of("--framework torch"):
        problem = devices().gpu_problem()
    return f"--device {device}: {problem}" if problem else ""


def main() -> int:
    arguments = parse_arguments()
    has_hooks = arguments.many_small and arguments.framework != DDP
    kind = CudaRun if arguments.device != "cpu" else HooksRun if has_hooks else ExchangeRun
    return run_plan(lambda: plan(arguments), kind)


if __name__ == "__main__":
    raise SystemExit(main())
