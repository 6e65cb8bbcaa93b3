"""Time communication of gradients on a GPU, for `exchange`.

Includes what Horovod's hooks cost in the backward pass. A hook is done when it returns; a step's communication when the
GPU has finished all that was launched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import exchange_hooks
import numpy as np
import torch
from rich import box
from rich.table import Table

from horovod_quant.bench.report import shown
from horovod_quant.frontends.methods import FP16, NONE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


class Trial(exchange_hooks.Trial):
    """A model on a GPU, and its optimizer."""

    def prepare(self, keep: bool = False) -> None:
        super().prepare(keep)
        self.settle()

    def settle(self) -> None:
        if not INTERPRETED:
            torch.cuda.synchronize()


def table(results: Sequence[dict[str, Any]]) -> Table:
    where = "the CPU, interpreted" if INTERPRETED else torch.cuda.get_device_name()
    table = Table(title=f"Milliseconds of an exchange on {where}", box=box.MARKDOWN,
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
