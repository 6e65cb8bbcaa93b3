"""BinSGDM optimizers for Keras 2 or tf-keras.

Source: Peng et al., published as Birder, NeurIPS 2023.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.frontends.binsgdm import (
    DEFAULT_BETA,
    SPREAD,
    WITHOUT_ITS_COMPRESSOR,
    clipped,
    require_beta,
    require_clip_norm,
    require_step_sizes,
)
from horovod_quant.kernels import notices
from horovod_quant.tensorflow import kernels
from horovod_quant.tensorflow.groups import StoredState
from horovod_quant.tensorflow.horovod_call import name_of, own_variable
from horovod_quant.tensorflow.integer_shapes import integer_shapes
from horovod_quant.tensorflow.parts import StatePart
from horovod_quant.tensorflow.state import outside_of_functions, outside_of_traces, uncollected_variable

_HAS_KERAS_2 = int(getattr(tf.keras, "__version__", "2").partition(".")[0]) < 3

# Under Keras 3 the classes below exist, so that modules can be imported, and their constructors raise.
_Optimizer: Any = tf.keras.optimizers.Optimizer if _HAS_KERAS_2 else object
_LegacyOptimizer: Any = tf.keras.optimizers.legacy.Optimizer if _HAS_KERAS_2 else object


class BinaryUpdate:
    """Handling of momentum and scale that all BinSGDM optimizers share."""

    beta: float
    seed: int
    clip_norm: float | None
    iterations: tf.Variable

    def _require_keras_2(self) -> None:
        if not _HAS_KERAS_2:
            raise RuntimeError(
                f"{type(self).__name__} is an optimizer of Keras 2, but TensorFlow has Keras 3 here: use "
                f"horovod_quant.keras.optim.BinSGDM"
            )

    @tf.__internal__.tracking.no_automatic_dependency_tracking  # the parts are not variables to be saved
    def _begin(self, beta: float, seed: int, clip_norm: float | None) -> None:
        require_beta(beta)
        require_clip_norm(clip_norm)
        self.clip_norm = clip_norm
        self.beta = float(beta)
        self.seed = int(seed)
        self._exchanged: dict[int, tf.Variable | None] = {}
        self._largest: dict[int, tf.Variable] = {}
        self._parts: dict[Any, tuple[StatePart, ...]] = {}  # a momentum's and its scale's
        self.has_compressor = False

    def _state_of(self, variable: Any) -> tuple[tf.Variable, tf.Variable, int]:
        """Return a variable's momentum, scale, and index in the optimizer's variables."""
        raise NotImplementedError

    def _create_state(self, variables: Sequence[Any]) -> None:
        """Create the state of the optimizer's variables, if there is none yet."""
        raise NotImplementedError

    def stored_state(self, variable: Any, variables: Sequence[Any], averages: bool = False) -> StoredState:
        """Return the state that a reduction of the variable's gradient updates.

        From now on its updates come from reductions.

        Args:
            variable: the gradient's variable.
            variables: all variables that the optimizer will update, in case it does not know them yet.
            averages: whether reductions return averages of the workers' bits, not bits.

        Raises:
            ValueError: the variable does not belong to this optimizer.
        """
        with outside_of_functions(), tf.compat.v1.name_scope(None):
            self._create_state(variables)
        momentum, scale, index = self._state_of(variable)
        largest = self._largest_of(index) if averages else None
        self._exchanged[index] = largest
        return StoredState(momentum, scale, self.beta, self._update_number(), self.clip_norm, largest)

    def _update_number(self) -> tf.Tensor:
        """Return the number of the current update, int64."""
        return tf.cast(own_variable(self.iterations).read_value(), tf.int64)

    def _largest_of(self, index: int) -> tf.Variable:
        """Return the variable with the largest magnitude of averages.

        It passes this number from a reduction to its update.
        """
        if index not in self._largest:
            # It needs no initialization in TensorFlow 1 graphs: it is assigned before it is read.
            self._largest[index] = outside_of_traces(
                lambda: uncollected_variable(tf.zeros([]), "horovod_quant_largest")
            )
        return self._largest[index]

    def keep_part(self, state: StoredState, start: int, stop: int, process_set: Any) -> StoredState:
        """Return the elements ``start .. stop - 1`` of a state.

        From its first update on, this worker stores these elements only.

        Args:
            state: the state of a variable.
            start, stop: the range of elements.
            process_set: Horovod's workers that together store all elements.

        Raises:
            RuntimeError: this worker stores other elements.
        """
        reference = state.momentum.ref()
        if reference not in self._parts:
            whole = state.momentum, state.scale
            self._parts[reference] = tuple(StatePart(each, start, stop, process_set) for each in whole)
        momentum, scale = self._parts[reference]
        if (momentum.start, momentum.stop) != (start, stop):
            raise RuntimeError(
                "BinSGDM: this worker already keeps other elements of a variable's momentum and scale; reduce each "
                "gradient under one name, in nodes of one size, or construct another optimizer"
            )
        return state._replace(momentum=momentum, scale=scale)

    def gather_state(self) -> Any:
        """Gather the whole state on every worker after hierarchical reductions.

        Call it on all workers. Any worker can then save it, for any number of workers to load, or broadcast it. The
        next reduction splits it again. Without hierarchical reductions it does nothing.

        Returns:
            The operation to run in a TensorFlow 1 graph; otherwise None.
        """
        gathered = [
            part.gathered(f"horovod_quant_{name}_{number}")
            for number, parts in enumerate(self._parts.values())
            for name, part in zip(("momentum", "scale"), parts)
        ]
        return None if tf.executing_eagerly() else tf.group(gathered)

    def _state_parts(self) -> list[StatePart]:
        return [part for parts in self._parts.values() for part in parts]

    def _without_parts(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that are not split between workers.

        A broadcast would find the others empty.
        """
        hidden = {state.variable.ref() for state in self._state_parts() if state.is_spread()}
        return [variable for variable in variables if own_variable(variable).ref() not in hidden]

    def _require_whole_state(self) -> None:
        if any(state.is_spread() for state in self._state_parts()):
            raise RuntimeError(SPREAD)

    def _forget_parts(self) -> None:
        for state in self._state_parts():
            state.forget()

    def set_weights(self, weights: Any) -> None:
        """Set weights as in Keras.

        The next hierarchical reduction splits the state again.
        """
        self._forget_parts()
        super().set_weights(weights)  # type: ignore[misc]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Return the objects to save with functions, but not in checkpoints.

        These are shares, and results of reductions.
        """
        parent: Any = super()
        children = dict(parent._trackable_children(save_type, **kwargs))
        if save_type == "savedmodel":
            shares = enumerate(state.share for state in self._state_parts())
            children.update((f"horovod_quant_share_{number}", share) for number, share in shares)
            children.update((f"horovod_quant_largest_{index}", own) for index, own in self._largest.items())
        return children

    @integer_shapes()
    def _step_of_elements(self, gradient: Any, variable: Any) -> tf.Tensor:
        """Return +-1 or an averaged bit per element.

        The result has the variable's dtype. It recovers the reduced bits from a scaled gradient (by a loss scale,
        clipping or a sum). For a gradient that arrives averaged it draws random bits by momentum and scale, the same on
        every worker. It is zero where no worker has a gradient.
        """
        if (
            hasattr(self, "_allreduce_grads") and not self.has_compressor
        ):  # Horovod's class derives from this one
            self.has_compressor = True
            notices.warn(WITHOUT_ITS_COMPRESSOR, stacklevel=2)
        gradient = tf.ensure_shape(gradient, variable.shape)  # a gathered gradient has no static shape
        momentum, scale, index = self._state_of(variable)
        if index in self._exchanged:
            largest = self._exchanged[index]
            moves = _signs(gradient) if largest is None else _averages(gradient, largest)
            return tf.cast(moves, variable.dtype)
        chain = kernels.RngKey(self.seed, f"parameter {index}")
        key = chain.key("alone", self._update_number())
        values = clipped(kernels, tf.reshape(gradient, [-1]), self.clip_norm)
        words, broken = kernels.binarize(values, momentum, scale, self.beta, key)
        elements = variable.shape.num_elements()
        bits = kernels.decode_signs(words, 1.0, tf.TensorSpec([elements], variable.dtype))
        moves = kernels.with_nonfinite(bits, tf.reduce_any(broken), float("nan"))
        has_had_one = (values != 0) | tf.reshape(tf.convert_to_tensor(scale) != 0, [-1])
        moves = tf.where(is_there(values) & has_had_one, moves, tf.zeros_like(bits))
        return tf.reshape(moves, variable.shape)

    def _own_config(self) -> dict[str, Any]:
        self._require_whole_state()
        return {"beta": self.beta, "seed": self.seed, "clip_norm": self.clip_norm}


def _signs(exchanged: tf.Tensor) -> tf.Tensor:
    """Recover the workers' bits from a scaled gradient; NaN stays."""
    return tf.where(tf.math.is_nan(exchanged), exchanged, tf.sign(exchanged))


def _averages(exchanged: tf.Tensor, largest: tf.Variable) -> tf.Tensor:
    """Recover the averages of the workers' bits.

    The gradient may be scaled; NaN stays.
    """
    with tf.control_dependencies([exchanged]):  # the reduction has assigned `largest`
        stored = largest.read_value()
    values = tf.cast(exchanged, tf.float32)
    return values * tf.math.divide_no_nan(stored, largest_magnitude(values))


def is_there(gradient: tf.Tensor) -> tf.Tensor:
    """Return whether a gradient has an element that is not zero."""
    return tf.reduce_any(tf.not_equal(gradient, 0))


def largest_magnitude(values: tf.Tensor) -> tf.Tensor:
    """Return the largest magnitude, float32, ignoring NaN.

    It is 0 without elements.
    """
    magnitudes = tf.abs(tf.cast(values, tf.float32))
    found = tf.reduce_max(tf.where(tf.math.is_nan(magnitudes), tf.zeros_like(magnitudes), magnitudes))
    return tf.maximum(found, 0.0)


class SavedUpdate(BinaryUpdate):
    """Additional methods for Keras optimizers that save their variables."""

    _momenta: list[Any]
    _scales: list[Any]

    @property
    def variables(self) -> Any:
        """All variables except those whose elements are split among workers: see `gather_state`."""
        variables = super().variables  # type: ignore[misc]
        return type(variables)(self._without_parts(variables))

    def _create_state(self, variables: Sequence[Any]) -> None:
        if not hasattr(self, "_momenta"):
            self.build(variables)  # type: ignore[attr-defined]

    def _index_of(self, variable: Any) -> int | None:
        """Return a variable's index in the optimizer's variables, or None."""
        raise NotImplementedError

    def _state_of(self, variable: Any) -> tuple[tf.Variable, tf.Variable, int]:
        index = self._index_of(variable)
        if index is None:
            raise ValueError(
                f"{name_of(variable)} is not one of this optimizer's variables; call its build() first"
            )
        return own_variable(self._momenta[index]), own_variable(self._scales[index]), index

    def save_own_variables(self, store: Any) -> None:
        """Save variables as in Keras.

        Raises:
            RuntimeError: the state is split among workers; see `gather_state`.
        """
        self._require_whole_state()
        super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Load variables as in Keras.

        The next hierarchical reduction splits the state again.
        """
        self._forget_parts()
        super().load_own_variables(store)  # type: ignore[misc]


class BinSGDM(SavedUpdate, _Optimizer):
    """Sign-based optimizer with random signs that follow momentum.

    It moves every element of every variable by ``+-learning_rate``.

    1. ``momentum = beta momentum + (1 - beta) g``, ``scale = beta scale + (1 - beta) |g|``, where ``g`` is the
       gradient, clipped to ``clip_norm``;
    2. a bit is +1 with probability ``(1 + momentum / scale) / 2``, else -1;
    3. ``v = v - learning_rate (bit + weight_decay v)``.

    With ``compression=horovod_quant.tensorflow.BinSGDM()`` each worker applies steps 1 and 2 to its local gradient, and
    the workers' bits are averaged and binarized again in the reduction; with ``server_bits`` above 1 the average is the
    ``bit`` of step 3, a number from -1 to 1. Gradients that arrive averaged instead (one worker, small gradients,
    another compression) go through steps 1 and 2 here, with random bits that are the same on every worker. The ``bit``
    of a variable whose gradient is zero on every worker is 0. Momentum and scale are slot variables, saved with the
    model. With ``BinSGDM(hierarchical=True)`` each worker stores them only for its share of the elements: call
    `gather_state` before saving or broadcasting them.

    Args:
        learning_rate: step size of each element; a number or a schedule.
        beta: decay of momentum and scale.
        weight_decay: decoupled weight decay; None for none.
        seed: seed of the random bits.
        name: name of the optimizer.
        clip_norm: maximum L2 norm of each worker's local gradient of a variable, which is scaled down to it; None for
            no limit. Keras clips (``clipnorm``) after the reduction, where it has no effect on bits.
        **kwargs: see ``tf.keras.optimizers.Optimizer``.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: TensorFlow has Keras 3.
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
        self._require_keras_2()
        require_rates(learning_rate, weight_decay or 0.0)
        super().__init__(name=name, weight_decay=weight_decay, **kwargs)
        self._begin(beta, seed, clip_norm)
        self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, var_list: Any) -> None:
        super().build(var_list)
        if hasattr(self, "_momenta"):
            return
        self._momenta, self._scales = [], []
        for variable in var_list:
            for name, variables in (("momentum", self._momenta), ("scale", self._scales)):
                variables.append(
                    self.add_variable(variable.shape, tf.float32, name=f"{variable._shared_name}/{name}")
                )
        self._built = True

    def _index_of(self, variable: Any) -> int | None:
        can_be = hasattr(self, "_momenta") and isinstance(variable, tf.Variable)
        return self._index_dict.get(self._var_key(variable)) if can_be else None

    def update_step(self, gradient: Any, variable: Any) -> None:
        rate = tf.cast(self.learning_rate, variable.dtype)
        variable.assign_sub(rate * self._step_of_elements(gradient, variable))

    def get_config(self) -> dict[str, Any]:
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate, **self._own_config()}


