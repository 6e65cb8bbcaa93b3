"""Errors in a graph, some time after what was wrong was found.

An error ends the run of a graph, and what has not started by then never starts. Of two workers that find the same
error, one may have given another gradient to Horovod already and the other one not; then the first would wait for ever.
While the error waits, what gets ready starts. A backward pass that takes longer after the error than that leaves the
other worker waiting until the script that got the error ends, which ends Horovod for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_quant.tensorflow.traced_once import elementwise

SECONDS = 1.0


def pause() -> None:
    time.sleep(SECONDS)


def require(condition: tf.Tensor, told: Sequence[Any]) -> Any:
    """As ``tf.debugging.Assert`` of a boolean scalar."""
    # XLA, if Horovod's operations are compiled by it, calls nothing back.
    if os.environ.get("HOROVOD_ENABLE_XLA_OPS") != "1":
        condition = _after_a_pause(condition)
    return tf.debugging.Assert(condition, told)


@elementwise
def _after_a_pause(condition: tf.Tensor) -> tf.Tensor:
    """``condition``, later if it is false."""
    return tf.cond(condition, lambda: tf.constant(True), lambda: tf.numpy_function(_paused, [], tf.bool))


def _paused() -> np.bool_:
    pause()
    return np.bool_(False)
