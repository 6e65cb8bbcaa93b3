"""Trains under elastic horovodrun while workers come, are killed, and are let go. Run by test_elastic.py.

horovodrun --min-np 2 ... python torch_elastic_worker.py LOG_FOLDER HOSTS_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from elastic_job import PHASES, Kept, Log, assert_levels, count_step, exchanges_of, fatal_method
from oracle import assert_average
from torch_harness import (
    METHODS,
    assert_same_on_all_ranks,
    base_optimizer,
    followed,
    gather_objects,
    net,
    net_loss,
)

import horovod_quant.torch as hvq
from horovod_quant.autotune import trial

AUTO = "auto"
MAKERS = {**METHODS, AUTO: lambda **common: hvq.Auto(methods=["global-qsgd-8"], **common)}

SHORT = {"ROUNDS": 1, "MEASURED": 1, "FIRST_WARM_UP": 1}
"""Of Auto's trials: with the first step and the one that decides they take as many steps as `AUTO_STEPS`."""
AUTO_STEPS = 6


class Training:
    """A model that one method trains."""

    def __init__(self, method: str, log: Log) -> None:
        self.method, self._log = method, log
        # Small groups, so that some are under way while the backward pass goes on.
        self.compressor, self.model = MAKERS[method](group_bytes=8192), net()
        self.optimizer = hvd.DistributedOptimizer(
            base_optimizer(self.compressor, self.model.parameters()),
            self.model.named_parameters(),
            compression=self.compressor,
        )
        self.own: dict[str, np.ndarray] = {}
        self.doomed = False
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._keep(name, gradient))

    def _keep(self, name: str, gradient: torch.Tensor) -> None:
        self.own[name] = gradient.detach().numpy().reshape(-1).copy()
        if self.doomed and name == "0.weight":  # the last one: the others are being exchanged
            self._log.die(self.method)

    def step(self, number: int, doomed: bool) -> None:
        """One step and its check, or a whole trial. ``doomed``: this worker shall not come back from it."""
        self.doomed = doomed
        if self.method != AUTO:
            self._step(number)
            return
        for part in range(AUTO_STEPS):
            self._step(AUTO_STEPS * number + part)
        report = self.compressor.report()
        assert report.workers == hvd.size(), report
        choices = gather_objects((report, self.compressor.state_dict()["choices"]), hvd.global_process_set)
        assert len(set(map(str, choices))) == 1, choices

    def _step(self, number: int) -> None:
        self.optimizer.zero_grad()
        net_loss(self.model, number).backward()
        self.optimizer.synchronize()
        self._check()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def _check(self) -> None:
        """Every result is the average of what all workers have now, as well as the method knows it."""
        for name, parameter in self.model.named_parameters():
            reduced = parameter.grad.numpy().reshape(-1)
            everyone = gather_objects((self.own[name], reduced.tobytes()), hvd.global_process_set)
            assert all(other == everyone[0][1] for _, other in everyone), f"{name} differs between ranks"
            scheme = followed(self.compressor, self.optimizer).policy.scheme_for(name, reduced.size)
            gradients = [gradient for gradient, _ in everyone]
            assert_average(scheme, gradients, reduced, name, isinstance(self.compressor, hvq.BinSGDM))
            if scheme is not None and isinstance(self.compressor, hvq.GlobalQSGD):
                assert_levels(scheme, gradients, reduced, name)

    def updates(self) -> set[int]:
        """How often BinSGDM has updated each parameter."""
        states = self.optimizer.state.values()
        return {int(state["step"]) for state in states if "momentum" in state}

    def binary_state(self) -> Iterator[np.ndarray]:
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        return (state[name].numpy() for state in states for name in ("momentum", "scale"))


def state_of(trainings: list[Training]) -> Any:
    parts = {f"model_{number}": training.model for number, training in enumerate(trainings)}
    parts |= {f"optimizer_{number}": training.optimizer for number, training in enumerate(trainings)}
    return hvd.elastic.TorchState(**parts, step=0, phase=0, steps_in_phase=0)


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    log = Log(folder)
    vars(trial).update(SHORT)
    trainings = [Training(method, log) for method in MAKERS]
    (binary,) = (training for training in trainings if isinstance(training.compressor, hvq.BinSGDM))
    kept = Kept()

    @hvd.elastic.run
    def train(state: Any) -> None:
        if state.step:
            Kept.assert_survived(gather_objects(kept.now(binary.binary_state()), hvd.global_process_set))
        while state.phase < len(PHASES):
            fatal = fatal_method(state.phase)
            for training in trainings:
                training.step(state.step, doomed=training.method == fatal)
            weights = [p for training in trainings for p in training.model.parameters()]
            assert_same_on_all_ranks(weights, "parameters")
            count_step(state, hvd.size(), hvd.rank(), hosts)
            updates = binary.updates()
            assert updates == {state.step}, f"BinSGDM counts {updates} updates after {state.step} steps"
            exchanges = exchanges_of(training.compressor for training in trainings)
            log.write(step=state.step, size=hvd.size(), phase=state.phase, exchanges=exchanges)
            kept.note(binary.binary_state())
            state.commit()

    train(state_of(trainings))
    log.write(finished=True)


if __name__ == "__main__":
    main()
