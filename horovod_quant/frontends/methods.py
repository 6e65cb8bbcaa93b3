"""Names of methods, such as ``global-qsgd-8``, in commands, scripts and documents.

A name has the scheme and its arguments: one of the scheme's short names (`presets` of
`horovod_quant.schemes.base.Scheme`), the number of bits if the preset leaves the argument ``bits`` open, and the
differences from the defaults: ``qsgd-4`` is ``QSGD(bits=4)``, ``qsgd-4-l2-bucket1024`` is ``QSGD(bits=4, norm="l2",
bucket_size=1024)``. ``none`` and ``fp16`` are Horovod's.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from horovod_quant.frontends import former_names
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme, argument_names, type_hints

NONE, FP16 = registry.HOROVODS_OWN
BINSGDM = "binsgdm"

MOST_BITS = 32
"""Numbers of bits to try with a scheme: float32 has no more."""


class Method(NamedTuple):
    """Method with its name, scheme class and arguments.

    Horovod's methods have no class.
    """

    name: str
    scheme_class: type[Scheme] | None
    arguments: dict[str, Any]

    @property
    def class_name(self) -> str | None:
        """Name of the scheme's and the frontends' class."""
        return None if self.scheme_class is None else self.scheme_class.__name__

    @property
    def family(self) -> str:
        """Name without the bits."""
        for name, kind, preset in _presets():
            if kind is self.scheme_class and _has_bits(kind, preset):
                bits, rest = f"{name}-{self.arguments.get('bits')}", self.name
                if rest == bits or rest.startswith(f"{bits}-"):
                    return name + rest[len(bits) :]
        return self.name

    @property
    def own_optimizer(self) -> str | None:
        """Required optimizer, see `horovod_quant.schemes.base.Scheme`."""
        return None if self.scheme_class is None else self.scheme_class.own_optimizer

    def scheme(self) -> Scheme | None:
        """Return the scheme; None for Horovod's methods."""
        return None if self.scheme_class is None else self.scheme_class(**self.arguments)

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """Return the value for ``compression=``.

        Args:
            hvd: ``horovod.torch`` or ``horovod.tensorflow``.
            hvq: ``horovod_quant.torch`` or ``horovod_quant.tensorflow``.
            **options: further arguments of the compressor; ignored for Horovod's own.
        """
        if self.class_name is None:
            return getattr(hvd.Compression, self.name)
        return getattr(hvq, self.class_name)(**{**self.arguments, **options})

    def code(self, **options: Any) -> str:
        """Return the code after ``compression=``: ``hvq.QSGD(bits=4, norm='l2')``, ``hvd.Compression.fp16``.

        Args:
            **options: further arguments of the compressor; ignored for Horovod's own.
        """
        if self.class_name is None:
            return f"hvd.Compression.{self.name}"
        given = {**self.arguments, **options}
        return f"hvq.{self.class_name}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def every_family() -> list[tuple[Method, ...]]:
    """Return the methods that commands consider, with all possible bits.

    Those that differ only in their bits are together, sorted by bits. They are Horovod's, and those of each short name
    and variant. Methods that lack an argument are left out, as are those that another package's scheme refuses.
    """
    found: list[tuple[Method, ...]] = [(Method(name, None, {}),) for name in (NONE, FP16)]
    for short, kind, preset, variant in _variants():
        members = []
        for bits in range(1, MOST_BITS + 1) if _has_bits(kind, preset) else (None,):
            with suppress(ValueError):
                members.append(_method(short, kind, preset, bits, variant))
        if members:
            found.append(tuple(members))
    return found


def families(for_compressor: bool = False) -> list[str]:
    """Return method names for help texts, with ``BITS`` for a number.

    Args:
        for_compressor: see `parse`.
    """
    found = [] if for_compressor else [NONE, FP16]
    for name, kind, preset, variant in _variants():
        if not for_compressor or kind.own_optimizer is None:
            bits = ["BITS"] if _has_bits(kind, preset) else []
            found.append("-".join([name, *bits, *_spelled(kind, variant)]))
    return found


