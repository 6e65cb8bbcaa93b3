"""Written by scripts/write-stubs: this module for type checkers and editors."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from horovod_quant.nodes import hierarchical_process_sets as hierarchical_process_sets
from horovod_quant.schemes.base import Scheme
from horovod_quant.torch import auto as _auto
from horovod_quant.torch import compressor as _compressor
from horovod_quant.torch import optim as optim

__all__ = [
    "Auto",
    "BinSGDM",
    "Compressor",
    "EDEN",
    "GlobalQSGD",
    "NUQSGD",
    "QSGD",
    "hierarchical_process_sets",
    "optim",
]

class Compressor(_compressor.Compressor):
    """A compressor for ``hvd.DistributedOptimizer``, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    Args:
        scheme: the scheme with its arguments, such as ``schemes.QSGD(bits=4)`` or one of your own; or a method's name,
            such as ``"qsgdinf-4"``.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range.
        ImportError: Horovod is missing, or was built without PyTorch.
    """
    def __init__(
        self,
        scheme: Scheme | str,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...

class Auto(_auto.Auto):
    """Takes the fastest method, as measured in the first steps of the training itself, or none if that is as fast.

    Horovod's own allreduce and up to six methods have three turns of a few steps each. Every step meanwhile is a
    correct exchange. Then all workers stay with the method whose steps were the shortest; of those within 2% of it, the
    one with the smallest error, which is none's. The same happens again when the number of workers has changed.

    `report` returns the measurements, and rank 0 writes them in a line to the log ``horovod_quant`` (its level is
    INFO). For the gradients of a ``DistributedOptimizer``; other calls need a method.

    Args:
        max_error: of the methods that are tried: ``||average - exact|| / ||exact||`` for gradients that have nothing in
            common. They are the registered, unbiased ones, each with the fewest bits that keep to it.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.
        methods: the names of those to try instead, such as ``["eden-3", "qsgdinf-4"]``; ``max_error`` does not count
            then.
        again_after: steps after which they are tried again, because a network may have changed; 0 for never.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        max_error: float = 0.3,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
        methods: Iterable[str] | None = None,
        again_after: int = 0,
    ) -> None: ...

class QSGD(Compressor):
    """QSGDinf (``norm="max"``) and the paper's QSGD (``norm="l2"``) with ``2^(bits-1) - 1`` uniform levels.

    Without arguments it is what docs/results.md recommends. The methods' names, such as ``qsgdinf-4``, are of buckets
    of 1,024 elements.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"max"`` or ``"l2"``, of each bucket of each worker. The l2 norm wants 8 bits: 4 leave it too few levels.
        bucket_size: elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0; an element or a norm
            that float32 does not hold makes NaN of the bucket.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an alltoall for more than `MOST_GATHERED` workers.
        rounding: of the workers' gradients. ``"joint"``: the workers' random numbers sum to a constant. Half of the
            sum's error is left where gradients differ (more where most elements are smaller than a step of the levels),
            and 1 / n of it where an even number n of gradients are equal. ``"independent"``: each worker draws for
            itself, as in the paper.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        bits: int = 4,
        norm: Literal["l2", "max"] = "max",
        bucket_size: int = 256,
        coding: Literal["fixed", "elias", "elias-omega"] = "fixed",
        exchange: Literal["allgather", "alltoall", "auto"] = "allgather",
        rounding: Literal["joint", "independent"] = "joint",
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...

class NUQSGD(Compressor):
    """NUQSGD: ``2^(bits-1) - 1`` non-zero exponential levels, so s = ``2^(bits-1) - 2``.

    Args:
        bits: width of a code, 2 to 8: a sign and a level index. (8 bits reach down to 2^-126, the smallest normal
            float; more would add levels that no gradient uses.)
        norm: ``"l2"`` or ``"max"``, of each bucket of each worker.
        bucket_size: elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0; an element or a norm
            that float32 does not hold makes NaN of the bucket.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: see `horovod_quant.schemes.QSGD`. Levels of unequal distances cancel less: 0.6 to 0.75
            of the error is left where gradients differ.
        rounding: see `horovod_quant.schemes.QSGD`. Levels of unequal distances cancel less: 0.6 to 0.75
            of the error is left where gradients differ.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        bits: int = 4,
        norm: Literal["l2", "max"] = "l2",
        bucket_size: int = 1024,
        coding: Literal["fixed", "elias", "elias-omega"] = "fixed",
        exchange: Literal["allgather", "alltoall", "auto"] = "allgather",
        rounding: Literal["joint", "independent"] = "joint",
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...

