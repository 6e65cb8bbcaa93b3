"""docs/troubleshooting*.md have every error, warning and printed complaint that a user can meet: they are read from the
source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "horovod_quant"
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("troubleshooting*.md"))}
PAGE = "\n".join(PAGES.values())
ANYTHING = "…"
"""Stands, here and on the page, for what differs between two messages of a kind."""

NOT_ON_THE_PAGE = {
    "kernels/arrays.py": "kernels' arguments, which schemes give",
    "kernels/checks.py": "as above",
    "kernels/native.py": "as above",
    "kernels/native_arguments.py": "as above",
    "kernels/native_segments.py": "as above",
    "kernels/segment_offsets.py": "as above",
    "kernels/entropy.py": "as above; the page has a row for all corrupt payloads",
    "kernels/reference.py": "as above",
    "kernels/rotated_sums.py": "as above",
    "kernels/rotation.py": "as above",
    "kernels/buffer_view.py": "as above",
    "kernels/triton/": "as above; the page has what the frontends say of GPUs",
    "tensorflow/kernels.py": "as above",
    "kernels/native_library.py": "the page has why there is no library",
    "codecs/arguments.py": "functions of levels and errors, whose arguments a message names",
    "codecs/rotated_codes.py": "as above",
    "codecs/rounding_error.py": "as above",
}
"""Modules whose messages nobody meets who trains, measures or predicts, and why."""

COMPOSED = {
    "self._disagreement(name)": "the workers did not send the same gradient here",
    "disagreement(self._arguments, unequal)": "here, but not on all other workers",
    "disagreement(question.arguments, unequal)": "here, but not on all other workers",
    "_missing(missing[0], f'{_DYNAMIC} is not set', hierarchical)": "Horovod has no process set for ranks",
    "_missing(ranks, error, hierarchical)": "Horovod has no process set for ranks",
    "_problems[-1]": "cannot be used",
    "_missing_names.message(__name__, name, known)": "module … has no attribute …",
    "missing_names.message(__name__, name, known)": "module … has no attribute …",
    "missing_names.message(self._module, name, self.listed())": "module … has no attribute …",
    "f'{argument}: {error}' if argument else str(error)": None,  # another error, with the option's name before it
    "str(error)": None,
    "plan.problem": None,  # of the first worker's options
    "name": None,  # an attribute that a backend of kernels does not have
}
"""Messages that the source makes elsewhere than where they are raised, and what of them is on the page."""


FOUND_ELSEWHERE = {
    "scheme_findings": "cannot be used",
    "host_kernel_findings": "numpy kernels",
}
"""Functions that show a text of another module as a finding, and what of it is on the page."""

PRINTERS = {"self._complain", "self._say", "console.print", "parser.error"}
"""What prints a complaint of the commands: a text, or nothing that is one."""

RETURNERS = {"_agreed_problem", "memory_problem"}
"""Functions that return one."""


class Message(NamedTuple):
    place: str
    text: str
    """The stable part: without what to do, which follows a semicolon, a sentence, or a reason in brackets."""


def constants(tree: ast.Module) -> dict[str, str]:
    """A module's texts, by name."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
CONSTANTS = {name: text for tree in TREES.values() for name, text in constants(tree).items()}


def template(node: ast.expr, own: Mapping[str, str]) -> str | None:
    """A message with `ANYTHING` in place of its values; None where it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left, own), template(node.right, own)
        return None if left is None else left + (ANYTHING if right is None else right)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return own.get(name, CONSTANTS.get(name))


def raised(tree: ast.Module) -> Iterator[tuple[str, int, ast.expr]]:
    """Exceptions, lines and messages of what is raised or warned of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node).startswith(WARNERS):
            call = node
        else:
            continue
        kind = ast.unparse(call.func)
        if kind in ("AssertionError", "SystemExit"):
            continue
        if call.args:
            message = next(each for each in call.args if ast.unparse(each) not in BEFORE_MESSAGES)
            yield kind, node.lineno, message