def compared() -> list[str]:
    """Return the names of the methods that are compared by default."""
    return [NONE, FP16, *(name for kind in registry.registered() for name in registry.compared_of(kind))]


def examples() -> dict[str, Scheme]:
    """Return a scheme with defaults for each short name, where possible."""
    found = {}
    for name, kind, preset, variant in _variants():
        if set(registry.required_arguments(kind)) <= {*preset, *variant}:
            with suppress(ValueError):  # another package's, whose defaults do not suit its preset
                found["-".join([name, *_spelled(kind, variant)])] = kind(**{**preset, **variant})
    return found


def parse(
    name: str, *, version: int | None = None, workers: int | None = None, for_compressor: bool = False
) -> Method:
    """Return the method with a name.

    A name of version 0.1.0 issues a FutureWarning.

    Args:
        name: a name of `families`, or one with other arguments spelled out.
        version: version of the names in a file, see `former_names.VERSION`; None for a user's name. A file's name has
            the meaning of that version, and no warning is issued.
        workers: number of workers of the file, if known.
        for_compressor: True to suggest only what ``hvq.Compressor`` accepts: neither a method of Horovod nor one that
            belongs to an optimizer.

    Raises:
        ValueError: there is no such method; the message suggests valid names.
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no method's name; use a text such as 'qsgd-4'")
    if name in (NONE, FP16):
        return Method(name, None, {})
    method = _find(former_names.present(name, version, workers) or name)
    if method is None:
        raise ValueError(f"there is no method {name!r}; {_nearest(name, for_compressor)}")
    return method


# ---- reading a name --------------------------------------------------------------------------------------------------


def _find(name: str) -> Method | None:
    """Return the method or None; raise ValueError for impossible arguments."""
    # The longest short name first: another package's may begin with one of ours.
    for short, kind, preset in sorted(_presets(), key=lambda each: -len(each[0])):
        if name != short and not name.startswith(f"{short}-"):
            continue
        rest, bits = name[len(short) :], None
        if _has_bits(kind, preset):
            found = re.match(r"-([0-9]{1,9})(?=-|$)", rest)
            if found is None:
                if not rest:
                    usual = _default_bits(kind)
                    raise ValueError(f"{name!r} lacks the number of bits; use {short}-{usual}, for example")
                continue
            bits, rest = int(found[1]), rest[found.end() :]
        spelled = _read(kind, rest)
        if spelled is None:
            continue
        try:
            return _method(short, kind, preset, bits, spelled)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return None


def _method(
    short: str, kind: type[Scheme], preset: Mapping[str, Any], bits: int | None, spelled: Mapping[str, Any]
) -> Method:
    """Make a method.

    Raise ValueError for arguments that the scheme refuses or lacks.
    """
    usual = _defaults(kind)
    differing = {
        name: value for name, value in spelled.items() if name in preset or value != usual.get(name, value)
    }
    given = {**({} if bits is None else {"bits": bits}), **preset, **differing}
    lacking = [argument for argument in registry.required_arguments(kind) if argument not in given]
    if lacking:
        raise ValueError(
            f"{kind.__name__} needs {', '.join(lacking)}, which its name does not specify; add presets to "
            f"{kind.__name__}, or defaults for these arguments"
        )
    numbers = [] if bits is None else [str(bits)]
    method = Method("-".join([short, *numbers, *_spelled(kind, differing)]), kind, given)
    method.scheme()
    return method


def _spelled(kind: type[Scheme], arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of a name for arguments other than defaults."""
    usual = _defaults(kind)
    found = []
    for field in _fields(kind):
        value = arguments.get(field, usual[field])
        if value == usual[field] or value is None:
            continue
        if value is True:
            found.append(field.replace("_", "-"))
        elif isinstance(value, str):
            found.append(value)
        else:
            found.append(f"{_stem(field)}{value}")
    return found


