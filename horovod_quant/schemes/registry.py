"""Known schemes of this package, the program, and installed packages.

All lists of schemes (method names, the frontends' classes, ``bench``, ``advise``, ``doctor``, the shared tests) come
from here. Another package announces its schemes by entry points, in its ``setup.cfg``::

    [options.entry_points]
    horovod_quant.schemes =
        terngrad = its_module:TernGrad
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterable
from importlib import metadata
from typing import Any, TypeVar

from horovod_quant.kernels import notices
from horovod_quant.reductions.agreement import COMMON
from horovod_quant.schemes.base import Scheme, argument_names

GROUP = "horovod_quant.schemes"
"""Group of entry points."""

HOROVODS_OWN = ("none", "fp16")
"""Names of Horovod's methods."""

_OF_COMPRESSORS = {*COMMON, "scheme", "kernels", "named_parameters", "process_set"}

Kind = TypeVar("Kind", bound=type[Scheme])

_registered: dict[str, type[Scheme]] = {}
_problems: list[str] = []
_lock = threading.RLock()
_searched = False


def register(scheme_class: Kind) -> Kind:
    """Register a scheme, as ``hvq.<Name>`` and by name in the commands.

    Usable as a decorator.

    A class with the same module and name replaces the earlier one, as when a notebook cell is run again.

    Args:
        scheme_class: a frozen dataclass, see `horovod_quant.schemes.base.Scheme`.

    Returns:
        The class.

    Raises:
        TypeError: it is not such a class.
        ValueError: a declaration is invalid, or another scheme has its name or one of its short names.
    """
    check(scheme_class)
    with _lock:
        name = scheme_class.__name__
        before = _registered.get(name)
        if before is not None and (before.__module__, before.__qualname__) != (
            scheme_class.__module__,
            scheme_class.__qualname__,
        ):
            raise ValueError(f"{name}: {before.__module__} already has a scheme of that name; rename one")
        for other in _registered.values():
            taken = set(families_of(other)) & set(families_of(scheme_class)) if other is not before else set()
            if taken:
                names = ", ".join(map(repr, sorted(taken)))
                raise ValueError(f"{name}.presets: {other.__name__} already has {names}; use other names")
        _registered[name] = scheme_class
    return scheme_class


def check(scheme_class: Any) -> None:
    """Raise the errors of `register` for an invalid class, regardless of others."""
    if not isinstance(scheme_class, type) or not issubclass(scheme_class, Scheme):
        shown = scheme_class.__name__ if isinstance(scheme_class, type) else repr(scheme_class)
        raise TypeError(f"{shown}: register a class derived from horovod_quant.schemes.base.Scheme")
    name = scheme_class.__name__
    if not getattr(getattr(scheme_class, "__dataclass_params__", None), "frozen", False):
        raise TypeError(f"{name}: put @dataclass(frozen=True) before the class")
    for needed in () if _overrides(scheme_class, "reduction") else ("collectives", "begin"):
        if not _overrides(scheme_class, needed):
            raise TypeError(
                f"{name}.{needed}: define it, or reduction; see horovod_quant.schemes.base.Scheme"
            )
    if name in ("Auto", "Compressor"):
        raise ValueError(f"{name}: the frontends already have a class of that name; rename it")
    names = argument_names(scheme_class)
    for argument in names:
        if argument in _OF_COMPRESSORS:
            raise ValueError(
                f"{name}.{argument}: compressors already have an argument of that name; rename the field"
            )
    for declared in Scheme.__annotations__:
        if declared in names:
            raise TypeError(f"{name}.{declared}: declare it without a type; with one it is an argument")
    given = [("variants", variant) for variant in vars(scheme_class).get("variants", ())]
    for family, preset in families_of(scheme_class).items():
        given.append((f"presets[{family!r}]", preset))
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", family) or family in HOROVODS_OWN:
            raise ValueError(
                f"{name}.presets: {family!r} is not a name; use small letters, digits and hyphens"
            )
    for where, arguments in given:
        for argument in arguments:
            if argument not in names:
                usable = ", ".join(names) or "no arguments (it has none)"
                raise ValueError(f"{name}.{where}: no argument {argument!r}; use {usable}")
    for method in compared_of(scheme_class):
        if not any(re.fullmatch(f"{family}(-.+)?", method) for family in families_of(scheme_class)):
            raise ValueError(
                f"{name}.compared: {method!r} is not one of its methods; its short names are in presets"
            )


def _overrides(scheme_class: type[Scheme], name: str) -> bool:
    return getattr(scheme_class, name) is not getattr(Scheme, name)


def families_of(scheme_class: type[Scheme]) -> dict[str, dict[str, Any]]:
    """Return the short names with their arguments.

    By default the lower-case class name.

    Inherited presets do not count: they are another scheme's names.
    """
    presets = vars(scheme_class).get("presets") or {scheme_class.__name__.lower(): {}}
    return {family: dict(preset) for family, preset in presets.items()}


def compared_of(scheme_class: type[Scheme]) -> list[str]:
    """Return the full names of the methods that are compared by default."""
    return list(vars(scheme_class).get("compared", ()))


def registered() -> list[type[Scheme]]:
    """Return the schemes in the order of registration, installed packages' last."""
    _search()
    with _lock:
        return list(_registered.values())


def find(name: str) -> type[Scheme] | None:
    """Return the scheme class with a name, or None."""
    if name not in _registered:
        _search()
    return _registered.get(name)


def own() -> list[type[Scheme]]:
    """Return this package's schemes."""
    return [kind for kind in _registered.values() if is_own(kind)]


def is_own(scheme_class: type[Scheme]) -> bool:
    """True if the scheme is one of this package."""
    return scheme_class.__module__.partition(".")[0] == __name__.partition(".")[0]


def problems() -> list[str]:
    """Return messages about installed packages' schemes that could not be registered."""
    _search()
    return list(_problems)


def _search() -> None:
    """Register the schemes of installed packages, once."""
    global _searched
    with _lock:
        if _searched:
            return
        _searched = True
        for entry in _entry_points():
            try:
                register(entry.load())
            except Exception as error:  # any error of another package leaves the other schemes usable
                _problems.append(
                    f"the entry point {entry.name} = {entry.value} of {GROUP} cannot be used: "
                    f"{type(error).__name__}: {error}"
                )
                notices.warn(_problems[-1], stacklevel=4)


def _entry_points() -> Iterable[metadata.EntryPoint]:
    found: Any = metadata.entry_points()
    return found.select(group=GROUP) if hasattr(found, "select") else dict.fromkeys(found.get(GROUP, ()))


def required_arguments(scheme_class: type[Scheme]) -> list[str]:
    """Return the names of the arguments without a default."""
    return [
        field.name
        for field in dataclasses.fields(scheme_class)  # type: ignore[arg-type]
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]
