"""What is often given by mistake gets a message that says what to do, in both frontends."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from horovod_quant import schemes

FRONTENDS = ["horovod_quant.torch", "horovod_quant.tensorflow"]
every_frontend = pytest.mark.parametrize("frontend", FRONTENDS)

MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda hvq: hvq.QSGD(bit=8), "QSGD() has no argument 'bit'; did you mean 'bits'?"),
    (
        lambda hvq: hvq.NUQSGD(min_element=1),
        "NUQSGD() has no argument 'min_element'; did you mean 'min_elements'?",
    ),
    (
        lambda hvq: hvq.GlobalQSGD(through=1),
        "GlobalQSGD() has no argument 'through'; use bits, norm, levels, bucket",
    ),
    (lambda hvq: hvq.BinSGDM(betas=0.9), "BinSGDM() has no argument 'betas'; did you mean 'beta'?"),
    (
        lambda hvq: hvq.QSGD(4, "l2", 1024, "fixed", "auto", "correlated", 0),
        "QSGD(): too many positional arguments",
    ),
    (lambda hvq: hvq.QSGD(4, bits=4), "QSGD(): multiple values for argument 'bits'"),
    (lambda hvq: hvq.Compressor("qsgd-4", sed=1), "Compressor() has no argument 'sed'; did you mean 'seed'?"),
    (lambda hvq: hvq.Compressor(), "missing 1 required positional argument: 'scheme'"),
    (lambda hvq: hvq.QSGD.compress(np.ones(3)), "compression=QSGD: that is a class; use an instance, QSGD()"),
    (
        lambda hvq: hvq.BinSGDM.compress(np.ones(3)),
        "compression=BinSGDM: that is a class; use an instance, BinSGDM()",
    ),
    (
        lambda hvq: hvq.QSGD.decompress(np.ones(3), None),
        "compression=QSGD: that is a class; use an instance, QSGD()",
    ),
    (
        lambda hvq: schemes.QSGD(bits=2).compress(np.ones(3)),
        "that is a scheme, not a compressor; use hvq.Compressor(QSGD(bits=2, norm='max'",
    ),
    (
        lambda hvq: schemes.QSGD.compress(np.ones(3)),
        "that is a scheme, not a compressor; use hvq.Compressor(...)",
    ),
    (
        lambda hvq: schemes.BinSGDM().compress(np.ones(3)),
        "that is a scheme, not a compressor; use hvq.BinSGDM(...), for the optimizer BinSGDM",
    ),
    (
        lambda hvq: schemes.Hierarchical(schemes.BinSGDM()).compress(np.ones(3)),
        "that is a scheme, not a compressor; use hvq.BinSGDM(hierarchical=True), for the optimizer BinSGDM",
    ),
]


@every_frontend
@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_explained(make: Callable[[Any], Any], message: str, frontend: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make(importlib.import_module(frontend))


@every_frontend
def test_what_to_use_for_a_hierarchical_scheme(frontend: str) -> None:
    hvq, scheme = importlib.import_module(frontend), schemes.Hierarchical(schemes.QSGD(8))
    with pytest.raises(TypeError, match="not a compressor; use ") as refused:
        scheme.compress(np.ones(3))
    with pytest.raises(ValueError, match="give its inner scheme; use ") as refused_again:
        hvq.Compressor(scheme)
    for error in (refused, refused_again):
        usable = eval(str(error.value).rpartition("; use ")[2], {**vars(schemes), "hvq": hvq})
        assert usable.policy.scheme == scheme


@every_frontend
def test_a_subclass_may_call_the_methods_on_its_base(frontend: str) -> None:
    hvq = importlib.import_module(frontend)

    class Own(hvq.QSGD):
        def decompress(self, output: Any, ctx: Any) -> Any:
            return super().decompress(output, ctx), hvq.QSGD.decompress(self, output, ctx)

    assert Own().decompress("as it is", None) == ("as it is", "as it is")


@every_frontend
def test_methods_can_be_replaced(frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hvq = importlib.import_module(frontend)
    original = hvq.EDEN.decompress
    monkeypatch.setattr(hvq.EDEN, "decompress", lambda self, *given: (self, original(self, *given)))
    eden = hvq.EDEN()
    assert eden.decompress("as it is", None) == (eden, "as it is")
    assert hvq.QSGD().decompress("as it is", None) == "as it is"
    with pytest.raises(TypeError, match="EDEN: that is a class; use an instance"):
        hvq.EDEN.decompress("as it is", None)
    monkeypatch.undo()
    assert eden.decompress("as it is", None) == "as it is"


@every_frontend
def test_a_compressor_is_no_scheme(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match=re.escape("scheme=QSGD(bits=4, norm='max'")) as caught:
        hvq.Compressor(hvq.QSGD())
    assert str(caught.value).endswith("that is a compressor already; use it directly")
    with pytest.raises(ValueError, match=re.escape("scheme=QSGD: that is a class; use an instance, QSGD()")):
        hvq.Compressor(hvq.QSGD)


@every_frontend
def test_whole_floats_are_bytes(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    assert hvq.QSGD(group_bytes=32e6).group_bytes == 32_000_000
    assert hvq.QSGD(group_bytes=32e6)._arguments() == hvq.QSGD(group_bytes=32_000_000)._arguments()


@every_frontend
def test_of_a_foreign_state_dict_the_keys_alone_are_shown(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    foreign = {f"layer{i}": np.zeros(10_000) for i in range(50)}
    with pytest.raises(ValueError, match="use what a compressor's state_dict") as caught:
        hvq.QSGD().load_state_dict(foreign)
    message = str(caught.value)
    assert message.startswith("state=<dict with the keys 'layer0', 'layer1', 'layer2'")
    assert len(message) < 200
    with pytest.raises(ValueError, match=re.escape("state=[0, 0")) as caught:
        hvq.QSGD().load_state_dict([0] * 10_000)
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match="with the keys 'exchanges'"):
        hvq.QSGD().load_state_dict({"exchanges": {"layer": -1}})


def parameters(frontend: str, *sizes: int) -> list[tuple[str, Any]]:
    if frontend == "horovod_quant.torch":
        torch = importlib.import_module("torch")
        return [(f"layer{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    tf = importlib.import_module("tensorflow")
    return [(f"layer{i}", tf.Variable(tf.zeros([size]))) for i, size in enumerate(sizes)]


@every_frontend
def test_a_model_of_small_tensors_is_worth_a_warning(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.warns(RuntimeWarning, match="NUQSGD compresses nothing: each of the model's 2 gradients has fewer than "
                      "min_elements=1024 elements .the largest has 1023."):  # fmt: skip
        hvq.NUQSGD(named_parameters=parameters(frontend, 3, 1023))
    with pytest.warns(RuntimeWarning, match="compresses nothing"):
        hvq.QSGD(exclude="layer*", named_parameters=parameters(frontend, 5000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvq.NUQSGD(named_parameters=parameters(frontend, 3, 1024))
    assert not caught


@every_frontend
def test_where_warnings_are_errors_they_are_logged(frontend: str, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that an error of its own stopped would leave the others in a step without it."""
    hvq = importlib.import_module(frontend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvq.NUQSGD(named_parameters=parameters(frontend, 3, 1023))
    assert "NUQSGD compresses nothing" in caplog.text


@every_frontend
@pytest.mark.parametrize(
    "arguments", [{"exclude": "*.bais"}, {"overrides": {"*.bais": {"bits": 8}}}], ids=str
)
def test_patterns_are_checked_at_construction(frontend: str, arguments: dict[str, Any]) -> None:
    """One worker's Horovod never calls the compressor."""
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="'[*].bais' matches no parameter; the parameters are 'layer0'"):
        hvq.QSGD(named_parameters=parameters(frontend, 5000), **arguments)


