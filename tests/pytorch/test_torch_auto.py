"""What of Auto needs no other worker. (The rest is in tests/parallel/torch_auto.py.)"""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch

import horovod_quant.torch as hvq
from horovod_quant.autotune.trial import Report
from horovod_quant.schemes.base import Workers
from horovod_quant.torch.participation import ParticipationProbe, probe_bound, with_probe
from horovod_quant.torch.tuning_session import TuningSession


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_nmse": 0}, "max_nmse=0: use a positive number, for example 0.09"),
        ({"max_nmse": "0.1"}, "max_nmse='0.1': use a positive number"),
        ({"max_nmse": float("nan")}, "max_nmse=nan: use a positive number"),
        ({"max_nmse": True}, "max_nmse=True: use a positive number"),
        ({"max_nmse": 1e-18}, "max_nmse=1e-18: no method has so small an nmse, even with two workers"),
        (
            {"methods": ["GlobalQSGD"]},
            "methods: there is no method 'GlobalQSGD'; did you mean 'global-qsgd-8'?",
        ),
        ({"again_after": -1}, "again_after=-1: use an integer from 0"),
        ({"methods": "eden-3"}, "methods='eden-3': use a list of names"),
        ({"methods": ["eden-9"]}, "methods: 'eden-9': bits=9"),
        ({"methods": ["global-qsgd-2"]}, "bits=2: the sum of 2 workers' integers does not fit"),
        ({"min_elements": -1}, "min_elements=-1"),
        ({"kernels": "cuda"}, "kernels='cuda': no such backend"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        hvq.Auto(**arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("overrides", "'overrides'; use max_nmse"),
        ("scheme", "'scheme'"),
        ("again_afte", "mean 'again_after'"),
    ],
)
def test_arguments_that_it_does_not_have_are_refused(argument: str, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        hvq.Auto(**{argument: {}})


def test_it_prints_what_makes_it_and_copies_keep_that() -> None:
    auto = hvq.Auto(0.04, methods=["eden-3", "qsgd-4"], again_after=500, exclude="*.bias", seed=3)
    shown = "Auto(max_nmse=0.04, exclude=('*.bias',), seed=3, methods=('eden-3', 'qsgd-4'), again_after=500)"
    assert repr(auto) == shown
    again = eval(shown, {"Auto": hvq.Auto})
    assert (repr(again), again._arguments()) == (shown, auto._arguments())
    auto.load_state_dict(
        {"exchanges": {}, "choices": {"a": {"method": "eden-3", "workers": 4}}, "version": 2}
    )
    for other in (pickle.loads(pickle.dumps(auto)), copy.deepcopy(auto)):
        assert repr(other) == repr(auto)
        assert other.state_dict()["choices"] == {}
        assert other.report() == Report(None)
    assert len(pickle.dumps(auto)) < 1000
    assert repr(hvq.Auto()) == "Auto()"


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"exchanges": {}},
        {"exchanges": {}, "choices": []},
        {"exchanges": {}, "choices": {"a": "eden-3"}},
        {"exchanges": {}, "choices": {"a": {"method": "eden-3"}}},
        {"exchanges": {}, "choices": {"a": {"method": "eden-3", "workers": "4"}}},
        {"exchanges": {"a": -1}, "choices": {}},
        {"exchanges": {}, "choices": {}, "version": "2"},
        [("choices", {})],
    ],
)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    auto = hvq.Auto()
    with pytest.raises(ValueError, match="use what a"):
        auto.load_state_dict(state)
    assert auto.state_dict() == {"exchanges": {}, "version": 2, "choices": {}}


def test_a_state_comes_back() -> None:
    auto = hvq.Auto()
    own = TuningSession(auto, "a", {"a": 3000, "b": 20})
    state = {"exchanges": {"a": 3}, "version": 2, "choices": {own.key: {"method": "eden-3", "workers": 4}}}
    auto.load_state_dict(state)
    assert auto.state_dict() == state
    others = [
        TuningSession(auto, "a", {"a": 3000, "b": 30}),
        TuningSession(auto, "a", {"a": 3000}),
        TuningSession(auto, "b", {}),
    ]
    assert (auto.known_choice(own, 4), auto.known_choice(own, 5)) == ("eden-3", None)
    assert [auto.known_choice(other, 4) for other in others] == [None] * 3


