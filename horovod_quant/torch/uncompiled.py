"""Keeps ``torch.compile`` out of this package: it would trace kernels, threads and waiting, none of which it can."""

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
"""Not None where functions that are called would be compiled first: a method that compiled functions call then calls
itself by `uncompiled`. So it adds no frame, and takes no time, where nobody compiles.
"""


@torch._disable_dynamo
def uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls it; neither it nor what it calls is compiled."""
    return function(*arguments)