def _read(kind: type[Scheme], text: str) -> dict[str, Any] | None:
    """Return the arguments that a name's suffix spells out.

    They are None if it is invalid.
    """
    if not text:
        return {}
    for field, choices in _fields(kind).items():
        for choice in choices:
            word = field.replace("_", "-") if choice is True else choice
            if text == f"-{word}" or text.startswith(f"-{word}-"):
                further = _read(kind, text[len(word) + 1 :])
                if further is not None:
                    return None if field in further else {field: choice, **further}
        number = re.match(rf"-{_stem(field)}([0-9]{{1,9}})(?=-|$)", text)
        if number is not None and not choices:
            further = _read(kind, text[number.end() :])
            if further is not None:
                return None if field in further else {field: int(number[1]), **further}
    return None


def _fields(kind: type[Scheme]) -> dict[str, tuple[Any, ...]]:
    """Return arguments that names can spell out, with choices; none for numbers."""
    hints = type_hints(kind)
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints.get(field.name)
        if not field.init or field.name == "bits" or field.default is dataclasses.MISSING:
            continue
        if hint is bool:
            found[field.name] = (True,)
        elif typing.get_origin(hint) is typing.Literal and all(
            isinstance(each, str) for each in typing.get_args(hint)
        ):
            # "elias" begins "elias-omega"
            found[field.name] = tuple(sorted(typing.get_args(hint), key=len, reverse=True))
        elif hint is int or int in typing.get_args(hint):
            found[field.name] = ()
    return found


def _stem(field: str) -> str:
    """Return ``bucket`` for ``bucket_size``, ``server`` for ``server_bits``."""
    return re.sub("_(size|bits)$", "", field).replace("_", "-")


def _defaults(kind: type[Scheme]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]


def _nearest(name: str, for_compressor: bool) -> str:
    """Return a remedy: a class's methods, a similar name, or all names."""
    known = families()
    kind = registry.find(name)
    shorts = {short: found for short, found, _ in _presets()}
    near = [each for each in known if kind is not None and shorts.get(each.partition("-BITS")[0]) is kind][:1]
    if not near:
        plain = {each.replace("-BITS", ""): each for each in known}
        written = re.sub(r"-?[0-9]{1,9}(?=-|$)", "", name.lower(), count=1)[:100]
        near = [plain[each] for each in difflib.get_close_matches(written, plain, 1)]
    for each in near:
        usual = _default_bits(shorts.get(each.partition("-BITS")[0]))
        for bits in (*re.findall(r"(?<![0-9])[0-9]{1,2}(?=-|$)", name), usual):
            with suppress(ValueError):
                found = _find(each.replace("BITS", str(bits)))
                if found is None:
                    continue
                if not for_compressor or (found.scheme_class is not None and found.own_optimizer is None):
                    return f"did you mean {found.name!r}?"
                if found.own_optimizer is not None:
                    return (
                        f"did you mean compression=hvq.{found.class_name}(), for the optimizer "
                        f"hvq.optim.{found.own_optimizer}?"
                    )
    *others, last = families(for_compressor)
    return f"use {', '.join(others)} or {last}"


def _default_bits(kind: type[Scheme] | None) -> int:
    with suppress(TypeError, ValueError):  # another package's, which needs arguments
        if kind is not None and isinstance(getattr(kind(), "bits", None), int):
            return int(getattr(kind(), "bits"))  # noqa: B009
    return 4


def _presets() -> Iterator[tuple[str, type[Scheme], dict[str, Any]]]:
    for kind in registry.registered():
        for family, preset in registry.families_of(kind).items():
            yield family, kind, preset


def _variants() -> Iterator[tuple[str, type[Scheme], dict[str, Any], Mapping[str, Any]]]:
    """Yield each preset without further arguments, then with those of each variant."""
    for family, kind, preset in _presets():
        for variant in ({}, *vars(kind).get("variants", ())):
            yield family, kind, preset, variant


def _has_bits(kind: type[Scheme], preset: Mapping[str, Any]) -> bool:
    """True if a method's name has the bits."""
    return "bits" in argument_names(kind) and "bits" not in preset
