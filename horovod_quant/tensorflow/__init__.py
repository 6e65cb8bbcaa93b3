"""Gradient quantization for ``horovod.tensorflow``, ``horovod.tensorflow.keras`` and ``horovod.keras``::

    import horovod_quant.tensorflow as hvq
    hvd.DistributedGradientTape(tape, compression=hvq.GlobalQSGD(bits=8))
    hvd.DistributedOptimizer(optimizer, compression=hvq.GlobalQSGD(bits=8))

The page "Which method" (docs/choosing.md) compares the methods.
"""

try:
    import tensorflow  # noqa: F401, ICN001
except ImportError as error:
    raise ImportError(
        "horovod_quant.tensorflow needs TensorFlow, which is not installed: pip install tensorflow"
    ) from error

from horovod_quant.frontends.compressor_classes import Classes
from horovod_quant.frontends.nodes import hierarchical_process_sets
from horovod_quant.tensorflow import optim
from horovod_quant.tensorflow.auto import Auto as Auto
from horovod_quant.tensorflow.binsgdm import BinSGDMCompressor
from horovod_quant.tensorflow.compressor import Compressor
from horovod_quant.tensorflow.metrics import MetricsCallback

# ``__init__.pyi`` declares the classes generated here for type checkers and editors.
_classes = Classes(__name__, [Compressor, BinSGDMCompressor])
__getattr__ = _classes.find
__dir__ = _classes.listed

__all__ = [
    "Compressor",
    "MetricsCallback",
    "hierarchical_process_sets",
    "optim",
    *_classes.own_names(),
]
