"""Compressor that chooses its method by measuring several.

Four facts shape it. A step's method must be known when its first gradient arrives, and be the same on all workers,
which may have participated in different numbers of steps (``hvd.join()``). A script that ends up without compression
must run as with plain Horovod. No worker may wait in a backward pass. And workers measure different times.

1. Every step reduces gradients correctly: by Horovod's allreduce (passthrough), or by one method. Each method has
   separate groups (`horovod_quant.torch.buckets`), which pause while other methods are measured.
2. A step counts if every worker participated in it, which a small gradient shows
   (`horovod_quant.torch.participation`). All participating workers see the same result, and an absent worker misses no
   step that counts. So all workers have counted the same steps whenever a step begins, and the number of counted steps
   determines what comes next.
3. After ``hvd.init()`` Horovod reduces all gradients until a step counts. At its end the workers compare arguments and
   earlier choices, since only some workers may have loaded one from a checkpoint.
4. Then trials measure the methods in rounds (`horovod_quant.autotune.trial`). In a last step, which Horovod reduces,
   one sum combines the workers' medians. Both waits are safe, since every worker has launched all that others wait for.
5. The choice stays until ``again_after`` steps have counted, or the number of workers changes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from horovod_quant.autotune import candidates
from horovod_quant.autotune.candidates import MOST_NMSE, Candidate
from horovod_quant.autotune.trial import Report
from horovod_quant.frontends import former_names, no_gain
from horovod_quant.frontends.arguments import in_short
from horovod_quant.frontends.compressor_classes import refuse_unknown
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import notices
from horovod_quant.schemes.base import Scheme, Workers, require_int, require_whole_nodes
from horovod_quant.torch import memory as memories
from horovod_quant.torch.caller import OptimizerCall, asking_optimizer
from horovod_quant.torch.compressor import Compressor, is_integral
from horovod_quant.torch.participation import probe_bound, with_probe
from horovod_quant.torch.tensor_plan import TensorPlan, known_plan
from horovod_quant.torch.tuning_session import TuningSession
from horovod_quant.torch.uncompiled import compiling, uncompiled

_SESSIONS = "_horovod_quant_tuning_sessions"
"""Attribute of an optimizer with its tuning sessions, by compressor."""

_NO_SESSIONS: Mapping[Any, TuningSession] = {}

_PAIR = Workers(0, 2)
"""The number of workers for which every method has its smallest nmse."""


class Auto(Compressor):
    """Compressor that measures methods while training and keeps the fastest.

    A tuning session measures Horovod's allreduce and up to six methods, in three trials of a few steps each; every step
    reduces gradients correctly. Then all workers keep the method with the shortest steps or, of those within 2% of it,
    the one with the smallest nmse: no compression, if that is among them. The trials are repeated when the number of
    workers changes.

    `report` returns the measurements, and rank 0 logs them as one line to the logger ``horovod_quant`` (level INFO).
    Works for the gradients of a ``DistributedOptimizer``; other calls need a fixed method.

    Args:
        max_nmse: largest nmse of the methods to try: ``||average - exact||^2 / ||exact||^2``, expected for
            uncorrelated gradients; a training needs about this share of steps more. Candidates are the registered,
            unbiased methods, each with the fewest bits that suffice.
        methods: names of the methods to try instead, such as ``["eden-3", "qsgd-4"]``; ``max_nmse`` is then ignored.
        again_after: number of steps after which the trials are repeated, in case the network has changed; 0 for never.
        **common: arguments of every compressor, except ``overrides``.

    Raises:
        ValueError: an argument is out of range.
    """

    not_taken = ("scheme", "overrides")

    def __init__(
        self,
        max_nmse: float = MOST_NMSE,
        *,
        methods: Iterable[str] | None = None,
        again_after: int = 0,
        **common: Any,
    ) -> None:
        if "max_error" in common:
            max_nmse = _from_max_error(common.pop("max_error"), max_nmse)
        known = inspect.signature(type(self)).parameters
        refuse_unknown(type(self).__name__, [name for name in common if name not in known], known)
        if (
            isinstance(max_nmse, bool)
            or not isinstance(max_nmse, (int, float))
            or not 0 < max_nmse < math.inf
        ):
            raise ValueError(f"max_nmse={max_nmse!r}: use a positive number, for example {MOST_NMSE}")
        require_int("again_after", again_after, 0, 2**62)
        self.max_nmse = float(max_nmse)
        self.methods = None if methods is None else candidates.check_names(methods)
        self.again_after = int(again_after)
        self._on_device = common.get("kernels") == memories.TRITON
        self._possible = [each.scheme for each in self._possible_ones() if each.scheme is not None]
        # The choice of gradients to compress depends on no method, so the first one represents all.
        super().__init__(self._possible[0], **common)

    def _possible_ones(self) -> Sequence[Candidate]:
        """Methods to try with two workers.

        All named ones, or one from the registry.
        """
        if self.methods is not None:
            return [candidates.named(name, _PAIR, False) for name in self.methods]
        found = candidates.any_of(self.max_nmse, _PAIR, False, candidates.usable(), self._on_device)
        if found is None:
            raise ValueError(
                f"max_nmse={self.max_nmse!r}: no method has so small an nmse, even with two workers; use a larger "
                f"value, or leave compression out"
            )
        return [found]

    def _check_kernels(self) -> None:
        memories.check(self._kernels, self._possible)

    def _check_workers(self, size: int) -> None:
        require_whole_nodes(size, self._local_size())

    def _choosing_arguments(self) -> dict[str, Any]:
        return {
            "compression": type(self).__name__,
            "max_nmse": self.max_nmse,
            "methods": self.methods,
            "again_after": self.again_after,
            "kernels": memories.TRITON if self._on_device else "any other",
            "registered": [kind.__name__ for kind in candidates.usable()],
        }

    def _bind(self) -> None:
        super()._bind()
        self._left_out: list[str] = []
        self._policies: dict[Scheme, Policy] = {}
        self._reports: dict[str, Report] = {}
        self._choices: dict[str, _Choice] = {}

    # ---- what users call -------------------------------------------------------------------------------------

    def report(self, optimizer: Any = None) -> Report:
        """Return the progress of the trials, or the latest measurements and choice.

        Prints as one line.

        Args:
            optimizer: the ``DistributedOptimizer``, if several use this compressor.
        """
        if optimizer is None:
            return next(reversed(self._reports.values()), Report(None))
        session = self.session_of(optimizer)
        return Report(None) if session is None else self._reports.get(session.key, Report(None))

    def state_dict(self) -> dict[str, Any]:
        """Return every compressor's state, plus the choice.

        The choice is valid for the same number of workers.
        """
        choices = {key: choice._asdict() for key, choice in self._choices.items()}
        return {**super().state_dict(), "version": former_names.VERSION, "choices": choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Call it on at least one worker, before the first step.

        Raises:
            ValueError: ``state`` is something else.
        """
        counts = dict(state) if isinstance(state, Mapping) else {}
        choices, version = counts.pop("choices", None), counts.pop("version", 1)
        if (
            not isinstance(choices, Mapping)
            or not isinstance(version, int)
            or not all(map(_is_choice, choices.values()))
        ):
            raise ValueError(f"state={in_short(state)}: use what an Auto's state_dict() returned")
        super().load_state_dict(counts)
        self._choices = {}
        for key, saved in choices.items():
            method, workers = saved["method"], saved["workers"]
            present = former_names.present(method, version, workers) or method
            self._choices[str(key)] = _Choice(present, workers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled compressor, also one of version 0.1.0."""
        if "max_error" in state:
            state = {**state, "max_nmse": _squared(state["max_error"])}
            del state["max_error"]
        super().__setstate__(state)

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that Horovod reduces instead, and a context.

        Raises:
            ValueError: the gradient does not belong to an optimizer's step.
        """
        if compiling() is not None:
            return uncompiled(Auto.compress, self, tensor)
        optimizer, parameter = asking_optimizer()
        session = self.session_of(optimizer)
        if session is not None:
            plan = self._plan_of_the_choice(session, optimizer, parameter, tensor)
            if plan is not None and session.is_horovods:  # as little as possible beside Horovod's own work
                plan.counted.times += 1
                return self._handed_over(tensor, plan.call)
            if plan is not None:
                return self._send_again(tensor, plan)
        if is_integral(tensor.dtype):
            return tensor, None
        call = self._call_for(tensor)
        if not isinstance(call, OptimizerCall):
            raise ValueError(
                f"{call.name}: compression=Auto(...) measures the steps of an hvd.DistributedOptimizer, and this "
                f"call is not part of one; use a method such as hvq.EDEN(): `horovod-quant bench` and `advise` "
                f"recommend one"
            )
        session = self.session_of(call.optimizer)
        if session is None:
            session = TuningSession(self, call.label, self._elements(call))
            vars(call.optimizer).setdefault(_SESSIONS, {})[self] = session
        session.arrive(call, tensor)
        sent, context = self._compress(tensor, call, session.policy)
        if not session.is_counting:
            return sent, context
        bound = None
        if session.probe.is_of(call.parameter):
            bound = probe_bound(call)
            if context is None or isinstance(context, torch.Tensor):
                sent, context = with_probe(sent), tensor
        return sent, _Watched(session, context, bound)

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced gradient with the dtype and shape of the input."""
        if compiling() is not None:
            return uncompiled(Auto.decompress, self, output, ctx)
        if not isinstance(ctx, _Watched):
            return super().decompress(output, ctx)
        session, context, bound = ctx
        is_followed_by_probe = bound is not None and isinstance(context, torch.Tensor)
        reduced = output[:-1].reshape(context.shape) if is_followed_by_probe else output
        result = super().decompress(reduced, context)
        if bound is not None:
            session.note_participation(float(output[-1 if is_followed_by_probe else 0]) > bound)
        session.note_delivery()
        return result

    def _plan_of_the_choice(
        self, session: TuningSession, optimizer: Any, parameter: Any, tensor: torch.Tensor
    ) -> TensorPlan | None:
        """Return a gradient's plan for the choice, or None.

        It is None where the tuning session has to see the result: of the participation probe and, except where Horovod
        reduces all gradients, of each step that counts.
        """
        policy = session.policy
        if session.is_counting and not session.is_horovods:
            return None
        plan = known_plan(optimizer, parameter, tensor, (self, policy))
        if plan is None or plan.call.grouped:
            return None
        if session.is_delivering:
            assert isinstance(plan.call, OptimizerCall)
            session.arrive(plan.call, tensor)
        if session.is_counting and (not session.is_horovods or session.probe.is_of(parameter)):
            return None
        return plan if session.policy is policy else None

    # ---- what a tuning session calls -------------------------------------------------------------------------

    def session_of(self, optimizer: Any) -> TuningSession | None:
        """Return an optimizer's tuning session, which lives as long as the optimizer.

        Returns None before its first step.
        """
        return getattr(optimizer, _SESSIONS, _NO_SESSIONS).get(self)

    def candidates_for(self, call: OptimizerCall) -> tuple[Candidate, ...]:
        """Return the candidates for an optimizer; the first is no compression."""
        self._check(call, call.parameter, size := call.process_set.size())
        if size == 1 or not self.policy.compresses_any(self._elements(call)):
            return (candidates.NONE,)
        workers, hierarchical = Workers(0, size, local_size=self._local_size()), bool(self.hierarchical)
        found = self._methods_for(workers, hierarchical, call.process_set.rank() == 0)
        if not self._said_it_sends_more and call.process_set.rank() == 0:
            reducing = Workers(0, workers.nodes)
            self._said_it_sends_more = no_gain.warn_of_candidates(found, reducing, hierarchical)
        return (candidates.NONE, *found)

    def _methods_for(self, workers: Workers, hierarchical: bool, first: bool) -> Sequence[Candidate]:
        """Return the methods to try; warn of those left out."""
        if self.methods is not None:
            found, left_out = candidates.possible(self.methods, workers, hierarchical, self.inside)
            if first and left_out and left_out != self._left_out:
                self._left_out = left_out
                notices.warn(
                    f"Auto leaves out methods that {workers.size} workers cannot use: {', '.join(left_out)}",
                    stacklevel=2,
                )
            return found
        usable = candidates.usable()
        return candidates.find(self.max_nmse, workers, hierarchical, usable, self._on_device, self.inside)

    def policy_for(self, candidate: Candidate) -> Policy | None:
        """Return the policy of a candidate's steps.

        Returns None where Horovod reduces all gradients.
        """
        scheme = candidate.scheme
        if scheme is None:
            return None
        if scheme not in self._policies:
            self._policies[scheme] = Policy(scheme, self.policy.min_elements, self.policy.exclude)
        return self._policies[scheme]

    def known_choice(self, session: TuningSession, workers: int) -> str | None:
        """Return the method chosen earlier for such an optimizer, or None.

        It must be for the same number of workers.
        """
        # Version 0.1.0 saved choices under the label alone, which a model of other sizes may share.
        choice = self._choices.get(session.key, self._choices.get(session.label))
        return choice.method if choice is not None and choice.workers == workers else None

    def keep(self, session: TuningSession, report: Report) -> None:
        self._reports.pop(session.key, None)  # report() returns the latest entry
        self._reports[session.key] = report
        self._choices.pop(session.label, None)
        if report.method is not None:
            self._choices[session.key] = _Choice(report.method, report.workers)

    def note_progress(self, session: TuningSession, workers: int, step: int, steps: int) -> Report:
        """Record and return the progress of the trials.

        While they are repeated, the report also has the earlier choice.
        """
        known = self._reports.get(session.key, Report(None))
        report = known if known.workers == workers else Report(None, (), workers)
        self._reports[session.key] = report._replace(step=step, steps=steps)
        return self._reports[session.key]


class _Choice(NamedTuple):
    """A chosen method's name, and its number of workers."""

    method: str
    workers: int


def _from_max_error(max_error: Any, max_nmse: Any) -> Any:
    """Convert the former argument, a rel_rmse, to an nmse."""
    if max_nmse != MOST_NMSE:
        raise TypeError("Auto() got 'max_error' and 'max_nmse', two names of one argument")
    notices.deprecated("Auto(max_error=...) is now Auto(max_nmse=...), of its square: 0.3 is 0.09")
    return _squared(max_error) if isinstance(max_error, float) and max_error > 0 else max_error


def _squared(root: float) -> float:
    """Return the square without digits that come from float arithmetic."""
    return float(f"{root * root:.12g}")


class _Watched(NamedTuple):
    """Context of a gradient in a step that may count.

    Attributes:
        session: the optimizer's tuning session.
        context: the context that it would have otherwise.
        bound: the value that the participation probe's sum exceeds if all workers participate; None if the gradient
            carries no probe.
    """

    session: TuningSession
    context: Any
    bound: float | None


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == set(_Choice._fields)
        and isinstance(value["method"], str)
        and isinstance(value["workers"], int)
    )
