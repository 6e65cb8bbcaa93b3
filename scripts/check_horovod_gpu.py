"""Check that Horovod was built for GPUs as requested, and sums.

scripts/setup starts it, as one process.

Usage: check_horovod_gpu.py nccl|host
"""

import sys

import horovod.torch as hvd
import torch


def main(kind):
    hvd.init()
    assert hvd.cuda_built(), "Horovod was built without CUDA"
    assert bool(hvd.nccl_built()) == (kind == "nccl"), f"Horovod was built with NCCL {hvd.nccl_built()}"
    if not torch.cuda.is_available():
        print("no GPU is visible here: what was built for one has not been run")
        return
    total = hvd.allreduce(torch.full((4,), 3.0, device="cuda"), op=hvd.Sum)
    assert total.tolist() == [3.0] * 4, f"the sum of one worker's 3 is {total}"
    print(f"{torch.cuda.get_device_name()}: Horovod sums there")


main(*sys.argv[1:])