def test_a_state_of_the_first_release_comes_back_once() -> None:
    auto = hvq.Auto()
    one, other = TuningSession(auto, "a", {"a": 3000}), TuningSession(auto, "a", {"a": 2000})
    auto.load_state_dict({"exchanges": {}, "choices": {"a": {"method": "eden-3", "workers": 4}}})
    assert auto.known_choice(one, 4) == "eden-3-server3"  # what eden-3 meant then
    auto.keep(one, Report("eden-3", (), 4))
    assert (auto.known_choice(one, 4), auto.known_choice(other, 4)) == ("eden-3", None)


def test_the_former_name_of_the_limit_was_a_root() -> None:
    with pytest.warns(DeprecationWarning, match="max_nmse=...., of its square: 0.3 is 0.09") as caught:
        auto = hvq.Auto(max_error=0.3)
    assert (auto.max_nmse, repr(auto)) == (0.09, "Auto()")
    assert caught[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="max_nmse"),
        pytest.raises(ValueError, match="use a positive number"),
    ):
        hvq.Auto(max_error=-0.3)
    with pytest.raises(TypeError, match="two names of one argument"):
        hvq.Auto(max_nmse=0.04, max_error=0.2)


def test_methods_that_a_resize_makes_impossible_are_left_out_with_one_warning() -> None:
    auto = hvq.Auto(methods=["global-qsgd-5", "eden-3"])

    def tried(workers: int, first: bool = True) -> list[str]:
        return [each.name for each in auto._methods_for(Workers(0, workers), False, first)]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert tried(4) == ["global-qsgd-5", "eden-3"]
        assert tried(64, first=False) == ["eden-3"]
        assert not warned
        assert tried(64) == tried(64) == ["eden-3"]
    (message,) = (str(each.message) for each in warned)
    assert message.startswith(
        "Auto leaves out methods that 64 workers cannot use: global-qsgd-5 (bits=5: the sum of"
    )
    only = hvq.Auto(methods=["global-qsgd-5"])
    with pytest.raises(ValueError, match="bits=5: the sum of 64 workers' integers does not fit"):
        only._methods_for(Workers(0, 64), False, True)


def test_the_probe_is_a_small_vector_and_another_one_when_it_is_gone() -> None:
    parameters = [
        (f"p{i}", torch.zeros(shape)) for i, shape in enumerate([(2, 1), (9,), (7,), (7,), (50, 40)])
    ]
    probe = ParticipationProbe()

    def chosen() -> list[str]:
        return [name for name, parameter in parameters if probe.is_of(parameter)]

    probe.choose(parameters)
    assert chosen() == ["p2"]
    probe.choose(reversed(parameters))
    assert chosen() == ["p2"]
    probe.choose(parameters[:2] + parameters[3:])
    assert chosen() == ["p3"]
    probe.choose(parameters[:1])
    assert chosen() == ["p0"]
    probe.choose([])
    assert chosen() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_worker_less_is_noticed_whatever_the_type(dtype: torch.dtype) -> None:
    """As Horovod computes an average: a sum in the type, times 1 / n, with all workers and with one missing."""
    from horovod.torch.mpi_ops import Average, Sum

    for size in (2, 3, 64, 100):
        for op in (Average, Sum):
            call: Any = type(
                "Call", (), {"op": op, "process_set": type("Set", (), {"size": lambda _, n=size: n})()}
            )()
            for present in (size, size - 1):
                own = with_probe(torch.full((3, 2), float("nan"), dtype=dtype))
                assert own.shape == (7,)
                total = own * present * (1 / size if op is Average else 1)
                assert (float(total[-1]) > probe_bound(call)) == (present == size), (size, present)
