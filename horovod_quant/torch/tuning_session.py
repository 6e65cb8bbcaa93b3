"""Tuning session of `Auto` for one optimizer."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from horovod_quant.autotune.trial import Report, Trial, TrialStep, evaluate
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import notices
from horovod_quant.torch.caller import OptimizerCall
from horovod_quant.torch.control import ActiveRankQuery, Question
from horovod_quant.torch.participation import ParticipationProbe
from horovod_quant.transports.progress import PROGRESS

if TYPE_CHECKING:
    from horovod_quant.torch.auto import Auto

_PROGRESS = 20
"""Steps of the trials between two lines of the log."""

_MOST_UNKNOWN = 20
_UNKNOWN = (
    "horovod_quant: Auto cannot tell which workers participate in the steps of the optimizer of %s, so it chooses "
    "nothing: Horovod sums no gradient of %s, perhaps because that gradient is sparse (use sparse_as_dense=True), or "
    "because no backward pass reaches the parameter and optimizer._requires_update is empty"
)


class TuningSession:
    """Methods and times of one optimizer's steps.

    Args:
        auto: the compressor.
        label: the optimizer's label, the same on every worker.
        elements: numbers of elements of the optimizer's gradients, by name.

    Attributes:
        key: the key of the choice; it differs between models with the same names and other sizes.
        policy: the policy of the current step; None where Horovod reduces all gradients.
        is_counting: whether the current step counts if all workers participate.
        is_horovods: whether Horovod reduces all gradients of the current step and of the following ones.
        is_delivering: whether a result of the current step is known, so that the next gradient begins another one.
        probe: the participation probe, carried by one gradient.
    """

    def __init__(self, auto: Auto, label: str, elements: Mapping[str, int]) -> None:
        self._auto = auto
        self.label = label
        digest = hashlib.blake2b(repr(sorted(elements.items())).encode(), digest_size=8)
        self.key = f"{label} {digest.hexdigest()}"
        self.probe = ParticipationProbe()
        self.policy: Policy | None = None
        self.is_counting = True
        self.is_horovods = False
        self.is_delivering = False
        self._session: Any = None
        self._devices: Collection[torch.device] = ()

    # ---- a step ----------------------------------------------------------------------------------------------

    def arrive(self, call: OptimizerCall, tensor: torch.Tensor) -> None:
        """Begin a step with its first gradient.

        To be called first for each gradient; in the middle of a step it does nothing.
        """
        from horovod.torch import mpi_ops

        if mpi_ops._handle_map is not self._session:
            self._open(call)
            self._session = mpi_ops._handle_map
        elif not self.is_delivering:
            return
        self._record()
        self._begin_step(call, tensor.device)

    def _open(self, call: OptimizerCall) -> None:
        """Reset all but the choice: Horovod has been initialized again."""
        self._candidates = self._auto.candidates_for(call)
        self._process_set = call.process_set
        self._phase: Literal["opening", "trial", "closing", "chosen"] = "opening"
        self._trial = Trial(len(self._candidates))
        self._auto.note_progress(self, call.process_set.size(), *self._trial.progress)
        self._chosen = 0  # no compression
        self._counted = 0  # steps since the choice
        self._unknown = 0  # steps without a result of the participation probe
        self._trial_step: TrialStep | None = None
        self._last: Any = None  # time of the latest result of a trial's step

    def _begin_step(self, call: OptimizerCall, device: torch.device) -> None:
        self.is_delivering = False
        self._is_complete = False
        self._trial_step = self._trial.current if self._phase == "trial" else None
        number = self._chosen if self._trial_step is None else self._trial_step.method
        self.policy = self._auto.policy_for(self._candidates[number])
        self.is_horovods = self._phase == "chosen" and self.policy is None
        self.is_counting = self._phase != "chosen" or self._auto.again_after > 0
        self._before, self._last = self._last, None
        if self.is_counting:
            expected = call.expected()
            self.probe.choose(expected)
            self._unknown += 1
            if self._unknown == _MOST_UNKNOWN:
                notices.log(logging.WARNING, _UNKNOWN, self.label, self.probe.name)
            if self._trial_step is not None:
                devices = {parameter.device for _, parameter in expected} or {device}
                if devices != self._devices:
                    self._before = None  # of another clock
                self._devices = devices
                self._first = _now(devices)

    def note_delivery(self) -> None:
        """Record the time of a gradient's result.

        All gradients of the step have arrived before.
        """
        self.is_delivering = True
        if self._trial_step is not None:
            self._last = _now(self._devices)

    def _record(self) -> None:
        """Record the time of the step before, which is over."""
        if self._trial_step is not None and self._is_complete and self._before is not None:
            self._trial.record(
                self._trial_step, _seconds(self._first, self._last), _seconds(self._before, self._last)
            )

    # ---- a step that counts ----------------------------------------------------------------------------------

    def note_participation(self, is_complete: bool) -> None:
        """Record whether all workers participate.

        To be called once in a step, after ``synchronize`` has begun.
        """
        self._is_complete = is_complete
        self._unknown = 0
        if not is_complete:
            return
        if self._phase == "opening":
            self._compare()
        elif self._phase == "trial":
            self._trial.count_step()
            self._note_progress()
            if self._trial.current is None:
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
        """Compare arguments, and adopt an earlier choice of any worker."""
        size = self._process_set.size()
        if size > 1:
            query = ActiveRankQuery(Question(self._process_set, self.label, self._auto._arguments()))
            PROGRESS.hand(query)
            PROGRESS.wait([query], lambda: query.ended)
            if query.error is not None:
                raise query.error
        names = [candidate.name for candidate in self._candidates]
        if len(names) > 1:
            known = self._auto.known_choice(self, size)
            votes = self._sum([int(name == known) for name in names], "choices")
            names = [name for name, count in zip(names, votes) if count]
        if len(names) == 1:
            self._choose(Report(names[0], (), size))
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
        """Sum over all workers, and wait for them.

        To be called only in steps that Horovod reduces.
        """
        import horovod.torch as hvd

        local = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        name = f"horovod_quant.{self.label}.{what}"
        return hvd.allreduce(local, op=hvd.Sum, name=name, process_set=self._process_set).tolist()


def _now(devices: Collection[torch.device]) -> Any:
    """Return a time stamp of the devices of a step's gradients.

    On one GPU it is an event on the current stream. Events of several devices cannot be compared, so there it is the
    host's time, after waiting for the GPUs' current streams.
    """
    streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
    if len(devices) == len(streams) == 1:
        event = torch.cuda.Event(enable_timing=True)
        event.record(streams[0])
        return event
    for stream in streams:
        stream.synchronize()
    return time.perf_counter()


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
