"""The names of methods, as in ``global-qsgd-8``, that commands, scripts and documents use.

A name is a family and, for all but ``none``, ``fp16`` and ``binsgdm``, the bits: ``qsgd-4``. ``none`` and ``fp16`` are
Horovod's own.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from horovod_quant import schemes
from horovod_quant.schemes.base import Scheme

NONE, FP16, BINSGDM = "none", "fp16", "binsgdm"

_QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgd": ("QSGD", {"norm": "l2"}),
    "qsgdinf": ("QSGD", {"norm": "max"}),
    "nuqsgd": ("NUQSGD", {"norm": "l2"}),
    "qsgd-alltoall": ("QSGD", {"norm": "l2", "exchange": "alltoall"}),
    "qsgdinf-alltoall": ("QSGD", {"norm": "max", "exchange": "alltoall"}),
    "nuqsgd-alltoall": ("NUQSGD", {"norm": "l2", "exchange": "alltoall"}),
    "global-qsgd": ("GlobalQSGD", {"norm": "max"}),
    "global-qsgd-l2": ("GlobalQSGD", {"norm": "l2"}),
    "global-qsgd-exp": ("GlobalQSGD", {"norm": "max", "levels": "exponential"}),
}

FAMILIES = [NONE, FP16, *(f"{family}-BITS" for family in _QUANTIZED), BINSGDM]
"""What `parse` takes, for help texts and messages."""

METHODS = [NONE, FP16, "qsgdinf-4", "nuqsgd-4", "global-qsgd-8", "global-qsgd-4", BINSGDM]
"""Those that are compared where nobody has chosen."""


class Method(NamedTuple):
    """A method: the name, the class of the schemes and frontends, and its arguments; Horovod's own have no class."""

    name: str
    class_name: str | None
    arguments: dict[str, Any]

    def scheme(self) -> Scheme | None:
        """None for Horovod's own."""
        if self.class_name is None:
            return None
        scheme: Scheme = getattr(schemes, self.class_name)(**self.arguments)
        return scheme

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """What goes into ``compression=``.

        Args:
            hvd: ``horovod.torch`` or ``horovod.tensorflow``.
            hvq: ``horovod_quant.torch`` or ``horovod_quant.tensorflow``.
            **options: further arguments of the compressor; Horovod's own take none.
        """
        if self.class_name is None:
            return getattr(hvd.Compression, self.name)
        return getattr(hvq, self.class_name)(**self.arguments, **options)


def parse(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    if name in (NONE, FP16):
        return Method(name, None, {})
    if name == BINSGDM:
        return Method(name, "BinSGDM", {})
    found = re.fullmatch(r"([a-z0-9-]*[a-z][a-z0-9]*)(?:-([0-9]{1,9}))?", name)
    if found is None or found[1] not in _QUANTIZED:
        raise ValueError(f"there is no method {name!r}; use {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}")
    family, bits = found[1], found[2]
    if bits is None:
        raise ValueError(f"{name!r} lacks the number of bits; use {family}-4, for example")
    class_name, arguments = _QUANTIZED[family]
    method = Method(name, class_name, {"bits": int(bits), **arguments})
    try:
        method.scheme()
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    # One name for each method: "qsgd-04" would be another.
    return method._replace(name=f"{family}-{int(bits)}")
