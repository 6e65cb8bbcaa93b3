"""What is compared: a method with its settings."""

from __future__ import annotations

from typing import Any, NamedTuple

from horovod_quant.frontends.methods import FP16, NONE, Method
from horovod_quant.transports.traffic import ring_allreduce_bytes

ELEMENT_BYTES = {NONE: 4, FP16: 2}


class Variant(NamedTuple):
    """A method of Horovod's or of this package, with further arguments of its compressor.

    Attributes:
        label: for people, and for the names of Horovod's operations; different for each variant.
        method: None for a backward pass without any exchange.
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
        """Name in ``hvq.optim`` of the optimizer that the method belongs to."""
        return None if self.method is None else self.method.own_optimizer

    @property
    def averages(self) -> bool:
        """Whether the result means to be the average; an optimizer's update has no error in this sense."""
        return self.method is not None and self.own_optimizer is None

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """What goes into ``compression=``; this package's compressors with further arguments."""
        assert self.method is not None
        if not self.ours:
            return self.method.compression(hvd, hvq)
        return self.method.compression(hvd, hvq, group_bytes=self.group_bytes, seed=self.seed, **options)

    def plain_bytes(self, elements: int, size: int) -> float:
        """What a worker sends in one exchange without this package."""
        if self.method is None:
            return 0.0
        return ring_allreduce_bytes(ELEMENT_BYTES[self.method.name] * elements, size)

    def refusal(self, size: int) -> str | None:
        """Return why the method cannot serve this number of workers."""
        scheme = None if self.method is None else self.method.scheme()
        try:
            if scheme is not None:
                scheme.check_workers(size)
        except ValueError as error:
            return str(error)
        return None


class Options(NamedTuple):
    """How the gradients are exchanged, with every method.

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
