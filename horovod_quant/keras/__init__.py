"""Averaging and gradient quantization for Keras 3 on TensorFlow.

Horovod's own optimizer does not average under Keras 3.

import horovod_quant.keras as hvq
optimizer = hvq.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvq.GlobalQSGD(bits=8))
"""

from typing import Any

from horovod_quant.keras import requirements as _requirements  # noqa: F401

# isort: split
from horovod_quant import tensorflow as _tensorflow
from horovod_quant.frontends import missing_names as _missing_names
from horovod_quant.keras import callbacks as callbacks
from horovod_quant.keras import optim as optim
from horovod_quant.keras.optimizer import DistributedOptimizer
from horovod_quant.keras.saving import load_model
from horovod_quant.schemes import registry as _registry
from horovod_quant.tensorflow.auto import Auto
from horovod_quant.tensorflow.metrics import MetricsCallback


def __getattr__(name: str) -> Any:
    """Return a compressor of `horovod_quant.tensorflow`."""
    if name in _tensorflow.__all__ or _registry.find(name) is not None:
        return getattr(_tensorflow, name)
    known = {*__all__, *dir(_tensorflow)}
    raise AttributeError(_missing_names.message(__name__, name, known))


__all__ = [
    "Auto",
    "DistributedOptimizer",
    "MetricsCallback",
    "callbacks",
    "load_model",
    "optim",
    *(name for name in _tensorflow.__all__ if name not in ("MetricsCallback", "optim")),
]
