"""Gradient quantization for ``horovod.torch``::

    import horovod_quant.torch as hvq
    hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvq.GlobalQSGD(bits=8))

The page "Which method" (docs/choosing.md) compares the methods.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horovod_quant.torch needs PyTorch, which is not installed: pip install torch"
    ) from error

from horovod_quant.frontends.compressor_classes import Classes
from horovod_quant.frontends.nodes import hierarchical_process_sets
from horovod_quant.torch import ddp, fsdp, optim
from horovod_quant.torch.auto import Auto
from horovod_quant.torch.binsgdm import BinSGDMCompressor
from horovod_quant.torch.compressor import Compressor

# ``__init__.pyi`` declares the classes generated here for type checkers and editors.
_classes = Classes(__name__, [Compressor, BinSGDMCompressor], [Auto])
__getattr__ = _classes.find
__dir__ = _classes.listed

__all__ = ["Auto", "Compressor", "ddp", "fsdp", "hierarchical_process_sets", "optim", *_classes.own_names()]
