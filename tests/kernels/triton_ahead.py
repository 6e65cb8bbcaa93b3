"""Compiles the kernels of an encoding for a GPU that need not be there; Triton's cache and the log tell it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from triton.runtime import driver

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from gpu_checks.ahead import _Driver

from horovod_quant.kernels import triton as kernels
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.triton import arguments, compiling


def encode() -> None:
    x = torch.ones(1000)
    norms = kernels.bucket_maxima(x, 256)
    words = kernels.encode_uniform_codes(x, norms, 256, 3, Key(1, 2))
    kernels.decode_uniform_codes([words], [norms], 256, 3, 1.0, x)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    driver.set_active(_Driver(90))
    arguments.INTERPRETED = True  # tensors are in the host's memory
    compiling.compile_kernels_of(encode, "QSGD", torch.device("cpu"))
