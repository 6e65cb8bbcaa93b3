"""Written by scripts/write-stubs: this module for type checkers and editors."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from horovod_quant.frontends.nodes import hierarchical_process_sets as hierarchical_process_sets
from horovod_quant.schemes.base import Scheme
from horovod_quant.tensorflow import compressor as _compressor
from horovod_quant.tensorflow import optim as optim
from horovod_quant.tensorflow.metrics import MetricsCallback as MetricsCallback

__all__ = [
    "BinSGDM",
    "Compressor",
    "EDEN",
    "GlobalQSGD",
    "MetricsCallback",
    "NUQSGD",
    "QSGD",
    "hierarchical_process_sets",
    "optim",
]

class Compressor(_compressor.Compressor):
    """A compressor for Horovod's optimizers and tapes, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    If two models use it, variables of the same name are counted together; BinSGDM's supports only one optimizer.

    Args:
        scheme: a scheme with its arguments, such as ``schemes.QSGD(bits=4)`` or a custom one; or the name of a
            method, such as ``"qsgd-4-l2"``.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range.
        ImportError: Horovod is missing, or was built without TensorFlow.
    """
    def __init__(
        self,
        scheme: Scheme | str,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
    ) -> None: ...

class QSGD(Compressor):
    """QSGDinf (``norm="max"``) and the paper's QSGD (``norm="l2"``), with uniform levels.

    1. Each worker computes the norms of its buckets.
    2. It rounds stochastically to the levels and packs the codes. With ``rounding="correlated"`` the random bits make
       the workers' errors partly cancel, although each worker's distribution stays the same.
    3. One allgather distributes a payload of norms and codes.
    4. Each worker decodes every worker's codes with that worker's norms, and adds them in rank order.

    With ``exchange="alltoall"``, which ``"auto"`` chooses from 5 workers on, steps 3 and 4 are:

    3. An alltoall sends all workers' norms and codes of a shard to the rank that reduces the shard.
    4. The reducer decodes and averages them, and rounds the average in the same way; an allgather distributes the
       reducers' norms and codes.

    This is unbiased as well, but the second rounding adds an nmse that does not shrink with the number of workers.
    The defaults are what docs/results.md recommends.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"max"`` or ``"l2"``, computed per bucket and worker. The l2 norm needs 8 bits: 4 give too few levels.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside the range of float32 turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an alltoall for more than 4 workers, where an
            allgather would send more than 2× the bytes; with Elias coding an allgather.
        rounding: how the workers round their gradients. ``"correlated"``: their random numbers sum to a constant.
            Where gradients differ, half of the nmse remains (more where most elements are smaller than the
            distance between levels); where an even number n of gradients are equal, 1 / n of it. ``"independent"``:
            the workers' numbers are independent, as in the paper.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        bits: int = 4,
        norm: Literal["l2", "max"] = "max",
        bucket_size: int = 256,
        coding: Literal["fixed", "elias", "elias-omega"] = "fixed",
        exchange: Literal["allgather", "alltoall", "auto"] = "auto",
        rounding: Literal["correlated", "independent"] = "correlated",
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
    ) -> None: ...

class NUQSGD(Compressor):
    """NUQSGD: ``2^(bits-1) - 1`` non-zero exponential levels.

    The paper's s is ``2^(bits-1) - 2``.

    Args:
        bits: width of a code, 2 to 8: a sign and a level index. (8 bits reach down to 2^-126, the smallest normal
            float; more would add levels that no gradient uses.)
        norm: ``"l2"`` or ``"max"``, computed per bucket and worker.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside the range of float32 turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: see `horovod_quant.schemes.QSGD`. With unequally spaced levels correlated rounding cancels
            less: 0.6 to 0.75 of the nmse remains where gradients differ.
        rounding: see `horovod_quant.schemes.QSGD`. With unequally spaced levels correlated rounding cancels
            less: 0.6 to 0.75 of the nmse remains where gradients differ.
        server_bits: width of the codes that the reducers of an alltoall send, 2 to 16: uniform levels of a bucket's
            largest magnitude. By default ``bits + 2`` where ``exchange="auto"`` is an alltoall. With
            ``exchange="alltoall"`` the default is the workers' exponential levels, whose nmse stays large with any
            number of bits.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range, or ``server_bits`` is given to an allgather.
    """
    def __init__(
        self,
        bits: int = 4,
        norm: Literal["l2", "max"] = "l2",
        bucket_size: int = 1024,
        coding: Literal["fixed", "elias", "elias-omega"] = "fixed",
        exchange: Literal["allgather", "alltoall", "auto"] = "auto",
        rounding: Literal["correlated", "independent"] = "correlated",
        server_bits: int | None = None,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
    ) -> None: ...

