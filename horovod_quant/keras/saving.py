"""Loading of models that were saved with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from horovod_quant.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a model, and make its optimizer a distributed one.

    The file has the optimizer's state, including ``iterations``: random bits continue where they were.

    Args:
        filepath: a ``.keras`` file, or ``.h5``.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: further classes, by name.
        safe_mode: see ``keras.saving.load_model``.
        **options: arguments of `DistributedOptimizer`, which are not in the file.

    Returns:
        The model; without a distributed optimizer if it was saved without an optimizer.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects or None, safe_mode=safe_mode)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, **options)
    return model
