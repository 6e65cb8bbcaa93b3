from __future__ import annotations

import pytest

from horovod_quant.frontends.policy import Policy
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme

NAMES = ["conv.weight", "conv.bias", "head.weight"]


def test_small_gradients_are_left_alone() -> None:
    policy = Policy(QSGD(), min_elements=100)
    assert policy.scheme_for("w", 99) is None
    assert policy.scheme_for("w", 100) == QSGD()
    assert policy.scheme_for("w", 99) is None  # a name may come with another size
    assert Policy(QSGD(), min_elements=0).scheme_for("w", 0) is None  # nothing to compress
    assert Policy(QSGD(), min_elements=0).scheme_for("w", 1) == QSGD()
    assert Policy(QSGD()).scheme_for("w", 1023) is None


@pytest.mark.parametrize("exclude", ["*.bias", ["*.bias"], ("other", "conv.bias"), ["*.b[i]as"]])
def test_excluded_names_are_left_alone(exclude) -> None:
    policy = Policy(QSGD(), exclude=exclude)
    assert [policy.scheme_for(name, 5000) for name in NAMES] == [QSGD(), None, QSGD()]


def test_patterns_respect_case_and_whole_names() -> None:
    policy = Policy(QSGD(), exclude=["CONV.*", "weight"])
    assert all(policy.scheme_for(name, 5000) for name in NAMES)


def test_the_first_override_that_matches_counts() -> None:
    policy = Policy(QSGD(4, "max"), overrides={"head.weight": {"bits": 8}, "*.weight": {"bits": 2}})
    chosen = [policy.scheme_for(name, 5000) for name in NAMES]
    assert chosen == [QSGD(2, "max"), QSGD(4, "max"), QSGD(8, "max")]


def test_excluding_outweighs_overriding() -> None:
    policy = Policy(QSGD(), exclude="conv.*", overrides={"conv.*": {"bits": 8}})
    assert policy.scheme_for("conv.bias", 5000) is None


@pytest.mark.parametrize(
    ("scheme", "changed", "expected"),
    [
        (GlobalQSGD(rotate=True), {"rotate": False}, GlobalQSGD()),
        (GlobalQSGD(), {"rotate": True}, GlobalQSGD(rotate=True)),
        (GlobalQSGD(), {"rotate": True, "bucket_size": 16384}, GlobalQSGD(rotate=True)),
        (GlobalQSGD(bucket_size=512), {"bits": 4}, GlobalQSGD(4, bucket_size=512)),
        (GlobalQSGD(rotate=True), {"bits": 4}, GlobalQSGD(4, rotate=True)),
        (EDEN(), {"nmse": 0.02}, EDEN(nmse=0.02)),
        (EDEN(4, server_bits=4), {"nmse": 0.1}, EDEN(nmse=0.1)),
        (EDEN(nmse=0.1), {"nmse": 0.2}, EDEN(nmse=0.2)),
        (EDEN(nmse=0.1), {"bits": 4}, EDEN(4)),
        (EDEN(nmse=0.1, trellis=True), {"nmse": None}, EDEN(trellis=True)),
        (EDEN(2, server_bits=4), {"bits": 1}, EDEN(1, server_bits=4)),
    ],
)
def test_defaults_follow_from_the_overriding_arguments(
    scheme: Scheme, changed: dict, expected: Scheme
) -> None:
    policy = Policy(scheme, overrides={"head.*": changed})
    assert [policy.scheme_for(name, 5000) for name in NAMES] == [scheme, scheme, expected]
    again = Policy(scheme, overrides=policy.given_overrides())
    assert again.scheme_for("head.weight", 5000) == expected
    nested = Policy(Hierarchical(scheme), overrides={"head.*": changed})
    assert nested.scheme_for("head.weight", 5000) == Hierarchical(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Policy(QSGD(), min_elements=-1), "min_elements=-1: use an integer from 0"),
        (lambda: Policy(QSGD(), min_elements=True), "min_elements=True: use an integer"),
        (lambda: Policy(QSGD(), min_elements=1.5), "min_elements=1.5: use an integer"),
        (lambda: Policy(QSGD(), exclude=["a", 3]), r"exclude=\['a', 3\]: use names or patterns, not 3"),
        (
            lambda: Policy(NUQSGD(), overrides={"head.*": {"bit": 8}}),
            r"overrides\['head.\*'\]: NUQSGD has no argument 'bit'; use bits, norm, bucket_size, coding, exchange",
        ),
        (
            lambda: Policy(BinSGDM(), overrides={"w": {"bits": 8}}),
            r"overrides\['w'\]: BinSGDM has no argument 'bits'; use server_bits",
        ),
        (
            lambda: Policy(QSGD(), overrides={"w": 8}),
            r"overrides\['w'\]=8: use a mapping such as \{'bits': 8\}",
        ),
        (
            lambda: Policy(QSGD(), overrides={"w": {"bits": 0}}),
            r"overrides\['w'\]: bits=0: use an integer from 2 to 16",
        ),
        (
            lambda: Policy(GlobalQSGD(), overrides={"w": {"bucket_size": 100}}),
            r"overrides\['w'\]: bucket_size=100: use a multiple of 32",
        ),
        (
            lambda: Policy(GlobalQSGD(bucket_size=512), overrides={"w": {"rotate": True}}),
            r"overrides\['w'\]: bucket_size=512: rotate=True works only with bucket_size=16384",
        ),
        (
            lambda: Policy(EDEN(), overrides={"w": {"bits": 2, "nmse": 0.1}}),
            r"overrides\['w'\]: nmse=0.1 chooses the bits; leave out either bits=2 or nmse",
        ),
    ],
)
def test_bad_arguments_are_named_with_what_would_work(call, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        call()


def test_patterns_that_match_nothing_are_refused() -> None:
    Policy(QSGD(), exclude="*.bias", overrides={"head.*": {"bits": 8}}).check_names(NAMES)
    with pytest.raises(
        ValueError, match=r"^exclude: '\*\.bais' matches no parameter; the parameters are 'conv.weight'"
    ):
        Policy(QSGD(), exclude="*.bais").check_names(NAMES)
    with pytest.raises(ValueError, match=r"^overrides: 'haed' matches no parameter"):
        Policy(QSGD(), overrides={"haed": {"bits": 8}}).check_names(NAMES)


def test_too_few_bits_are_found_in_overrides_too() -> None:
    Policy(GlobalQSGD(5)).check_workers(8)
    with pytest.raises(ValueError, match="8 workers need bits >= 5 with norm='max'"):
        Policy(GlobalQSGD(8), overrides={"w": {"bits": 3}}).check_workers(8)
    with pytest.raises(ValueError, match="8 workers need bits >= 5 with norm='max'"):
        Policy(GlobalQSGD(3)).check_workers(8)
    Policy(QSGD(2)).check_workers(10**6)
