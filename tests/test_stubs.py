"""What type checkers and editors are told of the frontends' classes is what the classes are."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from parallel.launching import ROOT

from horovod_quant.frontends.compressor_classes import signature_of

FRONTENDS = ["horovod_quant.torch", "horovod_quant.tensorflow"]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_stubs_are_those_that_the_script_writes(frontend: str) -> None:
    sys.path.append(str(ROOT / "scripts"))
    import write_stubs

    assert write_stubs.path_of(frontend).read_text() == write_stubs.stub(frontend), "run scripts/write-stubs"


SNIPPET = """
import horovod_quant.torch as torch_hvq
import horovod_quant.tensorflow as tf_hvq
from horovod_quant.schemes import QSGD

torch_hvq.QSGD(bits=8, norm="max", seed=3, exclude="*.bias")
tf_hvq.BinSGDM(beta=0.9, optimizer=None)
torch_hvq.Compressor(QSGD(bits=4), min_elements=5)
tf_hvq.Compressor("qsgd-4")
report = torch_hvq.Auto(0.04, again_after=1000, exclude="*.bias").report()
assert report.measurements[0].step > 0
tf_hvq.MetricsCallback(tf_hvq.QSGD())
"""
MISTAKES = {
    "torch_hvq.QSGD(bit=8)": 'Unexpected keyword argument "bit" for "QSGD"',
    "tf_hvq.QSGD(bit=8)": 'Unexpected keyword argument "bit" for "QSGD"',
    'torch_hvq.GlobalQSGD(norm="l1")': '"GlobalQSGD" has incompatible type "Literal[\'l1\']"',
    'torch_hvq.QSGD(kernels="tensorflow")': '"QSGD" has incompatible type "Literal[\'tensorflow\']"',
    'tf_hvq.QSGD(kernels="triton")': '"QSGD" has incompatible type "Literal[\'triton\']"',
    'torch_hvq.Compressor("qsgd-4", min_element=3)': 'Unexpected keyword argument "min_element" for "Compressor"',
    "torch_hvq.Auto(overrides={})": 'Unexpected keyword argument "overrides" for "Auto"',
    "tf_hvq.Auto()": 'Module has no attribute "Auto"',
    "tf_hvq.NUQSDG()": 'Module has no attribute "NUQSDG"',
    'QSGD(coding="huffman")': '"QSGD" has incompatible type "Literal[\'huffman\']"',
}


def test_mypy_finds_wrong_arguments(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text("\n".join([SNIPPET, *MISTAKES]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", str(file)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    first = SNIPPET.count("\n") + 2
    for place, (mistake, message) in enumerate(MISTAKES.items()):
        line = f"snippet.py:{first + place}: error: "
        assert any(line in error and message in error for error in found), (
            f"{mistake}: {done.stdout}{done.stderr}"
        )
    assert len(found) == len(MISTAKES), done.stdout


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_class_shows_every_argument_with_type_default_and_a_line(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    for name in ("Compressor", "QSGD", "NUQSGD", "GlobalQSGD", "EDEN", "BinSGDM"):
        shown = inspect.signature(getattr(hvq, name)).parameters
        documented = inspect.getdoc(getattr(hvq, name))
        assert {"min_elements", "exclude", "overrides", "seed", "kernels", "hierarchical"} < set(shown)
        for argument, parameter in shown.items():
            assert parameter.annotation is not parameter.empty
            assert parameter.default is not parameter.empty or argument == "scheme"
            assert f"\n    {argument}: " in documented, (name, argument)
    assert str(inspect.signature(hvq.QSGD)).startswith(
        "(bits: int = 4, norm: Literal['l2', 'max'] = 'max', bucket_size"
    )
    assert str(inspect.signature(hvq.BinSGDM)).startswith(
        "(beta: float | None = None, *, server_bits: int = 1,"
    )
    assert signature_of(hvq.Compressor) == inspect.signature(hvq.Compressor)


def test_auto_shows_its_arguments_and_those_of_all_but_two() -> None:
    import horovod_quant.torch as hvq

    shown, all_others = (set(inspect.signature(each).parameters) for each in (hvq.Auto, hvq.Compressor))
    assert shown == (all_others - {"scheme", "overrides"}) | {"max_nmse", "methods", "again_after"}
    assert all(f"\n    {argument}: " in inspect.getdoc(hvq.Auto) for argument in shown)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_module_shows_its_public_names_alone(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    public = [
        "BinSGDM",
        "Compressor",
        "EDEN",
        "GlobalQSGD",
        "NUQSGD",
        "QSGD",
        "hierarchical_process_sets",
        "optim",
    ]
    public += ["Auto", "ddp", "fsdp"] if frontend.endswith("torch") else ["MetricsCallback"]
    assert dir(hvq) == sorted(hvq.__all__) == sorted(public)
    assert hvq.QSGD is hvq.QSGD
    assert (hvq.QSGD.__module__, hvq.QSGD.__qualname__) == (frontend, "QSGD")
    with pytest.raises(AttributeError, match=f"module '{frontend}' has no attribute 'QSDG'"):
        hvq.QSDG  # noqa: B018


def test_what_types_need_is_in_the_package() -> None:
    metadata = ConfigParser(interpolation=None)
    metadata.read(ROOT / "setup.cfg")
    assert metadata["options.package_data"]["*"] == "py.typed, *.pyi"
    assert (ROOT / "horovod_quant" / "py.typed").is_file()
