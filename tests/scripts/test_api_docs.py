"""scripts/api-docs: the reference can be built, and no link between its pages is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment

sys.path.append(str(ROOT / "scripts"))

import api_docs


@pytest.mark.extended
def test_the_reference_is_built_without_a_broken_link(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "api_docs.py"), "--output", str(tmp_path / "api")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "no broken links" in done.stdout
    page = (tmp_path / "api" / "horovod_quant" / "torch.html").read_text()
    for anchor in ("GlobalQSGD", "EDEN", "Auto", "Compressor.stats"):
        assert f'id="{anchor}"' in page


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<p id="here"></p>')
    (tmp_path / "page.html").write_text(
        '<a href="other.html#here"></a> <a href="other.html#gone"></a> <a href="missing.html"></a> <a href="#"></a>'
        '<a href="https://example.org/"></a> <script src="search.js"></script>'
    )
    assert api_docs.broken_links(tmp_path) == [
        "page.html: other.html#gone", "page.html: missing.html", "page.html: search.js",
    ]  # fmt: skip
