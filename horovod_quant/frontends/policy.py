"""Choice of a scheme for each gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import Scheme, Workers, argument_names, renamed_arguments, require_int
from horovod_quant.schemes.hierarchical import inner_of

_REMEMBERED = 10_000
"""Maximum number of cached choices."""


class Policy:
    """Chooser of schemes by name and size, alike on all workers.

    Args:
        scheme: the scheme of all gradients without an override.
        min_elements: minimum elements of a gradient that is compressed.
        exclude: names or shell-style patterns (``"*.bias"``) of gradients that are not compressed; None for none.
        overrides: different arguments of the scheme for names or patterns: ``{"head.*": {"bits": 8}}``. The first
            match is used.

    Raises:
        ValueError: an argument is out of range, or an override names an argument that the scheme does not have.
    """

    def __init__(
        self,
        scheme: Scheme,
        min_elements: int = 1024,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        require_int("min_elements", min_elements, 0, 2**62)
        self.scheme = scheme
        self.min_elements = int(min_elements)
        self.exclude = _patterns(exclude)
        if overrides is not None and not isinstance(overrides, Mapping):
            raise ValueError(
                f"overrides={overrides!r}: use a mapping from names or patterns to arguments, such as "
                f"{{'head.*': {{'bits': 8}}}}"
            )
        self.overrides: list[tuple[str, Scheme]] = [
            (pattern, _replaced(scheme, pattern, arguments))
            for pattern, arguments in (overrides or {}).items()
        ]
        self._chosen: dict[tuple[str, int], Scheme | None] = {}

    is_off = False
    """True if nothing is compressed, whatever the arguments: see `horovod_quant.frontends.switch`."""

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes that may be chosen."""
        return [self.scheme, *(scheme for _, scheme in self.overrides)]

    def given_overrides(self) -> dict[str, dict[str, Any]]:
        """Overrides that differ from the scheme, as given by the user."""
        usual = inner_of(self.scheme)
        return {
            pattern: {
                argument: getattr(inner_of(scheme), argument)
                for argument in argument_names(usual)
                if getattr(inner_of(scheme), argument) != getattr(usual, argument)
            }
            for pattern, scheme in self.overrides
        }

    def scheme_for(self, name: str, elements: int) -> Scheme | None:
        """Return the scheme for a gradient; None to leave it to Horovod."""
        return None if self.is_off else self.scheme_unless_off(name, elements)

    def scheme_unless_off(self, name: str, elements: int) -> Scheme | None:
        """Return the scheme for a gradient, ignoring the switch."""
        if (name, elements) not in self._chosen:
            if len(self._chosen) >= _REMEMBERED:  # a script may make up a new name for each call
                self._chosen.clear()
            self._chosen[name, elements] = self._choose(name, elements)
        return self._chosen[name, elements]

    def _choose(self, name: str, elements: int) -> Scheme | None:
        if elements < max(self.min_elements, 1) or self.excludes(name):
            return None
        return next((scheme for pattern, scheme in self.overrides if fnmatchcase(name, pattern)), self.scheme)

    def excludes(self, name: str) -> bool:
        """True if ``exclude`` matches a name."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches no name: it may be misspelt."""
        known = list(names)
        patterns = [("exclude", pattern) for pattern in self.exclude]
        patterns += [("overrides", pattern) for pattern, _ in self.overrides]
        for argument, pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                shown = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
                raise ValueError(f"{argument}: {pattern!r} matches no parameter; the parameters are {shown}")

    def compresses_any(self, elements: Mapping[str, int]) -> bool:
        """True if any gradient is compressed; ``elements`` are their lengths, by name."""
        return any(self.scheme_for(name, count) is not None for name, count in elements.items())

    def check_workers(self, size: int, local_size: int = 1) -> None:
        """Raise ValueError if a scheme does not support these workers and nodes."""
        for scheme in self.schemes:
            scheme.for_workers(Workers(0, size, local_size=local_size)).check_workers(size)


def _patterns(exclude: Any) -> list[str]:
    """Return the patterns in the same order on all workers.

    A set has none.
    """
    if exclude is None or isinstance(exclude, str):
        return [] if exclude is None else [exclude]
    if isinstance(exclude, (bytes, Mapping)) or not isinstance(exclude, Iterable):
        raise ValueError(f"exclude={exclude!r}: use a name or pattern, a list of them, or None")
    patterns = list(exclude)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"exclude={exclude!r}: use names or patterns, not {pattern!r}")
    return sorted(patterns)


def _replaced(scheme: Scheme, pattern: Any, arguments: Any) -> Scheme:
    if not isinstance(pattern, str):
        raise ValueError(f"overrides: {pattern!r} is not a name or pattern; use strings such as 'head.*'")
    if isinstance(scheme, Hierarchical):
        return dataclasses.replace(scheme, inner=_replaced(scheme.inner, pattern, arguments))
    known = argument_names(scheme)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"overrides[{pattern!r}]={arguments!r}: use a mapping such as {{'bits': 8}}")
    arguments = renamed_arguments(type(scheme), arguments)
    for argument in arguments:
        if argument not in known:
            usable = ", ".join(known) or "no arguments (it has none)"
            raise ValueError(
                f"overrides[{pattern!r}]: {type(scheme).__name__} has no argument {argument!r}; use {usable}"
            )
    try:
        return scheme.replaced(**arguments)
    except ValueError as error:
        raise ValueError(f"overrides[{pattern!r}]: {error}") from None
