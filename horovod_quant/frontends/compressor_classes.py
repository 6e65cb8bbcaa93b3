"""Compressor classes of schemes: ``hvq.QSGD(bits=4)`` is ``hvq.Compressor(schemes.QSGD(bits=4))``.

Signature and documentation come from the scheme's fields and from the constructors of the frontend's class, so that
nothing is written twice. scripts/write_stubs writes the stubs for type checkers from the same source.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from inspect import Parameter, Signature
from typing import Any

from horovod_quant.frontends import missing_names
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme, argument_names, renamed_arguments, type_hints


class Classes:
    """Compressor classes of a frontend, created on first use.

    Args:
        module: name of the classes' module.
        bases: the frontend's compressor classes: one for any optimizer, and those for specific ones.
        further: compressor classes without a scheme.
    """

    def __init__(self, module: str, bases: Sequence[Any], further: Sequence[type] = ()) -> None:
        self._module = module
        self._bases: dict[str | None, type] = {base.own_optimizer: base for base in bases}
        self._made: dict[type[Scheme], type] = {}
        for kind in (*bases, *further):
            _describe_constructor(kind)
        for kind in (self._bases[None], *further):
            kind.__doc__ = documentation(kind)

    def find(self, name: str) -> type:
        """Return a class by name, for a module's ``__getattr__``.

        Raises:
            AttributeError: no scheme has that name, or it needs an optimizer that this frontend does not have.
        """
        scheme_class = None if name.startswith("_") else registry.find(name)
        if scheme_class is None:
            raise AttributeError(missing_names.message(self._module, name, self.listed()))
        if scheme_class not in self._made:
            self._made[scheme_class] = self._make(scheme_class)
        return self._made[scheme_class]

    def own_names(self) -> list[str]:
        """Names of this package's schemes."""
        return [scheme_class.__name__ for scheme_class in registry.own()]

    def listed(self) -> list[str]:
        """Return the module's names and those of all schemes, for its ``__dir__``."""
        public = getattr(sys.modules.get(self._module), "__all__", ())
        return sorted({*public, *(scheme_class.__name__ for scheme_class in registry.registered())})

    def _make(self, scheme_class: type[Scheme]) -> type:
        name, wanted = scheme_class.__name__, scheme_class.own_optimizer
        if wanted not in self._bases:
            raise AttributeError(f"{name} needs the optimizer {wanted}, which {self._module} does not have")
        base = self._bases[wanted]
        signature = signature_of(base, scheme_class)
        fields = set(argument_names(scheme_class))

        def __init__(self: Any, *given: Any, **named: Any) -> None:
            arguments = _bound(signature, name, given, renamed_arguments(scheme_class, named))
            own = {argument: arguments.pop(argument) for argument in fields & set(arguments)}
            base.__init__(self, scheme_class(**own), **arguments)  # type: ignore[misc]

        _set_signature(__init__, signature)
        contents = {
            "__init__": __init__,
            "__doc__": documentation(base, scheme_class),
            "__module__": self._module,
        }
        return type(name, (base,), contents)


# ---- signatures ------------------------------------------------------------------------------------------------------


def signature_of(base: type, scheme_class: type[Scheme] | None = None) -> Signature:
    """Return a compressor's signature: the scheme's arguments, then keyword-only common ones.

    Args:
        base: `BaseCompressor` or a subclass; its ``not_taken`` names arguments of base classes that it does not take.
        scheme_class: None for the signature of ``base`` itself.
    """
    found: dict[str, Parameter] = {}
    constructors = [
        vars(kind)["__init__"] for kind in base.__mro__ if "__init__" in vars(kind) and kind is not object
    ]
    for constructor in reversed(constructors):
        hints = type_hints(constructor)
        written: Signature = getattr(constructor, "_written", None) or inspect.signature(constructor)
        for parameter in written.parameters.values():
            if parameter.name != "self" and parameter.kind is not Parameter.VAR_KEYWORD:
                found[parameter.name] = parameter.replace(
                    annotation=hints.get(parameter.name, parameter.annotation)
                )
    for name in getattr(base, "not_taken", ()):
        del found[name]
    own = [found.pop("scheme")] if "scheme" in found else []
    if scheme_class is not None:
        hints = type_hints(scheme_class)
        # Positional arguments of the base class stay positional.
        taken = any(parameter.kind is Parameter.POSITIONAL_OR_KEYWORD for parameter in found.values())
        own = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY
                if taken or getattr(field, "kw_only", False)
                else Parameter.POSITIONAL_OR_KEYWORD,
                default=_default(field),
                annotation=hints.get(field.name, field.type),
            )
            for field in dataclasses.fields(scheme_class)  # type: ignore[arg-type]
            if field.init
        ]
    parameters = sorted([*own, *found.values()], key=lambda each: each.kind)
    return Signature(parameters, return_annotation=None)


def _describe_constructor(base: type) -> None:
    """Make ``inspect.signature`` show the arguments of base classes, too."""
    constructor: Any = vars(base)["__init__"]
    whole, constructor._written = signature_of(base), inspect.signature(constructor)
    _set_signature(constructor, whole)


def _set_signature(constructor: Any, signature: Signature) -> None:
    own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    constructor.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is dataclasses.MISSING else field.default


def _bound(signature: Signature, name: str, given: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments by name; raise TypeError with the class's name."""
    refuse_unknown(name, [each for each in named if each not in signature.parameters], signature.parameters)
    try:
        return signature.bind(*given, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None


def refuse_unknown(name: str, unknown: Sequence[str], known: Iterable[str]) -> None:
    """Raise TypeError for arguments that a class does not have."""
    if not unknown:
        return
    usable = list(known)
    nearest = difflib.get_close_matches(unknown[0], usable, 1)
    remedy = f"did you mean {nearest[0]!r}?" if nearest else f"use {', '.join(usable)}"
    raise TypeError(f"{name}() has no argument {unknown[0]!r}; {remedy}")


# ---- documentation ---------------------------------------------------------------------------------------------------


def documentation(base: type, scheme_class: type[Scheme] | None = None) -> str:
    """Return a scheme's docstring with all arguments, or that of ``base``."""
    head, own, rest = _parts(scheme_class or base)
    above = [_parts(kind)[1] for kind in reversed(base.__mro__) if kind is not object]
    texts = {name: text for each in above for name, text in each.items()}
    texts.update(own)
    lines = []
    for name in signature_of(base, scheme_class).parameters:
        first, *more = texts.get(name, "see the scheme.").splitlines()
        lines += [f"    {name}: {first}", *(f"        {line}" for line in more)]
    if scheme_class is not None and scheme_class.own_optimizer is not None:
        head = f"{head.strip()}\n\n{_parts(base)[0].strip()}"
    return "\n".join([head.strip(), "", "Args:", *lines, *(["", rest.strip()] if rest.strip() else []), ""])


def _parts(kind: type) -> tuple[str, dict[str, str], str]:
    """Split a docstring into text before, each argument's, and text after."""
    text = inspect.cleandoc(vars(kind).get("__doc__") or kind.__name__)
    head, _, rest = text.partition("\nArgs:\n")
    listed, _, rest = re.sub(r"\n\n(?=\S)", "\0", rest, count=1).partition("\0")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in listed.splitlines():
        item = re.match(r"    ([*\w]+(?:, \w+)*): (.*)", line)
        if item:
            names = item[1].split(", ")
            found.update(dict.fromkeys(names, item[2]))
        else:
            found.update({name: f"{found[name]}\n{line.strip()}" for name in names})
    return head, found, rest
