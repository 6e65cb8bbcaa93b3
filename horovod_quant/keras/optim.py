"""BinSGDM optimizer for Keras 3.

Source: Peng et al., published as Birder, NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from horovod_quant.frontends.binsgdm import DEFAULT_BETA
from horovod_quant.tensorflow.horovod_call import own_variable
from horovod_quant.tensorflow.optim import SavedUpdate, require_rates


@keras.saving.register_keras_serializable("horovod_quant")
class BinSGDM(SavedUpdate, keras.optimizers.Optimizer):
    """Sign-based optimizer with random signs that follow momentum.

    It moves every element of every variable by ``+-learning_rate``. It computes the same as
    `horovod_quant.tensorflow.optim.BinSGDM`. Momentum and scale are saved with the model.

    Args:
        learning_rate, beta, weight_decay, seed, name, clip_norm: see `horovod_quant.tensorflow.optim.BinSGDM`.
        **kwargs: see ``keras.optimizers.Optimizer``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta: float = DEFAULT_BETA,
        weight_decay: float | None = None,
        seed: int = 0,
        name: str = "BinSGDM",
        clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        require_rates(learning_rate, weight_decay or 0.0)
        super().__init__(learning_rate=learning_rate, name=name, weight_decay=weight_decay, **kwargs)
        self._begin(beta, seed, clip_norm)

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self._momenta, self._scales = (
            [
                self.add_variable(variable.shape, dtype="float32", name=f"{name}_{i}")
                for i, variable in enumerate(variables)
            ]
            for name in ("momentum", "scale")
        )

    @property
    def variables(self) -> list[Any]:
        """All variables except those whose elements are split among workers: see `gather_state`."""
        return self._without_parts(super().variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * self._step_of_elements(gradient, own_variable(variable)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._own_config()}

    def _update_number(self) -> tf.Tensor:
        return tf.cast(tf.convert_to_tensor(self.iterations), tf.int64)

    def _create_state(self, variables: Sequence[Any]) -> None:
        self.build(variables)

    def _index_of(self, variable: Any) -> int | None:
        return self._trainable_variables_indices.get(self._var_key(variable)) if self.built else None