def printed(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Lines and texts of what a command prints of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTERS:
            yield from ((node.lineno, text) for text in node.args[:1] if isinstance(text, TEXTS))
        elif isinstance(node, ast.FunctionDef) and node.name in RETURNERS:
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and part.value is not None:
                    both = isinstance(part.value, ast.IfExp)
                    values = [part.value.body, part.value.orelse] if both else [part.value]
                    yield from ((part.lineno, value) for value in values if isinstance(value, TEXTS))


TEXTS = (ast.Constant, ast.JoinedStr)

WARNERS = ("notices.warn(", "notices.deprecated(", "notices.log(logging.WARNING", "_log.warning(")

BEFORE_MESSAGES = ("logging.WARNING", "'%s'")


def findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of doctor's findings, but for those that all is well."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        assigned = [
            (node.lineno, node.targets[0].id, node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"):
                continue
            mark, text = node.args[:2]
            if ast.unparse(mark) == "OK":
                continue
            if isinstance(text, ast.Name):
                # The nearest one before: a name such as `text` is used again and again.
                before = [value for line, name, value in assigned if name == text.id and line < node.lineno]
                known = bool(before) and isinstance(before[-1], TEXTS)
                shown = template(before[-1], {}) if known else FOUND_ELSEWHERE[function.name]
            else:
                shown = template(text, {})
            assert shown is not None, ast.unparse(node)
            yield node.lineno, shown


def messages_printed() -> Iterator[Message]:
    for file, tree in TREES.items():
        texts = [(line, template(node, {}) or "") for line, node in printed(tree)] + list(findings(tree))
        for line, text in texts:
            stable = re.sub(f"{ANYTHING}+", ANYTHING, text).strip(f"{ANYTHING}:;, ")
            if re.search(r"\w", stable):
                yield Message(f"horovod_quant/{file}:{line}", stable)


def messages() -> Iterator[Message]:
    for file, tree in TREES.items():
        own = constants(tree)
        left_out = any(file.startswith(name) for name in NOT_ON_THE_PAGE)
        for kind, line, node in raised(tree):
            if left_out and kind != "NativeKernelsUnavailable":
                continue
            source = ast.unparse(node)
            text = COMPOSED[source] if source in COMPOSED else template(node, own)
            if source in COMPOSED and text is None:
                continue
            place = f"horovod_quant/{file}:{line}"
            assert text is not None, f"{place}: say in COMPOSED what `{source}` is"
            stable = (
                re.split(rf";|\. (?=[A-Z])|(?<=\({ANYTHING}\)):", text)[0]
                .replace("%s", ANYTHING)
                .strip(f"{ANYTHING}: ")
            )
            if re.search(r"\w", stable):  # else it only puts a name before another message
                yield Message(place, stable)


def test_every_message_is_on_the_page() -> None:
    found = [*messages(), *messages_printed()]
    assert len(found) > 200
    lacking = [f"{place}: {text}" for place, text in found if text not in PAGE]
    assert not lacking, "docs/troubleshooting*.md do not have\n" + "\n".join(lacking)


def test_the_first_page_leads_to_the_others() -> None:
    first = PAGES["troubleshooting.md"]
    assert all(f"]({name})" in first for name in PAGES if name != "troubleshooting.md")


def test_every_row_says_why_or_what_to_do() -> None:
    rows = [re.split(r" \| ", row) for row in re.findall(r"^\| (.* \| .* \| .*) \|$", PAGE, re.MULTILINE)]
    assert len(rows) > 150
    assert {len(row) for row in rows} == {3}
    vague = ("as it says", "as above")
    assert not [what for what, why, remedy in rows if why.startswith(vague) and remedy.startswith(vague)]


def test_complaints_that_are_new_are_noticed() -> None:
    source = """
def _agreed_problem(self):
    if self.lost:
        return f"worker {self.rank} is lost" if self.rank else ""
def finding(self):
    text = f"{self.name} is odd"
    self._complain(f"{self.name}: strange")
    return [Finding(PROBLEM, text, "x"), Finding(OK, "fine"), Finding(WARNING, f"{text}; more")]
"""
    tree = ast.parse(source)
    assert {template(node, {}) for _, node in printed(tree)} == {"worker … is lost", "", "…: strange"}
    assert {text for _, text in findings(tree)} == {"… is odd", "…; more"}


@pytest.mark.parametrize("file", NOT_ON_THE_PAGE)
def test_what_is_left_out_is_there(file: str) -> None:
    assert any(name.startswith(file) for name in TREES)


def test_a_message_that_is_new_is_noticed() -> None:
    tree = ast.parse("raise ValueError(f'bits={bits!r}: an unheard-of mistake; use another')")
    ((_, _, node),) = raised(tree)
    assert template(node, {}) == f"bits={ANYTHING}: an unheard-of mistake; use another"
    assert "an unheard-of mistake" not in PAGE
