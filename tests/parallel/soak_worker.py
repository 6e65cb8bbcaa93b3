"""Trains for a long time with one method after another, and measures what a process holds. Run by test_soak.py.

horovodrun -np 4 python soak_worker.py torch|tensorflow FILE STEPS WARM_UP METHOD...

A METHOD is a name of `horovod_quant.frontends.methods`, and perhaps a coding, as in "qsgd-4 elias"; or LEAKING. FILE
gets a line of JSON a method: what each worker held after WARM_UP steps and after STEPS, and its parameters'
fingerprint.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from training import fingerprint

from horovod_quant.frontends import methods

LEAKING = "none leaking"

SAMPLES = 10
"""Steps after which the resident set is looked at; their median counts."""

# A hundred tensors, on either side of min_elements.
LENGTHS = [1024 + 37 * i for i in range(50)] + [1 + 20 * i for i in range(50)]
GROUP_BYTES = 1 << 18  # of two groups

_LEAK: list[Any] = []


class TorchTraining:
    """Parameters that are drawn to another target on each worker."""

    def __init__(self, method: str) -> None:
        import horovod.torch as hvd
        import torch
        from torch_harness import base_optimizer

        import horovod_quant.torch as hvq

        self._compressor = compression(method, hvd, hvq)
        self._parameters = [torch.nn.Parameter(torch.from_numpy(part)) for part in parts_of(0)]
        self._target = torch.from_numpy(np.concatenate(parts_of(1 + hvd.rank())))
        self._optimizer = hvd.DistributedOptimizer(
            base_optimizer(self._compressor, self._parameters),
            named_parameters=[(f"part{i}", parameter) for i, parameter in enumerate(self._parameters)],
            compression=self._compressor,
        )

    def step(self) -> None:
        import torch

        self._optimizer.zero_grad()
        (torch.cat(self._parameters) - self._target).pow(2).sum().backward()
        self._optimizer.step()

    def weights(self) -> list[np.ndarray]:
        return [parameter.detach().numpy() for parameter in self._parameters]

    def sent(self) -> Sequence[float] | None:
        return sent_bytes(self._compressor)

    def settle(self) -> None:
        """Waits until Horovod's thread has let go of the last operations' tensors: it does so after it has said that
        they are complete.
        """
        import horovod.torch as hvd

        hvd.barrier()

    def held(self) -> dict[str, int]:
        import torch

        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return {"tensors": tensors}


class TensorFlowTraining:
    """The same with variables and a tape, in a graph."""

    def __init__(self, method: str) -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf
        from tf_harness import optimizer_for

        import horovod_quant.tensorflow as hvq

        self._variables = [tf.Variable(part) for part in parts_of(0)]
        target = tf.constant(np.concatenate(parts_of(1 + hvd.rank())))
        if method == methods.BINSGDM:
            optimizer = hvq.optim.BinSGDM(1e-3)
            self._compressor = compression(method, hvd, hvq, optimizer=optimizer)
        else:
            self._compressor = compression(method, hvd, hvq)
            optimizer = optimizer_for(self._compressor)
        optimizer.build(self._variables)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.concat(self._variables, 0) - target) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=self._compressor)
            optimizer.apply_gradients(zip(tape.gradient(loss, self._variables), self._variables))

        self.step = step

    def weights(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self._variables]

    def sent(self) -> Sequence[float] | None:
        return sent_bytes(self._compressor)

    def settle(self) -> None:
        pass

    def held(self) -> dict[str, int]:
        return {"traces": self.step.experimental_get_tracing_count()}


def compression(method: str, hvd: Any, hvq: Any, **options: Any) -> Any:
    name, *coding = method.split()
    parsed = methods.parse(name)
    if parsed.class_name is None:
        return parsed.compression(hvd, hvq)
    if coding:
        options["coding"] = coding[0]
    return parsed.compression(hvd, hvq, group_bytes=GROUP_BYTES, **options)


def sent_bytes(compressor: Any) -> Sequence[float] | None:
    """Bytes sent, and those that float32 would have taken; None for Horovod's own compressions."""
    return compressor.stats().total if hasattr(compressor, "stats") else None


def parts_of(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(length).astype(np.float32) for length in LENGTHS]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held_after_steps(training: Any, steps: int) -> dict[str, int]:
    """What the process holds when so many steps have been made."""
    for _ in range(steps - SAMPLES):
        training.step()
    gc.collect()
    gc.disable()
    resident = []
    for _ in range(SAMPLES):
        training.step()
        resident.append(resident_bytes())
    training.settle()
    training.sent()  # adds up what the last groups sent; where their lengths differ, some hundreds are kept until then
    cyclic = gc.collect()  # left by these steps, in reference cycles
    gc.enable()
    return {
        "resident": int(statistics.median(resident)),
        "cyclic": cyclic,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "blocks": sys.getallocatedblocks(),  # of Python's memory: every object is one
        "objects": len(gc.get_objects()),
        **training.held(),
    }


def leak(training: Any) -> None:
    """Every step leaves something behind."""
    clean_step = training.step

    def step() -> None:
        clean_step()
        _LEAK.append([np.ones(60_000), os.dup(1), *([] for _ in range(10))])

    training.step = step


def soak(training: Any, steps: int, warm_up: int) -> dict[str, Any]:
    first = fingerprint(training.weights())
    held_after_steps(training, warm_up // 2)  # so that measuring, too, has been done before
    before = held_after_steps(training, warm_up - warm_up // 2)
    begin = time.perf_counter()
    after = held_after_steps(training, steps - warm_up)
    seconds = (time.perf_counter() - begin) / (steps - warm_up)
    weights = training.weights()
    return {
        "before": before,
        "after": after,
        "parameters": fingerprint(weights),
        "trained": fingerprint(weights) != first and bool(np.isfinite(np.concatenate(weights)).all()),
        "sent": training.sent(),
        "seconds": seconds,
    }


def main() -> None:
    framework, file, steps, warm_up, names = sys.argv[1], *sys.argv[2:5], sys.argv[5:]
    if framework == "torch":
        import horovod.torch as hvd
        import torch
        from torch_harness import gather_objects

        torch.set_num_threads(1)
        kind: Any = TorchTraining
    else:
        import horovod.tensorflow as hvd
        from tf_harness import gather_objects

        kind = TensorFlowTraining
    hvd.init()
    for name in names:
        training = kind(name.removesuffix(" leaking") if name == LEAKING else name)
        if name == LEAKING:
            leak(training)
        workers = gather_objects(soak(training, int(steps), int(warm_up)), hvd.global_process_set)
        if hvd.rank() == 0:
            with open(file, "a") as log:
                log.write(json.dumps({"method": name, "workers": workers}) + "\n")
        del training
        for leaked in _LEAK:
            os.close(leaked[1])
        _LEAK.clear()
        gc.collect()


if __name__ == "__main__":
    main()
