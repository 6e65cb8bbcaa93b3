"""Gradient quantization for Horovod.

Use `horovod_quant.torch` with PyTorch and `horovod_quant.tensorflow` with TensorFlow and Keras. This package itself is
the numpy core: `schemes`, `kernels`, `simulator`, `analysis`.
"""

__version__ = "0.1.0"

import sys

from horovod_quant.frontends import policy
from horovod_quant.schemes.registry import register

sys.modules[f"{__name__}.policy"] = policy  # by which compressors that 0.1.0 has pickled name it

__all__ = ["register"]
