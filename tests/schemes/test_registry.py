"""Schemes from elsewhere: what is registered, under which names, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import horovod_quant
from horovod_quant import schemes
from horovod_quant.frontends import methods
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leaves the registry as it was."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


class Sending(Scheme):
    """What a scheme needs."""

    collectives = ()

    def begin(self, gradients: Any, workers: Any, kernels: Any) -> Any:
        yield from ()


@dataclass(frozen=True)
class Plain(Sending):
    share: float = 0.5


@dataclass(frozen=True)
class Named(Sending):
    bits: int = 4
    mode: str = "a"

    presets = {"named-b": {"mode": "b"}, "named-2": {"bits": 2}}
    compared = ("named-b-3",)


def test_the_packages_schemes_are_registered_in_the_order_of_help_texts() -> None:
    assert registry.registered() == registry.own() == [
        schemes.QSGD, schemes.NUQSGD, schemes.GlobalQSGD, schemes.EDEN, schemes.BinSGDM
    ]  # fmt: skip
    assert registry.problems() == []


def test_a_scheme_that_declares_nothing_is_a_method_of_its_name() -> None:
    assert horovod_quant.register(Plain) is Plain
    assert registry.registered()[-1] is Plain
    assert "Plain" not in [kind.__name__ for kind in registry.own()]
    assert methods.families()[-1] == "plain"
    assert methods.parse("plain").scheme() == Plain()
    assert methods.examples()["plain"] == Plain()
    assert "plain" not in methods.compared()
    with pytest.raises(ValueError, match="there is no method 'plain-4'; did you mean 'plain'"):
        methods.parse("plain-4")
    assert Plain().expected_nmse(3, 3) is Plain().levels_left(3, 3) is Plain().host_requirement() is None


def test_a_scheme_of_version_0_1_states_the_root() -> None:
    @dataclass(frozen=True)
    class Older(Sending):
        def relative_error(self, workers: int, hosts: int) -> float | None:
            return 0.5 if workers > 1 else None

    assert (Older().expected_nmse(4, 4), Older().expected_nmse(1, 1)) == (0.25, None)


def test_names_and_their_bits() -> None:
    horovod_quant.register(Named)
    assert methods.families()[-2:] == ["named-b-BITS", "named-2"]
    assert methods.parse("named-b-7").scheme() == Named(7, "b")
    assert methods.parse("named-2").scheme() == Named(2, "a")
    assert methods.compared()[-1] == "named-b-3"
    with pytest.raises(ValueError, match="'named-b' lacks the number of bits; use named-b-4"):
        methods.parse("named-b")
    with pytest.raises(ValueError, match="no method 'named-2-2'"):
        methods.parse("named-2-2")


def test_a_scheme_whose_name_does_not_tell_enough() -> None:
    @horovod_quant.register
    @dataclass(frozen=True)
    class Demanding(Sending):
        share: float

    assert "demanding" not in methods.examples()
    with pytest.raises(
        ValueError, match="'demanding': Demanding needs share, which its name does not specify"
    ):
        methods.parse("demanding")


def test_a_scheme_that_is_derived_from_another_has_names_of_its_own() -> None:
    @horovod_quant.register
    @dataclass(frozen=True)
    class Finer(schemes.QSGD):
        bits: int = 8

    assert methods.families()[-1] == "finer-BITS"
    assert methods.parse("finer-6").scheme() == Finer(6)
    assert methods.compared().count("qsgd-4") == 1
    assert Finer.unbiased


def test_a_class_that_is_made_again_takes_the_place_of_the_one_before() -> None:
    def make() -> type[Scheme]:
        @horovod_quant.register
        @dataclass(frozen=True)
        class Again(Sending):
            pass

        return Again

    first, second = make(), make()
    assert registry.find("Again") is second is not first


@dataclass(frozen=True)
class _Base(Sending):
    share: float = 0.5


def changed(name: str = "Other", **contents: Any) -> type:
    return type(name, (_Base,), {"__module__": __name__, **contents})


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (5, TypeError, "5: register a class derived from"),
    (int, TypeError, "int: register a class derived from"),
    (Plain(), TypeError, "Plain(share=0.5): register a class"),
    (type("Bare", (Sending,), {}), TypeError, "Bare: put @dataclass(frozen=True) before the class"),
    (
        dataclass(frozen=True)(type("Idle", (Scheme,), {})),
        TypeError,
        "Idle.collectives: define it, or reduction; see",
    ),
    (changed("Compressor"), ValueError, "Compressor: the frontends already have a class of that name"),
    (changed("QSGD"), ValueError, "QSGD: horovod_quant.schemes.qsgd already has a scheme of that name"),
    (changed(presets={"qsgd": {}}), ValueError, "Other.presets: QSGD already has 'qsgd'; use other names"),
    (changed(presets={"Other": {}}), ValueError, "Other.presets: 'Other' is not a name; use small letters"),
    (changed(presets={"fp16": {}}), ValueError, "Other.presets: 'fp16' is not a name"),
    (
        changed(compared=("other-3", "qsgd-4")),
        ValueError,
        "Other.compared: 'qsgd-4' is not one of its methods",
    ),
    (changed(presets={"o": {"bits": 3}}), ValueError, "Other.presets['o']: no argument 'bits'; use share"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_cannot_be_registered(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        horovod_quant.register(given)
    assert str(caught.value).startswith(message)
    assert registry.registered() == registry.own()


def test_fields_that_would_be_mixed_up() -> None:
    @dataclass(frozen=True)
    class Seeded(Sending):
        seed: int = 0

    with pytest.raises(
        ValueError, match="Seeded.seed: compressors already have an argument of that name; rename"
    ):
        horovod_quant.register(Seeded)

    @dataclass(frozen=True)
    class Typed(Sending):
        host_only: bool = True  # type: ignore[misc]

    with pytest.raises(
        TypeError, match="Typed.host_only: declare it without a type; with one it is an argument"
    ):
        horovod_quant.register(Typed)


def test_fields_that_are_no_values_are_refused() -> None:
    frontend = pytest.importorskip("horovod_quant.torch")

    @dataclass(frozen=True)
    class Listed(Sending):
        layers: Any = field(default_factory=list)

    with pytest.raises(ValueError, match="unhashable type: 'list'; use tuples and numbers"):
        frontend.Compressor(Listed())
    with pytest.raises(TypeError, match="Bare: put @dataclass.frozen=True. before the class"):
        frontend.Compressor(type("Bare", (Sending,), {})())


@pytest.mark.skipif(sys.version_info < (3, 10), reason="dataclasses have no kw_only")
def test_fields_by_name_alone_and_fields_without_defaults() -> None:
    frontend = pytest.importorskip("horovod_quant.torch")

    @horovod_quant.register
    @dataclass(frozen=True)
    class Chosen(Sending):
        share: float
        mode: str = field(default="a", kw_only=True)

    made = frontend.Chosen(0.25, mode="b", seed=3)
    assert (made.policy.scheme, made.seed) == (Chosen(0.25, mode="b"), 3)
    assert repr(made) == "Chosen(share=0.25, mode='b', seed=3)"
    with pytest.raises(TypeError, match="Chosen..: missing a required argument: 'share'"):
        frontend.Chosen()
    with pytest.raises(TypeError, match="Chosen..: too many positional arguments"):
        frontend.Chosen(0.25, "b")


def test_an_optimizer_that_a_frontend_does_not_have() -> None:
    frontend = pytest.importorskip("horovod_quant.torch")

    @horovod_quant.register
    @dataclass(frozen=True)
    class Adaptive(Sending):
        own_optimizer = "OneBitAdam"

    with pytest.raises(
        AttributeError,
        match="Adaptive needs the optimizer OneBitAdam, which horovod_quant.torch does not",
    ):
        frontend.Adaptive  # noqa: B018


INSTALLED = """
from dataclasses import dataclass
from horovod_quant.schemes.base import Scheme

