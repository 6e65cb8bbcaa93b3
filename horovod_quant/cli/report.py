"""Findings, and how they are shown: through ``rich`` where it is installed, as plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
"""A note says what is not known or not used; a warning, what a user can mend."""

_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", PROBLEM: "bold red"}


class Finding(NamedTuple):
    """One line: a mark, what was found, and what to do about it (nothing where all is well)."""

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
    """``1 problem, 2 warnings``."""
    marks = [finding.mark for section in sections for finding in section.findings]
    counts = {"problem": marks.count(PROBLEM), "warning": marks.count(WARNING)}
    return ", ".join(f"{count or 'no'} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())


def show(sections: Sequence[Section], hints: Sequence[str] = (), plain: bool = False) -> None:
    """Prints the sections, their summary, and hints.

    On a terminal there are colours, and long findings are broken with an indent. In a pipe, and with ``plain``, each
    stays one line, and nothing but ASCII is printed: horovodrun, whose workers may well believe to have a terminal,
    cuts their output between any two bytes.
    """
    ending = [summary(sections), *hints]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plain(sections, ending)
        return
    console = Console(highlight=False, emoji=False, markup=False)
    if plain or not console.is_terminal:
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
