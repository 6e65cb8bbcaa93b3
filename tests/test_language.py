"""Words and phrases that PHRASES replaces do not grow back: how often each file may still have one."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = Path(__file__).with_name("language_exceptions.json")
"""For each phrase the files that still have it, and how often. Counts here may only fall."""

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
    r"[Jj]oint rounding": "correlated rounding",
    r"[Jj]oint (bits|dithers?|numbers)": "correlated bits",
    r"exchanged (once |it |them )?again|exchanged a second time": "resent",
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


def pages() -> list[Path]:
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")]
    for folder in ("horovod_quant", "benchmarks", "examples", "scripts"):
        sources += (ROOT / folder).rglob("*.py")
    return sorted([*sources, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])


def found(phrase: str) -> dict[str, int]:
    """How often each file has a phrase, where it has it."""
    pattern = re.compile(rf"(?<![\w.`_])(?:{phrase})(?![\w_(])")
    counts = Counter(
        {path.relative_to(ROOT).as_posix(): len(pattern.findall(path.read_text())) for path in pages()}
    )
    return {path: count for path, count in counts.items() if count}


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_do_not_grow_back(phrase: str) -> None:
    allowed = json.loads(EXCEPTIONS.read_text())[phrase]
    more = {path: count for path, count in found(phrase).items() if count > allowed.get(path, 0)}
    assert not more, f"write {PHRASES[phrase]!r} instead of {phrase!r}"


def test_exceptions_are_of_files_that_exist() -> None:
    allowed = json.loads(EXCEPTIONS.read_text())
    assert set(allowed) == set(PHRASES)
    assert all((ROOT / path).is_file() for files in allowed.values() for path in files)


def test_a_phrase_is_found(tmp_path: Path) -> None:
    pattern = next(phrase for phrase in PHRASES if "carriers" in phrase)
    assert re.search(rf"(?<![\w.`_])(?:{pattern})(?![\w_(])", "the carrier of a gradient")
    assert not re.search(rf"(?<![\w.`_])(?:{pattern})(?![\w_(])", "carrier_of(gradient)")


def write() -> None:
    """Set the exceptions to what there is: after phrases were replaced."""
    EXCEPTIONS.write_text(json.dumps({phrase: found(phrase) for phrase in PHRASES}, indent=1) + "\n")


if __name__ == "__main__":
    write()
