"""Uses compressors before Horovod is initialized, after its end, and after it has been initialized again.

    horovodrun -np 2 python misuse_worker.py torch|tensorflow

Prints FINISHED when all went as it should, and `HUNG` when Horovod has not come up again.

Horovod's launcher keeps the workers' addresses of the first time when their last words of it arrive in an unlucky
order; a worker that takes an old one then waits for ever.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from typing import Any, Callable

import numpy as np

HUNG = "Timeout ("
"""What faulthandler prints."""

PATIENCE = 90
"""Seconds."""


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def main() -> None:
    framework = sys.argv[1]
    hvd = importlib.import_module(f"horovod.{framework}")
    hvq = importlib.import_module(f"horovod_quant.{framework}")
    library = importlib.import_module(framework)
    tensor_of = library.from_numpy if framework == "torch" else library.constant
    compressors = {
        "qsgd": hvq.QSGD(bits=8, bucket_size=64),
        "nuqsgd": hvq.NUQSGD(bits=8, bucket_size=64),
        "global-qsgd": hvq.GlobalQSGD(bits=16),
    }

    def reduce(compressor: Any) -> np.ndarray:
        values = np.random.default_rng(hvd.rank()).standard_normal(3000).astype(np.float32)
        return hvd.allreduce(tensor_of(values), name="values", compression=compressor).numpy()

    def is_refused() -> None:
        for name, compressor in compressors.items():
            tensor = tensor_of(np.ones(3000, np.float32))
            message = message_of(lambda: hvd.allreduce(tensor, name="values", compression=compressor))  # noqa: B023
            assert "hvd.init" in message, f"{name}: {message}"

    def is_right() -> None:
        data = [np.random.default_rng(rank).standard_normal(3000) for rank in range(hvd.size())]
        exact = np.mean(data, axis=0)
        for name, compressor in compressors.items():
            error = np.linalg.norm(reduce(compressor) - exact) / np.linalg.norm(exact)
            assert 0 < error < 0.5, f"{name}: {error}"

    is_refused()
    hvd.init()
    is_right()
    hvd.shutdown()
    is_refused()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    hvd.init()
    faulthandler.cancel_dump_traceback_later()
    is_right()
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main()