class GlobalQSGD(Compressor):
    """Global-QSGD with standard (uniform) or exponential dithering.

    With ``rotate`` (not in the paper) all workers rotate their gradients alike, which makes every coordinate of the
    *sum* look Gaussian, and round to multiples of a step with which the sum fits its field, by an estimate of its norm:
    any number of workers can take part. A bucket of 1,024 elements whose sum does not fit, less than one in a million,
    is noticed and exchanged again, exactly; ``stats()`` counts them.

    Args:
        bits: width of an integer on the wire. Uniform levels: 2 to 16, wide enough for the sum of all workers'
            integers. Exponential levels: 2 to 8, a sign and a level index. With ``rotate`` 4 to 8.
        norm: of a bucket over all workers: ``"max"`` (largest magnitude) or ``"l2"`` (square root of the sum of all
            squares; for the same width about sqrt(n) times more levels of a scale that is larger).
        levels: ``"uniform"`` or ``"exponential"``.
        bucket_size: elements that share a norm, a multiple of 32, by default 1,024. A norm below 2^-96 counts as 0; an
            element or a norm that float32 does not hold makes NaN of the bucket. With ``rotate`` it is 16,384, of which
            each 1,024 are rotated together and have a norm of their own.
        rounding: ``"joint"`` or ``"independent"``, see `horovod_quant.schemes.QSGD`.
        rotate: whether the scale is the sum's, after a rotation; with uniform levels, and without a choice of ``norm``.
            Its kernels run on the host.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range.
    """
    def __init__(
        self,
        bits: int = 8,
        norm: Literal["max", "l2"] = "max",
        levels: Literal["uniform", "exponential"] = "uniform",
        bucket_size: int | None = None,
        rounding: Literal["joint", "independent"] = "joint",
        rotate: bool = False,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...

class EDEN(Compressor):
    """EDEN: a random rotation, ``2^bits`` Lloyd-Max levels for a Gaussian, and one scale a bucket of 1,024 elements.

    1. each worker rotates its buckets by signs of its own, rounds to the nearest level, and finds the scale that makes
       the result right on average over the rotations;
    2. an alltoall brings everybody's codes and scales of a chunk to the worker that serves it;
    3. the server decodes and averages them, and encodes the average with another rotation: with one of the workers' it
       would be wrong on average;
    4. an allgather brings the servers' codes and scales to everybody.

    With an allgather instead, for two workers, everybody decodes and adds all workers' codes after step 1.

    With the codes goes the number of the step that selected the signs, one word for each server's part of a gradient:
    the workers' counts need not be the same.

    A rounding adds a constant share of the squared gradient, whatever its distribution: 0.57, 0.13, 0.036 or 0.0096 for
    1 to 4 bits. It is spread evenly over the bucket: a bucket of zeros stays one, zeros among other elements do not.

    Args:
        bits: width of a code, 1 to 4; 3 unless ``error`` is given. A bucket whose largest magnitude is below 2^-96
            counts as 0; an element that float32 does not hold makes NaN of its bucket.
        server_bits: width of the servers' codes. The second rounding's error does not shrink with the workers, so
            ``"auto"`` takes the fewest, no fewer than ``bits``, with which it is at most twice what is left of the
            workers' own: ``bits`` for up to 11 workers, one more from 12 on, two more from about 70 on, and 4 at most.
            An allgather has no second rounding.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an allgather for two workers, an alltoall for more.
        error: instead of ``bits``, the largest squared error of the average, relative to its own square, that
            gradients without anything in common may have: the exchange with the fewest bytes that keeps to it is
            taken, given the number of workers. 0.0193 and more can be had by an alltoall, 0.0096 by an allgather.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range, or ``error`` is given beside ``bits`` or ``server_bits``.
    """
    def __init__(
        self,
        bits: int | None = None,
        server_bits: int | str = "auto",
        exchange: Literal["allgather", "alltoall", "auto"] = "auto",
        error: float | None = None,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...

class BinSGDM(Compressor):
    """BinSGDM's 1-bit allreduce.

    1. every worker updates its momentum and scale and draws a bit an element;
    2. an alltoall brings the bits of a chunk to the worker that serves it;
    3. the server averages the n bits and draws one from the average;
    4. an allgather brings the servers' bits to everybody.

    A tile (1,024 elements) with a non-finite gradient on any worker decodes to NaN on all; one flag bit a tile
    travels with the signs.

    For the optimizer `horovod_quant.torch.optim.BinSGDM`, whose state are momentum and scale.

    Args:
        beta: None, or the optimizer's ``beta``, which counts, once more, to have it checked.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged; None for none.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding and schemes that are ``host_only``.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        hierarchical: whether workers of the same host first average among themselves, in full precision, so that only
            hosts exchange quantized gradients. A number instead of True: that many consecutive ranks are a node,
            whatever hosts they are on. It is for all workers, not for a process set, and not for elastic training.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.
    """
    def __init__(
        self,
        beta: float | None = None,
        *,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: Literal["auto", "native", "numpy", "triton"] = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        group_bytes: int = 33554432,
        overlap: bool = True,
    ) -> None: ...
