"""Exclusion of this package from ``torch.compile``.

It cannot trace kernels, threads and waits.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch._C._dynamo import eval_frame  # cheap, unlike the compiler: torch.compiler.disable would import it

_set_callback = eval_frame.set_eval_frame


def _callback_by_taking_it_away() -> Any:
    callback = _set_callback(None)
    _set_callback(callback)
    return callback


compiling: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", _callback_by_taking_it_away)
"""Return None unless a called function would be compiled first.

A method that compiled functions call then calls itself by `uncompiled`. Without ``torch.compile`` this adds no frame
and costs no time.
"""


@torch._disable_dynamo
def uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function so that neither it nor its callees are compiled."""
    return function(*arguments)
