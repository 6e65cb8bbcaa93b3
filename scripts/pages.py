"""What scripts write into pages of docs/ stands between two comments, which name the script."""

from __future__ import annotations


def insert(page: str, mark: str, script: str, text: str) -> str:
    """A page with what stands between a script's two comments replaced.

    Args:
        page: its text.
        mark: which of the script's places it is.
        script: its name, in scripts/.
        text: that shall stand there.

    Raises:
        SystemExit: the page does not have both comments exactly once.
    """
    begin, end = f"<!-- {mark}: scripts/{script} -->", f"<!-- /{mark} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"the page must have {begin} and {end} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
