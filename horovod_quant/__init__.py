"""Gradient quantization for Horovod.

Use `horovod_quant.torch` with PyTorch. The numpy core is here: `schemes`, `kernels`, `simulator`, `analysis`.
"""

__version__ = "0.1.0"

from horovod_quant.schemes.registry import register

__all__ = ["register"]
