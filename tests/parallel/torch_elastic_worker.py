"""Trains under elastic horovodrun while workers come, are killed, and are let go. Run by test_torch_elastic.py.

horovodrun --min-np 2 ... python torch_elastic_worker.py LOG_FOLDER HOSTS_FILE
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from oracle import assert_average
from torch_harness import METHODS, assert_same_on_all_ranks, base_optimizer, gather_objects, net, net_loss

import horovod_quant.torch as hvq


class Phase(NamedTuple):
    """So many steps with so many workers; then another list of hosts, or the end of a host's worker, by SIGKILL."""

    size: int
    steps: int
    hosts: str = ""
    kill: str = ""


# A host whose worker has failed is never used again. All these names are this machine's.
PHASES = [
    Phase(2, 3, hosts="localhost:2\n127.0.0.1:1\n"),
    Phase(3, 3, kill="127.0.0.1"),
    Phase(2, 2, hosts="localhost:2\n127.1:1\n"),
    Phase(3, 3, kill="127.1"),
    Phase(2, 2, hosts="localhost:2\n127.0.1:1\n"),
    Phase(3, 3, hosts="localhost:2\n"),
    Phase(2, 3),
]


class Training:
    """A model that one method trains."""

    def __init__(self, method: str) -> None:
        # Small groups, so that some are under way while the backward pass goes on.
        self.compressor, self.model = METHODS[method](group_bytes=8192), net()
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
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, number: int) -> None:
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
            scheme = self.compressor.policy.scheme_for(name, reduced.size)
            gradients = [gradient for gradient, _ in everyone]
            assert_average(scheme, gradients, reduced, name, isinstance(self.compressor, hvq.BinSGDM))

    def updates(self) -> set[int]:
        """How often BinSGDM has updated each parameter."""
        states = self.optimizer.state.values()
        return {int(state["step"]) for state in states if "momentum" in state}


def state_of(trainings: list[Training]) -> Any:
    parts = {f"model_{number}": training.model for number, training in enumerate(trainings)}
    parts |= {f"optimizer_{number}": training.optimizer for number, training in enumerate(trainings)}
    return hvd.elastic.TorchState(**parts, step=0, phase=0, steps_in_phase=0)


def main() -> None:
    folder, hosts = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    log = open(folder / f"{os.getpid()}.jsonl", "w")
    trainings = [Training(method) for method in METHODS]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.phase < len(PHASES):
            before = PHASES[state.phase - 1] if state.phase else None
            victim = before is not None and before.kill == os.environ["HOROVOD_HOSTNAME"]
            for training in trainings[:2]:  # the other two have been exchanged then, those two are under way
                training.doomed = victim
            for training in trainings:
                training.step(state.step)
            weights = [p for training in trainings for p in training.model.parameters()]
            assert_same_on_all_ranks(weights, "parameters")
            state.step += 1
            updates = trainings[list(METHODS).index("binsgdm")].updates()
            assert updates == {state.step}, f"BinSGDM counts {updates} updates after {state.step} steps"
            log.write(json.dumps({"step": state.step, "size": hvd.size(), "phase": state.phase}) + "\n")
            log.flush()
            phase = PHASES[state.phase]
            state.steps_in_phase += hvd.size() == phase.size
            if state.steps_in_phase == phase.steps:
                state.phase += 1
                state.steps_in_phase = 0
                if phase.hosts and hvd.rank() == 0:
                    hosts.write_text(phase.hosts)
            state.commit()

    train(state_of(trainings))
    log.write(json.dumps({"finished": True}) + "\n")
    log.close()


if __name__ == "__main__":
    main()
