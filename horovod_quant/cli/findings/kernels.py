"""Findings about this machine's kernels: their names, speed and results."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_quant import kernels
from horovod_quant.cli import probe
from horovod_quant.cli.report import OK, PROBLEM, WARNING, Finding
from horovod_quant.kernels import native, native_library, reference
from horovod_quant.kernels.keys import RngKey

_KERNEL_VARIABLES = ("HOROVOD_QUANT_KERNELS", "HOROVOD_QUANT_LIBRARY", "HOROVOD_QUANT_ISA")


def findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    wanted = os.environ.get("HOROVOD_QUANT_KERNELS")
    if wanted in kernels.OWN_OF_FRAMEWORKS:
        what = "TensorFlow" if wanted == "tensorflow" else "Triton"
        own = Finding(OK, f"{what} kernels, requested by HOROVOD_QUANT_KERNELS; where there are none:")
        return [own, *host_kernel_findings(""), *gpu_kernel_findings(facts)]
    return [*host_kernel_findings(wanted), *gpu_kernel_findings(facts)]


def host_kernel_findings(wanted: str | None) -> list[Finding]:
    """Return findings about host kernels; ``wanted`` names those that the user chose."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the findings have the same text
            backend = kernels.get()
        text = kernels.describe()
    except (ImportError, ValueError) as error:
        variables = [name for name in _KERNEL_VARIABLES if os.environ.get(name)]
        return [Finding(PROBLEM, f"no kernels: {error}", f"unset or correct {' and '.join(variables)}")]
    if backend is not native:
        remedy = "unset HOROVOD_QUANT_KERNELS" if wanted else native_remedy()
        return [Finding(WARNING, text, remedy)]
    if not same_bits(native):
        return [
            Finding(
                PROBLEM,
                f"{text}, but not bit-identical to the reference",
                "set HOROVOD_QUANT_KERNELS=numpy and report this",
            )
        ]
    library = native_library.loaded()
    if library.instruction_set != library.available[-1]:
        return [Finding(WARNING, f"{text}, requested by HOROVOD_QUANT_ISA", "unset it to use the fastest")]
    return [Finding(OK, f"{text}; bit-identical to the reference")]


def gpu_kernel_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return findings about kernels for PyTorch's gradients on a GPU, if any."""
    if not facts.get("torch", {}).get("gpus"):
        return []
    if probe.version_of("triton") is None:
        text = "PyTorch's gradients on a GPU are copied to the host, quantized there, and copied back"
        return [Finding(WARNING, text, "pip install triton")]
    try:
        importlib.import_module("horovod_quant.kernels.triton")
    except ImportError as error:
        text = f"PyTorch's gradients on a GPU are quantized on the host: {error}"
        return [Finding(WARNING, text, "install a newer PyTorch, which brings a newer Triton")]
    text = "PyTorch's gradients on a GPU are quantized there, by Triton's kernels; never on several GPUs"
    return [Finding(OK, text)]


def native_remedy() -> str:
    if os.environ.get("HOROVOD_QUANT_LIBRARY"):
        return "unset HOROVOD_QUANT_LIBRARY, or set it to a library of this version"
    return (
        "install a C++ compiler, then run HOROVOD_QUANT_REQUIRE_NATIVE=1 pip install . in the source folder"
    )


def same_bits(backend: Any) -> bool:
    """True if a few kernels return the reference's results on this machine."""
    gradient = np.random.default_rng(0).standard_normal(5000, np.float32)
    key = RngKey(0, "doctor").key("worker", 0)

    def encoded_and_decoded(k: Any) -> list[np.ndarray]:
        norms = k.bucket_maxima(gradient, 1024)
        words = k.encode_uniform_sum(gradient, norms, 1024, 31, 8, key)
        codes = k.encode_exponential(gradient, norms, 1024, 4, key)
        return [
            words,
            codes,
            k.decode_uniform_sum(words, norms, 1024, 31, 8, 0.25, np.empty_like(gradient)),
            k.decode_exponential([codes] * 2, [norms] * 2, 1024, 4, 0.5, np.empty_like(gradient)),
        ]

    return all(map(np.array_equal, encoded_and_decoded(backend), encoded_and_decoded(reference)))
