"""Placeholder for ``Auto``, which exists only for PyTorch."""

from __future__ import annotations

from typing import Any


class Auto:
    """Placeholder that raises an error: `horovod_quant.torch.Auto` has no counterpart here.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        raise NotImplementedError(
            "Auto tries methods during training, but TensorFlow fixes the method when it traces the graph; measure "
            "them beforehand with `horovodrun ... horovod-quant bench --framework tensorflow`, or predict them with "
            "`horovod-quant advise`, and use the method that it recommends"
        )

    compress = decompress = __init__
