"""Check that Horovod averages between two processes.

scripts/setup starts it under horovodrun.

Usage: check_horovod.py --gloo|--mpi FRAMEWORK...

Under Gloo one framework per process: two of them collide while they look for their peers.
"""

import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def filled(framework, value):
    """Return a tensor of four elements with this value."""
    if framework == "torch":
        import torch

        return torch.full((4,), value)
    import tensorflow

    return tensorflow.fill((4,), value)


def main(controller, *frameworks):
    for framework in frameworks:
        hvd = importlib.import_module(f"horovod.{framework}")
        hvd.init()
        assert hvd.size() == 2, f"{hvd.size()} processes, not 2"
        assert hvd.gloo_enabled() == (controller == "--gloo"), "not the requested controller"
        total = hvd.allreduce(filled(framework, hvd.rank() + 1.0), op=hvd.Sum)
        assert total.numpy().tolist() == [3.0] * 4, f"1 + 2 gave {total}"


main(*sys.argv[1:])
