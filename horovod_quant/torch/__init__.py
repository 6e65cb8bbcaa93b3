"""Gradient quantization for ``horovod.torch``.

import horovod_quant.torch as hvq
hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvq.GlobalQSGD(bits=8))
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horovod_quant.torch needs PyTorch, which is not installed: pip install 'horovod-quant[torch]'"
    ) from error

from horovod_quant.nodes import hierarchical_process_sets
from horovod_quant.torch import optim
from horovod_quant.torch.compressor import NUQSGD, QSGD, BinSGDM, Compressor, GlobalQSGD

__all__ = ["BinSGDM", "Compressor", "GlobalQSGD", "NUQSGD", "QSGD", "hierarchical_process_sets", "optim"]
