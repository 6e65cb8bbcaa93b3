"""What is known of a gradient before it comes: all that follows from its optimizer, name, shape and type."""

from __future__ import annotations

from typing import Any

import torch

from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import Repeated
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import Scheme
from horovod_quant.torch.control import ControlTensor
from horovod_quant.torch.horovod_call import Call, OptimizerCall
from horovod_quant.torch.schedule import Schedule

_ROUTES = "_horovod_quant_routes"
"""An optimizer's attribute: its routes by owner and by the identities of the parameters, which they keep alive."""

_NO_ROUTES: dict[int, Route] = {}

Owner = tuple[Any, Policy]
"""A compressor, and which of its policies."""


class Route:
    """Where the gradients of one parameter go, found once; or a tensor that a script reduces itself.

    Args:
        call: who wants what.
        tensor: the gradient.
        scheme: that exchanges it; None to leave it to Horovod.
        schedule: of the exchanges; None where there is none.
        chain: of the keys.
        signs: what its control tensor carries.
        counted: what it adds to the statistics each time.

    Attributes:
        spare: a submission that has been delivered, for the next step; None as long as there is none.
    """

    __slots__ = (
        "call", "control_tensor", "chain", "counted", "dtype", "is_direct", "mpi_ops", "scheme", "schedule", "session",
        "shape", "signs", "spare",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        tensor: torch.Tensor,
        scheme: Scheme | None,
        schedule: Schedule | None,
        chain: RngKey | None,
        signs: tuple[float, ...],
        counted: Repeated,
    ) -> None:
        from horovod.torch import mpi_ops

        self.call = call
        self.is_direct = not isinstance(call, OptimizerCall)
        self.mpi_ops = mpi_ops
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.scheme, self.schedule, self.chain, self.signs, self.counted = (
            scheme, schedule, chain, signs, counted,
        )  # fmt: skip
        self.session = mpi_ops._handle_map
        self.spare: Any = None
        # Never the gradient's own if that is narrow: what Horovod multiplies by must come back exact.
        self.control_tensor = ControlTensor(torch.promote_types(tensor.dtype, torch.float32))


def known_route(optimizer: Any, parameter: Any, tensor: torch.Tensor, owner: Owner) -> Route | None:
    """The route that an optimizer's gradient has taken before, if it still leads there."""
    routes = getattr(optimizer, _ROUTES, None)
    route = None if routes is None else routes.get(owner, _NO_ROUTES).get(id(parameter))
    if (
        route is None
        or route.session is not route.mpi_ops._handle_map
        or route.dtype is not tensor.dtype
        or route.shape != tensor.shape
        or route.call.op != optimizer.op
    ):
        return None
    return route


def remember(route: Route, owner: Owner) -> None:
    """Makes it the route of the parameter's gradients."""
    call = route.call
    assert isinstance(call, OptimizerCall)
    vars(call.optimizer).setdefault(_ROUTES, {}).setdefault(owner, {})[id(call.parameter)] = route