class GlobalQSGD(Compressor):
    """Global-QSGD with standard (uniform) or exponential dithering.

    With ``rotate`` (not in the paper) all workers apply the same rotation to their gradients, which makes every
    coordinate of the *sum* look Gaussian. They round to multiples of a step size for which the sum fits its field,
    according to an estimate of its norm, so the number of workers is not limited. A bucket of 1,024 elements whose sum
    does not fit, less than one in a million, is detected and resent exactly; ``stats()`` counts them.

    Args:
        bits: width of an integer on the wire. Uniform levels: 2 to 16, wide enough for the sum of all workers'
            integers. Exponential levels: 2 to 8, a sign and a level index. With ``rotate``: 4 to 8.
        norm: norm of a bucket over all workers: ``"max"`` (largest magnitude) or ``"l2"`` (square root of the sum of
            all squares; for the same width about sqrt(n) times more levels, on a larger scale).
        levels: ``"uniform"`` or ``"exponential"``.
        bucket_size: number of elements that share a norm, a multiple of 32, by default 1,024. A norm below 2^-96 counts
            as 0. An element or norm outside the range of float32 turns the bucket into NaN. With ``rotate`` it is
            16,384, of which each 1,024 are rotated together and have a separate norm.
        rounding: ``"correlated"`` or ``"independent"``, see `horovod_quant.schemes.QSGD`.
        rotate: whether to rotate and use the sum's scale. Needs uniform levels, allows no choice of ``norm``, and runs
            its kernels on the host.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        bits: int = 8,
        norm: Literal["max", "l2"] = "max",
        levels: Literal["uniform", "exponential"] = "uniform",
        bucket_size: int | None = None,
        rounding: Literal["correlated", "independent"] = "correlated",
        rotate: bool = False,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
    ) -> None: ...

class EDEN(Compressor):
    """EDEN: random rotation, ``2^bits`` Lloyd-Max levels, and a scale per 1,024 elements.

    1. Each worker rotates its buckets with separate random signs, rounds to the nearest level (Lloyd-Max for a
       Gaussian), and chooses the scale that makes the component along the bucket exact.
    2. An alltoall sends all workers' codes and scales of a shard to the rank that reduces the shard.
    3. The reducer decodes and averages them, and encodes the average with a different rotation: a worker's rotation
       would bias the result.
    4. An allgather distributes the reducers' codes and scales.

    With two workers there is an allgather after step 1 instead; each worker decodes and adds all workers' codes. The
    number of the step that selected the signs is sent with the codes, one word for each reducer's part of a
    gradient, so the workers' counts need not be equal.

    Rounding adds a constant fraction of the squared gradient, for any distribution: 0.57, 0.13, 0.036 or 0.0096
    for 1 to 4 bits. The noise spreads evenly over the bucket: a bucket of zeros stays zero, zeros among other elements
    do not.

    The mean over the rotations is not exactly the bucket. The largest bias found in a bucket of d elements, relative to
    its norm, is below 1.7, 1, 1 or 0.5 / sqrt(d) for 1 to 4 bits, where two to four elements of nearly equal magnitude,
    or one beside tiny ones, are most of the norm. d is 1,024, or the power of two from 32 on that a tensor's last
    bucket is padded to. A bucket of normally distributed elements has 0.3% with 1 bit and d = 32, and less otherwise.

    Args:
        bits: width of a code, 1 to 4; 3 unless ``nmse`` is given. A bucket whose largest magnitude is below 2^-96
            counts as 0. An element outside the range of float32 turns its bucket into NaN.
        server_bits: width of the reducers' codes. The nmse of the second rounding does not shrink with the number of
            workers. ``"auto"`` uses the fewest bits, at most 4, whose nmse is at most what remains of the workers' nmse
            after averaging: 4 with ``bits=3`` (``server_bits=3`` sends 14% less and has 1.6× the nmse); with ``bits=2``
            3 for up to 28 workers, then 4. An allgather has no second rounding.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an allgather for two workers, an alltoall for more.
        nmse: instead of ``bits``, the largest acceptable nmse of the average, for uncorrelated gradients; the bits and
            the reduction with the fewest bytes follow. At least 0.0096, with a trellis 0.0067; 2× with an alltoall.
        trellis: trellis-coded quantization (Marcellin and Fischer, 1990): 2× the levels for the same bits, and earlier
            codes select the half from which a code chooses. Rounding then adds 0.48, 0.10, 0.026 or 0.0067 of the
            squared gradient for 1 to 4 bits. Encoding takes 2.1× to 2.9× the time, with 4 bits 3.5× to 4×.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range, or ``nmse`` is combined with ``bits`` or ``server_bits``.
    """
    def __init__(
        self,
        bits: int | None = None,
        server_bits: int | str = "auto",
        exchange: Literal["allgather", "alltoall", "auto"] = "auto",
        nmse: float | None = None,
        trellis: bool = False,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
    ) -> None: ...

class BinSGDM(Compressor):
    """BinSGDM's 1-bit allreduce.

    1. Each worker updates its momentum and scale, and draws one bit per element.
    2. An alltoall sends all workers' bits of a shard to the rank that reduces the shard.
    3. The reducer averages the n bits of each element and draws one bit from the average.
    4. An allgather distributes the reducers' bits.

    A tile (1,024 elements) with a non-finite gradient on any worker decodes to NaN on all workers; one flag bit per
    tile travels with the signs.

    With ``server_bits`` above 1 (not in the paper) the reducers return the average itself, and the optimizer moves each
    element by it instead of by +1 or -1. One bit to the reducers and ``server_bits`` from them are
    ``(1 + server_bits) / 2`` times the default's bytes.

    Compressor for the Keras optimizers BinSGDM and LegacyBinSGDM.

    These are `horovod_quant.tensorflow.optim.BinSGDM`, `horovod_quant.tensorflow.optim.LegacyBinSGDM` and
    `horovod_quant.keras.optim.BinSGDM`. Momentum and scale are the optimizer's slot variables.

    Args:
        beta: None, or the optimizer's ``beta``, to check that they agree; the optimizer's value is used.
        server_bits: bits of an element that the reducers return, 1 to 8. 1: a bit drawn from the average, as in the
            paper. More: a sign, and a magnitude of one bit less. They represent the exact average of up to
            ``2^(server_bits - 1)`` workers, and of any even number of workers below ``2^server_bits``: 3 bits suffice
            for 4 workers. With more workers it is rounded at random, without bias.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"`` for kernels on the CPU, which the graph calls back;
            ``"tensorflow"`` for kernels of TensorFlow operations, which run on the gradient's device. ``"auto"``
            chooses these if TensorFlow sees a GPU. Where a shape is unknown when the graph is built, under elastic
            training, and for schemes that are ``host_only``, the CPU kernels are used anyway, with bit-identical
            results.
        named_parameters: (name, variable) pairs; by default the variables' names are used.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives, among those that Horovod groups (``groups=``).
        overlap: always True: TensorFlow starts collectives as soon as their gradients are ready.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.
        optimizer: the optimizer, for ``hvd.DistributedGradientTape``, which does not know it;
            ``hvd.DistributedOptimizer`` does.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        beta: float | None = None,
        *,
        server_bits: int = 1,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "tensorflow"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Literal["float32", "float16", 8] = "float32",
        group_bytes: int = 33554432,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
        optimizer: Any = None,
    ) -> None: ...