@every_frontend
@pytest.mark.parametrize(
    "arguments",
    [{"bits": 2}, {"bits": 8, "overrides": {"layer*": {"bits": 2}}}, {"bits": 2, "norm": "l2"}],
    ids=str,
)
def test_bits_that_fit_no_two_workers_are_refused_at_construction(
    frontend: str, arguments: dict[str, Any]
) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="bits=2: the sum of 2 workers' integers does not fit; .* bits >= 3"):
        hvq.GlobalQSGD(**arguments)


@every_frontend
def test_parameters_are_checked_at_construction(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="named_parameters: it is empty; build the model first"):
        hvq.QSGD(named_parameters=iter([]))
    numbers = np.zeros(3, np.complex64)
    if frontend == "horovod_quant.torch":
        torch = importlib.import_module("torch")
        trained, frozen = (torch.nn.Parameter(torch.from_numpy(numbers), grad) for grad in (True, False))
    else:
        tf = importlib.import_module("tensorflow")
        trained, frozen = (tf.Variable(numbers, trainable=trainable) for trainable in (True, False))
    with pytest.raises(TypeError, match="phase: a gradient of dtype .*complex64.* cannot be quantized"):
        hvq.QSGD(named_parameters=[*parameters(frontend, 5000), ("phase", trained)])
    hvq.QSGD(named_parameters=[*parameters(frontend, 5000), ("phase", frozen)])
    if frontend == "horovod_quant.torch":  # DDP averages excluded gradients
        hvq.QSGD(named_parameters=[*parameters(frontend, 5000), ("phase", trained)], exclude="phase")


