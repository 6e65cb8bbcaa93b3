"""Every exchange sends and returns the bits that are on record, with the specification as with the fast kernels."""

from __future__ import annotations

import json

import pytest
from golden.exchanges import FILE, Case, cases, digests
from helpers import in_turn

RECORDED = json.loads(FILE.read_text())
CASES = list(cases())


def test_each_case_is_on_record() -> None:
    assert [case.name for case in CASES] == list(RECORDED)


@pytest.mark.parametrize(
    ("kernels", "case"),
    in_turn(("numpy", "native"), [(case,) for case in CASES]),
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_the_bits_are_those_on_record(kernels: str, case: Case) -> None:
    assert digests(case, kernels) == RECORDED[case.name]
