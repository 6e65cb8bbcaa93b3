"""scripts/docs: the site is built from every page, a broken link is an error, and pages are short and say for whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from parallel.launching import ROOT, environment

sys.path.append(str(ROOT / "scripts"))

import documentation

MOST_LINES = 200
"""Of a page that is not Evidence."""

MOST_SECONDS = 60
"""For a build with its links; it takes 14 on 2 cores."""

GENERATED = "api"


def source_of(page: str) -> Path:
    names = {name.removesuffix(".md"): ROOT / source for source, name in documentation.ROOT_PAGES.items()}
    return names.get(page, documentation.DOCS / f"{page}.md")


def pages_of(*parts: str) -> dict[str, str]:
    """Of these parts of the site, and the first page, what a person has written, by name."""
    names = [name for part in parts for name in documentation.PARTS[part] if name != GENERATED]
    return {name: source_of(name).read_text() for name in ("index", *names)}


def test_every_page_is_in_one_part() -> None:
    there = {
        path.relative_to(documentation.DOCS).as_posix()[:-3] for path in documentation.DOCS.rglob("*.md")
    }
    roots = {name[:-3] for name in documentation.ROOT_PAGES.values()} - {"index"}
    listed = [page for part in documentation.PARTS.values() for page in part]
    assert sorted(listed) == sorted([*there, *roots, GENERATED])


def test_no_page_but_evidence_is_long() -> None:
    lines = {name: text.count("\n") for name, text in pages_of("Start", "Guides", "Reference").items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_the_first_paragraph_says_for_whom_a_page_is_and_what_they_can_do_then() -> None:
    pages = pages_of(*documentation.PARTS)
    del pages["index"]
    pages[GENERATED] = documentation.REFERENCE
    first = {name: text.split("\n\n")[1] for name, text in pages.items()}
    assert not [
        name for name, text in first.items() if not (text.startswith("For ") and "Afterwards " in text)
    ]


def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "documentation.py"), "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=MOST_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    reference = (tmp_path / "api.html").read_text()
    for anchor in (
        "torch.GlobalQSGD", "torch.EDEN", "torch.Auto", "torch.Auto.report", "simulator.run", "keras.optim.BinSGDM",
        "keras.DistributedOptimizer", "keras.callbacks.MetricAverageCallback",
    ):  # fmt: skip
        assert f'id="horovod_quant.{anchor}"' in reference
    start = (tmp_path / "index.html").read_text()
    assert all(part in start for part in documentation.PARTS)
    assert {"searchindex.js", ".nojekyll"} <= {path.name for path in tmp_path.iterdir()}


BROKEN = {
    "[a](missing.md)": "cross-reference target not found: 'missing.md'",
    "[a](install.md#no-such-heading)": "local id not found in doc 'install': 'no-such-heading'",
}


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    program = (
        "import documentation as d, pathlib, sys; inner = d.stage; d.MODULES = ()\n"
        "def stage(folder):\n"
        "    inner(folder)\n"
        f"    with (folder / 'tuning.md').open('a') as page: page.write({' '.join(BROKEN)!r})\n"
        "d.stage = stage; sys.exit(d.build(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MOST_SECONDS,
        env={**environment(), "PYTHONPATH": str(ROOT / "scripts")},
    )  # fmt: skip
    assert done.returncode != 0
    assert all(warning in done.stdout for warning in BROKEN.values())


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[a](docs/install.md#x)", "[a](install.md#x)"),
        ("README.md", "![a](docs/results/overview.png)", "![a](results/overview.png)"),
        ("README.md", "[changes](CHANGELOG.md)", "[changes](changelog.md)"),
        ("docs/results/eden.md", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("docs/architecture.md", "[`a`](../horovod_quant/schemes/qsgd.py)", "`a`"),
        ("docs/architecture.md", "[a](../horovod_quant/gone.py)", "[a](../horovod_quant/gone.py)"),
        ("docs/auto.md", "[a](tuning.md), [b](#c), [d](https://example.org)", "[a](tuning.md), [b](#c), [d](https://example.org)"),
    ],
)  # fmt: skip
def test_links_lead_to_the_site(source: str, link: str, expected: str) -> None:
    assert documentation.with_site_links(link, source) == expected
