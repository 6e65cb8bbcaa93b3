"""Names of a model's parameters, whatever the model is wrapped in, so that they are Horovod's and the simulator's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_COMPILED = "_orig_mod"
_WRAPPERS = ("_forward_module", _COMPILED)
"""Attributes in which Fabric's modules and compiled ones have what they wrap."""


def unwrapped(module: Any) -> Any:
    """The user's own module."""
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
    """A model's parameters, by name.

    Args:
        module: the model, which may be wrapped.
        given: names that a compressor was given; those of other parameters are the model's.
    """
    names = {id(parameter): name for name, parameter in given or ()}
    found = {}
    for name, parameter in unwrapped(module).named_parameters():
        plain = ".".join(part for part in name.split(".") if part != _COMPILED)
        found[names.get(id(parameter), plain)] = parameter
    return found
