"""The steps of one optimizer whose method `horovod_quant.torch.auto` finds: which method each has, and their times."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from horovod_quant.autotune.trial import Report, Trial, Turn, evaluate
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import notices
from horovod_quant.torch.attendance import Witness
from horovod_quant.torch.caller import OptimizerCall
from horovod_quant.torch.control import ActiveRankQuery, Question
from horovod_quant.transports.traffic import ring_allreduce_bytes

if TYPE_CHECKING:
    from horovod_quant.torch.auto import Auto

_PROGRESS = 20
"""Steps of a trial between two lines of the log."""

_MOST_UNTOLD = 20
_UNTOLD = (
    "horovod_quant: Auto cannot tell which workers take part in the steps of the optimizer of %s, so it chooses "
    "nothing: Horovod sums no gradient of %s, perhaps because that gradient is sparse (use sparse_as_dense=True), or "
    "because no backward pass reaches the parameter and optimizer._requires_update is empty"
)


class Handed:
    """How often a gradient has gone to Horovod as it is since that was last counted, and the bytes of each time."""

    def __init__(self, call: OptimizerCall, tensor: torch.Tensor, size: int) -> None:
        self.name = call.name
        self.float32_bytes = ring_allreduce_bytes(4 * tensor.numel(), size)
        self.sent_bytes = ring_allreduce_bytes(tensor.numel() * tensor.element_size(), size)
        self.device = tensor.device
        self.times = 0


class Course:
    """One optimizer's steps: what method each has, and what they have taken.

    Args:
        auto: the compressor.
        label: of the optimizer, the same on every worker.
        elements: numbers of elements of the optimizer's gradients, by name.

    Attributes:
        key: under which the choice is kept: it tells models of the same names and other sizes apart.
        policy: of the step under way; None where Horovod reduces all gradients.
        is_counting: whether it matters who takes part in the step under way.
        is_horovods: whether Horovod reduces all gradients of the step under way and those that follow.
        witness: whose gradient tells who does.
    """

    def __init__(self, auto: Auto, label: str, elements: Mapping[str, int]) -> None:
        self._auto = auto
        self.label = label
        digest = hashlib.blake2b(repr(sorted(elements.items())).encode(), digest_size=8)
        self.key = f"{label} {digest.hexdigest()}"
        self.witness = Witness()
        self.policy: Policy | None = None
        self.is_counting = True
        self.is_horovods = False
        self._session: Any = None
        self._delivering = False
        self._handed: dict[Any, Handed] = {}

    # ---- a step ----------------------------------------------------------------------------------------------

    def arrive(self, call: OptimizerCall, tensor: torch.Tensor) -> None:
        """To be called for each gradient, before anything is done with it."""
        from horovod.torch import mpi_ops

        if mpi_ops._handle_map is not self._session:
            self._open(call)
            self._session = mpi_ops._handle_map
        elif not self._delivering:
            return
        self._record()
        self._begin_step(call, tensor.device)

    def _open(self, call: OptimizerCall) -> None:
        """Horovod has been initialized: nothing from before counts, but for what was chosen."""
        self._candidates = self._auto.candidates_for(call)
        self._process_set = call.process_set
        self._phase: Literal["opening", "trial", "closing", "chosen"] = "opening"
        self._trial = Trial(len(self._candidates))
        self._auto.note_progress(self, call.process_set.size(), *self._trial.progress)
        self._chosen = 0  # none, as long as nothing is
        self._counted = 0  # steps since the choice
        self._untold = 0  # steps in which no gradient has told who takes part
        self._turn: Turn | None = None
        self._handed = {}
        self._last: Any = None  # the moment of the latest result

    def _begin_step(self, call: OptimizerCall, device: torch.device) -> None:
        self._delivering = False
        self._is_complete = False
        self._turn = self._trial.turn if self._phase == "trial" else None
        number = self._chosen if self._turn is None else self._turn.method
        self.policy = self._auto.policy_for(self._candidates[number])
        self.is_horovods = self._phase == "chosen" and self.policy is None
        self.is_counting = self._phase != "chosen" or self._auto.again_after > 0
        if not self.is_horovods:
            self._handed = {}
        if self.is_counting:
            self.witness.choose(call.expected())
            self._untold += 1
            if self._untold == _MOST_UNTOLD:
                notices.log(logging.WARNING, _UNTOLD, self.label, self.witness.name)
        self._before, self._last = self._last, None
        self._first = _now(device)

    def note_delivery(self, device: torch.device) -> None:
        """To be called when a gradient's result is there: after all of a step's gradients have come."""
        self._delivering = True
        self._last = _now(device)

    def _record(self) -> None:
        """The step before is over: the last result was the last of all."""
        if self._turn is not None and self._is_complete and self._before is not None:
            self._trial.record(
                self._turn, _seconds(self._first, self._last), _seconds(self._before, self._last)
            )

    # ---- steps that are Horovod's alone ----------------------------------------------------------------------

    def hand_through(self, call: OptimizerCall, tensor: torch.Tensor, size: int) -> Handed:
        """From now on the parameter's gradients may go to Horovod as they come: no more than a glance at each."""
        self._handed[call.parameter] = handed = Handed(call, tensor, size)
        return handed

    def hands_through(self, parameter: Any, tensor: torch.Tensor) -> bool:
        """Whether a gradient may; counts it."""
        from horovod.torch import mpi_ops

        handed = self._handed.get(parameter)
        if handed is None or self._delivering or mpi_ops._handle_map is not self._session:
            return False
        if not tensor.is_contiguous() or tensor.device != handed.device:
            return False
        if self.is_counting and self.witness.is_of(parameter):
            return False
        handed.times += 1
        return True

    # ---- a step that counts ----------------------------------------------------------------------------------

    def attend(self, everybody: bool) -> None:
        """To be called once in a step, after ``synchronize`` has begun, with whether every worker takes part."""
        self._is_complete = everybody
        self._untold = 0
        if not everybody:
            return
        if self._phase == "opening":
            self._compare()
        elif self._phase == "trial":
            self._trial.count_step()
            self._note_progress()
            if self._trial.turn is None:
                self._phase = "closing"
        elif self._phase == "closing":
            self._decide()
        else:
            self._counted += 1
            if self._counted >= self._auto.again_after and len(self._candidates) > 1:
                self._begin_trial()

    def _begin_trial(self) -> None:
        self._trial = Trial(len(self._candidates))
        self._phase, self._chosen = "trial", 0
        self._note_progress()

    def _note_progress(self) -> None:
        step, steps = self._trial.progress
        report = self._auto.note_progress(self, self._process_set.size(), step, steps)
        if step % _PROGRESS == 0 and self._process_set.rank() == 0:
            notices.log(logging.INFO, "horovod_quant: Auto: %s", report)

    def _compare(self) -> None:
        """All workers have the same arguments; what any of them has chosen before counts for all."""
        size = self._process_set.size()
        if size > 1:
            ActiveRankQuery(Question(self._process_set, self.label, self._auto.arguments())).answer()
        if len(self._candidates) == 1:
            self._choose(Report(self._candidates[0].name, (), size))
            return
        known = self._auto.known_choice(self, size)
        votes = self._sum([int(candidate.name == known) for candidate in self._candidates], "choices")
        voted = [candidate.name for candidate, count in zip(self._candidates, votes) if count]
        if len(voted) == 1:
            self._choose(Report(voted[0], (), size))
        else:
            self._begin_trial()

    def _decide(self) -> None:
        sums = self._sum(self._trial.medians(), "medians")
        report = evaluate(self._candidates, sums, self._process_set.size())
        self._choose(report)
        if self._process_set.rank() == 0:
            notices.log(logging.INFO, "horovod_quant: Auto %s", report)

    def _choose(self, report: Report) -> None:
        self._auto.keep(self, report)
        names = [candidate.name for candidate in self._candidates]
        self._chosen = names.index(report.method or names[0])
        self._phase, self._counted = "chosen", 0

    def _sum(self, numbers: Sequence[int], what: str) -> list[int]:
        """Over all workers; waits for them. For steps that Horovod reduces itself."""
        import horovod.torch as hvd

        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        name = f"horovod_quant.{self.label}.{what}"
        return hvd.allreduce(own, op=hvd.Sum, name=name, process_set=self._process_set).tolist()


def _now(device: torch.device) -> Any:
    """A moment: of the device's current stream, where the gradients are on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
