"""Compare Auto's choice with none and every method that it tries.

    horovodrun -np 2 python benchmarks/auto.py
    horovodrun -np 4 python benchmarks/auto.py --shapes 1024x1024 1024x1024 64 --backward 0.05 --json auto.json
    horovodrun -np 4 python benchmarks/auto.py --rounds 1 --watch 120 --again-after 20

Auto's trial runs first, alone; then each round measures none, Auto and each method once, as `horovod-quant bench`
does. With ``--watch`` it continues for the given seconds, during which the network's rate may be changed, and prints
the result of each trial that ends. The JSON file is like that of `horovod-quant bench`; its ``auto`` is Auto's report.

`scripts/lab-auto` runs it between the hosts of a lab.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np

from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.shapes import parse_shapes
from horovod_quant.autotune import candidates, trial
from horovod_quant.bench.command import Plan, Run, run_plan
from horovod_quant.bench.variants import Options, Variant
from horovod_quant.cli.problem import Problem
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.frontends.methods import NONE, parse
from horovod_quant.schemes.base import Workers

AUTO = "auto"
CACHE = "16384"  # of Horovod's responses: the collectives of each method have separate names


class AutoVariant(Variant):
    """Auto as a method of the benchmark.

    ``method`` represents those that Auto takes: methods of this package, for every optimizer.
    """

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        return hvq.Auto(group_bytes=self.group_bytes, seed=self.seed, **options)


class AutoRun(Run):
    program = "benchmarks/auto.py"
    watch = 0.0
    again_after = 0

    def _leave_out(self) -> None:
        """Add the methods that Auto tries with this number of workers."""
        found = candidates.find(candidates.MOST_NMSE, Workers(0, self.bench.size), False, candidates.usable())
        self.variants += [Variant(each.name, parse(each.name), GROUP_BYTES) for each in found]

    def make_trial(self, variant: Variant) -> Any:
        made = super().make_trial(variant)
        if variant.label == AUTO:
            # The steps of its trial, with the first one and the one that decides.
            made.warm_up = len(trial.timetable(len(self.variants) - 1)) + 3
            self.auto = made._compression
        return made

    def more(self) -> None:
        self.setting[AUTO] = self.auto.report()._asdict()
        self._say(f"auto {self.auto.report()}")
        if self.watch:
            self._watch()

    def _watch(self) -> None:
        import horovod.torch as hvd

        import horovod_quant.torch as hvq

        followed = super().make_trial(Variant("watched", parse(NONE), GROUP_BYTES))
        auto = hvq.Auto(again_after=self.again_after)
        followed._optimizer._compression = auto
        begin, shown, going = time.monotonic(), (), True
        while going:
            self.bench.measured(followed)
            report = auto.report()
            if report.step == report.steps and report.measurements != shown:
                shown = report.measurements
                self._say(f"after {time.monotonic() - begin:.0f} s auto {report}")
            # The first worker's clock decides for all.
            going = bool(hvd.broadcast_object(time.monotonic() - begin < self.watch, name="going"))

    def tables(self, results: list[dict[str, Any]]) -> list[Any]:
        return [*super().tables(results), verdict(results)]


def verdict(results: list[dict[str, Any]]) -> str:
    """Compare Auto's time with the fastest method, in the same rounds."""
    walls = {result["method"]: np.array(result["wall_seconds"]) for result in results}
    medians = {name: float(np.median(wall)) for name, wall in walls.items() if name != AUTO}
    best = min(medians, key=lambda name: medians[name])
    percent = 100 * (float(np.median(walls[AUTO] / walls[best])) - 1)
    return f"auto: {percent:+.1f}% of the time of {best}, the fastest"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare Auto's choice with none and every method that it tries."
    )
    gradients = parser.add_mutually_exclusive_group()
    gradients.add_argument(
        "--model", default="resnet50", choices=MODELS, help="the model whose gradients are averaged"
    )
    gradients.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help="shapes of other gradients: 1024x1024 64"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each method")
    parser.add_argument("--backward", type=float, default=0.0, metavar="SECONDS",
                        help="let the backward pass sleep this long, as if an accelerator computed it")  # fmt: skip
    parser.add_argument("--watch", type=float, default=0.0, metavar="SECONDS", help="continue for this long")
    parser.add_argument(
        "--again-after", type=int, default=20, metavar="STEPS", help="with --watch: steps between trials"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    return parser


def plan(arguments: argparse.Namespace) -> Plan:
    with Problem.of("--shapes"):
        shapes = parse_shapes(arguments.shapes) if arguments.shapes else MODELS[arguments.model]
    return Plan(
        framework="torch",
        model=None if arguments.shapes else arguments.model,
        shapes=shapes,
        variants=[
            Variant(NONE, parse(NONE), GROUP_BYTES),
            AutoVariant(AUTO, parse("eden-3"), GROUP_BYTES),
        ],
        options=Options(arguments.backward),
        rounds=arguments.rounds,
        seed=0,
        json=arguments.json,
    )


def main() -> int:
    arguments = make_parser().parse_args()
    os.environ.setdefault("HOROVOD_CACHE_CAPACITY", CACHE)
    AutoRun.watch, AutoRun.again_after = arguments.watch, arguments.again_after
    return run_plan(lambda: plan(arguments), AutoRun)


if __name__ == "__main__":
    raise SystemExit(main())
