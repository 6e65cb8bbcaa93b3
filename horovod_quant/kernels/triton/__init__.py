"""Kernels in Triton for tensors on a GPU, bit-identical to `reference`.

They take and return flat, contiguous tensors, enqueue their work on the current stream, and do not wait for it. Within
a `batch` one launch of a kernel processes all of its tensors; `pack` begins a batch.

With TRITON_INTERPRET=1 in the environment when Triton is imported, the same kernels run in Triton's interpreter, on
tensors in host memory, thousands of times slower. Tests use this.

Elias coding is not here: the host encodes and decodes its streams.
"""

from __future__ import annotations

import sys

try:
    import torch
    import triton
except ImportError as error:
    raise ImportError(
        "horovod_quant.kernels.triton needs PyTorch and Triton: pip install torch triton"
    ) from error
if not hasattr(triton, "constexpr_function"):
    raise ImportError(
        f"horovod_quant.kernels.triton needs a newer Triton than {triton.__version__}, which belongs to PyTorch "
        f"{torch.__version__}; install a newer PyTorch, which brings one"
    )

from horovod_quant.kernels.triton.arrays import (  # noqa: F401 (part of every backend)
    TILES_AT_A_TIME,
    concatenate,
    empty,
    mean,
    norms_of_square_sums,
    pack,
    pack_flags,
    scale,
    step_word,
    to_float16,
    to_float32,
    unpack_flags,
    view,
    with_nan_tiles,
)
from horovod_quant.kernels.triton.each_rotated import TritonSegments
from horovod_quant.kernels.triton.functions import (  # noqa: F401 (part of every backend)
    binarize,
    bucket_magnitude_sums,
    bucket_maxima,
    bucket_square_sums,
    bucket_sums,
    clip,
    decode_exponential,
    decode_signs,
    decode_uniform_codes,
    decode_uniform_sum,
    encode_exponential,
    encode_uniform_codes,
    encode_uniform_sum,
    less,
    minimum,
    next_powers_of_two,
    tensor_deviation,
    tensor_maximum,
    tensor_mean_magnitude,
    vote,
    where,
)
from horovod_quant.kernels.triton.launching import INTERPRETED, batch  # noqa: F401
from horovod_quant.kernels.triton.rotated import (  # noqa: F401 (part of every backend)
    add_rotated,
    decode_rotated,
    encode_rotated,
    key_of_word,
)

NAME = "triton"

segments = TritonSegments(sys.modules[__name__])
"""Kernels for many segments of tensors at once."""
