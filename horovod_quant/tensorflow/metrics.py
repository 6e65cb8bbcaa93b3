"""Keras callback that adds compressors' statistics to the logs of a training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class MetricsCallback(tf.keras.callbacks.Callback):
    """Callback that adds a compressor's statistics to the logs.

    It adds ``compression.stats().metrics()`` at the end of each epoch. Put it before callbacks that read the logs, such
    as ``tf.keras.callbacks.TensorBoard``.

    Args:
        compression: the optimizer's compressor.

    Raises:
        ValueError: the compressor has no statistics.
    """

    def __init__(self, compression: Any) -> None:
        super().__init__()
        if not callable(getattr(compression, "stats", None)) or isinstance(compression, type):
            raise ValueError(f"compression={compression!r}: use a compressor of horovod_quant.tensorflow")
        self.compression = compression

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the figures to ``logs``."""
        if logs is not None:
            logs.update(self.compression.stats().metrics())
