"""Display of findings, by ``rich`` if installed, otherwise as plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
"""Marks of findings: a note is unknown or unused; a warning can be fixed by the user."""

_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "bold red"}


class Finding(NamedTuple):
    """Finding with its mark, text and remedy (empty if none is needed)."""

    mark: str
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


class Section(NamedTuple):
    title: str
    findings: list[Finding]


def summary(sections: Sequence[Section]) -> str:
    """Return a summary: ``1 problem, 2 warnings``."""
    marks = [finding.mark for section in sections for finding in section.findings]
    counts = {"problem": marks.count(PROBLEM), "warning": marks.count(WARNING)}
    return ", ".join(f"{count or 'no'} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())


def show(sections: Sequence[Section], hints: Sequence[str] = (), plain: bool = False) -> None:
    """Print the sections, their summary, and hints.

    On a terminal there are colours, and long findings are wrapped with an indent. In a pipe, and with ``plain``, each
    is one line of ASCII: horovodrun splits its workers' output between any two bytes, even on an apparent terminal.
    """
    ending = [summary(sections), *hints]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        plain = True
    if plain or not (console := Console(highlight=False, emoji=False, markup=False)).is_terminal:
        _show_plain(sections, ending)
        return
    for section in sections:
        console.print(Text(section.title, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=len(PROBLEM) + 1, no_wrap=True)
        table.add_column()
        for finding in section.findings:
            line = Text(finding.text)
            if finding.remedy:
                line.append(f"; {finding.remedy}", style=_STYLES[finding.mark])
            table.add_row(Text(f" {finding.mark}", style=_STYLES[finding.mark]), line)
        console.print(table)
    console.print(Text(ending[0], style="bold"))
    for hint in ending[1:]:
        console.print(hint)


def _show_plain(sections: Sequence[Section], ending: Sequence[str]) -> None:
    lines = []
    for section in sections:
        lines.append(section.title)
        lines += [f" {finding.mark:8}{finding.line}" for finding in section.findings]
    text = "\n".join([*lines, *ending]) + "\n"
    sys.stdout.write(text.encode("ascii", "replace").decode())
    sys.stdout.flush()
