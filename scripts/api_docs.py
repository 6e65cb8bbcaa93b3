"""Renders the public docstrings to HTML, and checks every link between the pages. Started by scripts/api-docs."""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent

MODULES = (
    "horovod_quant",
    "horovod_quant.torch",
    "horovod_quant.torch.optim",
    "horovod_quant.tensorflow",
    "horovod_quant.tensorflow.optim",
    "horovod_quant.simulator",
    "horovod_quant.mpi",
    "horovod_quant.frontends.methods",
    "horovod_quant.frontends.frontend",
    "horovod_quant.frontends.stats",
    "horovod_quant.schemes",
    "horovod_quant.schemes.base",
    "horovod_quant.schemes.registry",
    "horovod_quant.kernels.reference",
    "horovod_quant.analysis.bounds",
    "horovod_quant.analysis.cost_model",
)
"""What a user or the author of a scheme imports. The rest of the package is its own business."""


def render(folder: Path) -> None:
    import pdoc

    # Annotations that dataclasses hand on as text are shown as that text.
    warnings.filterwarnings("ignore", message="Error parsing type annotation")
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    # The expression leaves out the submodules of a package, unless they are named themselves.
    others = "|".join(name.replace(".", r"\.") for name in MODULES)
    pdoc.pdoc(*MODULES, f"!(?!({others})$).*", output_directory=folder)
    unlink_what_is_not_ours(folder)


def unlink_what_is_not_ours(folder: Path) -> None:
    """pdoc links to private bases and to what Keras' docstrings mention, and gives neither an entry."""
    for name in MODULES:
        path = folder.joinpath(*name.split(".")).with_suffix(".html")
        module = importlib.import_module(name)

        def plain(link: re.Match[str], module: Any = module) -> str:
            return link[2] if is_not_ours(module, link[1]) else link[0]

        path.write_text(re.sub(r'<a href="#([\w.]+)">([^<]*)</a>', plain, path.read_text()))


def is_not_ours(module: Any, name: str) -> bool:
    """Whether a module's ``Class.member`` is private, or a member that no class of this package defines."""
    owner, _, member = name.rpartition(".")
    if name.startswith("_"):
        return True
    kinds = getattr(getattr(module, owner, None), "__mro__", ()) if owner else ()
    ours = [kind for kind in kinds if kind.__module__.startswith("horovod_quant")]
    return bool(kinds) and not any(member in vars(kind) for kind in ours)


class Page(HTMLParser):
    """The links of an HTML page, and what they may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(folder: Path) -> list[str]:
    """``page: link`` for each that leads to no file or anchor of the folder. Links to other hosts are not followed."""
    pages = {path.resolve(): Page(path.read_text()) for path in folder.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            known = pages[target].anchors if target in pages else {""}
            if not target.exists() or unquote(address.fragment) not in known:
                broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return broken


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="api-docs", description=(__doc__ or "").split(". ")[0])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "api", metavar="FOLDER", help="(docs/api)"
    )
    return parser


def main() -> int:
    folder = make_parser().parse_args().output
    shutil.rmtree(folder, ignore_errors=True)
    render(folder)
    broken = broken_links(folder)
    for line in broken:
        print(f"api-docs: broken link: {line}", file=sys.stderr)
    if not broken:
        print(
            f"api-docs: {folder / 'index.html'}: {len(list(folder.rglob('*.html')))} pages, no broken links"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
