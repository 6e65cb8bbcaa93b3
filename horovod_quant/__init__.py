"""Gradient quantization for Horovod.

Use `horovod_quant.torch` with PyTorch and `horovod_quant.tensorflow` with TensorFlow and Keras. This package itself is
the numpy core: `schemes`, `kernels`, `simulator`, `analysis`.
"""

__version__ = "0.1.0"

from horovod_quant.schemes.registry import register

__all__ = ["register"]
