"""What ``Auto`` says here: it is PyTorch's alone."""

from __future__ import annotations

from typing import Any


class Auto:
    """`horovod_quant.torch.Auto` has no counterpart here.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        raise NotImplementedError(
            "Auto tries methods while training, and TensorFlow fixes the method when it traces the graph; measure them "
            "before, with `horovodrun ... horovod-quant bench --framework tensorflow`, or predict them, with "
            "`horovod-quant advise`, and use what these recommend"
        )

    compress = decompress = __init__
