"""Phrases, names and long docstrings do not grow back: how often each file may still have one."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = Path(__file__).with_name("language_exceptions.json")
"""For each rule the files that still break it, and how often. Counts here may only fall."""

PHRASES = {
    r"as many|so many|that many": "the same number of; N",
    r"times (as fast|as much|as long|fewer)": "N× faster, N× less traffic",
    r"(float32|float16|none|fp16)'s": "the float32 loss, a step without compression",
    r"for ever": "indefinitely",
    r"whoever|nobody|everybody": "any caller, no rank, all workers",
    r"says so|told": "logs, states; message",
    r"lets? go of": "release",
    r"takes? part in|took part in": "participate",
    r"stands? in|comes? of": "is in, is caused by",
    r"on the way (in|out|up|down)": "on the reduce-scatter side, on the allgather side",
    r"carriers?": "control tensor",
    r"roll call|head count|attendance": "active-rank query, active worker count, participation probe",
    r"joint rounding": "correlated rounding",
    r"joint (bits|dithers?|numbers)": "correlated bits",
    r"(has|have|with|gives?|returns?) the same bits": "bit-identical",
    r"in turns?|(a|the same|three) turns?": "trials, alternately, in each round",
    r"swap(s|ped|ping)?": "exchange pairwise",
    r"exchanged (once |it |them )?again|exchanged a second time": "resent",
    r"exchang(e|es|ed|ing)": "reduction, collective, step communication; average, send",
    r"witness(es)?|tall(y|ies)": "participation probe, operation-count padding",
    r"serves? (a|no|the|this) (chunk|shard)|the served": "reduces a shard, of the shard that this rank reduces",
    r"takes? the place of": "replaces",
    r"(Skipped|Wanted|Left out|Missing) (is|are)": "X is skipped, target: X",
    r"(longer|shorter|more|less), the (longer|shorter|more|less)": "backs off with elapsed time",
    r'"""(Raises|Returns|Writes|Gives|Adds|Puts)': "an imperative: Raise, Return, Write",
    r'"""(Reads|Makes|Models|Measures|Starts|Prints|Runs|Probes|Looks|Says|Tells|Takes|Predicts|Identifies)': (
        "an imperative: Read, Create, Measure"
    ),
    r'"""(Whether|What|Which|How|Whose|Of|For|As|By|On|In|With|From|To|Where|When|Before|Besides|Between|Up)': (
        "a noun phrase or an imperative: True if, Return the"
    ),
    r'"""(Those|That|Everything|Everybody|All of|More than|Over)': "a noun phrase that names the thing",
}
"""Regular expressions; without capitals they match at the beginning of a sentence as well."""

NAMES = {
    r"exchanged_again": "resent",
    r"swap(s|ped)?": "pairwise",
    r"turns?": "trial, rotation",
    r"carriers?|witness(es)?|tall(y|ies)|attendance|roll_call|head_count": "see CONTRIBUTING.md, Words",
    r"chunks?|served?": "shard, reduced",
    r"joint": "correlated",
    r"told|whoever|nobody|everybody": "message, any, no",
}
"""The same for words of names of modules, classes, their fields, functions and arguments."""

LONG = "first lines of docstrings with more than twelve words"

ADVICE = {**PHRASES, **{f"name: {words}": advice for words, advice in NAMES.items()}, LONG: "a shorter one"}


@cache
def texts() -> dict[str, str]:
    """Pages and Python files by their path; the tests' own for their names alone."""
    sources = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    for folder in ("horovod_quant", "benchmarks", "examples", "scripts", "tests"):
        sources += (ROOT / folder).rglob("*.py")
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(sources)}


def is_read(path: str) -> bool:
    return not path.startswith("tests/")


@cache
def tree(path: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(texts()[path]))) if path.endswith(".py") else []


def pattern(phrase: str) -> re.Pattern[str]:
    flags = re.IGNORECASE if phrase == phrase.lower() else 0
    return re.compile(rf"(?<![\w.`_])(?:{phrase})(?![\w_(])", flags)


def names(path: str) -> list[str]:
    """Return names that a file defines, in small letters with underscores."""
    found = [Path(path).stem]
    for node in tree(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.arg):
            found.append(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    return [re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in found]


def long_docstrings(path: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in tree(path) if isinstance(node, documented)]
    return sum(len(text.partition("\n")[0].split()) > 12 for text in found)


def found(rule: str) -> dict[str, int]:
    """How often each file breaks a rule, where it does."""
    if rule in PHRASES:
        counts = {path: len(pattern(rule).findall(text)) for path, text in texts().items() if is_read(path)}
    elif rule == LONG:
        counts = {path: long_docstrings(path) for path in texts() if is_read(path)}
    else:
        words = re.compile(rf"(?:^|_)(?:{rule.removeprefix('name: ')})(?:_|$)")
        counts = {path: sum(bool(words.search(name)) for name in names(path)) for path in texts()}
    return Counter({path: count for path, count in counts.items() if count})


@pytest.mark.parametrize("rule", ADVICE)
def test_nothing_grows_back(rule: str) -> None:
    allowed = json.loads(EXCEPTIONS.read_text())[rule]
    more = {path: count for path, count in found(rule).items() if count > allowed.get(path, 0)}
    assert not more, f"write {ADVICE[rule]!r} instead of {rule!r}"


def test_exceptions_are_of_files_that_exist() -> None:
    allowed = json.loads(EXCEPTIONS.read_text())
    assert set(allowed) == set(ADVICE)
    assert all((ROOT / path).is_file() for files in allowed.values() for path in files)


def test_phrases_and_names_are_found() -> None:
    carriers = next(phrase for phrase in PHRASES if "carriers" in phrase)
    assert pattern(carriers).search("the carrier of a gradient")
    assert not pattern(carriers).search("carrier_of(gradient)")
    nobody = next(phrase for phrase in PHRASES if "nobody" in phrase)
    assert pattern(nobody).search("Nobody waits.")
    assert {"test_language", "is_read", "rule"} <= {*names("tests/test_language.py")}


def lowered(rule: str, allowed: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the exceptions of a rule without those that are no longer needed; all that there are for a new rule."""
    there = found(rule)
    if rule not in allowed:
        return there
    return {path: min(count, allowed[rule][path]) for path, count in there.items() if path in allowed[rule]}


def test_counts_only_fall() -> None:
    rule = LONG
    path, count = next(iter(found(rule).items()))
    assert lowered(rule, {rule: {path: count + 1, "gone.py": 1}}) == {path: count}
    assert lowered(rule, {rule: {path: count - 1}}) == {path: count - 1}
    assert lowered(rule, {}) == found(rule)


def write() -> None:
    """Lower the exceptions to what there is: after phrases were replaced."""
    allowed = json.loads(EXCEPTIONS.read_text())
    EXCEPTIONS.write_text(json.dumps({rule: lowered(rule, allowed) for rule in ADVICE}, indent=1) + "\n")


if __name__ == "__main__":
    write()
