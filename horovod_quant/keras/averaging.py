"""Reductions of a distributed optimizer's step: their tensors, groups and names."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # there is no public function for it

from horovod_quant.frontends.arguments import require_process_set
from horovod_quant.frontends.calls import check_operation
from horovod_quant.frontends.frontend import BaseCompressor
from horovod_quant.keras.averaged_before import require_not_averaged
from horovod_quant.tensorflow.collectives import is_elastic
from horovod_quant.tensorflow.compressor import Compressor
from horovod_quant.tensorflow.horovod_call import HorovodCall, own_variable, unique_names

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of optimizers that have averaged, by process set.

Every worker of a process set averages with the same optimizers in the same order, whatever other optimizers it has.
"""


class Averaging:
    """Averaging by a distributed optimizer, with its settings.

    Args:
        compression: None, a compressor of this package or one of Horovod's.
        op: the reduction.
        process_set: the process set that reduces; None for all workers.
        groups: None, a number of groups, or lists of variables; see `DistributedOptimizer`.
        sparse_as_dense: whether ``tf.IndexedSlices`` are converted to dense tensors.
        predivide: the part of the average's divisor to divide by before the sum.
        devices: devices of dense and of sparse gradients; "" for TensorFlow's choice.
        scale_local_gradients: whether gradients of local variables are divided by the number of workers.

    Attributes:
        variables: the variables of the gradients that are being applied.
    """

    def __init__(
        self,
        compression: Any,
        op: Any,
        process_set: Any,
        groups: int | Sequence[Sequence[Any]] | None,
        sparse_as_dense: bool,
        predivide: float,
        devices: tuple[str, str],
        scale_local_gradients: bool,
    ) -> None:
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._op = hvd.Average if op is None else op
        require_process_set(process_set)
        self._process_set = hvd.global_process_set if process_set is None else process_set
        groups = int(groups) if isinstance(groups, np.integer) else groups
        _require_settings(compression, self._op, hvd, predivide)
        _require_groups(groups)
        for argument, device in zip(("device_dense", "device_sparse"), devices):
            _require_device(argument, device)
        _require_switch("sparse_as_dense", sparse_as_dense)
        _require_switch("scale_local_gradients", scale_local_gradients)
        self._compression = hvd.Compression.none if compression is None else compression
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._predivide = float(predivide)
        self._devices = devices
        self._scale_local = scale_local_gradients
        self._local: set[Any] = set()
        self._number: int | None = None
        self.variables: Sequence[Any] = ()

    @property
    def compression(self) -> Any:
        return self._compression

    @property
    def process_set(self) -> Any:
        return self._process_set

    def check_variables(self, variables: Sequence[Any]) -> None:
        """Raise an error for variables unfit for the compressor.

        Also with one worker.
        """
        compression = self._compression
        if isinstance(compression, Compressor) and not compression._names_in_copies:
            paths = unique_names(map(_path_of, variables))
            compression.check_variables(list(zip(paths, map(own_variable, variables))))

    def keep_local(self, variable: Any) -> None:
        if not hasattr(own_variable(variable), "ref"):
            raise ValueError(f"var={variable!r}: use a variable of the model or of TensorFlow")
        self._local.add(own_variable(variable).ref())

    def average(self, gradients: Sequence[Any], indices: Sequence[int], step: Any) -> list[Any]:
        """Return the gradients of ``variables``, averaged over the workers.

        Args:
            gradients: tensors, ``tf.IndexedSlices`` or None, in the order of ``variables``.
            indices: the variables' indices in the optimizer, part of the operations' names.
            step: number of the update, for random bits.

        Raises:
            ValueError: XLA compiles the graph, or the gradients have been averaged already.
        """
        if self._is_alone():
            return list(gradients)
        _require_no_xla()
        require_not_averaged(gradients)
        step = tf.cast(tf.convert_to_tensor(step), tf.int64)
        results = list(gradients)
        dense: dict[int, tf.Tensor] = {}
        for position, (gradient, variable) in enumerate(zip(gradients, self.variables)):
            if gradient is None:
                continue
            if own_variable(variable).ref() in self._local:
                results[position] = self._scaled(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
                with tf.device(self._devices[1]):
                    results[position] = self._gathered(gradient, self._label(f"sparse_{indices[position]}"))
            else:
                dense[position] = tf.convert_to_tensor(gradient)
        with tf.device(self._devices[0]):
            for positions in self._cut(dense):
                reduced = self._reduced(positions, [dense[position] for position in positions], indices, step)
                for position, result in zip(positions, reduced):
                    results[position] = result
        return results

    def agree(self, flag: tf.Tensor) -> tf.Tensor:
        """Return True if ``flag`` is true on every worker."""
        if self._is_alone():
            return flag
        _require_no_xla()
        everywhere = self._hvd.allreduce(
            tf.cast(flag, tf.int32),
            op=self._hvd.Min,
            name=f"HorovodAllreduce_{self._label('finite')}",
            process_set=self._process_set,
            ignore_name_scope=True,
        )
        return tf.cast(everywhere, tf.bool)

    def _is_alone(self) -> bool:
        if self._process_set.process_set_id is None:
            raise ValueError(
                f"process_set={self._process_set}: Horovod does not know it; give it to hvd.init(process_sets=[...]), "
                f"or to hvd.add_process_set(...) on all workers"
            )
        if is_elastic():
            return False
        return not self._process_set.included() or self._process_set.size() == 1

    def _label(self, what: str) -> str:
        """Return a name, equal on all workers and new in its graph.

        Keras's names count a process's layers. A step may apply the optimizer to the gradients of several losses.
        """
        process_set = self._process_set.process_set_id
        if self._number is None:
            self._number = next(_numbers[process_set])
        label = f"keras_{process_set}_{self._number}_{what}"
        if tf.executing_eagerly():
            return label
        graph = tf.compat.v1.get_default_graph()
        while type(graph).__name__ == "CondBranchFuncGraph":  # of a loss scale, or an accumulation
            graph = graph.outer_graph
        uses = getattr(graph, "_horovod_quant_labels", None)
        if uses is None:
            uses = graph._horovod_quant_labels = Counter()
        uses[label] += 1
        return label if uses[label] == 1 else f"{label}_{uses[label]}"

    def _cut(self, dense: dict[int, tf.Tensor]) -> list[list[int]]:
        """Return the gradients that are reduced together.

        They have one dtype, as Horovod's groups require.
        """
        groups: list[list[int]] = []
        if isinstance(self._groups, int):
            groups = [list(map(int, part)) for part in np.array_split(list(dense), self._groups)]
        elif self._groups is not None:
            where = {own_variable(variable).ref(): i for i, variable in enumerate(self.variables)}
            asked = [[where.get(own_variable(each).ref()) for each in group] for group in self._groups]
            groups = [
                [position for position in group if position is not None and position in dense]
                for group in asked
            ]
        together = {position for group in groups for position in group}
        groups += [[position] for position in dense if position not in together]
        by_type: dict[tuple[int, Any], list[int]] = {}
        for number, group in enumerate(groups):
            for position in group:
                by_type.setdefault((number, dense[position].dtype), []).append(position)
        return list(by_type.values())

    def _reduced(
        self, positions: Sequence[int], tensors: list[tf.Tensor], indices: Sequence[int], step: tf.Tensor
    ) -> list[tf.Tensor]:
        compression, siblings = self._compression, tensors if len(tensors) > 1 else ()
        labels = [self._label(f"gradient_{indices[position]}") for position in positions]
        sent, contexts = [], []
        for position, tensor, label in zip(positions, tensors, labels):
            if isinstance(compression, Compressor):
                call = self._call(position, indices[position], label, siblings, step)
                number, context = compression.compress_for(call, tensor)
            else:
                # Horovod reduces no bfloat16.
                taken = tf.cast(tensor, tf.float32) if tensor.dtype is tf.bfloat16 else tensor
                number, context = compression.compress(taken)
            sent.append(number)
            contexts.append(context)
        options = {
            "op": self._op,
            "process_set": self._process_set,
            "ignore_name_scope": True,
            "name": f"HorovodAllreduce_{labels[0]}",
        }
        if self._op == self._hvd.Average:
            options.update(prescale_factor=1.0 / self._predivide, postscale_factor=self._predivide)
        if len(sent) == 1:
            outputs = [self._hvd.allreduce(sent[0], **options)]
        else:
            outputs = self._hvd.grouped_allreduce(sent, **options)
        results = [compression.decompress(output, context) for output, context in zip(outputs, contexts)]
        return [
            tf.ensure_shape(tf.cast(result, tensor.dtype), tensor.shape)
            for result, tensor in zip(results, tensors)
        ]

    def _call(
        self, position: int, index: int, label: str, siblings: Sequence[tf.Tensor], step: tf.Tensor
    ) -> HorovodCall:
        paths = unique_names(map(_path_of, self.variables))
        return HorovodCall(
            variable=own_variable(self.variables[position]),
            name=label,
            operation=label,
            op=self._op,
            process_set=self._process_set,
            ignore_name_scope=True,
            siblings=siblings,
            variables=tuple(map(own_variable, self.variables)),
            path=paths[position],
            paths=paths,
            key=f"variable {index}",
            step=step,
            is_direct=True,
        )

    def _gathered(self, gradient: tf.IndexedSlices, label: str) -> tf.IndexedSlices:
        if self._op not in (self._hvd.Average, self._hvd.Sum):
            raise ValueError(
                "op: sparse gradients (tf.IndexedSlices) support only op=hvd.Average and op=hvd.Sum; use "
                "sparse_as_dense=True"
            )
        values, indices = (
            self._hvd.allgather(
                tensor,
                name=f"HorovodAllgather_{label}_{what}",
                process_set=self._process_set,
                ignore_name_scope=True,
            )
            for what, tensor in (("values", gradient.values), ("indices", gradient.indices))
        )
        if self._op == self._hvd.Average:
            values = values / self._size(values.dtype)
        return tf.IndexedSlices(values, indices, dense_shape=gradient.dense_shape)

    def _scaled(self, gradient: Any) -> Any:
        if not self._scale_local:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / self._size(gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / self._size(gradient.dtype)

    def _size(self, dtype: tf.DType) -> tf.Tensor:
        size = self._hvd.size_op(process_set_id=self._process_set.process_set_id)
        return tf.cast(size if is_elastic() else self._process_set.size(), dtype)


def _path_of(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _require_no_xla() -> None:
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    ):
        raise ValueError(
            "jit_compile=True: XLA cannot run Horovod's operations; use model.compile(..., jit_compile=False), also "
            "where Keras's jit_compile='auto' has chosen it, as it does on GPUs"
        )


def _require_settings(compression: Any, op: Any, hvd: Any, predivide: Any) -> None:
    """Raise ValueError or TypeError, with valid alternatives, for an invalid setting."""
    if isinstance(compression, type) and issubclass(compression, BaseCompressor):
        name = compression.__name__
        raise TypeError(f"compression={name}: that is a class; use an instance, {name}()")
    if isinstance(compression, BaseCompressor) and not isinstance(compression, Compressor):
        raise TypeError(
            f"compression={compression!r}: it is for PyTorch; use one of horovod_quant.keras, such as "
            f"hvq.GlobalQSGD(bits=8)"
        )
    if compression is not None and not (
        hasattr(compression, "compress") and hasattr(compression, "decompress")
    ):
        raise TypeError(
            f"compression={compression!r}: use None, a compressor such as hvq.GlobalQSGD(bits=8), or one of "
            f"hvd.Compression"
        )
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise ValueError(f"op={op!r}: use hvd.Average, hvd.Sum or hvd.Adasum")
    if isinstance(compression, Compressor):
        check_operation(compression, op, (hvd.Average, hvd.Sum), hvd.Adasum)
    if (
        isinstance(predivide, bool)
        or not isinstance(predivide, (int, float, np.integer, np.floating))
        or not 0 < predivide < float("inf")
    ):
        raise ValueError(f"gradient_predivide_factor={predivide!r}: use a number above 0")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError(
            f"gradient_predivide_factor={predivide!r}: it is for op=hvd.Average; use 1.0 with another reduction"
        )


def _require_groups(groups: Any) -> None:
    """Raise ValueError unless it is None, a number, or disjoint lists."""
    if isinstance(groups, bool) or (isinstance(groups, int) and groups < 1):
        raise ValueError(f"groups={groups!r}: use a number of groups, 1 or more, or None")
    if groups is None or isinstance(groups, int):
        return
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, (list, tuple)) and all(hasattr(own_variable(each), "ref") for each in group)
        for group in groups
    ):
        raise ValueError(f"groups={groups!r}: use a number of groups, a list of lists of variables, or None")
    seen: set[Any] = set()
    for variable in itertools.chain(*groups):
        reference = own_variable(variable).ref()
        if reference in seen:
            raise ValueError(
                f"groups: {_path_of(variable)!r} appears twice; put each variable into one group"
            )
        seen.add(reference)


def _require_device(argument: str, device: Any) -> None:
    try:
        with tf.device(device):
            pass
    except (AttributeError, RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"{argument}={device!r}: use the name of a device, such as '/cpu:0', or '' for TensorFlow's choice"
        ) from None


def _require_switch(argument: str, value: Any) -> None:
    if not (isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1))):
        raise ValueError(f"{argument}={value!r}: use True or False")
