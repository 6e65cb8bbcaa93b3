"""Time whole training steps, and count the bytes sent. Run by `steps`.

    horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 python steps_worker.py SETTINGS FILE

SETTINGS is `steps.Settings` in JSON; the figures go to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import horovod_quant.torch as hvq
from horovod_quant.frontends import methods
from horovod_quant.transports.traffic import ring_allreduce_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from torch_char_transformer import CharTransformer

ALONE = "alone"  # without communication: the compute time
HIERARCHICAL = "binsgdm-hierarchical"


class Trial:
    """Transformer and optimizer for one method."""

    def __init__(self, method: str, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self._model = CharTransformer(**settings["model"])
        context, sequences = settings["model"]["context"], settings["sequences"]
        # Their content does not matter for time.
        self._windows = torch.randint(128, (sequences, context + 1))
        self.elements = sum(parameter.numel() for parameter in self._model.parameters())
        self._method, self._compression = method, None
        binsgdm = method in (methods.BINSGDM, HIERARCHICAL)
        kind = hvq.optim.BinSGDM if binsgdm else torch.optim.Adam
        self._optimizer = kind(self._model.parameters(), lr=1e-4)
        if method == ALONE:
            return
        parsed = methods.parse(
            methods.BINSGDM if binsgdm else method, version=settings["version"], workers=hvd.size()
        )
        # The formula of the bytes counts elements that are sent in one bit: with 1, all of them are.
        options = {"min_elements": settings["min_elements"]} if parsed.class_name else {}
        if method == HIERARCHICAL:
            options["hierarchical"] = True
        self._compression = parsed.compression(hvd, hvq, **options)
        # Names per method: the same name with another shape would be a miss in Horovod's response cache.
        named = [(f"{method}: {name}", parameter) for name, parameter in self._model.named_parameters()]
        self._optimizer = hvd.DistributedOptimizer(
            self._optimizer, named_parameters=named, compression=self._compression
        )

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model.loss(self._windows).backward()
        self._optimizer.step()

    def bytes_counted(self, steps: int) -> float:
        """Return the bytes of gradients that this worker sent in some steps."""
        if self._method == ALONE:
            return 0.0
        if hasattr(self._compression, "stats"):
            return self._compression.stats().total.bytes_sent
        width = {methods.NONE: 4, methods.FP16: 2}[self._method]
        return steps * ring_allreduce_bytes(width * self.elements, hvd.size())


def sent_by_host() -> int:
    """Return the bytes that have left this host by its link."""
    with open("/proc/self/net/dev") as file:
        rows = dict(line.strip().split(":") for line in file if ":" in line)
    return int(rows["eth0"].split()[8])


def everyones(value: Any) -> list[Any]:
    return hvd.allgather_object(value)


def turn(trial: Trial, steps: int) -> tuple[float, float]:
    """Run a trial; return seconds (maximum) and link bytes (mean) per step."""
    hvd.allreduce(torch.zeros(1), name="together")
    sent, begin = sent_by_host(), time.perf_counter()
    for _ in range(steps):
        trial.step()
    seconds = time.perf_counter() - begin
    hvd.allreduce(torch.zeros(1), name="together")
    sent = sent_by_host() - sent
    gathered = everyones((seconds, sent if hvd.local_rank() == 0 else 0))
    hosts = hvd.size() // hvd.local_size()
    return max(s for s, _ in gathered) / steps, sum(b for _, b in gathered) / hosts / steps


def main() -> None:
    settings, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    hvd.init(process_sets=hvq.hierarchical_process_sets() if HIERARCHICAL in settings["methods"] else None)
    torch.set_num_threads(1)
    trials = {method: Trial(method, settings) for method in settings["methods"]}
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in trials}
    order = list(trials)
    steps_made = (settings["warm_up"] + settings["rounds"]) * settings["steps"]
    for number in range(-settings["warm_up"], settings["rounds"]):
        # A round has a trial of every method, so that all see the same state of the machine; the first one rotates.
        first = number % len(order)
        for method in order[first:] + order[:first]:
            measured = turn(trials[method], settings["steps"])
            if number >= 0:
                found[method].append(measured)
    results = {}
    for method, measured in found.items():
        counted = sum(everyones(trials[method].bytes_counted(steps_made)))
        results[method] = {
            "seconds": [seconds for seconds, _ in measured],
            "link_bytes": [sent for _, sent in measured],
            "sent_bytes": counted / hvd.size() / steps_made,
        }
    if hvd.rank() == 0:
        figures = {"elements": trials[order[0]].elements, "workers": hvd.size(), "results": results}
        file.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
