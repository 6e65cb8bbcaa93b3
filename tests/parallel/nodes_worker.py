"""Writes down what a hierarchical exchange says that cannot be. Run by test_hierarchical_exchange.py.

horovodrun -np 3 -H localhost:2,127.0.0.1:1 python nodes_worker.py FOLDER FRAMEWORK HIERARCHICAL
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    folder, framework = Path(sys.argv[1]), sys.argv[2]
    hierarchical = True if sys.argv[3] == "True" else int(sys.argv[3])
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        import horovod_quant.torch as hvq

        ones = torch.ones(2000)
    else:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        import horovod_quant.tensorflow as hvq

        ones = tf.ones(2000)
    hvd.init()
    said, when = "", "construction"
    try:
        compression = hvq.QSGD(hierarchical=hierarchical)
        when = "exchange"
        hvd.allreduce(ones, name="ones", compression=compression)
    except Exception as error:
        said = f"{when}: {type(error).__name__}: {error}"
    (folder / str(hvd.rank())).write_text(said)
    hvd.allreduce(ones, name="end")


if __name__ == "__main__":
    main()
