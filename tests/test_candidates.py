"""Which methods of the registry are worth a trial."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import by_default

from horovod_quant.autotune import candidates
from horovod_quant.autotune.candidates import MOST_NMSE
from horovod_quant.frontends import methods
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import Hierarchical
from horovod_quant.transports.traffic import ring_allreduce_bytes


def found(size: int, **options: Any) -> tuple[candidates.Candidate, ...]:
    on_device = options.pop("on_device", False)
    workers, hierarchical = Workers(0, size, **options), "local_size" in options
    return candidates.find(MOST_NMSE, workers, hierarchical, candidates.usable(), on_device)


@pytest.mark.parametrize("size", by_default([4], [2, 3, 4, 16, 64, 256]))
def test_each_keeps_the_error_by_the_fewest_bits_and_sends_less_than_float32(size: int) -> None:
    chosen = found(size)
    assert 3 <= len(chosen) <= candidates.MOST
    assert [each.bits_sent for each in chosen] == sorted(each.bits_sent for each in chosen)
    for candidate in chosen:
        assert candidate.nmse == candidate.scheme.expected_nmse(size, size) <= MOST_NMSE
        assert candidate.scheme.unbiased
        assert candidate.bits_sent < ring_allreduce_bytes(32, size)
        bits = re.search("-([0-9]+)", candidate.name)
        try:
            narrower = methods.parse(candidate.name.replace(bits[0], f"-{int(bits[1]) - 1}", 1)).scheme()
            narrower.check_workers(size)
        except ValueError:
            continue
        assert narrower.expected_nmse(size, size) > MOST_NMSE


def test_different_ways_through_the_network_are_tried() -> None:
    schemes = [candidate.scheme.for_workers(Workers(0, 4)) for candidate in found(4)]
    wires = [[each.request.__name__ for each in scheme.collectives] for scheme in schemes]
    for wire in (["Allgather"], ["Alltoall", "Allgather"], ["Allreduce", "Allreduce"]):
        assert wire in wires, wires


def test_more_work_has_to_save_bytes() -> None:
    """With a trellis EDEN keeps an nmse of 0.13 with 2 bits, without one with 3; one of 0.09 takes 3 anyway."""
    workers = Workers(0, 4)

    def eden(max_nmse: float) -> list[str]:
        every = candidates.find(max_nmse, workers, False, candidates.usable())
        return [each.name for each in every if each.name.startswith("eden")]

    assert eden(0.13) == ["eden-2-trellis"]
    assert eden(0.09) == ["eden-3"]


def test_a_scheme_that_needs_the_host_replaces_none_that_does_not() -> None:
    assert any(each.scheme.host_requirement() for each in found(16))
    names = {each.name for each in found(16)}
    assert any(name.startswith("eden") for name in names), names
    assert not any(each.scheme.host_requirement() for each in found(16, on_device=True))


@pytest.mark.extended
def test_hierarchical_ones_are_judged_by_what_hosts_exchange() -> None:
    for candidate in found(16, local_size=8):
        assert isinstance(candidate.scheme, Hierarchical)
        assert candidate.nmse == candidate.scheme.inner.expected_nmse(2, 2)


def test_what_travels_inside_a_host_counts() -> None:
    workers, usable = Workers(0, 8, local_size=4), candidates.usable()
    for given in ({}, {"inside": 8}):
        named = candidates.named("qsgd-4", workers, True, **given)
        same = candidates.find(MOST_NMSE, workers, True, usable, **given)
        assert all(each.scheme.inside == given.get("inside", "float32") for each in (named, *same))
        # In and out, 3 of 4 elements each; between two hosts a quarter of the codes.
        inside, codes = 8 + 32 / 256 if given else 32, 4 + 32 / 256
        assert named.bits_sent == pytest.approx(3 / 4 * (inside + 2 * codes) + codes / 4, rel=0.01)


@dataclass(frozen=True)
class Sloppy(Scheme):
    """Unbiased, of one width, and does not tell its error."""

    bits: int = 4

    unbiased = True
    collectives = ()

    def begin(self, gradients: Any, workers: Any, kernels: Any) -> Any:
        return (yield)


def test_a_registered_scheme_that_does_not_tell_its_error_or_is_biased_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = candidates.usable()
    assert {kind.__name__ for kind in before} == {"QSGD", "NUQSGD", "GlobalQSGD", "EDEN"}
    monkeypatch.setitem(registry._registered, "Sloppy", Sloppy)
    assert Sloppy in candidates.usable()
    monkeypatch.setattr(candidates, "work_of", lambda *_: pytest.fail("it was tried"))
    assert not candidates.find(MOST_NMSE, Workers(0, 4), False, ())
    monkeypatch.setattr(Sloppy, "unbiased", False)
    assert Sloppy not in candidates.usable()


def test_names_are_full_ones_without_repetition() -> None:
    assert candidates.check_names(["qsgd-04", "eden-3", "qsgd-4"]) == ("qsgd-4", "eden-3")
    four = candidates.named("global-qsgd-5", Workers(0, 4), False)
    assert (four.name, four.scheme.bits) == ("global-qsgd-5", 5)
    with pytest.raises(ValueError, match="the sum of 64 workers' integers does not fit"):
        candidates.named("global-qsgd-5", Workers(0, 64), False)


def test_names_that_do_not_support_the_workers_are_left_out_if_others_do() -> None:
    (kept,), left_out = candidates.possible(["global-qsgd-5", "eden-3"], Workers(0, 64), False)
    assert kept.name == "eden-3"
    (reason,) = left_out
    assert reason.startswith("global-qsgd-5 (bits=5: the sum of 64 workers' integers does not fit")
    assert candidates.possible(["global-qsgd-5"], Workers(0, 4), False)[1] == []
    with pytest.raises(ValueError, match="bits=5: the sum of 64 workers' integers does not fit"):
        candidates.possible(["global-qsgd-5", "global-qsgd-4"], Workers(0, 64), False)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("eden-3", "methods='eden-3': use a list of names"),
        ([], "methods=[]: use a list of names"),
        ([3], "methods=[3]: use a list of names"),
        (["edne-3"], "methods: there is no method 'edne-3'; did you mean 'eden-3'?"),
        (["eden-9"], "methods: 'eden-9': bits=9"),
        (["none"], "'none' is always tried"),
        (["fp16"], "'fp16' is Horovod's own"),
        (["binsgdm"], "'binsgdm' belongs to an optimizer"),
    ],
)
def test_names_of_no_use_are_refused(names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        candidates.check_names(names)
