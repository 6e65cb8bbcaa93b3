from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import horovod_quant


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "horovod_quant",
        "horovod_quant.schemes",
        "horovod_quant.kernels",
        "horovod_quant.simulator",
        "horovod_quant.policy",
        "horovod_quant.stats",
        "horovod_quant.frontend",
        "horovod_quant.analysis.bounds",
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
        "ImportError: horovod_quant.mpi needs mpi4py: pip install 'horovod-quant[mpi]'"
    )


def test_the_version_is_the_packages() -> None:
    metadata = ConfigParser(interpolation=None)
    metadata.read(Path(__file__).parent.parent / "setup.cfg")
    assert horovod_quant.__version__ == metadata["metadata"]["version"]
