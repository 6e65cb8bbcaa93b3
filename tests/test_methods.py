from __future__ import annotations

import re
import warnings

import pytest

from horovod_quant import schemes
from horovod_quant.frontends import former_names, methods
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.frontends.methods import compared, families, parse
from horovod_quant.schemes import registry

SCHEMES = {
    "qsgd-4": schemes.QSGD(bits=4),
    "qsgd-2-l2": schemes.QSGD(2, norm="l2"),
    "qsgd-4-alltoall": schemes.QSGD(4, exchange="alltoall"),
    "nuqsgd-8": schemes.NUQSGD(8),
    "global-qsgd-8": schemes.GlobalQSGD(8),
    "global-qsgd-16-l2": schemes.GlobalQSGD(16, norm="l2"),
    "global-qsgd-4-exponential": schemes.GlobalQSGD(4, levels="exponential"),
    "global-qsgd-6-rotate": schemes.GlobalQSGD(6, rotate=True),
    "eden-3": schemes.EDEN(),
    "eden-3-trellis": schemes.EDEN(3, trellis=True),
    "binsgdm": schemes.BinSGDM(),
    "none": None,
    "fp16": None,
}

SPELLED = {
    "qsgd-4-l2-bucket1024-allgather": schemes.QSGD(4, "l2", 1024, exchange="allgather"),
    "qsgd-5-elias-omega-independent": schemes.QSGD(5, coding="elias-omega", rounding="independent"),
    "qsgd-5-elias": schemes.QSGD(5, coding="elias"),
    "nuqsgd-4-max-alltoall-server6": schemes.NUQSGD(4, "max", exchange="alltoall", server_bits=6),
    "eden-2-server4-trellis": schemes.EDEN(2, server_bits=4, trellis=True),
    "eden-3-server3": schemes.EDEN(3, server_bits=3),
    "binsgdm-server3": schemes.BinSGDM(server_bits=3),
}

FORMER = {
    "qsgdinf-4": ("qsgd-4-bucket1024-allgather", schemes.QSGD(4, "max", 1024, exchange="allgather")),
    "qsgdinf-alltoall-4": ("qsgd-4-bucket1024-alltoall", schemes.QSGD(4, "max", 1024, exchange="alltoall")),
    "qsgd-alltoall-8": ("qsgd-8-l2-bucket1024-alltoall", schemes.QSGD(8, "l2", 1024, exchange="alltoall")),
    "nuqsgd-alltoall-4": ("nuqsgd-4-alltoall", schemes.NUQSGD(4, exchange="alltoall")),
    "global-qsgd-l2-8": ("global-qsgd-8-l2", schemes.GlobalQSGD(8, norm="l2")),
    "global-qsgd-exp-4": ("global-qsgd-4-exponential", schemes.GlobalQSGD(4, levels="exponential")),
    "global-qsgd-rotated-8": ("global-qsgd-8-rotate", schemes.GlobalQSGD(rotate=True)),
    "eden-trellis-3": ("eden-3-server3-trellis", schemes.EDEN(3, server_bits=3, trellis=True)),
}
"""Names that version 0.1.0 had, and how they are spelled now."""

ANOTHER = {
    "qsgd-4": ("qsgd-4-l2-bucket1024-allgather", schemes.QSGD(4, "l2", 1024, exchange="allgather")),
    "nuqsgd-4": ("nuqsgd-4-allgather", schemes.NUQSGD(4, exchange="allgather")),
    "eden-3": ("eden-3-server3", schemes.EDEN(3, server_bits=3)),
}
"""Names whose meaning has changed: what they meant."""


@pytest.mark.parametrize("name", SCHEMES)
def test_names_mean_schemes(name: str) -> None:
    method = parse(name)
    assert method.name == name
    assert method.scheme() == SCHEMES[name]


@pytest.mark.parametrize("name", SPELLED)
def test_what_differs_from_the_defaults_is_spelled_out(name: str) -> None:
    method = parse(name)
    assert (method.name, method.scheme()) == (name, SPELLED[name])


