from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import horovod_quant
from horovod_quant.schemes import registry

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "horovod_quant",
        "horovod_quant.schemes",
        "horovod_quant.kernels",
        "horovod_quant.simulator",
        "horovod_quant.frontends.policy",
        "horovod_quant.frontends.stats",
        "horovod_quant.frontends.frontend",
        "horovod_quant.analysis.cost_model",
        "horovod_quant.cli.main",
    ],
)
def test_the_core_imports_no_framework(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert not {"torch", "tensorflow", "keras", "horovod", "mpi4py", "scipy"} & set(result.stdout.split())


def blocked(missing: str, module: str) -> str:
    """The last line of what importing a module says where another is not installed."""
    result = python(f"import sys; sys.modules[{missing!r}] = None; import {module}")
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_mpi_without_mpi4py_says_what_to_install() -> None:
    assert blocked("mpi4py", "horovod_quant.mpi") == (
        "ImportError: horovod_quant.mpi needs mpi4py: pip install mpi4py"
    )


def test_the_installed_page_links_to_no_page_that_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "horovod_quant" / "install.md").read_text()
    assert page.startswith("# Installing")
    assert "(docs/gpu.md)" in page
    assert all(link.startswith("https:") for link in re.findall(r"\]\(([^)]+)\)", page))


def names_in(file: Path) -> set[str]:
    """Those that its code uses, and its texts that are names; not what texts say."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.alias)):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize("scheme", [kind for kind in registry.own() if kind.own_optimizer is None])
def test_a_scheme_is_named_in_its_own_file_and_where_it_is_imported_alone(scheme: type) -> None:
    package = Path(horovod_quant.__file__).parent
    own = package.joinpath(*scheme.__module__.split(".")[1:]).with_suffix(".py")
    names = {scheme.__name__, *registry.families_of(scheme)}
    naming = {file for file in package.rglob("*.py") if names & names_in(file)}
    translated = package / "frontends" / "former_names.py"  # what version 0.1.0 called them
    derived = {Path(inspect.getfile(kind)) for kind in scheme.__subclasses__()}
    assert naming - {translated} - derived == {own, package / "schemes" / "__init__.py"}


def test_the_version_is_the_packages() -> None:
    metadata = ConfigParser(interpolation=None)
    metadata.read(Path(__file__).parent.parent / "setup.cfg")
    assert horovod_quant.__version__ == metadata["metadata"]["version"]
