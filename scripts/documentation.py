"""Build the documentation as a site; scripts/docs starts it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository's root, and their names in the site."""

PARTS = {
    "Start": ("install", "first-speed-up", "pays", "choosing", "features", "demonstration", "examples"),
    "Guides": (
        "pytorch", "ddp", "tensorflow", "keras", "clusters", "hierarchical", "tuning", "auto", "gpu", "simulator",
        "new-scheme", "troubleshooting", "troubleshooting-frontends", "troubleshooting-commands",
    ),
    "Reference": (
        "api", "doctor", "bench", "advise", "methods", "reliability", "rounding", "architecture", "kernels",
        "gpu-kernels", "lab", "contributing", "security", "changelog",
    ),
    "Evidence": (
        "results", "speed", "results/training", "results/qsgd", "results/nuqsgd", "results/global-qsgd",
        "results/binsgdm", "results/eden", "results/limits", "model", "gpu-measured",
    ),
}  # fmt: skip
"""The site's four parts, and the pages of each."""

EXPORTING = (
    "horovod_quant.torch", "horovod_quant.tensorflow", "horovod_quant.keras", "horovod_quant.simulator",
    "horovod_quant.mpi",
)  # fmt: skip
"""Modules that export what other modules of the package define."""

SHARED = {"horovod_quant.keras": "MetricsCallback"}
"""Exports that an earlier module has documented."""

INHERITING = ("horovod_quant.torch.ddp", "horovod_quant.torch.fsdp")
"""Modules whose classes inherit methods that no other module documents."""

MODULES = (
    *EXPORTING,
    *INHERITING,
    "horovod_quant.torch.optim",
    "horovod_quant.tensorflow.optim",
    "horovod_quant.keras.callbacks",
    "horovod_quant.keras.optim",
    "horovod_quant.frontends.methods",
    "horovod_quant.frontends.frontend",
    "horovod_quant.frontends.stats",
    "horovod_quant.schemes.base",
    "horovod_quant.schemes.registry",
    "horovod_quant.kernels.reference",
    "horovod_quant.analysis.cost_model",
)
"""Modules that a user or the author of a scheme imports."""

KERAS_CHECK = "horovod_quant.keras.requirements"

REFERENCE = """\
# Python API

For users who look up a class or function, and for authors of schemes. Afterwards you know the arguments, shapes and
errors of everything public; the text is that of the docstrings, and the search finds names.
"""

MODULE = """
## {name}

```{{eval-rst}}
.. automodule:: {name}
   :members:{options}
```
"""

CONFIGURATION = {
    "project": "horovod-quant",
    "extensions": "myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon,sphinx.ext.githubpages",
    "html_theme": "furo",
    "html_title": "horovod-quant",
    "html_static_path": "_static",
    "html_css_files": "site.css",
    "html_copy_source": "0",
    "highlight_language": "text",
    "html_show_sphinx": "0",
    "html_show_copyright": "0",
    "autodoc_typehints": "none",
    "autodoc_member_order": "bysource",
    "napoleon_use_ivar": "1",
    "myst_heading_anchors": "4",
    "exclude_patterns": "results/runs",
}

STYLE = """\
.highlight pre { font-size: 0.75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
table.docutils { font-size: 0.8rem; }
td code, table.indextable { overflow-wrap: anywhere; }
td:first-child:has(code) { min-width: 13rem; }
"""
"""No code is cut off, and few tables scroll, at a laptop's width."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def stage(folder: Path) -> None:
    """Lay out what the site is made of, in an empty folder."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.json", "runs"), dirs_exist_ok=True)
    for source, name in ROOT_PAGES.items():
        shutil.copy(ROOT / source, folder / name)
    for page in folder.rglob("*.md"):
        name = page.relative_to(folder).as_posix()
        (source,) = [key for key, value in ROOT_PAGES.items() if value == name] or [f"docs/{name}"]
        page.write_text(with_site_links(page.read_text(), source))
    (folder / "api.md").write_text(REFERENCE + "".join(map(section, MODULES)))
    (folder / "_static").mkdir()
    (folder / "_static" / "site.css").write_text(STYLE)
    contents = "\n".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n"
        + "\n".join(f"{entry_of(folder / f'{page}.md')} <{page}>" for page in pages)
        + "\n```"
        for part, pages in PARTS.items()
    )
    with (folder / "index.md").open("a") as index:
        index.write(contents + "\n")


def entry_of(page: Path) -> str:
    """Return a page's heading without the name of its part."""
    heading = page.read_text().partition("\n")[0].removeprefix("# ")
    within = heading.removeprefix("Evidence: ")
    return heading if within == heading else within[0].upper() + within[1:]


def section(module: str) -> str:
    options = "\n   :imported-members:" if module in EXPORTING else ""
    if module in INHERITING:
        options += "\n   :inherited-members:"
    if module in SHARED:
        options += f"\n   :exclude-members: {SHARED[module]}"
    return MODULE.format(name=module, options=options)


def with_site_links(text: str, source: str) -> str:
    """Return a page whose links lead to pages of the site.

    A link to another file of the repository becomes its text.

    Args:
        text: of the page.
        source: its path in the repository.
    """
    here = (ROOT / source).parent
    staged = here if here.is_relative_to(DOCS) else DOCS

    def with_site_link(match: re.Match[str]) -> str:
        image, label, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = Path(os.path.normpath(here / path))
        name = os.path.relpath(target, ROOT)
        if name in ROOT_PAGES:
            target = DOCS / ROOT_PAGES[name]
        elif not target.is_relative_to(DOCS):
            return label if target.exists() else match[0]
        return f"{image}[{label}]({os.path.relpath(target, staged)}{'#' + anchor if anchor else ''})"

    return _LINK.sub(with_site_link, text)


def build(output: Path) -> int:
    """Build the site, and return Sphinx's exit status.

    A broken link, or a page in no part, is an error.
    """
    from sphinx.cmd.build import build_main

    # It refuses Keras 2, with which the docstrings can be read as well.
    sys.modules.setdefault(KERAS_CHECK, types.ModuleType(KERAS_CHECK))
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "docs"
        stage(source)
        settings = [word for key, value in CONFIGURATION.items() for word in ("-D", f"{key}={value}")]
        return build_main(
            [
                *("-C", "-q", "-W", "--keep-going", "-b", "html", "-d", str(Path(made) / "doctrees")),
                *(*settings, str(source), str(output)),
            ]
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="docs", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "docs", metavar="FOLDER", help="(build/docs)"
    )
    return parser


def main() -> int:
    output = make_parser().parse_args().output
    status = build(output)
    if status == 0:
        print(f"docs: {output / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
