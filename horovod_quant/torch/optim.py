"""Optimizer of BinSGDM (Peng et al., published as Birder, NeurIPS 2023)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch

from horovod_quant.frontends.arguments import in_short
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
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import BinaryState, require_int
from horovod_quant.torch.uncompiled import compiling, uncompiled


class _Update(NamedTuple):
    """Record that a parameter's gradient contains the workers' reduced bits.

    Valid only for the same gradient tensor: a step may be skipped, and the next one may bring another gradient.

    Attributes:
        gradient: the gradient; None if DDP has yet to create it.
        moves: False if no worker has a gradient; None if the gradient is zero then.
        largest: the largest magnitude of the averages of the workers' bits; None if the result is bits.
    """

    gradient: weakref.ref[torch.Tensor] | None
    moves: bool | None
    largest: torch.Tensor | None


class _Part(NamedTuple):
    """Elements of a parameter whose state this worker stores.

    Attributes:
        start, stop: the range of elements.
        add: adds a tensor up over the workers that together store all elements, given a name; None for this worker
            alone.
    """

    start: int
    stop: int
    add: Callable[[torch.Tensor, str], Any] | None = None


_REQUIRED = ("lr", "beta", "weight_decay", "seed")
"""Keys of every saved parameter group; releases without ``clip_norm`` saved only these."""

_STATE = ("step", "momentum", "scale")


class BinSGDM(torch.optim.Optimizer):
    """Sign-based optimizer with random signs that follow momentum.

    It moves every element of every parameter by ``+-lr``.

    1. ``momentum = beta momentum + (1 - beta) g``, ``scale = beta scale + (1 - beta) |g|``, where ``g`` is the
       gradient, clipped to ``clip_norm``;
    2. a bit is +1 with probability ``(1 + momentum / scale) / 2``, else -1;
    3. ``p = p - lr (bit + weight_decay p)``.

    With ``compression=horovod_quant.torch.BinSGDM()`` each worker applies steps 1 and 2 to its local gradient, and the
    workers' bits are averaged and binarized again in the reduction; with ``server_bits`` above 1 the average is the
    ``bit`` of step 3, a number from -1 to 1. Gradients that arrive averaged instead (one worker, small gradients,
    another compression) go through steps 1 and 2 here, with random bits that are the same on every worker. Their
    elements that have never had a gradient do not move; in a reduction of bits such elements move up or down with equal
    probability.

    With ``compression=BinSGDM(hierarchical=True)`` each worker stores momentum and scale only for its share of the
    elements. Call `gather_state` before saving or broadcasting them.

    Args:
        params: parameters or parameter groups.
        lr: step size of each element.
        beta: decay of momentum and scale.
        weight_decay: decoupled weight decay.
        seed: seed of the random bits.
        clip_norm: maximum L2 norm of each worker's local gradient of a parameter, which is scaled down to it; None for
            no limit. Clipping after the reduction has no effect on bits.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = DEFAULT_BETA,
        weight_decay: float = 0.0,
        seed: int = 0,
        clip_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta": beta,
            "weight_decay": weight_decay,
            "seed": seed,
            "clip_norm": clip_norm,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its state.

        Horovod can then broadcast it before the first step.

        Raises:
            ValueError: an argument of the group is out of range.
        """
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._index_parameters()
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self._create_state(parameter)

    def __getstate__(self) -> dict[str, Any]:
        if self._parts:
            raise RuntimeError(SPREAD)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._index_parameters()

    def _index_parameters(self) -> None:
        """Set the attributes that follow from the parameter groups."""
        self._updates: dict[torch.Tensor, _Update] = getattr(self, "_updates", {})
        self._parts: dict[torch.Tensor, _Part] = getattr(self, "_parts", {})
        self._group_index: dict[int, int] = {}  # by the parameters' identities: tensors' hashes are slow
        self._chains: dict[torch.Tensor, RngKey] = {}
        numbers = {True: itertools.count(), False: itertools.count()}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._group_index[id(parameter)] = index
                # One worker alone may have additional frozen parameters, such as a copy of the model.
                trained = parameter.requires_grad
                name = f"{'' if trained else 'frozen '}parameter {next(numbers[trained])}"
                self._chains[parameter] = RngKey(group["seed"], name)

    def _create_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("momentum", "scale"):
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return state

    def next_update(self, parameter: torch.Tensor) -> int:
        """Return the number of the parameter's next update, from 0.

        Raises:
            ValueError: the parameter does not belong to this optimizer.
        """
        if not self.has(parameter):
            raise ValueError("the parameter does not belong to this optimizer")
        return int(self._create_state(parameter)["step"])

    def has(self, parameter: torch.Tensor) -> bool:
        """True if the parameter belongs to this optimizer."""
        return id(parameter) in self._group_index

    def count_update(self, parameter: torch.Tensor) -> int:
        """Count one update of the parameter and return its number, from 0.

        Raises:
            ValueError: the parameter does not belong to this optimizer.
        """
        step = self.next_update(parameter)
        self.state[parameter]["step"] = step + 1
        return step

    def stored_state(
        self,
        parameter: torch.Tensor,
        start: int,
        stop: int,
        add: Callable[[torch.Tensor, str], Any] | None = None,
    ) -> BinaryState:
        """Return the state of a range of elements for a reduction.

        The reduction updates it. From then on this worker stores the state of these elements only.

        Args:
            parameter: the gradient's parameter.
            start, stop: the range of elements.
            add: adds a tensor up in place over the workers that together store all elements, given a name for the
                collective; None for this worker alone.

        Raises:
            RuntimeError: this worker stores the state of other elements.
        """
        state, known = self.state[parameter], self._parts.get(parameter) if self._parts else None
        if known is None and add is None:
            is_kept = start == 0 and stop == parameter.numel()
        else:
            part = _Part(start, stop, add)
            # Also where this worker stores all elements: either all workers take the gathering path, or none.
            if known is None:
                for name in ("momentum", "scale"):
                    whole = state[name]
                    if whole.is_cuda:  # it is released before the copy has run
                        whole.record_stream(torch.cuda.current_stream(whole.device))
                    state[name] = whole.reshape(-1)[start:stop].clone()
                self._parts[parameter] = known = part
            is_kept = known == part
        if not is_kept:
            raise RuntimeError(SPREAD)
        beta = self.param_groups[self._group_index[id(parameter)]]["beta"]
        return BinaryState(state["momentum"], state["scale"], beta)

    def clip_norm_of(self, parameter: torch.Tensor) -> float | None:
        """Return the ``clip_norm`` of the parameter's group."""
        return self.param_groups[self._group_index[id(parameter)]].get("clip_norm")

    def gather_state(self) -> None:
        """Gather the whole state on every worker after hierarchical reductions.

        Call it on all workers. Any worker can then save it, for any number of workers to load, or broadcast it. The
        next reduction splits it again. Without hierarchical reductions it does nothing.
        """
        for parameter, chain in self._chains.items():
            part = self._parts.pop(parameter, None)
            if part is None:
                continue
            for name in ("momentum", "scale"):
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu")
                whole[part.start : part.stop] = self.state[parameter][name].cpu()
                assert part.add is not None, "a worker alone stores all elements"
                part.add(whole, f"horovod_quant.{name}.{chain.name}")
                self.state[parameter][name] = whole.reshape(parameter.shape).to(parameter.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in PyTorch.

        Raises:
            RuntimeError: the state is split among workers; see `gather_state`.
        """
        if self._parts:
            raise RuntimeError(SPREAD)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as in PyTorch, with momentum in float32.

        Momentum and scale stay float32 for parameters of any dtype.

        Raises:
            ValueError: it is not the state of a BinSGDM for such parameters; nothing is changed then.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved_ids = _checked_ids(state_dict, parameters)
        super().load_state_dict(state_dict)
        self._parts.clear()
        for index, parameter in zip(saved_ids, parameters):
            for name in ("momentum", "scale"):
                if index in state_dict["state"]:
                    saved = state_dict["state"][index][name].detach().to(parameter.device, torch.float32)
                    # Kernels update it in place, in the memory order of a contiguous tensor.
                    self.state[parameter][name] = saved.clone(memory_format=torch.contiguous_format)

    def mark_exchanged(
        self, parameter: torch.Tensor, moves: bool | None = True, largest: torch.Tensor | None = None
    ) -> None:
        """Record that the parameter's gradient already contains the workers' result.

        Args:
            parameter: the parameter whose gradient has been reduced.
            moves, largest: see `_Update`.
        """
        gradient = None if parameter.grad is None else weakref.ref(parameter.grad)
        self._updates[parameter] = _Update(gradient, moves, largest)

    def is_exchanged(self, parameter: torch.Tensor) -> bool:
        """True if the parameter's gradient is marked by `mark_exchanged`.

        It is False once a step has used it.
        """
        update = self._update_of(parameter)
        is_known = update is not None and update.gradient is not None and parameter.grad is not None
        return is_known and bool(parameter.grad.any())

    def _update_of(self, parameter: torch.Tensor) -> _Update | None:
        update = self._updates.get(parameter)
        if update is None or update.gradient is None or update.gradient() is parameter.grad:
            return update
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as in PyTorch."""
        self._updates.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update.

        A parameter that no worker's backward pass has reached, such as a frozen one, does not move. Sparse gradients
        are treated as dense: elements continue to move without a gradient once they have had one.
        """
        if compiling() is not None:
            return uncompiled(BinSGDM.step, self, closure)
        self._warn_without_compressor()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                update = self._update_of(parameter)
                if not (_has_values(gradient) if update is None or update.moves is None else update.moves):
                    continue  # zeros of Horovod, for a parameter that no worker's backward pass has reached
                if update is None:
                    moves = self._binarized(parameter, gradient)
                elif update.largest is None:
                    moves = _signs(gradient)
                else:
                    moves = _averages(gradient, update.largest)
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(moves, alpha=-group["lr"])
        self._updates.clear()
        return loss

    _has_checked_compressor = False

    def _warn_without_compressor(self) -> None:
        """Warn once if the distributed optimizer has another compression.

        Horovod's optimizer derives from this one.
        """
        if self._has_checked_compressor:
            return
        self._has_checked_compressor = True
        compression = getattr(self, "_compression", None)
        if compression is not None and getattr(compression, "own_optimizer", None) != BinSGDM.__name__:
            notices.warn(WITHOUT_ITS_COMPRESSOR, stacklevel=3)

    def _binarized(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        from horovod_quant.torch import memory as memories

        step = self.count_update(parameter)
        if parameter in self._parts:
            raise RuntimeError(SPREAD)
        memory = memories.choose("auto", parameter.device, has_nccl=lambda: False)  # nothing is sent
        kernels = memory.kernels
        stored = self.stored_state(parameter, 0, parameter.numel())
        momentum, scale = stored.momentum.to(memory.device), stored.scale.to(memory.device)
        values = as_array(memory.taken(gradient, None))
        memory.catch_up()
        key = self._chains[parameter].key("alone", step)
        with memory.working():
            values = clipped(kernels, values, self.clip_norm_of(parameter))
            words, nonfinite = kernels.binarize(
                values, memory.flat(momentum), memory.flat(scale), stored.beta, key
            )
            bits = torch.empty(parameter.shape, dtype=torch.float32, device=memory.device)
            kernels.decode_signs(words, 1.0, memory.flat(bits))
        memory.hand_over(bits, nonfinite)
        bits.masked_fill_(scale.view_as(bits) == 0, 0.0)
        if momentum is not stored.momentum:
            stored.momentum.copy_(momentum)
            stored.scale.copy_(scale)
        bits = torch.where(torch.as_tensor(nonfinite, device=memory.device).any(), float("nan"), bits)
        return bits.to(parameter.device)


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError if an argument of a group is out of range."""
    require_beta(group["beta"])
    require_step_sizes(lr=group["lr"], weight_decay=group["weight_decay"])
    require_clip_norm(group.get("clip_norm"))
    require_int("seed", group["seed"], 0, 2**63 - 1)


def _checked_ids(state_dict: Any, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the parameters' numbers in what must be a result of `BinSGDM.state_dict`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(
            f"state_dict={in_short(state_dict)}: use what the state_dict() of a BinSGDM returned"
        )
    for group in state_dict["param_groups"]:
        _require_names("parameter groups", _REQUIRED, group)
        _check_group(group)
    for saved in state_dict["state"].values():
        _require_names("parameters' states", _STATE, saved)
    saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, parameter in zip(saved_ids, parameters):
        for name in ("momentum", "scale"):
            shape = getattr(state_dict["state"].get(index, {}).get(name, parameter), "shape", ())
            if shape != parameter.shape:
                raise ValueError(
                    f"state_dict: the {name} of parameter {index} has shape {list(shape)}, but the parameter has "
                    f"{list(parameter.shape)}; load the state of the same model"
                )
    return saved_ids


def _require_names(where: str, required: Sequence[str], saved: Mapping[str, Any]) -> None:
    lacking = [name for name in required if name not in saved]
    if lacking:
        found = [name for name in saved if name != "params"]
        raise ValueError(
            f"state_dict: its {where} have {', '.join(map(repr, found))}, but not {', '.join(map(repr, lacking))}: it "
            f"is the state of another optimizer; use what the state_dict() of a BinSGDM returned, or load only the "
            f"model and let this optimizer start afresh"
        )


def _signs(reduced: torch.Tensor) -> torch.Tensor:
    """Recover the workers' bits from a scaled gradient.

    A loss scale, clipping or a sum may have scaled it; NaN stays.
    """
    signs = reduced.sign()
    if reduced.is_cpu and not reduced.sum().isnan():  # on a GPU this would wait
        return signs
    return torch.where(reduced.isnan(), reduced, signs)


def _has_values(gradient: torch.Tensor) -> bool:
    """True unless all elements are 0; bits are nowhere 0."""
    first = gradient[(0,) * gradient.dim()] if gradient.numel() else gradient
    return bool(first.any()) or bool(gradient.any())


def _averages(reduced: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Recover the averages of the workers' bits.

    The gradient may be scaled; NaN stays.
    """
    values = reduced.to(torch.float32)
    found = largest_magnitude(values)
    return values * torch.where(found > 0, largest / found, 0.0)


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, float32, ignoring NaN.

    It is 0 without elements.
    """
    magnitudes = values.detach().to(torch.float32).abs().nan_to_num(nan=0.0)
    return magnitudes.max() if len(magnitudes.reshape(-1)) else magnitudes.sum()
