"""Cached plan of a gradient.

It follows from its optimizer, name, shape and dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import Repeated
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import Scheme
from horovod_quant.torch.buckets import Buckets
from horovod_quant.torch.caller import Call, OptimizerCall
from horovod_quant.torch.control import ControlTensor

_PLANS = "_horovod_quant_plans"
"""Attribute with an optimizer's plans, by owner and ``id()`` of the parameter. A plan keeps it alive."""

_NO_PLANS: dict[int, TensorPlan] = {}

Owner = tuple[Any, "Policy | None"]
"""A compressor and one of its policies; None where Horovod reduces all gradients."""


class TensorPlan:
    """Plan for a parameter's gradients, or a direct call's tensor.

    Args:
        call: the call that reduces the gradient.
        tensor: the gradient.
        scheme: the scheme that reduces it; None if Horovod reduces it uncompressed.
        buckets: the buckets in which it waits for its collectives; None if there are none.
        keys: the random key of its random bits.
        fingerprint: the fingerprint in its control tensor.
        counted: the bytes that each step adds to the statistics.

    Attributes:
        spare: a pending tensor that has been delivered, for the next step; None as long as there is none.
    """

    __slots__ = (
        "buckets", "call", "control_tensor", "counted", "dtype", "fingerprint", "is_direct", "keys", "mpi_ops",
        "scheme", "session", "shape", "spare",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        tensor: torch.Tensor,
        scheme: Scheme | None,
        buckets: Buckets | None,
        keys: RngKey | None,
        fingerprint: tuple[float, ...],
        counted: Repeated,
    ) -> None:
        from horovod.torch import mpi_ops

        self.call = call
        self.is_direct = not isinstance(call, OptimizerCall)
        self.mpi_ops = mpi_ops
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.scheme, self.buckets, self.keys = scheme, buckets, keys
        self.fingerprint, self.counted = fingerprint, counted
        self.session = mpi_ops._handle_map
        self.spare: Any = None
        # Not a narrower dtype of the gradient: Horovod's factor must come back exact.
        self.control_tensor = ControlTensor(torch.promote_types(tensor.dtype, torch.float32))


def known_plan(optimizer: Any, parameter: Any, tensor: torch.Tensor, owner: Owner) -> TensorPlan | None:
    """Return the valid plan of an optimizer's gradient, or None."""
    plans = getattr(optimizer, _PLANS, None)
    plan = None if plans is None else plans.get(owner, _NO_PLANS).get(id(parameter))
    if (
        plan is None
        or plan.session is not plan.mpi_ops._handle_map
        or plan.dtype is not tensor.dtype
        or plan.shape != tensor.shape
        or plan.call.op != optimizer.op
    ):
        return None
    return plan


def remember(plan: TensorPlan, owner: Owner) -> None:
    """Store the plan of the parameter's gradients."""
    call = plan.call
    assert isinstance(call, OptimizerCall)
    vars(call.optimizer).setdefault(_PLANS, {}).setdefault(owner, {})[id(call.parameter)] = plan
