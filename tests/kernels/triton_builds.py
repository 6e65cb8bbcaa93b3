"""Compiles the Triton kernels for a GPU, which need not be there, and tells what they became.

Run as a program, because in a process whose Triton interprets kernels it compiles none:

    python triton_builds.py COMPUTE_CAPABILITY    # prints JSON: by a kernel's name and constants its `Built`
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from horovod_quant.kernels import triton as kernels
from horovod_quant.kernels.keys import Key, RngKey
from horovod_quant.kernels.triton import arguments, arrays, launching, rotated

KEY = Key(1, 2)
ELEMENTS, BUCKET = 1000, 256
DIVISIBLE = [["tt.divisibility", 16]]  # what Triton finds out about the addresses of the table and the owners


CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Built(NamedTuple):
    """Attributes:
    instructions: names of the PTX's.
    registers: of a thread.
    spilled: bytes of a thread's registers that went to memory, and of arrays there.
    multipliers: number of registers by which float32 numbers are multiplied in multiply-adds.
    """

    instructions: list[str]
    registers: int
    spilled: int
    multipliers: int


class Compiler:
    """Stands for `launching.Kernel.__call__`: compiles what would be launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.found: dict[str, Built] = {}

    def __call__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        function = kernel.function
        label = f"{function.__name__} {json.dumps(constants, default=str)}"
        if label in self.found:
            return
        names = function.arg_names
        signature = {"table": "*i64", "owners": "*i32", **dict.fromkeys(constants, "constexpr")}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(function, signature, values, {(0,): DIVISIBLE, (1,): DIVISIBLE})
        compiled = triton.compile(source, target=self._target, options=kernel.options)
        instructions = re.findall(r"^\s+(?:@\S+ )?([a-z][\w.:]+)", compiled.asm["ptx"], re.MULTILINE)
        multipliers = set(re.findall(r"fma\.rn\.f32\s+\S+, \S+, (\S+),", compiled.asm["ptx"]))
        self.found[label] = Built(instructions, *resources(compiled.asm["cubin"]), len(multipliers))


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of it that are in memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told)
    registers, stack, local = map(int, found)
    return registers, stack + local


def call_everything() -> None:
    """Calls each function; what reads and writes elements, for each type of them and several widths."""
    x = torch.ones(ELEMENTS)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for bits in (2, 3, 4):
            call_quantizers(x.to(dtype), bits)
    bits, broken = kernels.binarize(x, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), 0.9, KEY)
    kernels.with_nan_tiles(x, broken)
    kernels.vote([bits, bits], KEY)
    kernels.pack_flags(broken)
    kernels.mean([x, x])
    arrays.any_bits([bits, bits], torch.zeros_like(bits))
    kernels.clip(x, 1.0)
    kernels.pack([(len(bits), bits.numpy().dtype, lambda _: bits)])
    for dtype in arguments.KINDS:
        typed = x.to(dtype)
        kernels.to_float32(typed, None)
        kernels.to_float16(typed, None)
        kernels.scale([x], 2.0, typed)


def call_quantizers(x: torch.Tensor, bits: int) -> None:
    out = torch.zeros_like(x)
    norms = kernels.bucket_maxima(x, BUCKET)
    kernels.bucket_square_sums(x, BUCKET)
    kernels.bucket_sums(x, BUCKET)
    kernels.bucket_magnitude_sums(x, BUCKET)
    width = 2 * bits  # of GlobalQSGD's sums: 4 to 8
    words = kernels.encode_uniform_sum(x, norms, BUCKET, 7, width, KEY)
    kernels.decode_uniform_sum(words, norms, BUCKET, 7, width, 1.0, out)
    words = kernels.encode_uniform_codes(x, norms, BUCKET, bits, KEY)
    kernels.decode_uniform_codes([words, words], [norms, norms], BUCKET, bits, 1.0, out)
    words = kernels.encode_exponential(x, norms, BUCKET, bits, KEY)
    kernels.decode_exponential([words], [norms], BUCKET, bits, 1.0, out)
    key = kernels.key_of_word(RngKey(0, "w"), "worker", kernels.step_word(0))
    for trellis in (False, True):
        words, scales = kernels.encode_rotated(x, bits, key, trellis=trellis)
        kernels.add_rotated([words, words], [scales, scales], bits, [key, KEY], 1.0, out, trellis=trellis)
    words, broken = kernels.binarize(x, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), 0.9, KEY)
    kernels.decode_signs(words, 1.0, out)
    kernels.decode_signs(words, 1.0, out, kernels.pack_flags(broken))


def main() -> None:
    compiler = Compiler(int(sys.argv[1]))
    rotated.IN_REGISTERS = 1
    launching.INTERPRETED = arguments.INTERPRETED = True  # tensors are in the host's memory
    launching.Kernel.__call__ = lambda kernel, jobs, constants: compiler(kernel, constants)
    call_everything()
    json.dump(compiler.found, sys.stdout)


if __name__ == "__main__":
    main()
