"""What the frontends share: arguments of the compressors, what is missing, the carrier."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any, Callable

import pytest

from horovod_quant.agreement import COMPARED, different, signature, signs_of

FRONTENDS = ["horovod_quant.torch", "horovod_quant.tensorflow"]

BAD_ARGUMENTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda hvq: hvq.GlobalQSGD(bits=0), "bits=0: use an integer from 2 to 16"),
    (lambda hvq: hvq.GlobalQSGD(bits=17), "bits=17"),
    (lambda hvq: hvq.GlobalQSGD(bits=9, levels="exponential"), "bits=9: use an integer from 2 to 8"),
    (lambda hvq: hvq.QSGD(bits=1), "bits=1"),
    (lambda hvq: hvq.QSGD(bits=True), "bits=True"),
    (lambda hvq: hvq.NUQSGD(bits=9), "bits=9"),
    (lambda hvq: hvq.QSGD(bucket_size=100), "bucket_size=100: use a multiple of 32"),
    (lambda hvq: hvq.GlobalQSGD(norm="l1"), "norm='l1': use one of 'max', 'l2'"),
    (lambda hvq: hvq.GlobalQSGD(levels="log"), "levels='log'"),
    (lambda hvq: hvq.NUQSGD(coding="huffman"), "coding='huffman'"),
    (lambda hvq: hvq.QSGD(min_elements=-1), "min_elements=-1"),
    (lambda hvq: hvq.QSGD(seed=-1), "seed=-1"),
    (lambda hvq: hvq.QSGD(group_bytes=0), "group_bytes=0"),
    (lambda hvq: hvq.QSGD(kernels="fortran"), "kernels='fortran'"),
    (lambda hvq: hvq.QSGD(overrides={"fc.*": {"bit": 4}}), "no argument 'bit'; use bits"),
    (lambda hvq: hvq.QSGD(overrides={"fc.*": {"bits": 99}}), "overrides['fc.*']: bits=99"),
    (lambda hvq: hvq.QSGD(overrides={"fc.*": 4}), "overrides['fc.*']=4: use a mapping"),
    (lambda hvq: hvq.BinSGDM(beta=1.0), "beta=1.0"),
]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_are_named(make: Callable[[Any], Any], message: str, frontend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(importlib.import_module(frontend))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("missing", ["framework", "horovod"])
def test_a_missing_package_gives_one_sentence_with_the_remedy(frontend: str, missing: str) -> None:
    package = frontend.rpartition(".")[2] if missing == "framework" else missing
    program = f"import sys; sys.modules[{package!r}] = None; import {frontend} as q; q.QSGD()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: {frontend} needs")
    assert "pip install" in last


def test_carriers_of_different_names_have_different_signs() -> None:
    signs = {signs_of(f"layer{i}.weight") for i in range(1000)}
    # 1,000 draws from 65,536: 992 different ones expected, fewer than 980 in 1 of 10^5
    assert len(signs) > 980
    assert all(abs(sign) == 1 for sign in signs_of("x"))


def test_an_argument_that_differs_is_found() -> None:
    same = dict.fromkeys(COMPARED, "1")
    others = [same, same, {**same, "bits": "2"}, {**same, "seed": "7"}]
    total = [sum(signs) for signs in zip(*map(signature, others))]
    assert different(total, 4) == ["bits", "seed"]
    assert different([3 * sign for sign in signature(same)], 3) == []
