"""Runs scenarios one after another on every worker and writes down how each ended.

torchrun --nproc-per-node 2 worker.py FOLDER MODULE NAME ...

TORCH_DEVICE=cuda puts models on a GPU; DDP_BACKEND is the process group's (gloo).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def main() -> None:
    folder, module, names = Path(sys.argv[1]), importlib.import_module(sys.argv[2]), sys.argv[3:]
    if os.environ.get("TORCH_DEVICE") == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(os.environ.get("DDP_BACKEND", "gloo"))
    with open(folder / f"{dist.get_rank()}.jsonl", "w") as log:
        for name in names:
            failure, begin = "", time.monotonic()
            try:
                getattr(module, name)()
            except (Exception, pytest.fail.Exception):
                failure = traceback.format_exc()
            gc.collect()
            entry = {"scenario": name, "failure": failure, "seconds": time.monotonic() - begin}
            log.write(json.dumps(entry) + "\n")
            log.flush()
            dist.barrier()  # a worker that has failed alone must not meet the others in the next scenario
    # PyTorch with Gloo aborts at times where gradients outlive the process group.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
