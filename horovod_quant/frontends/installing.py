"""Requirement of Horovod, and the path of the page about installing it."""

from __future__ import annotations

import importlib
from pathlib import Path


def install_page() -> Path:
    """Return the path of ``docs/install.md`` in the package or the checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "install.md"
    return packaged if packaged.exists() else package.parent / "docs" / packaged.name


def require_horovod(module: str, framework: str) -> None:
    """Raise ImportError, with the remedy, without Horovod built with a framework.

    Args:
        module: the framework's module of Horovod and of this package, ``"torch"`` or ``"tensorflow"``.
        framework: the framework's name.
    """
    try:
        importlib.import_module(f"horovod.{module}")
    except ImportError as error:
        raise ImportError(
            f"horovod_quant.{module} needs Horovod built with {framework} ({error}); {install_page()} has the commands"
        ) from error