class Outside(schemes.QSGD):
    """A scheme of another package."""


@every_frontend
def test_what_is_shown_can_be_pasted_back(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    names = {name: getattr(hvq, name) for name in hvq.__all__}
    for made in (
        hvq.QSGD(),
        hvq.GlobalQSGD(4, levels="exponential", seed=7, min_elements=0, hierarchical=2, kernels="numpy"),
        hvq.QSGD(hierarchical=1, inside="float16"),
        hvq.NUQSGD(exclude=["b", "a.*"], overrides={"head.*": {"bits": 8, "norm": "max"}}, group_bytes=2**20),
        hvq.EDEN(nmse=0.1, overrides={"head.*": {"bits": 4, "nmse": None}}),
        hvq.BinSGDM(beta=0.5, seed=1),
        hvq.BinSGDM(server_bits=3),
    ):
        again = eval(repr(made), dict(names))
        assert type(again) is type(made)
        assert (repr(again), again._arguments()) == (repr(made), made._arguments())
    assert repr(hvq.BinSGDM()) == "BinSGDM(server_bits=1)"
    assert repr(hvq.BinSGDM(beta=0.5, seed=1)) == "BinSGDM(server_bits=1, beta=0.5, seed=1)"
    whole = hvq.Compressor("qsgd-4", exclude="b")
    assert repr(whole) == f"{repr(schemes.QSGD(4))[:-1]}, exclude=('b',))"
    foreign = hvq.Compressor(Outside(3), seed=2)
    assert repr(foreign) == f"Compressor({Outside(3)!r}, seed=2)"
    for made in (whole, foreign):
        again = eval(repr(made), {**names, "Outside": Outside})
        assert again._arguments() == made._arguments()
    assert eval(repr(schemes.GlobalQSGD(5)), vars(schemes)) == schemes.GlobalQSGD(5)


NAMES = [
    (
        "Compression",
        "Horovod's own are in hvd.Compression; here write, for example, GlobalQSGD()",
        "GlobalQSGD()",
    ),
    ("QSGDinf", "write QSGD(), whose default is the max norm", "QSGD()"),
    ("DRIVE", "write EDEN(bits=1)", "EDEN(bits=1)"),
    ("Birder", "write BinSGDM()", "BinSGDM()"),
    ("globalqsgd", "did you mean 'GlobalQSGD'?", "GlobalQSGD"),
    ("hierarchical_proces_sets", "did you mean 'hierarchical_process_sets'?", "hierarchical_process_sets"),
]


@every_frontend
@pytest.mark.parametrize(("name", "message", "suggested"), NAMES)
def test_a_name_that_is_not_there_is_answered_with_the_nearest(
    frontend: str, name: str, message: str, suggested: str
) -> None:
    hvq = importlib.import_module(frontend)
    lacking = f"module '{frontend}' has no attribute '{name}'; "
    with pytest.raises(AttributeError, match=re.escape(lacking + message)):
        getattr(hvq, name)
    assert not hasattr(hvq, "__path_of_nothing__")
    assert eval(f"hvq.{suggested}", {"hvq": hvq}) is not None


@pytest.mark.parametrize(
    "name", ["GlobalQSGD", "Auto", "Compressor", "optim", "ddp", "fsdp", "MetricsCallback"]
)
def test_the_package_says_where_a_name_is(name: str) -> None:
    package = importlib.import_module("horovod_quant")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; use ") as caught:
        getattr(package, name)
    places = re.findall(rf"(horovod_quant\.\w+)\.{name}", str(caught.value))
    having = [each for each in FRONTENDS if name in importlib.import_module(each).__all__]
    assert places == having
    for place in places:
        getattr(importlib.import_module(place), name)


def test_the_package_suggests_the_nearest_name() -> None:
    package = importlib.import_module("horovod_quant")
    with pytest.raises(AttributeError, match="has no attribute 'regster'; did you mean 'register'?"):
        package.regster  # noqa: B018
    if "horovod_quant.keras" not in sys.modules:
        with pytest.raises(AttributeError, match="import horovod_quant.keras first"):
            package.keras  # noqa: B018


def suggestion(error: ValueError) -> str:
    found = re.search("did you mean (?:compression=)?(.*)[?]$", str(error)) or re.search(
        "use ([^ ]*), for example", str(error)
    )
    assert found, str(error)
    return found[1]


@every_frontend
@pytest.mark.parametrize("name", ["GlobalQSGD", "EDEN", "global_qsgd-8", "EDEN-3", "qsgd8", "nuqsgd"])
def test_a_suggested_method_is_accepted(frontend: str, name: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="did you mean '|use ") as caught:
        hvq.Compressor(name)
    suggested = suggestion(caught.value).strip("'")
    assert hvq.Compressor(suggested).policy.scheme is not None
    if frontend == "horovod_quant.torch":
        with pytest.raises(ValueError, match=f"^methods: .*{suggested}"):
            hvq.Auto(methods=[name])
        assert hvq.Auto(methods=[suggested]).methods == (suggested,)


@every_frontend
@pytest.mark.parametrize("name", ["BinSGDM", "binsgd"])
def test_what_belongs_to_an_optimizer_is_suggested_as_such(frontend: str, name: str) -> None:
    hvq = importlib.import_module(frontend)
    makers = [hvq.Compressor]
    if frontend == "horovod_quant.torch":
        makers.append(lambda name: hvq.Auto(methods=[name]))
    for make in makers:
        with pytest.raises(ValueError, match="did you mean") as caught:
            make(name)
        compressor, optimizer = suggestion(caught.value).split(", for the optimizer ")
        assert eval(compressor, {"hvq": hvq}).own_optimizer == eval(optimizer, {"hvq": hvq}).__name__


@every_frontend
def test_of_all_methods_those_are_listed_that_a_compressor_takes(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="there is no method 'nonsense'; use ") as caught:
        hvq.Compressor("nonsense")
    listed = str(caught.value).partition("; use ")[2].replace("BITS", "4").replace(" or ", ", ").split(", ")
    assert len(listed) > 5
    for name in listed:
        assert hvq.Compressor(name).policy.scheme is not None


def test_a_name_is_no_compressor() -> None:
    """Horovod's own error, which docs/troubleshooting.md explains: no code of this package runs here."""
    pytest.importorskip("horovod.torch")
    script = "import horovod.torch as hvd; import torch; hvd.init(); hvd.allreduce(torch.ones(3), compression='qsgd-4')"
    # Of its own: where Horovod is initialized, later tests of this process find other workers than none.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("AttributeError: ")
    page = (Path(__file__).parents[1] / "docs/troubleshooting.md").read_text()
    (row,) = [line for line in page.splitlines() if f"`{error[len('AttributeError: ') :]}`" in line]
    remedy = re.findall(r"`compression=(hvq\.[^`]*)`", row)
    hvq = importlib.import_module("horovod_quant.torch")
    assert eval(remedy[0], {"hvq": hvq}).policy.scheme == schemes.GlobalQSGD(8)


@every_frontend
def test_the_switch_has_two_values(frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hvq = importlib.import_module(frontend)
    monkeypatch.setenv("HOROVOD_QUANT_DISABLE", "yes")
    with pytest.raises(
        ValueError, match="HOROVOD_QUANT_DISABLE='yes': use 1 to leave all gradients to Horovod, or 0"
    ):
        hvq.QSGD()


def test_the_keras_callback_needs_a_compressor() -> None:
    hvq = importlib.import_module("horovod_quant.tensorflow")
    with pytest.raises(ValueError, match="compression=5: use a compressor of horovod_quant.tensorflow"):
        hvq.MetricsCallback(5)


@every_frontend
def test_shares_and_steps_of_measurements_are_checked(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    with pytest.raises(ValueError, match="nmse_every=-1: use an integer from 0"):
        hvq.QSGD(nmse_every=-1)
    with pytest.raises(ValueError, match="nmse_share=2: use a number from 0 to 1"):
        hvq.QSGD(nmse_share=2)
    assert repr(hvq.QSGD(nmse_every=100)).endswith("rounding='correlated', nmse_every=100)")
