"""An exchange of gradients that are on a GPU, and what Horovod's hooks take of the backward pass: for `exchange`.

A hook is done when it returns; an exchange when the GPU has finished all that it was told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table

from horovod_quant.bench import torch_trial
from horovod_quant.bench.report import shown
from horovod_quant.bench.variants import Options, Variant
from horovod_quant.methods import FP16, NONE

DEVICE = "cuda"


class Trial(torch_trial.Trial):
    """A model on a GPU, and its optimizer.

    Attributes:
        hook_seconds: of each exchange so far: wall time of this worker within the optimizer's hooks, which compress a
            gradient and hand it to Horovod.
    """

    def __init__(self, variant: Variant, gradients: torch_trial.Gradients, options: Options) -> None:
        super().__init__(variant, gradients, options)
        self.hook_seconds: list[float] = []
        self._in_hooks = 0.0
        if self._optimizer is not None:
            # Not compress() itself: who stands between Horovod and a compressor hides the parameter from it.
            self._launch = self._optimizer._allreduce_grad_async
            self._optimizer._allreduce_grad_async = self._timed_launch

    def _timed_launch(self, parameter: torch.nn.Parameter) -> Any:
        begin = time.perf_counter()
        try:
            return self._launch(parameter)
        finally:
            self._in_hooks += time.perf_counter() - begin

    def prepare(self, keep: bool = False) -> None:
        super().prepare(keep)
        torch.cuda.synchronize()

    def run(self) -> None:
        self._in_hooks = 0.0
        super().run()
        torch.cuda.synchronize()
        self.hook_seconds.append(self._in_hooks)


def add_ratios(results: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Medians of each method's ratios to none and to fp16 within the same round; None without those."""
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


def table(results: Sequence[dict[str, Any]], gpu: str) -> Table:
    table = Table(title=f"Milliseconds of an exchange on {gpu}", box=box.MARKDOWN,
                  caption="in hooks: of the thread that runs the backward pass; ratios within a round")  # fmt: skip
    table.add_column("method", no_wrap=True)
    for column in ("in hooks", "x none", "x fp16", "total", "x none", "x fp16"):
        table.add_column(column, justify="right")
    for result in results:
        cells = []
        for name in ("hook", "wall"):
            cells.append(f"{1e3 * np.median(result[f'{name}_seconds']):,.1f}")
            cells += [shown(result[f"{name}_times_{other}"], 2) for other in (NONE, FP16)]
        table.add_row(result["method"], *cells)
    return table
