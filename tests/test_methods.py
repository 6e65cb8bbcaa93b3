from __future__ import annotations

import re

import pytest

from horovod_quant import schemes
from horovod_quant.frontends import methods
from horovod_quant.frontends.frontend import GROUP_BYTES
from horovod_quant.frontends.methods import compared, families, parse

SCHEMES = {
    "qsgd-4": schemes.QSGD(4, "l2", 1024),
    "qsgdinf-2": schemes.QSGD(2, "max", 1024),
    "nuqsgd-8": schemes.NUQSGD(8),
    "qsgd-alltoall-4": schemes.QSGD(4, "l2", 1024, exchange="alltoall"),
    "qsgdinf-alltoall-4": schemes.QSGD(4, "max", 1024, exchange="alltoall"),
    "nuqsgd-alltoall-4": schemes.NUQSGD(4, exchange="alltoall"),
    "global-qsgd-8": schemes.GlobalQSGD(8),
    "global-qsgd-l2-16": schemes.GlobalQSGD(16, norm="l2"),
    "global-qsgd-exp-4": schemes.GlobalQSGD(4, levels="exponential"),
    "global-qsgd-rotated-6": schemes.GlobalQSGD(6, rotate=True),
    "eden-2": schemes.EDEN(2),
    "eden-trellis-3": schemes.EDEN(3, trellis=True),
    "binsgdm": schemes.BinSGDM(),
    "none": None,
    "fp16": None,
}


@pytest.mark.parametrize("name", SCHEMES)
def test_names_mean_schemes(name: str) -> None:
    method = parse(name)
    assert method.name == name
    assert method.scheme() == SCHEMES[name]


def test_every_family_has_a_name_here_and_the_defaults_are_methods() -> None:
    assert {re.sub("-[0-9]+$", "", name) for name in SCHEMES} == {
        family.removesuffix("-BITS") for family in families()
    }
    assert [parse(name).name for name in compared()] == compared()
    assert compared()[:2] == [methods.NONE, methods.FP16]


def test_a_method_has_one_name() -> None:
    assert parse("qsgd-04") == parse("qsgd-4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "there is no method 'nonsense'; use none, fp16, qsgd-BITS"),
        ("", "there is no method ''"),
        ("QSGD-4", "there is no method"),
        ("fp16-4", "there is no method"),
        ("binsgdm-1", "there is no method"),
        ("global-qsgd", "'global-qsgd' lacks the number of bits; use global-qsgd-4"),
        ("global-qsgd-exp", "use global-qsgd-exp-4"),
        ("qsgd-1", "'qsgd-1': bits=1: use an integer from 2 to 16"),
        ("nuqsgd-9", "from 2 to 8"),
        ("qsgd-" + "9" * 5000, "there is no method"),
    ],
)
def test_other_names_are_explained(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="^(there is|')") as caught:
        parse(name)
    assert message in str(caught.value)


def test_compression_is_horovods_or_a_compressor_with_options() -> None:
    hvd = pytest.importorskip("horovod.torch")
    hvq = pytest.importorskip("horovod_quant.torch")
    assert parse("none").compression(hvd, hvq) is hvd.Compression.none
    assert parse("fp16").compression(hvd, hvq, seed=1) is hvd.Compression.fp16
    compressor = parse("global-qsgd-l2-4").compression(hvd, hvq, group_bytes=GROUP_BYTES, seed=1)
    assert isinstance(compressor, hvq.GlobalQSGD)
    assert compressor.policy.scheme == schemes.GlobalQSGD(4, norm="l2")
    assert (compressor.group_bytes, compressor.seed) == (GROUP_BYTES, 1)
    assert isinstance(parse("binsgdm").compression(hvd, hvq), hvq.BinSGDM)