class LegacyBinSGDM(BinaryUpdate, _LegacyOptimizer):
    """A `BinSGDM` in ``tf.keras.optimizers.legacy``, which Horovod's warm-up callback needs.

    Args:
        learning_rate, beta, seed, name, clip_norm: see `BinSGDM`.
        weight_decay: decoupled weight decay.
        **kwargs: see ``tf.keras.optimizers.legacy.Optimizer``.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: TensorFlow has Keras 3.
    """

    _HAS_AGGREGATE_GRAD = True

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta: float = DEFAULT_BETA,
        weight_decay: float = 0.0,
        seed: int = 0,
        name: str = "LegacyBinSGDM",
        clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._require_keras_2()
        require_rates(learning_rate, weight_decay)
        super().__init__(name, **kwargs)
        self._begin(beta, seed, clip_norm)
        self.weight_decay = float(weight_decay)
        self._indices: dict[Any, int] = {}
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("decay", self._initial_decay)

    def _create_state(self, variables: Sequence[Any]) -> None:
        self._create_all_weights(variables)

    def _create_slots(self, var_list: Any) -> None:
        for variable in var_list:
            self._indices.setdefault(variable.ref(), len(self._indices))
            if variable.dtype.base_dtype != tf.float32:
                raise ValueError(
                    f"{variable.name} is {variable.dtype.name}: LegacyBinSGDM supports only float32; use BinSGDM"
                )
            for name in ("momentum", "scale"):
                self.add_slot(variable, name)

    def variables(self) -> list[Any]:
        """All variables except those whose elements are split among workers: see `gather_state`."""
        return self._without_parts(super().variables())

    def get_weights(self) -> list[Any]:
        """Return weights as in Keras.

        Raises:
            RuntimeError: the state is split among workers; see `gather_state`.
        """
        self._require_whole_state()
        return super().get_weights()

    def _state_of(self, variable: Any) -> tuple[tf.Variable, tf.Variable, int]:
        if variable.ref() not in self._indices:
            raise ValueError(f"{name_of(variable)} is not one of this optimizer's variables")
        return (
            self.get_slot(variable, "momentum"),
            self.get_slot(variable, "scale"),
            self._indices[variable.ref()],
        )

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> tf.Operation:
        rate = self._decayed_lr(var.dtype.base_dtype)
        step = rate * self._step_of_elements(grad, var)
        return var.assign(var * (1 - rate * self.weight_decay) - step, use_locking=self._use_locking)

    def _resource_apply_sparse(
        self, grad: Any, var: Any, indices: Any, apply_state: Any = None
    ) -> tf.Operation:
        dense = tf.IndexedSlices(grad, indices, tf.shape(var))
        return self._resource_apply_dense(dense, var)

    def get_config(self) -> dict[str, Any]:
        rates = {name: self._serialize_hyperparameter(name) for name in ("learning_rate", "decay")}
        return {**super().get_config(), **rates, "weight_decay": self.weight_decay, **self._own_config()}


def require_rates(learning_rate: Any, weight_decay: float) -> None:
    """Raise ValueError for a number that is negative or not finite.

    A schedule is not checked.
    """
    require_step_sizes(weight_decay=weight_decay)
    if isinstance(learning_rate, (int, float)):
        require_step_sizes(learning_rate=learning_rate)


def binsgdm_of(optimizer: Any) -> Any:
    """Return the BinSGDM optimizer that ``optimizer`` is, or wraps (a loss scale).

    Returns None if there is none.
    """
    while optimizer is not None and not isinstance(optimizer, BinaryUpdate):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def restore_from_saved_model(model: Any, path: Any) -> None:
    """Restore a model's optimizer state from its SavedModel, including momentum and scale.

    Keras does not restore optimizer state from the SavedModel format (only from ``.h5``): call this after
    ``load_model``.

    Args:
        model: the loaded model, compiled with the optimizer that it was saved with.
        path: folder of the SavedModel.
    """
    optimizer = model.optimizer
    create = optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build
    create(model.trainable_variables)
    prefix = os.path.join(str(path), "variables", "variables")
    tf.train.Checkpoint(root=model).read(prefix).expect_partial()
