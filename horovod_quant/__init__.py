"""Gradient quantization for Horovod.

Use `horovod_quant.torch` with PyTorch and `horovod_quant.tensorflow` with TensorFlow and Keras. This package itself is
the numpy core: `schemes`, `kernels`, `simulator`, `analysis`.
"""

__version__ = "0.2.0"

import sys
from typing import Any

from horovod_quant.frontends import missing_names, policy
from horovod_quant.schemes import registry
from horovod_quant.schemes.registry import register

sys.modules[f"{__name__}.policy"] = policy  # by which compressors that 0.1.0 has pickled name it

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    """Raise AttributeError with the module that has a compressor."""
    if name in _ELSEWHERE or registry.find(name) is not None:
        frontends = _ELSEWHERE.get(name, ("torch", "tensorflow"))
        places = " or ".join(f"{__name__}.{frontend}.{name}" for frontend in frontends)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; use {places}")
    if name in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; import {__name__}.{name} first")
    known = [*_MODULES, "register", *(kind.__name__ for kind in registry.own())]
    raise AttributeError(missing_names.message(__name__, name, known))


_MODULES = ("analysis", "keras", "kernels", "mpi", "schemes", "simulator", "tensorflow", "torch")

_ELSEWHERE = {
    "Auto": ("torch",),
    "Compressor": ("torch", "tensorflow"),
    "DistributedOptimizer": ("keras",),
    "MetricsCallback": ("tensorflow",),
    "ddp": ("torch",),
    "fsdp": ("torch",),
    "hierarchical_process_sets": ("torch", "tensorflow"),
    "optim": ("torch", "tensorflow"),
}
"""Names that only frontends have, which are not imported here: each needs its framework."""