@dataclass(frozen=True)
class FromElsewhere(Scheme):
    share: float = 0.5
    collectives = ()

    def begin(self, gradients, workers, kernels):
        yield from ()
"""
ENTRIES = """[horovod_quant.schemes]
broken = installed_schemes:NoSuchScheme
other = installed_schemes:FromElsewhere
"""


def test_installed_packages_schemes_are_found_when_names_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "installed_schemes.py").write_text(INSTALLED)
    folder = tmp_path / "installed_schemes-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-schemes\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    program = (
        "import sys, horovod_quant.frontends.methods as methods; assert 'installed_schemes' not in sys.modules; "
        "methods.parse('fp16'); assert 'installed_schemes' not in sys.modules; "
        "print(methods.parse('fromelsewhere').scheme(), methods.parse('qsgd-4').class_name); "
        "from horovod_quant.cli.findings.installed import scheme_findings; "
        "[print(finding.mark, finding.line) for finding in scheme_findings()]"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found, ours, theirs = done.stdout.splitlines()
    assert found == "FromElsewhere(share=0.5) QSGD", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    problem = (
        "the entry point broken = installed_schemes:NoSuchScheme of horovod_quant.schemes cannot be used: "
        "AttributeError: module 'installed_schemes' has no attribute 'NoSuchScheme'"
    )
    assert problem in done.stderr
    assert ours == "ok schemes of other packages: FromElsewhere of installed_schemes"
    assert theirs == f"problem {problem}; repair or remove its package"
