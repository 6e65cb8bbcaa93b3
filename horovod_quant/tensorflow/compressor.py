"""Compressors for ``hvd.DistributedOptimizer(compression=...)`` and ``hvd.DistributedGradientTape``."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontends import nodes
from horovod_quant.frontends.arguments import require_no_host
from horovod_quant.frontends.calls import check_dtype, check_operation, check_process_set
from horovod_quant.frontends.frontend import BaseCompressor, gradient_fingerprint
from horovod_quant.frontends.groups import cut_by_scheme
from horovod_quant.frontends.installing import require_horovod
from horovod_quant.frontends.stats import OTHER_NAMES, Stats
from horovod_quant.frontends.step_counts import UNNAMED
from horovod_quant.kernels import notices
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.agreement import SIGNS, fingerprint_of, labels
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.tensorflow import optim
from horovod_quant.tensorflow.callbacks import CallbackExchange
from horovod_quant.tensorflow.collectives import (
    Scope,
    after_active_rank_query,
    control_tensor,
    is_elastic,
    not_constant_foldable,
    scope_of,
    worker_count,
)
from horovod_quant.tensorflow.groups import Group, Member, Results, StoredState
from horovod_quant.tensorflow.horovod_call import (
    KERAS_3_REMEDY,
    HorovodCall,
    identify,
    is_keras_3,
    name_of,
    optimizer_being_made,
    own_variable,
)
from horovod_quant.tensorflow.integer_shapes import integer_shapes
from horovod_quant.tensorflow.measured import ErrorSampler
from horovod_quant.tensorflow.recent import RecentNames
from horovod_quant.tensorflow.reused_memory import ReusedMemory
from horovod_quant.tensorflow.state import Ledger, owning_graph
from horovod_quant.tensorflow.traced import traced_reduction
from horovod_quant.transports.traffic import ring_allreduce_bytes

Kernels = Literal["auto", "native", "numpy", "tensorflow"]

MANY_GRADIENTS = 4
"""Minimum number of separately reduced gradients for a warning."""

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class Compressor(BaseCompressor):
    """A compressor for Horovod's optimizers and tapes, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    If two models use it, variables of the same name are counted together; BinSGDM's supports only one optimizer.

    Args:
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        **common: see `horovod_quant.frontends.frontend.BaseCompressor`.

    Raises:
        ValueError: an argument is out of range.
        ImportError: Horovod is missing, or was built without TensorFlow.
    """

    _in_copies = ("_names_in_copies",)

    def __init__(self, scheme: Scheme | str, *, kernels: Kernels = "auto", **common: Any) -> None:
        require_horovod("tensorflow", "TensorFlow")
        super().__init__(scheme, kernels=kernels, **common)
        if not self.overlap:
            raise ValueError("overlap=False: TensorFlow decides when a collective starts; leave it out")

    # Horovod uses compressors as keys of a cache of functions, by identity.
    __eq__ = object.__eq__

    def __hash__(self) -> int:
        being_made = optimizer_being_made()
        if being_made is not None:
            optimizer, process_set = being_made
            if is_keras_3(optimizer):
                raise RuntimeError(KERAS_3_REMEDY)
            if process_set is not None:
                self._check_process_set(process_set)
            self._welcome(optimizer)
        return object.__hash__(self)

    def _welcome(self, optimizer: Any) -> None:
        """Validate the distributed optimizer that is being created with this compressor."""
        self._optimizers.add(optimizer)
        if optim.binsgdm_of(optimizer) is not None:
            raise ValueError(
                f"compression={type(self).__name__}(...): the optimizer BinSGDM needs compression=hvq.BinSGDM()"
            )

    def _check_kernels(self) -> None:
        if self._kernels not in get_args(Kernels):
            *usable, last = map(repr, get_args(Kernels))
            raise ValueError(f"kernels={self._kernels!r}: use {', '.join(usable)} or {last}")
        if self._wanted_kernels() != "tensorflow":
            super()._check_kernels()
        for scheme in self.policy.schemes:
            if self._kernels == "tensorflow":
                require_no_host(scheme, "tensorflow")

    def _deciding(self, workers: Workers) -> Workers:
        return Workers(0, 1) if is_elastic() else workers  # as CallbackExchange has it

    def _wanted_kernels(self) -> str:
        name, _ = kernel_backends.requested(self._kernels)
        if name == "auto" and tf.config.list_physical_devices("GPU"):
            name = "tensorflow"
        return name

    def _name_parameters(self, named_parameters: Iterable[tuple[str, Any]] | None) -> None:
        named = [(name, own_variable(variable)) for name, variable in named_parameters or ()]
        self._names = {variable.ref(): name for name, variable in named}
        self._names_in_copies = _by_own_name(named)
        if named:
            self.check_variables(named)

    def _check_process_set(self, used: Any) -> None:
        check_process_set(self._process_set, used, bool(self.hierarchical))

    def check_variables(self, named: Sequence[tuple[str, Any]]) -> None:
        """Raise an error for variables unfit for the arguments.

        Warn if all are small.
        """
        self.policy.check_names(name for name, _ in named)
        for name, variable in named:
            dtype = tf.as_dtype(variable.dtype)
            if getattr(variable, "trainable", True) and not (dtype.is_integer or dtype.is_bool):
                check_dtype(name, dtype, _FLOATS)
        self._warn_if_nothing_is_compressed(_elements_of(named))

    def _bind(self) -> None:
        self._first: dict[str, int] = {}
        self._ledgers: dict[tuple[str, int, Any], Ledger] = {}
        self._optimizers: Any = weakref.WeakSet()
        self._recent = RecentNames(self._forget)
        self._open: Group | None = None
        self._state_memory = ReusedMemory()
        self._known_names: set[tuple[str, ...]] = set()
        self._looked_for_groups = False
        self._sampler = ErrorSampler(self.nmse_every, self.nmse_share)

    def _exchange_counts(self) -> dict[str, int]:
        counts = dict(self._steps)
        for (name, *_), ledger in self._ledgers.items():
            counts[name] = max(counts.get(name, 0), ledger.next())
        return counts

    def _resume_at(self, counts: dict[str, int], first_step: int) -> None:
        if self._ledgers or self._steps != self._first:
            raise RuntimeError(
                "load_state_dict: this compressor has already reduced gradients; load the state before that"
            )
        super()._resume_at(counts, first_step)
        self._first = dict(counts)

    def stats(self) -> Stats:
        """Return bytes sent and their float32 equivalent, per parameter and in total.

        Raises:
            RuntimeError: with ``kernels="tensorflow"`` in a TensorFlow 1 graph: there is no default session.
        """
        for (name, *_), ledger in self._ledgers.items():
            self._add_up(name, ledger)
        return super().stats()._replace(nmse=self._sampler.nmse)

    def _add_up(self, name: str, ledger: Ledger) -> None:
        """Count the reductions of a graph since the last call."""
        times = ledger.take()
        self._traffic.expect(name, times * ledger.float32_bytes, times)
        self._traffic.count(name, times * ledger.bytes_sent)

    def _uncounted(self, counted: Mapping[str, Any]) -> Iterable[str]:
        known = self._names.values() if self._names else itertools.chain(*self._known_names)
        return [name for name in dict.fromkeys(known) if name not in counted] if counted else ()

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    @integer_shapes()
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor that Horovod reduces instead, and a context.

        The context is for `decompress`. Called while a graph is traced or, for a direct allreduce in eager code, each
        time. Integers and booleans are returned unchanged for every operation, as with ``hvd.Compression.fp16``;
        `stats` does not count them.

        Raises:
            TypeError: the tensor has another dtype that cannot be quantized, such as a complex one.
            ValueError: an argument does not fit the number of workers, the variables' names or the operation.
        """
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype.is_integer or tensor.dtype.is_bool:
            return tensor, None
        call = identify()
        return (tensor, None) if call.is_export else self.compress_for(call, tensor)

    def compress_for(self, call: HorovodCall, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Compress a floating-point tensor for a caller that describes its reduction."""
        name = self._name(call)
        self._check(call, name, tensor)
        elements = _shape(call, tensor).num_elements()
        size = 2**62 if elements is None else elements
        if self.policy.is_off:
            tensor = self._after_comparison(tensor, self.policy.scheme_unless_off(name, size), call)
        scheme = self.policy.scheme_for(name, size)
        self._remember(call, name, elements if self._is_traced(tensor, scheme) else None)
        if scheme is None:
            return self._pass_through(tensor, name, call)
        return self._submit(tensor, name, scheme, call)

    @tf.autograph.experimental.do_not_convert
    @integer_shapes()
    def decompress(self, output: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced gradient with the dtype and shape of the input.

        Args:
            output: what Horovod reduced.
            ctx: the context that `compress` returned: a function of ``output``, or None.
        """
        return output if ctx is None else ctx(output)

    # ---- compress, step by step ------------------------------------------------------------------------------

    def _name(self, call: HorovodCall) -> str:
        if call.variable is None:
            return UNNAMED if call.name is None else call.name
        reference = call.variable.ref()
        if reference in self._names:
            return self._names[reference]
        if call.path is not None:
            return call.path
        own = name_of(call.variable)
        if self._names or own not in self._names_in_copies:
            return str(call.name)
        name = self._names_in_copies[own]
        if name is None:
            raise ValueError(
                f"named_parameters: several variables are named {own!r}, and a copy of the compressor cannot tell "
                f"them apart; construct a new compressor with named_parameters="
            )
        return name

    def _remember(self, call: HorovodCall, name: str, elements: int | None) -> None:
        if not tf.executing_eagerly():
            self._recent.use_in_graph(name)
        elif call.variable is None:
            self._recent.use(name, elements)

    def _forget(self, name: str, elements: int | None, is_last: bool) -> None:
        """Drop a direct call's name that was not used recently.

        Its random bits are never repeated.
        """
        ledger = None if elements is None else self._ledgers.pop((name, elements, None), None)
        if ledger is not None:
            self._first_step = max(self._first_step, ledger.next())
            self._add_up(name, ledger)
        if is_last:
            self._traffic.merge(name, OTHER_NAMES)
            self._first_step = max(self._first_step, self._steps.pop(name, 0))
            self._first.pop(name, None)
            self._chains.pop(name, None)

    def _check(self, call: HorovodCall, name: str, tensor: tf.Tensor) -> None:
        import horovod.tensorflow as hvd

        self._check_process_set(call.process_set)
        check_operation(self, call.op, (hvd.Average, hvd.Sum), hvd.Adasum)
        check_dtype(name, tensor.dtype, _FLOATS)
        size = call.process_set.size()
        if self._checked.get(call.process_set) != size:
            self._check_workers(size)
            self._checked[call.process_set] = size
        names = call.names()
        if names and not self._names_in_copies and names not in self._known_names:
            if not call.paths:  # of Keras 3's variables those with gradients; its optimizer has checked all
                self.policy.check_names(names)
            self._warn_if_nothing_is_compressed(_elements_of(zip(names, call.variables)))
            self._known_names.add(names)

    def _warn_without_groups(self, call: HorovodCall) -> None:
        """Warn once on rank 0 without ``groups=``.

        While a graph is traced, only Horovod can group gradients.
        """
        if self._looked_for_groups or not call.variables:
            return
        self._looked_for_groups = True
        elements = _elements_of(zip(call.names(), call.variables))
        quantized = sum(self.policy.scheme_for(name, own) is not None for name, own in elements.items())
        if call.siblings or quantized < MANY_GRADIENTS or call.process_set.rank() != 0:
            return
        notices.warn(
            f"{type(self).__name__} reduces {quantized} gradients one by one, which takes more time than together: "
            f"pass groups=4 to the DistributedGradientTape or DistributedOptimizer (for Keras 2 the one of "
            f"horovod.tensorflow.keras)",
            stacklevel=2,
        )

    def _after_comparison(self, tensor: tf.Tensor, scheme: Scheme | None, call: HorovodCall) -> tf.Tensor:
        """Return a gradient after the active-rank query of the others.

        In graphs, workers where compression is not switched off would wait for this worker in that query, before
        Horovod compares any shapes.
        """
        if scheme is None or call.variable is None:
            return tensor
        scope = self._scope(call, tensor)._replace(is_off=True)
        resolved = scheme.for_workers(self._deciding(scope.workers()))
        flat = after_active_rank_query(resolved.collectives, scope, tf.reshape(tensor, [-1]))
        return tf.ensure_shape(tf.reshape(flat, tf.shape(tensor)), tensor.shape)

    def _pass_through(self, tensor: tf.Tensor, name: str, call: HorovodCall) -> tuple[tf.Tensor, Any]:
        # Horovod reduces no bfloat16, and in a group only tensors of one type, wide enough for control tensors.
        as_it_is = tensor.dtype.size > 2 or (tensor.dtype is tf.float16 and not call.siblings)
        sent = tensor if as_it_is else tf.cast(tensor, tf.float32)
        if self._is_traced(tensor, None):
            ledger = self._ledger(name, tensor, call)
            ledger.bytes_sent = ring_allreduce_bytes(
                sent.dtype.size * tensor.shape.num_elements(), call.process_set.size()
            )
            with tf.control_dependencies([ledger.enter()]):
                sent = tf.reshape(not_constant_foldable(sent, call.process_set), sent.shape)
        else:
            sent = self._counted(sent, name, call)
        named = tf.identity(sent, name=scope_of(call, tensor).tensor_name)
        return named, partial(tf.cast, dtype=tensor.dtype)

    def _counted(self, sent: tf.Tensor, name: str, call: HorovodCall) -> tf.Tensor:
        """Return ``sent`` with a callback that counts it when the graph runs."""
        item_bytes = sent.dtype.size

        def count(size: Any, elements: Any) -> Any:
            self._enter(name, int(elements), int(size))
            self._traffic.count(name, ring_allreduce_bytes(item_bytes * int(elements), int(size)))
            return np.array([0, elements], np.int32)

        # A stateless call is made only if its result is used, and a stateful one would wait for all before it. A
        # slice of the whole tensor copies nothing.
        inputs = [worker_count(call.process_set), tf.size(sent)]
        bounds = tf.ensure_shape(tf.numpy_function(count, inputs, tf.int32, stateful=False), [2])
        whole = tf.slice(tf.reshape(sent, [-1]), bounds[:1], bounds[1:])
        return tf.ensure_shape(tf.reshape(whole, tf.shape(sent)), sent.shape)

    def _submit(
        self, tensor: tf.Tensor, name: str, scheme: Scheme, call: HorovodCall
    ) -> tuple[tf.Tensor, Any]:
        self._warn_without_groups(call)
        # Where Horovod uses generic names, the variables' names may differ between workers.
        common_name = str(name if call.operation is None else call.operation)
        shape = _shape(call, tensor)
        dimensions = None if shape.rank is None else tuple(shape)
        also = self._also_carried(tensor)
        signs = gradient_fingerprint(common_name, dimensions, tensor.dtype.name, scheme, self.seed)
        signs = signs[len(also) :]
        key = call.key or name
        state = self._state(call, name, scheme)
        member = Member(
            tensor,
            name,
            scheme,
            self._chains.setdefault(key, RngKey(self.seed, key)),
            signs,
            lambda output: self._factor(name, signs, output[: 1 + len(signs)]),
            self._disagreement(name),
            state,
            call.step if state is None else state.step,
        )
        group = self._group(call)
        position = group.add(member)
        numbers = control_tensor(signs, _control_dtype(tensor), scope_of(call, tensor), also)
        compared = self._comparison(tensor, name, call)

        def finish(output: tf.Tensor) -> tf.Tensor:
            result = self._delivered(state, group.result(position, output), output)
            return _without_gradient(result if compared is None else compared(result, output), tensor)

        return numbers, finish

    def _comparison(
        self, tensor: tf.Tensor, name: str, call: HorovodCall
    ) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None:
        """Return the function that measures a gradient's nmse, or None.

        Its arguments are the result and the reduced control tensor.
        """
        if (
            not self._sampler
            or call.variable is None
            or self.own_optimizer is not None
            or not tensor.shape.is_fully_defined()
            or is_elastic()  # where new workers have counted fewer steps
        ):
            return None
        sampler, scope = self._sampler, scope_of(call, tensor)
        key = call.key or name
        return lambda result, output: sampler.compared(name, key, tensor, result, output, scope)

    def _group(self, call: HorovodCall) -> Group:
        if not call.siblings:
            return Group(call, self._build)
        if self._open is None or self._open.call.siblings is not call.siblings:
            self._open = Group(call, self._build)
        return self._open

    def _build(self, members: list[Member], call: HorovodCall, control_tensor: tf.Tensor) -> Results:
        """Create the reductions of gradients that Horovod groups."""
        results: Results = {}
        most = self.group_bytes
        sizes = [(each.scheme, most if each.bytes is None else each.bytes) for each in members]
        for positions in cut_by_scheme(sizes, most):
            own = [members[position] for position in positions]
            # If other workers let Horovod reduce a tensor, because theirs is small, the control tensor is an error on
            # all workers, while the reduction's collectives would wait indefinitely.
            with tf.control_dependencies([control_tensor] if call.variable is None else []):
                result = self._reduction(own, call)
            results.update({position: partial(result, i) for i, position in enumerate(positions)})
        return results

    def _reduction(self, members: list[Member], call: HorovodCall) -> Callable[[int, tf.Tensor], tf.Tensor]:
        scope = self._scope(call, members[0].tensor)
        if scope.nodes is not None:
            members = [self._with_part(member, scope.nodes) for member in members]
        if not all(self._is_traced(member.tensor, member.scheme) for member in members):
            on_cpu = self._wanted_kernels() != "tensorflow"
            kernels = kernel_backends.get(self._kernels) if on_cpu else kernel_backends.fastest()
            return CallbackExchange(
                members, kernels, scope, self._enter, self._traffic, self._state_memory
            ).build()
        ledgers = [self._ledger(member.name, member.tensor, call) for member in members]
        for member, ledger in zip(members, ledgers):
            control_bytes = (1 + SIGNS) * _control_dtype(member.tensor).size
            ledger.bytes_sent = ring_allreduce_bytes(control_bytes, call.process_set.size())
        return traced_reduction(members, scope, ledgers)

    def _scope(self, call: HorovodCall, tensor: tf.Tensor) -> Scope:
        """Return the scope of collectives in which workers compare arguments."""
        arguments = self._arguments()
        return scope_of(call, tensor)._replace(
            signature=tuple(fingerprint_of(arguments)),
            labels=tuple(labels(arguments)),
            nodes=self._nodes() if self.hierarchical else None,
        )

    def _basics(self) -> Any:
        from horovod.tensorflow.mpi_ops import _basics

        return _basics

    def _nodes(self) -> nodes.Nodes:
        import horovod.tensorflow as hvd

        def gather(own: list[int]) -> list[list[int]]:
            with tf.init_scope():
                if not tf.executing_eagerly():
                    raise RuntimeError(
                        "hierarchical=True: in TensorFlow 1's graphs the workers cannot find their hosts; give the "
                        "number of workers per host, as in hierarchical=2"
                    )
                return (
                    hvd.allgather(tf.constant([own], tf.int32), name="horovod_quant.frontends.nodes")
                    .numpy()
                    .tolist()
                )

        return nodes.find(hvd, self._basics(), self.hierarchical, None, gather)

    def _is_traced(self, tensor: tf.Tensor, scheme: Scheme | None) -> bool:
        """Return whether the gradient's reduction uses TensorFlow operations."""
        return (
            self._wanted_kernels() == "tensorflow"
            and tensor.shape.is_fully_defined()
            and not is_elastic()
            and (scheme is None or scheme.host_requirement() is None)
        )

    def _enter(self, name: str, elements: int, size: int) -> int:
        """Count a reduction that a callback starts, and return its step."""
        self._traffic.expect(name, ring_allreduce_bytes(4 * elements, size))
        number = self._steps.get(name, self._first_step)
        self._steps[name] = number + 1
        return number

    def _ledger(self, name: str, tensor: tf.Tensor, call: HorovodCall) -> Ledger:
        key = (name, tensor.shape.num_elements(), owning_graph())
        if key not in self._ledgers:
            self._ledgers[key] = Ledger(self._first.get(name, self._first_step))
        ledger = self._ledgers[key]
        variables = (each for each in (call.variable, *call.variables) if isinstance(each, tf.Variable))
        for owner in (*itertools.islice(variables, 1), *self._optimizers):
            ledger.save_with(owner)
        ledger.float32_bytes = ring_allreduce_bytes(4 * key[1], call.process_set.size())
        return ledger

    def _state(self, call: HorovodCall, name: str, scheme: Scheme) -> StoredState | None:
        return None

    def _also_carried(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """Return scalars to append to the control tensor; `_delivered` gets their sums."""
        return ()

    def _delivered(
        self, state: StoredState | None, result: tf.Tensor, control_tensor: tf.Tensor
    ) -> tf.Tensor:
        """Return the reduced gradient, and update its optimizer's state."""
        return result

    def _with_part(self, member: Member, found: nodes.Nodes) -> Member:
        """Return the gradient with this worker's part of the state."""
        return member


def _by_own_name(named: Sequence[tuple[str, Any]]) -> dict[str, str | None]:
    """Return the given names by the variables' names.

    Returns None where several variables share a name.
    """
    counts = Counter(variable.name for _, variable in named)
    return {variable.name: name if counts[variable.name] == 1 else None for name, variable in named}


def _control_dtype(tensor: tf.Tensor) -> tf.DType:
    """Return the control tensor's dtype, at least float32.

    Horovod's factor must come back exact.
    """
    return tf.float64 if tensor.dtype is tf.float64 else tf.float32


def _shape(call: HorovodCall, tensor: tf.Tensor) -> tf.TensorShape:
    """Return a gradient's static shape, or else its variable's."""
    if call.variable is None or tensor.shape.is_fully_defined():
        return tensor.shape
    return call.variable.shape if call.variable.shape.is_fully_defined() else tensor.shape


def _elements_of(named: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Return the numbers of elements of variables of known shape."""
    counts = {name: variable.shape.num_elements() for name, variable in named}
    return {name: count for name, count in counts.items() if count is not None}


def _without_gradient(result: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """Return ``result`` with a gradient function that raises an error."""
    tied, _ = tf.identity_n([result, gradient])
    message = "a quantized allreduce cannot be differentiated; leave compression out of this call"
    return tf.raw_ops.PreventGradient(input=tied, message=message)
