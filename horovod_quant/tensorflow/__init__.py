"""Gradient quantization for ``horovod.tensorflow``, ``horovod.tensorflow.keras`` and ``horovod.keras``.

import horovod_quant.tensorflow as hvq
hvd.DistributedGradientTape(tape, compression=hvq.GlobalQSGD(bits=8))
hvd.DistributedOptimizer(optimizer, compression=hvq.GlobalQSGD(bits=8))
"""

try:
    import tensorflow  # noqa: F401, ICN001
except ImportError as error:
    raise ImportError(
        "horovod_quant.tensorflow needs TensorFlow, which is not installed: pip install 'horovod-quant[tensorflow]'"
    ) from error

from horovod_quant.nodes import hierarchical_process_sets
from horovod_quant.tensorflow import optim
from horovod_quant.tensorflow.binsgdm import BinSGDM
from horovod_quant.tensorflow.compressor import NUQSGD, QSGD, Compressor, GlobalQSGD

__all__ = ["BinSGDM", "Compressor", "GlobalQSGD", "NUQSGD", "QSGD", "hierarchical_process_sets", "optim"]
