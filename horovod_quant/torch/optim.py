"""The optimizer of BinSGDM (Peng et al., published as Birder, NeurIPS 2023)."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontend import require_beta, require_step_sizes
from horovod_quant.kernels.keys import KeyChain


class HeldState(NamedTuple):
    """A parameter's state for an exchange: float32 tensors to update in place, and the number of the update."""

    momentum: torch.Tensor
    scale: torch.Tensor
    beta: float
    step: int


class BinSGDM(torch.optim.Optimizer):
    """Moves every element of every parameter by ``+-lr``, up or down at random with its momentum's odds.

    1. ``momentum = beta momentum + (1 - beta) g``, ``scale = beta scale + (1 - beta) |g|``;
    2. a bit is +1 with probability ``(1 + momentum / scale) / 2``, else -1;
    3. ``p = p - lr (bit + weight_decay p)``.

    With ``compression=horovod_quant.torch.BinSGDM()`` steps 1 and 2 happen on each worker with its own gradient, and
    the workers' bits are averaged and binarized again on the way. Gradients that arrive averaged instead (one
    worker, small gradients, another compression) go through steps 1 and 2 here, with random bits that are the same
    on every worker.

    Args:
        params: parameters or parameter groups.
        lr: size of the step of each element.
        beta: decay of momentum and scale.
        weight_decay: decoupled weight decay.
        seed: of the random bits.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, beta: float = 0.95, weight_decay: float = 0.0, seed: int = 0
    ) -> None:
        require_beta(beta)
        require_step_sizes(lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its state exists from the start, so that Horovod can broadcast it before the first step."""
        super().add_param_group(param_group)
        self._index_parameters()
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self._create_state(parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index_parameters()

    def _index_parameters(self) -> None:
        """What follows from the parameter groups, and is no part of the state."""
        self._exchanged: set[torch.Tensor] = set()
        self._group_index: dict[torch.Tensor, int] = {}
        self._chains: dict[torch.Tensor, KeyChain] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._group_index[parameter] = index
                self._chains[parameter] = KeyChain(group["seed"], f"parameter {len(self._chains)}")

    def _create_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("momentum", "scale"):
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return state

    def binary_state(self, parameter: torch.Tensor) -> HeldState:
        """The state that an exchange of the parameter's gradient updates; counts one update.

        Raises:
            ValueError: the parameter is not one of this optimizer's.
        """
        if parameter not in self._group_index:
            raise ValueError("the parameter is not one of this optimizer's")
        group = self.param_groups[self._group_index[parameter]]
        state = self._create_state(parameter)
        step = int(state["step"])
        state["step"] = step + 1
        return HeldState(state["momentum"], state["scale"], group["beta"], step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but momentum and scale stay float32 for parameters of any type."""
        super().load_state_dict(state_dict)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters):
            for name in ("momentum", "scale"):
                if index in state_dict["state"]:
                    saved = state_dict["state"][index][name]
                    self.state[parameter][name] = saved.detach().to(parameter.device, torch.float32).clone()

    def mark_exchanged(self, parameter: torch.Tensor) -> None:
        """Notes that the parameter's gradient holds the workers' common bits already."""
        self._exchanged.add(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Sparse gradients are taken as dense: an element without a gradient moves, too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                exchanged = parameter in self._exchanged
                bits = _signs(gradient) if exchanged else self._binarized(parameter, gradient)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(bits, alpha=-group["lr"])
        self._exchanged.clear()
        return loss

    def _binarized(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        from horovod_quant.torch.exchange import flat_array

        kernels = kernel_backends.get()
        held = self.binary_state(parameter)
        momentum, scale = held.momentum.cpu(), held.scale.cpu()
        values = flat_array(gradient.cpu().contiguous())
        key = self._chains[parameter].key("alone", held.step)
        words, broken = kernels.binarize(values, flat_array(momentum), flat_array(scale), held.beta, key)
        bits = torch.empty(parameter.shape, dtype=torch.float32)
        kernels.decode_signs(words, 1.0, flat_array(bits))
        if broken.any():
            bits.fill_(float("nan"))
        if momentum is not held.momentum:
            held.momentum.copy_(momentum)
            held.scale.copy_(scale)
        return bits.to(parameter.device)


def _signs(exchanged: torch.Tensor) -> torch.Tensor:
    """The workers' bits, whatever they were multiplied by on the way (a loss scale, clipping, a sum); NaN stays."""
    return torch.where(exchanged.isnan(), exchanged, exchanged.sign())
