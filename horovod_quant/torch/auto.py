"""The compressor that chooses its method itself, by trying several in the first training steps.

Four facts shape it. Which method a step has must be known when its first gradient comes, and be the same on all
workers, who may have taken part in different numbers of steps (``hvd.join()``). A script that ends up without
compression shall run as with Horovod alone. Nobody may wait in a backward pass. And what one worker measures, another
may not.

1. Every step is a correct exchange: Horovod's own, handed through, or that of one method, whose groups
   (`horovod_quant.torch.buckets`) are its own and pauses while others have their turns.
2. A step counts if every worker has taken part in it, as a small gradient tells (`horovod_quant.torch.attendance`). All
   who are there learn that alike, who is missing misses no step that counts: so all have counted the same ones whenever
   a step begins, and what comes next follows from their number alone.
3. A session of Horovod's (``hvd.init()``) begins with steps that Horovod reduces itself, until one counts. At its end
   the workers compare arguments, and tell what each knows of an earlier choice: only some may have loaded one.
4. Then the methods have their turns (`horovod_quant.autotune.trial`), and a last step, again Horovod's own, brings the
   medians together by one sum. In both steps every worker has launched all that the others wait for when it waits for
   these.
5. What was chosen stays, until ``again_after`` steps have counted or Horovod has another number of workers.
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
from horovod_quant.frontends import former_names
from horovod_quant.frontends.arguments import in_short
from horovod_quant.frontends.compressor_classes import refuse_unknown
from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import Stats
from horovod_quant.kernels import notices
from horovod_quant.schemes.base import Scheme, Workers, require_int, require_whole_nodes
from horovod_quant.torch import memory as memories
from horovod_quant.torch.attendance import least_for_all, lengthened
from horovod_quant.torch.caller import OptimizerCall, asking_optimizer
from horovod_quant.torch.compressor import Compressor, Unchanged, is_integral
from horovod_quant.torch.course import Course, Handed
from horovod_quant.torch.tensor_plan import TensorPlan, known_plan
from horovod_quant.torch.uncompiled import compiling, uncompiled
from horovod_quant.transports.traffic import ring_allreduce_bytes

_COURSES = "_horovod_quant_courses"
"""An optimizer's attribute: its courses, by compressor."""

_NO_COURSES: Mapping[Any, Course] = {}

_PAIR = Workers(0, 2)
"""Among whom every method has its smallest error."""


