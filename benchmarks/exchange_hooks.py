"""Time what communication costs the training thread, for `exchange`.

Horovod's hooks compress each gradient and pass it to Horovod, while the thread runs the backward pass and, on a host
with a GPU, feeds it. ``synchronize`` takes the results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.table import Table

from horovod_quant.bench import torch_trial
from horovod_quant.bench.report import shown
from horovod_quant.bench.variants import Options, Variant
from horovod_quant.frontends.methods import FP16, NONE


class Spent(NamedTuple):
    """Seconds of one step's communication on this worker.

    Attributes:
        hook: within the optimizer's hooks.
        hook_cpu: likewise, CPU time of the calling thread.
        finish_cpu: in ``synchronize``, CPU time of the calling thread.
    """

    hook: float
    hook_cpu: float
    finish_cpu: float


class Trial(torch_trial.Trial):
    """A model and its optimizer, whose hooks are timed.

    Attributes:
        spent: seconds of each step so far.
    """

    def __init__(self, variant: Variant, gradients: torch_trial.Gradients, options: Options) -> None:
        super().__init__(variant, gradients, options)
        self.spent: list[Spent] = []
        self._in_hooks = self._in_hooks_cpu = self._finishing_cpu = 0.0
        if self._optimizer is not None:
            # Not compress() itself: a wrapper between Horovod and a compressor would hide the parameter from it.
            self._launch, self._finish = self._optimizer._allreduce_grad_async, self._optimizer.synchronize
            self._optimizer._allreduce_grad_async = self._timed_launch
            self._optimizer.synchronize = self._timed_finish

    def _timed_launch(self, parameter: torch.nn.Parameter) -> Any:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        try:
            return self._launch(parameter)
        finally:
            self._in_hooks += time.perf_counter() - begin
            self._in_hooks_cpu += time.thread_time() - begin_cpu

    def _timed_finish(self) -> None:
        begin = time.thread_time()
        self._finish()
        self._finishing_cpu += time.thread_time() - begin

    def run(self) -> None:
        self._in_hooks = self._in_hooks_cpu = self._finishing_cpu = 0.0
        super().run()
        self.settle()
        self.spent.append(Spent(self._in_hooks, self._in_hooks_cpu, self._finishing_cpu))

    def settle(self) -> None:
        """Wait until everything that was launched has been computed."""


def add_ratios(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Add the median ratios of each method to none and fp16.

    Ratios are taken within a round; None where none or fp16 was not measured.
    """
    for other in (NONE, FP16):
        reference = next((result for result in results if result["method"] == other), None)
        for result in results:
            for name in names:
                result[f"{name}_times_{other}"] = (
                    None
                    if reference is None or not all(reference[f"{name}_seconds"])
                    else float(
                        np.median(
                            np.array(result[f"{name}_seconds"]) / np.array(reference[f"{name}_seconds"])
                        )
                    )
                )


def per_gradient_table(results: Sequence[dict[str, Any]], gradients: int) -> Table:
    table = Table(
        title=f"Microseconds for each of {gradients:,} gradients", box=box.MARKDOWN,
        caption="in hooks, and CPU in hooks and in synchronize: of the calling thread; ratios within a round",
    )  # fmt: skip
    table.add_column("method", no_wrap=True)
    columns = ("hook", "hook_cpu", "finish_cpu", "cpu", "wall")
    for title in (
        "in hooks",
        "CPU in hooks",
        "CPU in synchronize",
        "CPU, all threads",
        "x none",
        "wall",
        "x none",
    ):
        table.add_column(title, justify="right")
    for result in results:
        cells = []
        for name in columns:
            cells.append(f"{1e6 / gradients * np.median(result[f'{name}_seconds']):,.1f}")
            if name in ("cpu", "wall"):
                cells.append(shown(result[f"{name}_times_{NONE}"], 2))
        table.add_row(result["method"], *cells)
    return table
