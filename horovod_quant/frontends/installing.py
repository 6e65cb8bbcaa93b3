"""Path of the page about installing Horovod."""

from __future__ import annotations

from pathlib import Path


def install_page() -> Path:
    """Return the path of ``docs/install.md`` in the package or the checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "install.md"
    return packaged if packaged.exists() else package.parent / "docs" / packaged.name
