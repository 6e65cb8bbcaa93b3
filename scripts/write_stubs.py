"""Write ``__init__.pyi`` of both frontends: see scripts/write-stubs.

Made from the schemes' fields and the constructors. A type checker runs no code, and so sees nothing of what
`horovod_quant.frontends.compressor_classes` makes. Schemes of other packages are not in the stubs:
``hvq.Compressor(TheirScheme(...))`` is what a type checker follows.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from horovod_quant.frontends.compressor_classes import signature_of
from horovod_quant.schemes import registry

ROOT = Path(__file__).resolve().parents[1]

FRONTENDS = ["horovod_quant.torch", "horovod_quant.tensorflow"]

DOORS = ["ddp", "fsdp"]
"""Modules for other libraries than Horovod, which a frontend may have."""

HEAD = '''"""Written by scripts/write-stubs: this module for type checkers and editors."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from horovod_quant.frontends.nodes import hierarchical_process_sets as hierarchical_process_sets
from horovod_quant.schemes.base import Scheme
{auto}from {module} import compressor as _compressor
{doors}from {module} import optim as optim
'''


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split("."), "__init__.pyi")


def stub(module: str) -> str:
    """Return the text of a frontend's stub, as ``ruff format`` leaves it."""
    frontend: Any = importlib.import_module(module)
    base = frontend.Compressor
    has_auto = "Auto" in frontend.__all__
    auto = f"from {module} import auto as _auto\n" if has_auto else ""
    doors = "".join(f"from {module} import {door} as {door}\n" for door in DOORS if door in frontend.__all__)
    parts = [HEAD.format(module=module, auto=auto, doors=doors), f"__all__ = {sorted(frontend.__all__)!r}\n"]
    if "MetricsCallback" in frontend.__all__:
        parts[0] += f"from {module}.metrics import MetricsCallback as MetricsCallback\n"
    parts.append(_class("Compressor", "_compressor.Compressor", base.__doc__, signature_of(base)))
    if has_auto:
        parts.append(_class("Auto", "_auto.Auto", frontend.Auto.__doc__, signature_of(frontend.Auto)))
    for scheme_class in registry.own():
        made = getattr(frontend, scheme_class.__name__)
        parts.append(_class(made.__name__, "Compressor", made.__doc__, inspect.signature(made)))
    return _formatted("\n".join(parts))


def _class(name: str, base: str, documentation: str, signature: Signature) -> str:
    own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    shown: list[str] = []
    for each in (own, *signature.parameters.values()):
        if each.kind is Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(_parameter(each))
    text = textwrap.indent(f'"""{inspect.cleandoc(documentation)}\n"""', "    ")
    return f"class {name}({base}):\n{text}\n    def __init__({', '.join(shown)}) -> None: ...\n"


def _parameter(parameter: Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return text if parameter.default is Parameter.empty else f"{text} = {parameter.default!r}"


def _annotation(annotation: Any) -> str:
    text = inspect.formatannotation(annotation)
    for prefix in ("typing.", "collections.abc.", "horovod_quant.schemes.base."):
        text = text.replace(prefix, "")
    return text


def _formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "stub.pyi", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def main() -> None:
    for module in FRONTENDS:
        path_of(module).write_text(stub(module))


if __name__ == "__main__":
    main()
