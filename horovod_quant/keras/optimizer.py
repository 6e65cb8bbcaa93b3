"""``DistributedOptimizer`` for Keras 3: averages an optimizer's gradients over Horovod's workers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from horovod_quant.frontends.binsgdm import WITHOUT_ITS_COMPRESSOR
from horovod_quant.frontends.installing import require_horovod
from horovod_quant.keras.averaging import Averaging
from horovod_quant.keras.loss_scale import agree_on_overflows, loss_scale_around, require_agreement
from horovod_quant.kernels import notices
from horovod_quant.tensorflow.compressor import Compressor
from horovod_quant.tensorflow.optim import binsgdm_of

_USED = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
"""Methods called before the averaging, which an optimizer class must not override."""

_SETTINGS = "_horovod_quant"
"""Attribute with an optimizer's `Averaging`. Keras does not track it, as it would save it."""


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras 3 average its gradients over Horovod's workers.

    It averages once for each update: after ``gradient_accumulation_steps``, before clipping, weight decay and moving
    averages of weights, in ``model.fit``, ``train_on_batch``, a custom ``train_step`` and with tapes alike. The
    optimizer is changed in place, and keeps its state and name. It is saved as its original class: ``keras.saving``
    loads it as the plain optimizer, `load_model` as a distributed one. Random bits depend on its ``iterations``, so
    that a saved and resumed run is bit-identical.

    Args:
        optimizer: a ``keras.optimizers.Optimizer``, also a ``LossScaleOptimizer``.
        name: a new name for it; None to keep its name.
        device_dense, device_sparse: device of the reductions of dense and sparse gradients; "" for TensorFlow's choice.
        compression: None to average in full precision, a compressor such as ``hvq.GlobalQSGD(bits=8)``, or one of
            ``hvd.Compression``.
        sparse_as_dense: whether ``tf.IndexedSlices`` are converted to dense tensors; otherwise workers gather them,
            uncompressed.
        gradient_predivide_factor: the part of the average's divisor to divide by before the sum; the rest is divided
            after it.
        op: ``hvd.Average``, the default, ``hvd.Sum`` or, without quantization, ``hvd.Adasum``.
        backward_passes_per_step: 1; see the optimizer's ``gradient_accumulation_steps``.
        average_aggregated_gradients: no effect; ``gradient_accumulation_steps`` averages.
        num_groups: 0; see ``groups``, which Horovod has in its place.
        groups: a number of groups of gradients that are reduced together, or lists of variables, each a group; None to
            reduce each gradient separately.
        process_set: an ``hvd.ProcessSet`` whose workers average; None for all.
        scale_local_gradients: whether the gradients of variables given to the optimizer's ``register_local_var``, which
            are not averaged, are divided by the number of workers.

    Returns:
        The optimizer, still an instance of its class.

    Raises:
        TypeError: ``optimizer`` or ``compression`` has another type.
        ValueError: an argument is out of range, the optimizer is distributed already, or its class overrides methods
            that are called before the averaging.
        ImportError: Horovod is missing, or was built without TensorFlow.
    """
    require_horovod("tensorflow", "TensorFlow")
    if backward_passes_per_step != 1:
        is_number = isinstance(backward_passes_per_step, int) and backward_passes_per_step > 1
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step!r}: Keras 3 accumulates gradients itself; use 1, and "
            f"the optimizer's gradient_accumulation_steps={backward_passes_per_step if is_number else 'N'}, after "
            f"which it averages once"
        )
    if num_groups != 0:
        raise ValueError(
            f"num_groups={num_groups!r}: Horovod has replaced it; use groups={num_groups!r}, or lists of variables"
        )
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"name={name!r}: use a text that is not empty, or None to keep the optimizer's name")
    loss_scale, inner = _unwrapped(optimizer)
    _require_usable(inner)
    averaging = Averaging(
        compression,
        op,
        process_set,
        groups,
        sparse_as_dense,
        gradient_predivide_factor,
        (device_dense, device_sparse),
        scale_local_gradients,
    )
    if isinstance(compression, Compressor):
        compression._check_process_set(averaging.process_set)
        compression._welcome(inner)
    elif binsgdm_of(inner) is not None:
        notices.warn(WITHOUT_ITS_COMPRESSOR, stacklevel=2)
    if name is not None:
        inner.name = name
    if inner.built:
        averaging.check_variables(inner._trainable_variables)
        _require_no_float8(inner._trainable_variables)
    inner.__class__ = _distributed(_plain(type(inner)))
    vars(inner)[_SETTINGS] = averaging
    if loss_scale is not None:
        agree_on_overflows(loss_scale)
    return optimizer


class _Distributed:
    """Mixin that precedes an optimizer's class."""

    _trainable_variables: Sequence[Any]
    iterations: Any

    def build(self, variables: Any) -> None:
        self._horovod_quant_averaging().check_variables(variables)
        _require_no_float8(variables)
        loss_scale = loss_scale_around(self)
        if loss_scale is not None:
            agree_on_overflows(loss_scale)
        parent: Any = super()
        parent.build(variables)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradient from averaging; see ``scale_local_gradients``."""
        self._horovod_quant_averaging().keep_local(var)

    @tf.autograph.experimental.do_not_convert
    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        require_agreement(self)
        self._horovod_quant_averaging().variables = tuple(trainable_variables)
        parent: Any = super()
        parent._backend_apply_gradients(grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert
    def _clip_gradients(self, grads: Any) -> Any:
        averaging = self._horovod_quant_averaging()
        parent: Any = super()
        indices = [parent._get_variable_index(variable) for variable in averaging.variables]
        return parent._clip_gradients(averaging.average(grads, indices, self.iterations))

    def _horovod_quant_averaging(self) -> Averaging:
        settings = vars(self).get(_SETTINGS)
        if settings is None:
            raise RuntimeError(
                f"{type(self).__name__}: this optimizer was made from the configuration of a distributed one, which "
                f"does not have its arguments; use hvq.DistributedOptimizer(...) on it"
            )
        return settings


def _plain(kind: Any) -> Any:
    """Return the class from which `_distributed` made ``kind``, or ``kind``."""
    return kind.__bases__[1] if issubclass(kind, _Distributed) else kind


@functools.cache
def _distributed(kind: type) -> type:
    # Keras saves its classes by their public module.
    module = "keras.optimizers" if kind.__module__.partition(".")[0] == "keras" else kind.__module__
    made = type(kind.__name__, (_Distributed, kind), {"__module__": module, "__doc__": kind.__doc__})
    package, _, name = keras.saving.get_registered_name(kind).rpartition(">")
    if package:
        # Saved under the plain class's name, so that it is loaded as the plain class.
        for each in (made, kind):
            keras.saving.register_keras_serializable(package, name)(each)
    return made


def averaging_of(optimizer: Any) -> Averaging | None:
    """Return the `Averaging` of an optimizer, or None.

    The optimizer may be inside a loss-scaling one.
    """
    return vars(getattr(optimizer, "inner_optimizer", optimizer)).get(_SETTINGS)


def _unwrapped(optimizer: Any) -> tuple[Any, Any]:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer, optimizer.inner_optimizer
    return None, optimizer


def _require_usable(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r}: use an instance of keras.optimizers.Optimizer, such as keras.optimizers.SGD(0.1)"
        )
    if _SETTINGS in vars(optimizer):  # unlike one that from_config() has made of its class
        raise ValueError(f"optimizer={name}: it is distributed already; use hvq.DistributedOptimizer once")
    if hasattr(optimizer, "_allreduce_grads"):
        raise ValueError(
            f"optimizer={name}: it comes from Horovod's DistributedOptimizer, which does not average under Keras 3; "
            f"give the plain optimizer to hvq.DistributedOptimizer"
        )
    kind = _plain(type(optimizer))
    overridden = [
        method for method in _USED if getattr(kind, method) is not getattr(keras.optimizers.Optimizer, method)
    ]
    if overridden:
        raise ValueError(
            f"optimizer={name}: its class overrides {overridden[0]}(), and gradients could go past the averaging; use "
            f"an optimizer that overrides only build() and update_step()"
        )


def _require_no_float8(variables: Any) -> None:
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
        raise ValueError(
            "dtype policy float8: its scales are overwritten by what arrives as their gradients, which would not be "
            "averaged; use float32, bfloat16 or mixed_float16 with hvq.DistributedOptimizer"
        )
