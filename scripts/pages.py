"""Insert text into pages of docs/, between comments that name the script."""

from __future__ import annotations

from pathlib import Path


def insert(page: str, mark: str, script: str, text: str) -> str:
    """Return a page with the text between a script's two comments replaced.

    Args:
        page: its text.
        mark: of one of the script's insertions.
        script: its name, in scripts/.
        text: the new text.

    Raises:
        SystemExit: the page does not have both comments exactly once.
    """
    begin, end = f"<!-- {mark}: scripts/{script} -->", f"<!-- /{mark} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"the page must have {begin} and {end} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def load_before(path: Path) -> str:
    """Return the sentence with what `load_and_processor` has written to a file."""
    return f"Load of the machine before the measurements: {path.read_text().strip()}."
