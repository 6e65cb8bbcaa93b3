"""Exchanges gradients between hosts, and counts what crosses their links. Run by test_lab.py, in scripts/lab.

horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 python lab_worker.py FOLDER flat|hierarchical WIDTH STEPS METHOD...

Appends a line of JSON to FOLDER/figures for each method of torch_harness.METHODS, for a layer of WIDTH x WIDTH.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from oracle import Oracle
from torch_harness import METHODS, base_optimizer, gather_objects

import horovod_quant.torch as hvq


def everyones(value: Any) -> list[Any]:
    return gather_objects(value, hvd.global_process_set)


class Run:
    """Trains a layer with one method, and remembers this rank's gradients and the reduced ones."""

    def __init__(self, method: str, hierarchical: bool, width: int) -> None:
        self.compressor = METHODS[method](hierarchical=hierarchical)
        torch.manual_seed(0)
        self._width = width
        self.layer = torch.nn.Linear(width, width, bias=False)
        self.own: list[np.ndarray] = []
        self.reduced: list[np.ndarray] = []
        self.layer.weight.register_hook(lambda gradient: self.own.append(gradient.numpy().copy()))
        self._optimizer = hvd.DistributedOptimizer(
            base_optimizer(self.compressor, self.layer.parameters()),
            named_parameters=self.layer.named_parameters(),
            compression=self.compressor,
        )

    def step(self) -> None:
        data = torch.Generator().manual_seed(1000 * len(self.own) + hvd.rank())
        self._optimizer.zero_grad()
        self.layer(torch.randn(4, self._width, generator=data)).pow(2).mean().backward()
        self._optimizer.synchronize()
        assert self.layer.weight.grad is not None
        self.reduced.append(self.layer.weight.grad.numpy().copy())
        with self._optimizer.skip_synchronize():
            self._optimizer.step()

    def wrong_elements(self, folder: Path) -> list[int]:
        """In each step: how many elements of the reduced gradient are not, bit for bit, what the simulator says.

        On rank 0. The others have the same gradients, see `ends_equal`, and hand over their own as files.
        """
        np.save(folder / f"{hvd.rank()}.npy", np.stack(self.own))
        everyones(None)
        if hvd.rank() != 0:
            return []
        gradients = [np.load(folder / f"{rank}.npy") for rank in range(hvd.size())]
        oracle, wrong = Oracle(self.compressor), []
        for step, reduced in enumerate(self.reduced):
            everyone = [{"weight": own[step]} for own in gradients]
            expected = oracle.expected(everyone, "weight", 1 / hvd.size())
            assert expected is not None
            wrong.append(int((expected.view(np.int32) != reduced.reshape(-1).view(np.int32)).sum()))
        return wrong

    def ends_equal(self) -> bool:
        """Whether all ranks have had the same reduced gradients and have the same parameters now."""
        arrays = [*self.reduced, self.layer.weight.detach().numpy()]
        return len(set(everyones(hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()))) == 1


def sent_by_host() -> dict[str, int]:
    """Bytes that have left this host by its link, and those between its own ranks, from the interfaces' counters."""
    with open("/proc/self/net/dev") as file:
        rows = dict(line.strip().split(":") for line in file if ":" in line)
    return {"link": int(rows["eth0"].split()[8]), "loopback": int(rows["lo"].split()[8])}


def count(run: Run, steps: int) -> dict[str, Any]:
    """Bytes that all ranks and hosts send in so many steps."""
    everyones(None)
    counted, before = run.compressor.stats().total.bytes_sent, sent_by_host()
    for _ in range(steps):
        run.step()
    everyones(None)
    after, counted = sent_by_host(), run.compressor.stats().total.bytes_sent - counted
    own = {name: after[name] - before[name] if hvd.local_rank() == 0 else 0 for name in after}
    own["stats"] = counted
    gathered = everyones(own)
    return {name: sum(rank[name] for rank in gathered) for name in own}


def main() -> None:
    folder, kind, width, steps, *methods = sys.argv[1:]
    hierarchical = kind == "hierarchical"
    hvd.init(process_sets=hvq.hierarchical_process_sets() if hierarchical else [])
    torch.set_num_threads(1)
    where = everyones((hvd.local_rank(), socket.gethostname()))
    for method in methods:
        run = Run(method, hierarchical, int(width))
        run.step()  # not counted: Horovod negotiates in it
        figures = {"method": method, "hosts": [host for _, host in where], **count(run, int(steps))}
        figures.update(wrong=run.wrong_elements(Path(folder)), equal=run.ends_equal())
        if hvd.rank() == 0:
            with open(Path(folder, "figures"), "a") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
