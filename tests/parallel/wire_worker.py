"""Measures what crosses the loopback interface while a large gradient is exchanged. Run by test_wire.py.

horovodrun -np 2 python wire_worker.py torch|tensorflow METHOD...
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

STEPS = 8

IDLE_SECONDS = 0.5
"""For which workers do nothing, to see what Horovod's controller sends meanwhile. It sends no less during steps: on a
loaded machine, where these take long, as much as a tenth of one-bit gradients.
"""

Setting = tuple[str, Callable[[], None], Any]
"""A method, a training step with it, and its compressor."""


def with_torch() -> Iterator[Setting]:
    import horovod.torch as hvd
    import torch
    from torch_harness import METHODS, VARIANTS, base_optimizer

    torch.set_num_threads(1)
    for method in sys.argv[2:]:
        torch.manual_seed(0)
        model, compressor = torch.nn.Linear(1000, 1000), {**METHODS, **VARIANTS}[method]()
        optimizer = hvd.DistributedOptimizer(
            base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
        )
        torch.manual_seed(hvd.rank())

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 1000)).pow(2).mean().backward()
            optimizer.step()

        yield method, step, compressor


def with_tensorflow() -> Iterator[Setting]:
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from tf_harness import IN_TENSORFLOW, METHODS, VARIANTS, optimizer_for

    import horovod_quant.tensorflow as hvq

    makers = {**METHODS, **VARIANTS, **IN_TENSORFLOW}
    for method in sys.argv[2:]:
        make = makers[method]
        weights, bias = tf.Variable(tf.ones([1000, 1000])), tf.Variable(tf.ones([1000]))
        optimizer = optimizer_for(make())
        optimizer.build([weights, bias])
        arguments: dict[str, Any] = {"optimizer": optimizer} if isinstance(make(), hvq.BinSGDM) else {}
        compressor = make(**arguments)

        def step(variables: Any = (weights, bias), compressor: Any = compressor) -> Any:
            x = tf.random.normal([4, 1000])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ variables[0] + variables[1]) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compressor)
            return [tf.reduce_sum(gradient) for gradient in tape.gradient(loss, variables)]

        yield method, tf.function(step), compressor


def loopback_bytes() -> int:
    """Sent over the loopback interface of this process's network namespace (/sys would show the first one's)."""
    with open("/proc/self/net/dev") as counters:
        line = next(line for line in counters if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    if sys.argv[1] == "torch":
        import horovod.torch as hvd
        from torch_harness import gather_objects

        settings = with_torch()
    else:
        import horovod.tensorflow as hvd
        from tf_harness import gather_objects

        settings = with_tensorflow()
    hvd.init()
    for method, step, compressor in settings:
        step()  # the first step also negotiates
        gather_objects(None, hvd.global_process_set)
        idle = loopback_bytes()
        time.sleep(IDLE_SECONDS)
        chatter = (loopback_bytes() - idle) / IDLE_SECONDS
        gather_objects(None, hvd.global_process_set)
        counted, wire, begin = compressor.stats().total.bytes_sent, loopback_bytes(), time.monotonic()
        for _ in range(STEPS):
            step()
        gather_objects(None, hvd.global_process_set)
        wire = loopback_bytes() - wire - round(chatter * (time.monotonic() - begin))
        counted = compressor.stats().total.bytes_sent - counted
        everyone = sum(gather_objects(counted, hvd.global_process_set))
        if hvd.rank() == 0:
            print("\nFIGURES", json.dumps({"method": method, "counted": everyone, "wire": wire}), flush=True)


if __name__ == "__main__":
    main()