class Auto(Compressor):
    """Uses the fastest method, as measured in the first training steps, or none if that is as fast.

    Horovod's own allreduce and up to six methods get three turns of a few steps each; every step of the trial is a
    correct exchange. Then all workers keep the method with the shortest steps or, of those within 2% of it, the one
    with the smallest error, which is none if it is among them. The trial repeats when the number of workers changes.

    `report` returns the measurements, and rank 0 logs them as one line to the logger ``horovod_quant`` (level INFO).
    Works for the gradients of a ``DistributedOptimizer``; other calls need a fixed method.

    Args:
        max_nmse: largest nmse of the methods to try: ``||average - exact||^2 / ||exact||^2``, expected for gradients
            that have nothing in common; a training needs about this share of steps more. Candidates are the registered,
            unbiased methods, each with the fewest bits that suffice.
        methods: names of the methods to try instead, such as ``["eden-3", "qsgd-4"]``; ``max_nmse`` is then ignored.
        again_after: number of steps after which the trial is repeated, in case the network has changed; 0 for never.
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
        # Which gradients are compressed depends on no method: the first stands for all.
        super().__init__(self._possible[0], **common)

    def _possible_ones(self) -> Sequence[Candidate]:
        """Methods that would be tried with two workers: all that were named, or one of the registry's."""
        if self.methods is not None:
            return candidates.named(self.methods, _PAIR, False)
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
        self._handed: list[Handed] = []
        self._policies: dict[Scheme, Policy] = {}
        self._reports: dict[str, Report] = {}
        self._choices: dict[str, _Choice] = {}

    # ---- what users call -------------------------------------------------------------------------------------

    def report(self, optimizer: Any = None) -> Report:
        """How far the trial is, or the latest measurements and choice; printed it is one line.

        Args:
            optimizer: which ``DistributedOptimizer``, if the compressor serves several.
        """
        if optimizer is None:
            return next(reversed(self._reports.values()), Report(None))
        course = self.course_of(optimizer)
        return Report(None) if course is None else self._reports.get(course.key, Report(None))

    def stats(self) -> Stats:
        """As for every compressor."""
        for handed in self._handed:
            times, handed.times = handed.times, 0
            self._traffic.expect(handed.name, times * handed.float32_bytes, times)
            self._traffic.count(handed.name, times * handed.sent_bytes)
        return super().stats()

    def state_dict(self) -> dict[str, Any]:
        """As for every compressor, plus the choice, which is valid for the same number of workers."""
        choices = {key: choice._asdict() for key, choice in self._choices.items()}
        return {**super().state_dict(), "version": former_names.VERSION, "choices": choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; call it before the first step. One worker is enough.

        Raises:
            ValueError: ``state`` is something else.
        """
        choices = state.get("choices") if isinstance(state, Mapping) else None
        version = state.get("version", 1) if isinstance(state, Mapping) else None
        if (
            not isinstance(choices, Mapping)
            or not isinstance(version, int)
            or not all(map(_is_choice, choices.values()))
        ):
            raise ValueError(f"state={in_short(state)}: use what an Auto's state_dict() returned")
        super().load_state_dict(
            {key: value for key, value in state.items() if key not in ("choices", "version")}
        )
        made = {str(key): _Choice(**choice) for key, choice in choices.items()}
        self._choices = {key: choice.with_present_name(version) for key, choice in made.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reads what version 0.1.0 has pickled, too."""
        if "max_error" in state:
            state = {**state, "max_nmse": _squared(state["max_error"])}
            del state["max_error"]
        super().__setstate__(state)

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As `Compressor.compress`.

        Raises:
            ValueError: the gradient does not come from an optimizer.
        """
        if compiling() is not None:
            return uncompiled(Auto.compress, self, tensor)
        optimizer, parameter = asking_optimizer()
        course = self.course_of(optimizer)
        if course is not None:
            plan = self._plan_of_a_chosen_method(course, optimizer, parameter, tensor)
            if plan is not None:
                return self._send_again(tensor, plan)
            if course.hands_through(parameter, tensor):
                return tensor, None
        if is_integral(tensor.dtype):
            return tensor, None
        call = self._call_for(tensor)
        if not isinstance(call, OptimizerCall):
            raise ValueError(
                f"{call.name}: compression=Auto(...) measures the steps of an hvd.DistributedOptimizer, and this "
                f"call is not part of one; use a method such as hvq.EDEN(): `horovod-quant bench` and `advise` "
                f"recommend one"
            )
        course = self._course(call, tensor)
        if course.policy is None:
            size = self._checked_size(tensor, call)
            sent, context = self._handed_over(tensor, call)
            self._traffic.expect(call.name, ring_allreduce_bytes(4 * tensor.numel(), size))
            self._traffic.count(call.name, ring_allreduce_bytes(sent.numel() * sent.element_size(), size))
            if sent is tensor and course.is_horovods:
                self._handed.append(course.hand_through(call, tensor, size))
        else:
            sent, context = self._compress(tensor, call, course.policy)
        if not course.is_counting:
            return sent, context
        least = None
        if course.witness.is_of(call.parameter):
            least = least_for_all(call)
            if context is None or isinstance(context, Unchanged):
                sent, context = lengthened(sent), Unchanged(tensor)
        return sent, _Watched(course, context, least)

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """As `Compressor.decompress`."""
        if compiling() is not None:
            return uncompiled(Auto.decompress, self, output, ctx)
        if not isinstance(ctx, _Watched):
            return super().decompress(output, ctx)
        course, context, least = ctx
        if least is None:
            result = super().decompress(output, context)
        elif isinstance(context, Unchanged):
            shape = context.destination.shape
            result = super().decompress(output[:-1].reshape(shape), context)
            course.attend(float(output[-1]) > least)
        else:
            result = super().decompress(output, context)
            course.attend(float(output[0]) > least)
        course.note_delivery(result.device)
        return result

    def _plan_of_a_chosen_method(
        self, course: Course, optimizer: Any, parameter: Any, tensor: torch.Tensor
    ) -> TensorPlan | None:
        """A gradient's, if it has been exchanged with the method that was chosen, and nothing is left to find out."""
        policy = course.policy
        if policy is None or course.is_counting:
            return None
        plan = known_plan(optimizer, parameter, tensor, (self, policy))
        if plan is None or plan.call.grouped:
            return None
        assert isinstance(plan.call, OptimizerCall)
        course.arrive(plan.call, tensor)
        return plan if course.policy is policy and not course.is_counting else None

    # ---- what a course asks for ------------------------------------------------------------------------------

    def _course(self, call: OptimizerCall, tensor: torch.Tensor) -> Course:
        """The optimizer's, with the step that the gradient belongs to begun."""
        course = self.course_of(call.optimizer)
        if course is None:
            course = Course(self, min(call.names), self._elements(call))
            vars(call.optimizer).setdefault(_COURSES, {})[self] = course
        course.arrive(call, tensor)
        return course

    def course_of(self, optimizer: Any) -> Course | None:
        """Where an optimizer's steps have got to; they live as long as it does."""
        return getattr(optimizer, _COURSES, _NO_COURSES).get(self)

    def candidates_for(self, call: OptimizerCall) -> tuple[Candidate, ...]:
        """What there is to choose from for an optimizer, none first."""
        self._check(call, call.parameter, size := call.process_set.size())
        if size == 1 or not self.policy.compresses_any(self._elements(call)):
            return (candidates.NONE,)
        workers = Workers(0, size, local_size=self._local_size())
        return (candidates.NONE, *self._methods_for(workers, bool(self.hierarchical)))

    def _methods_for(self, workers: Workers, hierarchical: bool) -> Sequence[Candidate]:
        if self.methods is not None:
            return candidates.named(self.methods, workers, hierarchical, self.inside)
        usable = candidates.usable()
        return candidates.find(self.max_nmse, workers, hierarchical, usable, self._on_device, self.inside)

    def policy_for(self, candidate: Candidate) -> Policy | None:
        """What chooses a gradient's scheme in a candidate's turn; None where Horovod reduces all."""
        scheme = candidate.scheme
        if scheme is None:
            return None
        if scheme not in self._policies:
            self._policies[scheme] = Policy(scheme, self.policy.min_elements, self.policy.exclude)
        return self._policies[scheme]

    def known_choice(self, course: Course, workers: int) -> str | None:
        """The method that was chosen before for such an optimizer, by ``workers`` workers."""
        # Version 0.1.0 saved choices under the label alone, which a model of other sizes may share.
        choice = self._choices.get(course.key, self._choices.get(course.label))
        return choice.method if choice is not None and choice.workers == workers else None

    def keep(self, course: Course, report: Report) -> None:
        self._reports.pop(course.key, None)  # the last one comes last
        self._reports[course.key] = report
        self._choices.pop(course.label, None)
        if report.method is not None:
            self._choices[course.key] = _Choice(report.method, report.workers)

    def note_progress(self, course: Course, workers: int, step: int, steps: int) -> Report:
        """How far a trial is; when it is repeated, beside what was chosen before."""
        known = self._reports.get(course.key, Report(None))
        report = known if known.workers == workers else Report(None, (), workers)
        self._reports[course.key] = report._replace(step=step, steps=steps)
        return self._reports[course.key]

    def arguments(self) -> dict[str, str]:
        """Those that must be the same on all workers."""
        return self._arguments()


class _Choice(NamedTuple):
    """A method's name, and the number of workers that have chosen it."""

    method: str
    workers: int

    def with_present_name(self, version: int) -> _Choice:
        """The method that was meant by the names of a version."""
        present = former_names.present(self.method, version, self.workers)
        return self if present is None else self._replace(method=present)


def _from_max_error(max_error: Any, max_nmse: Any) -> Any:
    """The nmse that the former argument means, which was a root."""
    if max_nmse != MOST_NMSE:
        raise TypeError("Auto() got 'max_error' and 'max_nmse', two names of one argument")
    notices.deprecated("Auto(max_error=...) is now Auto(max_nmse=...), of its square: 0.3 is 0.09")
    return _squared(max_error) if isinstance(max_error, float) and max_error > 0 else max_error


def _squared(root: float) -> float:
    """Without the last digits, which no user has written."""
    return float(f"{root * root:.12g}")


class _Watched(NamedTuple):
    """Context of a gradient in a step whose workers are counted: ``context`` is what it would be otherwise.

    Attributes:
        least: what the number that it takes along must be above, if it takes one.
    """

    course: Course
    context: Any
    least: float | None


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == set(_Choice._fields)
        and isinstance(value["method"], str)
        and isinstance(value["workers"], int)
    )
