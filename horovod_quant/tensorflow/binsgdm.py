"""Compressor of BinSGDM (Peng et al., published as Birder, NeurIPS 2023).

``optim.py`` has its optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.frontends import nodes
from horovod_quant.frontends.binsgdm import moves_by_averages, require_beta, require_same_beta
from horovod_quant.schemes.base import LOCAL, Scheme
from horovod_quant.tensorflow import optim
from horovod_quant.tensorflow.collectives import is_elastic
from horovod_quant.tensorflow.compressor import Compressor
from horovod_quant.tensorflow.groups import Member, StoredState
from horovod_quant.tensorflow.horovod_call import HorovodCall


class BinSGDMCompressor(Compressor):
    """Compressor for the Keras optimizers BinSGDM and LegacyBinSGDM.

    These are `horovod_quant.tensorflow.optim.BinSGDM`, `horovod_quant.tensorflow.optim.LegacyBinSGDM` and
    `horovod_quant.keras.optim.BinSGDM`. Momentum and scale are the optimizer's slot variables.

    Args:
        beta: None, or the optimizer's ``beta``, to check that they agree; the optimizer's value is used.
        optimizer: the optimizer, for ``hvd.DistributedGradientTape``, which does not know it;
            ``hvd.DistributedOptimizer`` does.
    """

    own_optimizer = optim.BinSGDM.__name__

    def __init__(
        self, scheme: Scheme | str, beta: float | None = None, *, optimizer: Any = None, **common: Any
    ) -> None:
        if beta is not None:
            require_beta(beta)
        self.beta = beta
        super().__init__(scheme, **common)
        if optimizer is not None:
            self._welcome(optimizer)

    def _bind(self) -> None:
        super()._bind()
        self._optimizer: Callable[[], Any] = lambda: None

    def _welcome(self, optimizer: Any) -> None:
        self._optimizers.add(optimizer)
        own = optim.binsgdm_of(optimizer)
        if own is None:
            raise ValueError(
                f"compression=BinSGDM(): it needs the optimizer of the same name, but was used with the optimizer "
                f"{type(optimizer).__name__}; use DistributedOptimizer(hvq.optim.BinSGDM(...), ...)"
            )
        known = self._optimizer()
        if known is not None and known is not own:
            raise ValueError(
                "compression=BinSGDM(): this compressor is already used by another optimizer; construct one for each "
                "optimizer"
            )
        require_same_beta(self.beta, [own.beta])
        if own.clipvalue is not None and any(map(moves_by_averages, self.policy.schemes)):
            raise ValueError(
                f"clipvalue={own.clipvalue!r}: with server_bits above 1 it would cut the averages of bits that the "
                f"optimizer moves by; use the optimizer's clip_norm=, which clips each worker's gradient"
            )
        self._optimizer = weakref.ref(own)
        own.has_compressor = True

    def compress_for(self, call: HorovodCall, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Compress a floating-point tensor for a caller that describes its reduction.

        For one worker Horovod traces this in a branch that does not run; the optimizer then has the gradient itself.
        """
        workers = call.process_set
        if call.variable is None or is_elastic() or (workers.included() and workers.size() > 1):
            return super().compress_for(call, tensor)
        self._check(call, self._name(call), tensor)
        return tensor, None

    def _state(self, call: HorovodCall, name: str, scheme: Scheme) -> StoredState:
        optimizer = self._optimizer()
        if optimizer is None or call.variable is None:
            raise ValueError(
                "compression=BinSGDM(): it needs the optimizer of the same name, but was used with no optimizer; use "
                "DistributedOptimizer(hvq.optim.BinSGDM(...), ...), or with a tape BinSGDM(optimizer=...)"
            )
        return optimizer.stored_state(call.variable, call.variables, moves_by_averages(scheme))

    def _also_carried(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """Return 1 if this worker has a gradient.

        Scripts apply zeros so that optimizers create variables.
        """
        return (optim.is_there(tensor),)

    def _delivered(
        self, state: StoredState | None, result: tf.Tensor, control_tensor: tf.Tensor
    ) -> tf.Tensor:
        numbers = tf.reshape(control_tensor, [-1])
        # If no worker has a gradient, any bits would move the variable.
        result = tf.where(tf.not_equal(numbers[-1], 0), result, tf.zeros_like(result))
        if state is None or state.largest is None:
            return result
        # The first element of the control tensor was 1: now it is Horovod's factor.
        unit = tf.cast(numbers[0], tf.float32)
        stored = state.largest.assign(optim.largest_magnitude(result) / unit, read_value=False)
        with tf.control_dependencies([stored]):
            return tf.identity(result)

    def _with_part(self, member: Member, found: nodes.Nodes) -> Member:
        if found.workers.local_size == 1:
            return member
        # Also if this worker has a whole tensor: other workers of its node then have nothing of it.
        assert member.state is not None
        elements = member.state.momentum.shape.num_elements()
        scheme = member.scheme.for_workers(found.workers)
        start, stop = scheme.owned(member.chain.name, elements, found.workers)  # as the reduction does
        process_set = found.process_sets[LOCAL]
        return member._replace(state=self._optimizer().keep_part(member.state, start, stop, process_set))
