"""The compiled library: which one is loaded, which is refused, and what the environment chooses."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import pytest
from native_builds import compile_library, load_installed

from horovod_quant import kernels
from horovod_quant.kernels import native, native_library, reference


def test_backends_have_names() -> None:
    assert kernels.get("native") is native
    assert kernels.get("numpy") is reference
    with pytest.raises(ValueError, match="no such backend"):
        kernels.get("fortran")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if the package had just been imported, with none of its environment variables."""
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(kernels, "_warned", False)
    for name in ("HOROVOD_QUANT_KERNELS", "HOROVOD_QUANT_ISA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_the_library_numpy_serves_and_says_so_once(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.delenv("HOROVOD_QUANT_LIBRARY", raising=False)
    fresh.setattr(native_library, "__file__", str(tmp_path / "native_library.py"))
    with pytest.warns(RuntimeWarning, match="slow numpy kernels.*no compiled library"):
        assert kernels.get() is reference
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.get("auto") is reference
    assert not caught
    assert "numpy kernels" in kernels.describe()
    assert f"no compiled library in {tmp_path}" in kernels.describe()
    with pytest.raises(ImportError, match="no compiled library"):
        kernels.get("native")


def test_a_library_that_does_not_fit_is_not_used(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    fresh.setenv("HOROVOD_QUANT_LIBRARY", str(broken))
    with pytest.raises(ImportError, match=r"cannot load .*kernels\.so"):
        native_library.load()
    source = tmp_path / "old.cpp"
    source.write_text(
        'extern "C" long best_instruction_set() { return 0; } extern "C" long interface_version() { return 0; }'
    )
    with pytest.raises(ImportError, match="built from other sources"):
        native_library.load(compile_library(tmp_path / "old.so", source, "g++"))


def test_what_is_declared_otherwise_than_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vote = native_library._SIGNATURES["vote"]
    for arguments in (vote[1:], (ctypes.c_float, *vote[1:])):
        monkeypatch.setitem(native_library._SIGNATURES, "vote", arguments)
        with pytest.raises(ImportError, match="built from other sources"):
            native_library.load(native_library._library_path())


def test_the_environment_chooses_the_backend(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("HOROVOD_QUANT_KERNELS", "numpy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.get("auto") is reference
    assert not caught
    assert kernels.describe() == "numpy kernels, requested by HOROVOD_QUANT_KERNELS"
    assert kernels.get("native") is native


def test_the_environment_chooses_the_instruction_set(fresh: pytest.MonkeyPatch) -> None:
    load_installed()
    best = native_library.loaded().available[-1]
    assert native_library.loaded().instruction_set == best
    assert kernels.describe().startswith(f"native kernels with {best}")
    fresh.setattr(native_library, "_library", None)
    fresh.setenv("HOROVOD_QUANT_ISA", "baseline")
    assert kernels.describe().startswith("native kernels with baseline")
    fresh.setattr(native_library, "_library", None)
    fresh.setenv("HOROVOD_QUANT_ISA", "mmx")
    with pytest.raises(ValueError, match="'mmx': this processor has baseline"):
        kernels.get("auto")
