"""examples/explained.py: every cell runs, and each picture is drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from parallel.launching import ROOT, environment


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "explained.py")], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "explained").iterdir()}
    assert set(pictures) == {"levels", "correlated", "rotation", "bits"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in pictures.values())
