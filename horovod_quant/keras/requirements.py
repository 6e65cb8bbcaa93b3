"""Requirements of `horovod_quant.keras`, checked when this module is imported, before all others."""

from __future__ import annotations

OLDEST = (3, 6)
"""Oldest release of Keras that clips gradients after accumulating them."""

_OLDEST = ".".join(map(str, OLDEST))

try:
    import keras
    import tensorflow as tf  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"horovod_quant.keras needs Keras {_OLDEST} or later and TensorFlow ({error}): pip install tensorflow"
    ) from error


def _check() -> None:
    release = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if release < (3,):
        raise ImportError(
            f"horovod_quant.keras is for Keras {_OLDEST} or later, and Keras {keras.__version__} is installed: with it "
            f"use horovod.tensorflow.keras.DistributedOptimizer and the compressors of horovod_quant.tensorflow"
        )
    if release < OLDEST:
        raise ImportError(
            f"horovod_quant.keras needs Keras {_OLDEST} or later, and Keras {keras.__version__} is installed, which "
            f"clips gradients before it accumulates them: pip install 'keras>={_OLDEST}'"
        )
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ImportError(
            f"horovod_quant.keras needs Keras's backend tensorflow, and it is {backend} here: set "
            f"KERAS_BACKEND=tensorflow before Keras is imported, or use horovod_quant.torch in a program of PyTorch"
        )


_check()
