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
        filepath: a ``.keras`` file. From ``.h5`` Keras 3 loads no optimizer that can train on.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: further classes, by name.
        safe_mode: see ``keras.saving.load_model``.
        **options: arguments of `DistributedOptimizer`, which are not in the file.

    Returns:
        The model; without a distributed optimizer if it was saved without an optimizer.

    Raises:
        ValueError: Keras loads no optimizer state from the file.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects or None, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if inner.built and model.trainable_variables and not inner._trainable_variables:
            raise ValueError(
                f"filepath={str(filepath)!r}: Keras loads no optimizer state from such a file, and could not train on; "
                f"save the model to a .keras file, or load it by keras.saving.load_model(..., compile=False) and "
                f"compile it with a new optimizer"
            )
        DistributedOptimizer(optimizer, **options)
    return model
