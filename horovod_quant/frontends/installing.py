"""Where it is written how to install Horovod."""

from __future__ import annotations

from pathlib import Path


def install_page() -> Path:
    """``docs/install.md``: beside this file, where setup.py puts it into the package, or in the checkout."""
    here = Path(__file__).resolve()
    packaged = here.with_name("install.md")
    return packaged if packaged.exists() else here.parents[1] / "docs" / packaged.name
