"""The names of methods, such as ``global-qsgd-8``, that commands, scripts and documents use.

A name is one of a scheme's short names (`presets` of `horovod_quant.schemes.base.Scheme`), followed by the number of
bits if the preset leaves the argument ``bits`` open: ``qsgd-4``. ``none`` and ``fp16`` are Horovod's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme, argument_names

NONE, FP16 = registry.HOROVODS_OWN
BINSGDM = "binsgdm"

MOST_BITS = 32
"""Numbers of bits to try, to find those that a scheme accepts: float32 has no more."""


class Method(NamedTuple):
    """A method: its name, the class of its scheme, and its arguments; Horovod's own methods have no class."""

    name: str
    scheme_class: type[Scheme] | None
    arguments: dict[str, Any]

    @property
    def class_name(self) -> str | None:
        """Name of the scheme's class, and of the frontends' class."""
        return None if self.scheme_class is None else self.scheme_class.__name__

    @property
    def family(self) -> str:
        """The name without the bits."""
        families = () if self.scheme_class is None else registry.families_of(self.scheme_class)
        return self.name.rpartition("-")[0] if families and self.name not in families else self.name

    @property
    def own_optimizer(self) -> str | None:
        """See `horovod_quant.schemes.base.Scheme`."""
        return None if self.scheme_class is None else self.scheme_class.own_optimizer

    def scheme(self) -> Scheme | None:
        """None for Horovod's own."""
        return None if self.scheme_class is None else self.scheme_class(**self.arguments)

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """The value for ``compression=``.

        Args:
            hvd: ``horovod.torch`` or ``horovod.tensorflow``.
            hvq: ``horovod_quant.torch`` or ``horovod_quant.tensorflow``.
            **options: further arguments of the compressor; Horovod's own accept none.
        """
        if self.class_name is None:
            return getattr(hvd.Compression, self.name)
        return getattr(hvq, self.class_name)(**{**self.arguments, **options})

    def code(self, **options: Any) -> str:
        """What to write after ``compression=`` in a script: ``hvq.QSGD(bits=4, norm='max')``, ``hvd.Compression.fp16``.

        Args:
            **options: further arguments of the compressor; Horovod's own accept none.
        """
        if self.class_name is None:
            return f"hvd.Compression.{self.name}"
        given = {**self.arguments, **options}
        return f"hvq.{self.class_name}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class Family(NamedTuple):
    """Methods that differ only in their bits; ``members`` is sorted by bits."""

    name: str
    members: tuple[Method, ...]


def every_family() -> list[Family]:
    """All methods: Horovod's own, and each short name with every number of bits that its scheme accepts.

    Methods that lack an argument are left out, as are those that another package's scheme refuses.
    """
    found = [Family(name, (Method(name, None, {}),)) for name in (NONE, FP16)]
    for family, kind, preset in _presets():
        names = (
            [f"{family}-{bits}" for bits in range(1, MOST_BITS + 1)] if _has_bits(kind, preset) else [family]
        )
        members = []
        for name in names:
            with suppress(ValueError):
                members.append(parse(name))
        if members:
            found.append(Family(family, tuple(members)))
    return found


def families() -> list[str]:
    """What `parse` accepts, for help texts and messages; ``BITS`` stands for a number."""
    found = (f"{name}-BITS" if _has_bits(kind, preset) else name for name, kind, preset in _presets())
    return [NONE, FP16, *found]


def compared() -> list[str]:
    """The names of the methods that are compared by default."""
    return [NONE, FP16, *(name for kind in registry.registered() for name in registry.compared_of(kind))]


def examples() -> dict[str, Scheme]:
    """A scheme for each short name, with defaults for what the name leaves open, where such a scheme can be made."""
    found = {}
    for name, kind, preset in _presets():
        if set(registry.required_arguments(kind)) <= set(preset):
            with suppress(ValueError):  # another package's, whose defaults do not suit its preset
                found[name] = kind(**preset)
    return found


def parse(name: str) -> Method:
    """The method with that name.

    Raises:
        ValueError: there is none; the message lists the valid names.
    """
    if name in (NONE, FP16):
        return Method(name, None, {})
    known = {family: (kind, preset) for family, kind, preset in _presets()}
    found = re.fullmatch(r"(.+)-([0-9]{1,9})", name)
    if name in known:
        family, bits = name, None
    elif found is not None and found[1] in known and _has_bits(*known[found[1]]):
        family, bits = found[1], int(found[2])
    else:
        *usable, last = families()
        raise ValueError(f"there is no method {name!r}; use {', '.join(usable)} or {last}")
    kind, preset = known[family]
    if _has_bits(kind, preset):
        if bits is None:
            raise ValueError(f"{name!r} lacks the number of bits; use {family}-4, for example")
        preset = {"bits": bits, **preset}
    lacking = [argument for argument in registry.required_arguments(kind) if argument not in preset]
    if lacking:
        raise ValueError(
            f"{name!r}: {kind.__name__} needs {', '.join(lacking)}, which its name does not specify; add "
            f"presets to {kind.__name__}, or defaults for these arguments"
        )
    # One name for each method: "qsgd-04" would be another.
    method = Method(family if bits is None else f"{family}-{bits}", kind, preset)
    try:
        method.scheme()
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return method


def _presets() -> Iterator[tuple[str, type[Scheme], dict[str, Any]]]:
    for kind in registry.registered():
        for family, preset in registry.families_of(kind).items():
            yield family, kind, preset


def _has_bits(kind: type[Scheme], preset: dict[str, Any]) -> bool:
    """Whether a method's name ends with the bits."""
    return "bits" in argument_names(kind) and "bits" not in preset
