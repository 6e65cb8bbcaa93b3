"""Horovod's Keras callbacks for Keras 3, with the same names and arguments.

Horovod's own callbacks fail under Keras 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_quant.keras.optimizer import averaging_of
from horovod_quant.tensorflow.horovod_call import own_variable


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Callback that broadcasts one worker's weights and optimizer state when training begins.

    Every worker then starts from the same weights, random or loaded. The state of dropout's random numbers is not
    broadcast: equal masks on all workers would make their batches less different. The workers are those of the
    optimizer's process set. BinSGDM's momentum differs between workers: if every worker has loaded a separate file,
    leave this callback out.

    A model without weights yet, such as a ``Sequential`` without ``keras.Input``, is built for the input shape of a
    worker that has some. If that fails, or no worker has weights, they are broadcast after the first batch, and are
    those from before it if ``root_rank`` had some then.

    Args:
        root_rank: the worker whose variables are broadcast.
        device: device of the broadcast; "" for TensorFlow's choice.
        local_variables: a variable, or several, to leave unchanged.

    Raises:
        ValueError: when training begins: the workers' models differ.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        if local_variables is None:
            local_variables = []
        elif hasattr(local_variables, "shape"):
            local_variables = [local_variables]
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._before: list[tuple[Any, Any]] = []
        self._local: set[Any] = set()
        for variable in local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        if not hasattr(own_variable(var), "ref"):
            raise ValueError(
                f"local_variables: it contains {var!r}; use variables of the model or of TensorFlow"
            )
        self._local.add(own_variable(var).ref())

    def on_train_begin(self, logs: Any = None) -> None:
        import horovod.tensorflow as hvd

        self.broadcast_done, self._before = not _is_member(self.model), []
        if self.broadcast_done:
            return
        was_built = self.model.built
        # All workers must choose alike: one that broadcast now would wait for others that wait for its gradients.
        with tf.device(self.device):
            some_built, alike = _build_alike(self.model, _process_set(self.model))
        if alike:
            self._broadcast()
        elif some_built:
            if was_built and hvd.rank() == self.root_rank:
                self._before = [(each, each.numpy()) for each in self._variables()]
            if self.model.optimizer is not None:
                # The first batch must be the same update, with the same random bits, on all workers.
                iterations = _inner(self.model.optimizer)._iterations
                with tf.device(self.device):
                    broadcast([iterations], self.root_rank, _process_set(self.model))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:  # the first batch has built the model
            for variable, value in self._before:
                variable.assign(value)
            self._broadcast()

    def _variables(self) -> list[Any]:
        model, optimizer = self.model, self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        # Not model.variables, which also has the seeds of dropout.
        variables = [*model.weights, *(optimizer.variables if optimizer is not None else ())]
        own = map(own_variable, variables)
        return [each for each in own if each.ref() not in self._local]

    def _broadcast(self) -> None:
        with tf.device(self.device):
            broadcast(self._variables(), self.root_rank, _process_set(self.model))
        self.broadcast_done, self._before = True, []


class MetricAverageCallback(keras.callbacks.Callback):
    """Callback that averages metrics over the workers when an epoch ends.

    Put it before callbacks that read metrics, such as ``EarlyStopping`` and ``ReduceLROnPlateau``: all workers then
    decide alike. The moving statistics of batch normalization stay local to each worker.

    Args:
        device: device of the reduction; "" for TensorFlow's choice.

    Raises:
        ValueError: when an epoch ends: the workers' metrics have different names.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs and _is_member(self.model):
            with tf.device(self.device):
                logs.update(average_metrics(logs, _process_set(self.model)))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Callback that multiplies the learning rate between two epochs.

    It sets it to ``initial_lr * multiplier``.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a function of the epoch; or a number, which is raised to the power of epochs since ``start_epoch``.
        start_epoch: the first epoch in which it is set.
        end_epoch: the first epoch in which it is no longer set; None for no end.
        staircase: whether it is set when epochs begin; otherwise with each batch, by fractions of epochs.
        momentum_correction: whether momentum is multiplied, once, by the ratio of a new learning rate to the old one,
            in optimizers that have momentum.
        steps_per_epoch: batches of an epoch, without ``staircase``; None to use Keras's count.

    Raises:
        ValueError: ``initial_lr`` is None; or, when training begins, the batches of an epoch are not known, or the
            optimizer has a schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: use the learning rate to multiply, such as 0.1 * hvd.size()")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        rate = getattr(_inner(self.model.optimizer), "_learning_rate", None)
        if not hasattr(rate, "assign"):
            raise ValueError(
                f"{type(self).__name__}: the optimizer has a learning-rate schedule, which cannot be set; give the "
                f"optimizer a number as its learning_rate"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: Keras does not know the number of batches of an epoch here; give "
                    f"steps_per_epoch="
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.current_epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self.current_epoch >= self.end_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old:
            _scale_momentum(_inner(self.model.optimizer), new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that raises the learning rate batch by batch.

    It rises from ``initial_lr / hvd.size()`` to ``initial_lr``. Source: Goyal et al., "Accurate, Large Minibatch SGD"
    (2017).

    Args:
        initial_lr: the final learning rate.
        warmup_epochs: number of epochs of the warm-up.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: whether the first worker prints a line when it ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        import horovod.tensorflow as hvd

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            size = hvd.size()
            # Plus one batch, so that an epoch ends with a round number.
            return ((epoch + 1 / self.steps_per_epoch) * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        import horovod.tensorflow as hvd

        super().on_epoch_end(epoch, logs)
        if self.verbose and hvd.rank() == 0 and self.end_epoch is not None and epoch == self.end_epoch - 1:
            print(f"\nEpoch {epoch + 1}: the learning rate has been warmed up to {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Callback that saves the model when a metric improves.

    One worker alone writes the file. Put it after `MetricAverageCallback`. It may be used on every worker, or on one.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: see ``keras.callbacks.ModelCheckpoint``.
        filepath: the file to write; None if the attribute ``filepath`` is set before training.

    Raises:
        ValueError: when training begins: there is no ``filepath``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(
            filepath=filepath or ("unset.weights.h5" if save_weights_only else "unset.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None if filepath is None else os.fspath(filepath)

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "filepath=None: give BestModelCheckpoint a file to save to, such as filepath='best.keras'"
            )
        super().on_train_begin(logs)

    def _save_model(self, *given: Any, **named: Any) -> None:
        if _process_set(self.model).rank() == 0:
            super()._save_model(*given, **named)


def broadcast(variables: Iterable[Any], root_rank: int, process_set: Any) -> None:
    """Assign one worker's values to variables on all workers.

    Args:
        variables: variables of Keras or TensorFlow, in the same order on all workers; their names may differ.
        root_rank: the worker, by its global rank.
        process_set: the workers.

    Raises:
        ValueError: the workers' variables differ in number, shape or type.
    """
    import horovod.tensorflow as hvd

    own = [own_variable(variable) for variable in variables]
    _require_same(_shapes(own), "variables (their types and shapes)", process_set)
    for i, variable in enumerate(own):
        value = variable.read_value()
        # Horovod broadcasts no bfloat16.
        sent = tf.cast(value, tf.float32) if value.dtype is tf.bfloat16 else value
        received = hvd.broadcast(
            sent, root_rank, name=f"horovod_quant_broadcast_{i}", process_set=process_set
        )
        variable.assign(tf.cast(received, value.dtype))


def average_metrics(logs: Mapping[str, Any], process_set: Any) -> dict[str, Any]:
    """Return the workers' averages of metrics, numbers or arrays.

    Raises:
        ValueError: the workers' metrics have different names or shapes.
    """
    import horovod.tensorflow as hvd

    own = {name: np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in sorted(logs)}
    _require_same([[name, *values.shape] for name, values in own.items()], "metrics", process_set)
    flat = np.concatenate([values.reshape(-1) for values in own.values()])
    averages = hvd.allreduce(
        tf.constant(flat), op=hvd.Average, name="horovod_quant_metrics", process_set=process_set
    ).numpy()
    ends = np.cumsum([values.size for values in own.values()])[:-1]
    parts = (part.reshape(values.shape) for part, values in zip(np.split(averages, ends), own.values()))
    return {name: part if part.ndim else float(part) for name, part in zip(own, parts)}


def _build_alike(model: Any, process_set: Any) -> tuple[bool, bool]:
    """Build this worker's model like another worker's if only some are built.

    Returns:
        True if a worker's model is built; and True if all can be broadcast now.
    """
    import horovod.tensorflow as hvd

    name = "horovod_quant_built"
    states = hvd.allgather_object(
        (model.built, model.get_build_config() if model.built else None), name=name, process_set=process_set
    )
    built = [is_built for is_built, _ in states]
    if all(built) or not any(built):
        return any(built), all(built)
    config = next((each for _, each in states if each), None)
    if not model.built and config is not None:
        # What fails here the first batch builds.
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            model.build_from_config(config)
    # Not `built`: Keras sets it also where layers are not.
    weights = hvd.allgather_object(_shapes(model.weights), name=name, process_set=process_set)
    return True, all(each == weights[0] for each in weights)


def _shapes(variables: Iterable[Any]) -> list[Any]:
    own = map(own_variable, variables)
    return [[each.dtype.name, each.shape.as_list()] for each in own]


def _require_same(value: list[Any], what: str, process_set: Any) -> None:
    """Raise ValueError on all workers unless their values agree.

    Horovod would block, or say less.
    """
    import horovod.tensorflow as hvd

    text = json.dumps(value)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int64)
    everyone = hvd.allgather(
        tf.constant(np.concatenate([digest, [len(value)]])),
        name=f"horovod_quant_same_{what.partition(' ')[0]}",
        process_set=process_set,
    )
    digests, lengths = everyone.numpy().reshape(-1, 2).T
    if len(set(digests.tolist())) > 1:
        raise ValueError(
            f"the workers have different {what}: {', '.join(map(str, lengths.tolist()))} of them; this worker has "
            f"{text[:400]}"
        )


def _process_set(model: Any) -> Any:
    import horovod.tensorflow as hvd

    averaging = None if model.optimizer is None else averaging_of(model.optimizer)
    return hvd.global_process_set if averaging is None else averaging.process_set


def _is_member(model: Any) -> bool:
    """Return True unless the optimizer's process set is without this worker."""
    return _process_set(model).included() is not False


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _scale_momentum(optimizer: Any, ratio: float) -> None:
    """Multiply an optimizer's accumulated momentum once.

    This replaces a change of the momentum coefficient. The coefficient is a constant of the graph.
    """
    if not isinstance(getattr(optimizer, "momentum", None), float) or ratio == 1.0:
        return
    for variable in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or ():
        if variable is not None:
            variable.assign(variable.value * tf.cast(ratio, variable.dtype))
