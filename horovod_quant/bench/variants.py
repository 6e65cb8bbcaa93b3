"""Variants that a benchmark compares: methods with settings."""

from __future__ import annotations

from typing import Any, NamedTuple

from horovod_quant.analysis.calibration import NOT_MODELLED
from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.analysis.network import DDP as DDP
from horovod_quant.frontends.methods import FP16, NONE, Method
from horovod_quant.transports.traffic import ring_allreduce_bytes

ELEMENT_BYTES = {NONE: 4, FP16: 2, "bf16": 2}
"""Bytes of an element that Horovod or DDP reduces itself."""

DDPS_OWN = (NONE, FP16, *NOT_MODELLED)
"""Hooks of PyTorch; none is DDP without a hook."""


class Variant(NamedTuple):
    """A method with further arguments of its compressor.

    Attributes:
        label: unique name, shown and used in the names of Horovod's operations.
        method: None for a backward pass without communication, and for a hook of PyTorch that Horovod does not have.
        group_bytes, seed: see `horovod_quant.frontends.frontend.BaseCompressor`.
    """

    label: str
    method: Method | None
    group_bytes: int
    seed: int = 0

    @property
    def ours(self) -> bool:
        return self.method is not None and self.method.scheme_class is not None

    @property
    def own_optimizer(self) -> str | None:
        """Name in ``hvq.optim`` of the optimizer that the method needs."""
        return None if self.method is None else self.method.own_optimizer

    @property
    def averages(self) -> bool:
        """True if the result approximates the average.

        An optimizer's update does not.
        """
        return self.method is not None and self.own_optimizer is None

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """Return the value of ``compression=``; this package's compressors get the options."""
        assert self.method is not None
        return self.method.compression(hvd, hvq, group_bytes=self.group_bytes, seed=self.seed, **options)

    def bytes_sent(self, compression: Any, runs: int, shapes: Shapes, size: int) -> float:
        """Return the counted bytes that a worker has sent in all runs."""
        if self.ours:
            return compression.stats().total.bytes_sent
        name = self.label if self.method is None else self.method.name
        return runs * ring_allreduce_bytes(ELEMENT_BYTES.get(name, 0) * elements(shapes), size)

    def refusal(self, size: int) -> str | None:
        """Return why the number of workers is not supported, or None."""
        scheme = None if self.method is None else self.method.scheme()
        try:
            if scheme is not None:
                scheme.check_workers(size)
        except ValueError as error:
            return str(error)
        return None


class Options(NamedTuple):
    """Settings of the communication with every method.

    Attributes:
        backward: seconds that the backward pass sleeps; PyTorch.
        overlap: see `horovod_quant.torch.Compressor`.
        groups: groups in which Horovod reduces the gradients; TensorFlow.
        device: ``"cpu"``, or ``"cuda"`` where the gradients are on a GPU; PyTorch.
    """

    backward: float = 0.0
    overlap: bool = True
    groups: int | None = None
    device: str = "cpu"
