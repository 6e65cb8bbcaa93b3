"""Names of a model's parameters, independent of wrappers.

They are the same as Horovod's and the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_COMPILED = "_orig_mod"
_WRAPPERS = ("_forward_module", _COMPILED)
"""Attributes in which modules of Fabric and ``torch.compile`` have the wrapped module."""


def unwrapped(module: Any) -> Any:
    """Return the user's module inside wrappers."""
    while True:
        if isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
            continue
        children = getattr(module, "_modules", {})
        name = next((each for each in _WRAPPERS if each in children), None)
        if name is None:
            return module
        module = children[name]


def named_parameters(
    module: torch.nn.Module, given: Iterable[tuple[str, torch.Tensor]] | None = None
) -> dict[str, torch.Tensor]:
    """Return a model's parameters, by name.

    Args:
        module: the model, which may be wrapped.
        given: names given to a compressor; other parameters have the model's names.
    """
    names = {id(parameter): name for name, parameter in given or ()}
    found = {}
    for name, parameter in unwrapped(module).named_parameters():
        plain = ".".join(part for part in name.split(".") if part != _COMPILED)
        found[names.get(id(parameter), plain)] = parameter
    return found
