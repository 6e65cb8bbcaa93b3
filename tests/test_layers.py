"""Layers point one way: kernels <- codecs <- reductions <- schemes <- transports <- everything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod_quant

PACKAGE = Path(horovod_quant.__file__).parent

LAYERS = ("kernels", "codecs", "reductions", "schemes", "transports")
"""Each imports those before it."""

FRAMEWORKS = ("torch", "tensorflow", "keras")
COMMANDS = ("cli", "bench")
READ_ANALYSIS = (*COMMANDS, "analysis", "autotune", "torch.auto")


def within(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def forbidden(module: str, imported: str) -> str | None:
    """Return the rule that an import breaks; names are without the package's own."""
    for i, layer in enumerate(LAYERS):
        if within(module, layer) and not within(imported, *LAYERS[: i + 1]):
            return f"{layer} imports {', '.join(LAYERS[: i + 1])} alone"
    if within(imported, "analysis") and not within(module, *READ_ANALYSIS):
        return f"analysis is read by {', '.join(READ_ANALYSIS)} alone"
    if within(module, "analysis") and within(imported, *FRAMEWORKS, *COMMANDS):
        return "analysis reads no framework and no command"
    if within(module, "keras") and within(imported, "tensorflow"):
        return None  # Keras 3's part is on top of TensorFlow's
    if within(imported, *FRAMEWORKS) and not within(module, *COMMANDS, imported.partition(".")[0]):
        return "a framework's part is imported by itself and by commands"
    if within(imported, *COMMANDS) and not within(module, *COMMANDS, "__main__"):
        return "commands are imported by commands"
    return None


def modules() -> dict[str, Path]:
    """The package's modules by name; a package has the name of its folder, and the outermost the empty one."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


def imports(source: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """The package's modules that code imports, inside functions as well, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the package has no relative imports"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, inner = name.partition(".")
            if top == PACKAGE.name:
                yield node.lineno, inner if inner in known else inner.rpartition(".")[0]


def violations(module: str, source: str, known: set[str]) -> list[str]:
    return [
        f"{module}:{line} imports {imported}: {rule}"
        for line, imported in imports(source, known)
        if (rule := forbidden(module, imported))
    ]


def test_imports_point_one_way() -> None:
    found = modules()
    assert {"", "kernels.reference", "schemes.qsgd", "torch.auto"} <= found.keys()
    bad = [text for name, path in found.items() for text in violations(name, path.read_text(), set(found))]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.reference", "from horovod_quant.codecs.rounding_error import level_set"),
        ("kernels.triton.each", "from horovod_quant.torch import memory"),
        ("codecs.base", "def late():\n    import horovod_quant.reductions.base"),
        ("reductions.base", "from horovod_quant import schemes"),
        ("schemes.qsgd", "class Late:\n    from horovod_quant.analysis import advice"),
        ("schemes.base", "from horovod_quant.transports.pairwise_via_allreduce import with_swaps"),
        ("transports.mpi", "def late():\n    from horovod_quant import simulator"),
        ("reductions.agreement", "from horovod_quant.frontends import policy"),
        ("frontends.frontend", "from horovod_quant.analysis.units import show_seconds"),
        ("torch.compressor", "from horovod_quant.analysis import advice"),
        ("analysis.calibration", "from horovod_quant.bench.rounds import Found"),
        ("analysis.work", "from horovod_quant.torch.memory import Memory"),
        ("torch.memory", "from horovod_quant.tensorflow import parts"),
        ("frontends.stats", "from horovod_quant.cli import main"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    assert violations(module, source, set(modules()))