def test_a_method_name_means_the_defaults_of_its_class() -> None:
    for kind in (schemes.QSGD, schemes.NUQSGD, schemes.GlobalQSGD, schemes.EDEN, schemes.BinSGDM):
        (short,) = registry.families_of(kind)
        name = f"{short}-{kind().bits}" if hasattr(kind(), "bits") else short
        assert parse(name).scheme() == kind()
        assert name in compared()


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_is_an_alias_with_a_warning(name: str) -> None:
    spelled, scheme = FORMER[name]
    with pytest.warns(FutureWarning, match=f"the method '{name}' is now called '{spelled}'") as caught:
        method = parse(name)
    assert (method.name, method.scheme()) == (spelled, scheme)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ANOTHER)
def test_a_name_with_another_meaning_warns_once_with_the_spelling_of_what_it_meant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hvq = pytest.importorskip("horovod_quant.torch")
    monkeypatch.setattr(former_names, "_warned", set())
    with pytest.warns(FutureWarning, match=f"what it meant in version 0.1 is called '{ANOTHER[name][0]}'"):
        made = hvq.Compressor(name)
    assert made.policy.scheme == parse(name).scheme() == SCHEMES.get(name, type(parse(name).scheme())())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvq.Compressor(name)


@pytest.mark.parametrize("name", [*FORMER, *ANOTHER])
def test_a_file_of_then_is_read_with_the_meaning_of_then(name: str) -> None:
    spelled, scheme = {**FORMER, **ANOTHER}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = parse(name, version=1, workers=4)
        assert parse(spelled, version=former_names.VERSION).scheme() == scheme
    assert (method.name, method.scheme()) == (spelled, scheme)


def test_edens_reducers_of_then_depended_on_the_workers() -> None:
    old = {workers: parse("eden-2", version=1, workers=workers).name for workers in (2, 4, 12, 40, 100)}
    assert old == {2: "eden-2", 4: "eden-2-server2", 12: "eden-2", 40: "eden-2-server3", 100: "eden-2"}


def test_every_family_has_a_name_here_and_the_defaults_are_methods() -> None:
    assert {re.sub("-[0-9]+", "", name) for name in SCHEMES} == {
        family.replace("-BITS", "") for family in families()
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
        ("QSGD-4", "there is no method 'QSGD-4'; did you mean 'qsgd-4'?"),
        ("GlobalQSGD", "there is no method 'GlobalQSGD'; did you mean 'global-qsgd-8'?"),
        ("QSGDinf", "did you mean 'qsgd-4'?"),
        ("edne-3", "did you mean 'eden-3'?"),
        ("EDEN", "did you mean 'eden-3'?"),
        ("qsgd8", "did you mean 'qsgd-8'?"),
        ("qsgd-4-l2-max", "there is no method 'qsgd-4-l2-max'"),
        ("fp16-4", "there is no method"),
        ("binsgdm-1", "there is no method 'binsgdm-1'; did you mean 'binsgdm'?"),
        ("global-qsgd", "'global-qsgd' lacks the number of bits; use global-qsgd-8"),
        ("global-qsgd-exponential", "did you mean 'global-qsgd-8-exponential'?"),
        ("qsgd-1", "'qsgd-1': bits=1: use an integer from 2 to 16"),
        ("nuqsgd-9", "from 2 to 8"),
        ("qsgd-" + "9" * 5000, "there is no method"),
    ],
)
def test_other_names_are_explained(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="^(there is|')") as caught:
        parse(name)
    assert message in str(caught.value)
    suggested = re.search(r"did you mean '(.*)'", str(caught.value))
    if suggested:
        assert parse(suggested[1]).name == suggested[1]


def test_compression_is_horovods_or_a_compressor_with_options() -> None:
    hvd = pytest.importorskip("horovod.torch")
    hvq = pytest.importorskip("horovod_quant.torch")
    assert parse("none").compression(hvd, hvq) is hvd.Compression.none
    assert parse("fp16").compression(hvd, hvq, seed=1) is hvd.Compression.fp16
    compressor = parse("global-qsgd-4-l2").compression(hvd, hvq, group_bytes=GROUP_BYTES, seed=1)
    assert isinstance(compressor, hvq.GlobalQSGD)
    assert compressor.policy.scheme == schemes.GlobalQSGD(4, norm="l2")
    assert (compressor.group_bytes, compressor.seed) == (GROUP_BYTES, 1)
    assert isinstance(parse("binsgdm").compression(hvd, hvq), hvq.BinSGDM)
