"""Uses a hierarchical compressor in one session of Horovod after another. Run by test_hierarchical_exchange.py.

    horovodrun --gloo -np 4 python reinit_worker.py FOLDER FRAMEWORK

Prints FINISHED when all went as it should.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from oracle import Oracle


def main() -> None:
    folder, framework = Path(sys.argv[1]), sys.argv[2]
    hvd = importlib.import_module(f"horovod.{framework}")
    hvq = importlib.import_module(f"horovod_quant.{framework}")
    library = importlib.import_module(framework)
    tensor_of = library.from_numpy if framework == "torch" else library.constant
    compressor = hvq.GlobalQSGD(bits=8, hierarchical=2)
    oracle = Oracle(compressor)
    orders = [[[0, 1], [2, 3], [0, 2], [1, 3]], [[0, 2], [1, 3], [0, 1], [2, 3]]]
    sessions: list[Any] = [[hvd.ProcessSet(ranks) for ranks in order] for order in orders]
    for session, process_sets in enumerate(sessions):
        hvd.init(process_sets=process_sets)
        data = [
            np.random.default_rng([session, rank]).standard_normal(5000).astype(np.float32)
            for rank in range(4)
        ]
        for _ in range(2):
            result = hvd.allreduce(tensor_of(data[hvd.rank()]), name="values", compression=compressor)
            expected = oracle.expected([{"values": own} for own in data], "values", 0.25)
            assert np.array_equal(result.numpy(), expected), f"session {session}"
        rank = hvd.rank()
        hvd.allreduce(tensor_of(np.ones(1, np.float32)), name="end")  # whose end would be that of all
        hvd.shutdown()
        meet(folder, session, rank, 4)
    print("FINISHED", flush=True)


def meet(folder: Path, session: int, rank: int, workers: int) -> None:
    """Waits for all workers: one that begins the next session before this one is over makes Gloo fail."""
    (folder / f"{session}.{rank}").touch()
    while len(list(folder.glob(f"{session}.*"))) < workers:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
