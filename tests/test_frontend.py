"""What the frontends share: arguments of the compressors, what is missing, the control tensor."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np
import pytest

from horovod_quant.frontends import nodes
from horovod_quant.frontends.nodes import hierarchical_process_sets
from horovod_quant.reductions import agreement
from horovod_quant.reductions.agreement import (
    COMMON,
    FIELD_SLOTS,
    different,
    disagreement,
    fingerprint_of,
    signs_of,
)
from horovod_quant.schemes import QSGD, BinSGDM, Hierarchical

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

NAMED = "use pairs of a name and a parameter"
WRONG_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("QSGD", {"bits": "4"}, "bits='4': use an integer from 2 to 16"),
    ("QSGD", {"bits": None}, "bits=None: use an integer from 2 to 16"),
    ("GlobalQSGD", {"bits": 8.0}, "bits=8.0: use an integer from 2 to 16"),
    ("NUQSGD", {"norm": 2}, "norm=2: use one of 'l2', 'max'"),
    ("QSGD", {"coding": None}, "coding=None: use one of 'fixed'"),
    ("QSGD", {"exchange": ["allgather"]}, "exchange=['allgather']: use one of 'allgather'"),
    ("GlobalQSGD", {"levels": True}, "levels=True: use one of 'uniform'"),
    ("QSGD", {"bucket_size": "1024"}, "bucket_size='1024': use a multiple of 32"),
    ("QSGD", {"bucket_size": True}, "bucket_size=True: use a multiple of 32"),
    ("QSGD", {"min_elements": True}, "min_elements=True: use an integer from 0"),
    ("QSGD", {"min_elements": None}, "min_elements=None: use an integer from 0"),
    ("QSGD", {"exclude": 5}, "exclude=5: use a name or pattern, a list of them, or None"),
    ("QSGD", {"exclude": {"head": 1}}, "exclude={'head': 1}: use a name or pattern, a list of them, or None"),
    ("QSGD", {"exclude": b"head"}, "exclude=b'head': use a name or pattern"),
    ("QSGD", {"exclude": ["head", None]}, "exclude=['head', None]: use names or patterns, not None"),
    ("QSGD", {"overrides": "head"}, "overrides='head': use a mapping from names or patterns to arguments"),
    ("QSGD", {"overrides": [("head", {"bits": 8})]}, "use a mapping from names or patterns to arguments"),
    ("QSGD", {"overrides": {5: {"bits": 8}}}, "overrides: 5 is not a name or pattern"),
    ("QSGD", {"overrides": {"head": None}}, "overrides['head']=None: use a mapping such as {'bits': 8}"),
    (
        "QSGD",
        {"overrides": {"head": {"bits": "8"}}},
        "overrides['head']: bits='8': use an integer from 2 to 16",
    ),
    ("QSGD", {"seed": "1"}, "seed='1': use an integer from 0"),
    ("QSGD", {"seed": None}, "seed=None: use an integer from 0"),
    ("QSGD", {"group_bytes": "32MB"}, "group_bytes='32MB': use an integer from 1"),
    ("QSGD", {"group_bytes": 32.5}, "group_bytes=32.5: use an integer from 1"),
    ("QSGD", {"group_bytes": float("inf")}, "group_bytes=inf: use an integer from 1"),
    ("QSGD", {"overlap": "no"}, "overlap='no': use True or False"),
    ("QSGD", {"overlap": None}, "overlap=None: use True or False"),
    ("QSGD", {"hierarchical": "yes"}, "hierarchical='yes': use True, False, or the number of workers"),
    ("QSGD", {"hierarchical": None}, "hierarchical=None: use True, False, or the number of workers"),
    ("QSGD", {"hierarchical": 2.0}, "hierarchical=2.0: use True, False, or the number of workers"),
    ("QSGD", {"hierarchical": 0}, "hierarchical=0: use True, False, or the number of workers"),
    ("QSGD", {"hierarchical": True, "inside": 4}, "inside=4: use 'float32', 'float16' or 8"),
    ("QSGD", {"hierarchical": True, "inside": True}, "inside=True: use 'float32', 'float16' or 8"),
    ("QSGD", {"hierarchical": True, "inside": 8.0}, "inside=8.0: use 'float32', 'float16' or 8"),
    ("QSGD", {"hierarchical": True, "inside": "8"}, "inside='8': use 'float32', 'float16' or 8"),
    ("QSGD", {"inside": None}, "inside=None: use 'float32', 'float16' or 8"),
    ("QSGD", {"inside": 8}, "inside=8: it is for hierarchical reductions; add hierarchical=True"),
    ("QSGD", {"kernels": 3}, "kernels=3: "),
    ("QSGD", {"kernels": None}, "kernels=None: "),
    ("QSGD", {"kernels": ["native"]}, "kernels=['native']: "),
    ("QSGD", {"process_set": 1}, "process_set=1: use an hvd.ProcessSet, or None"),
    ("QSGD", {"named_parameters": 5}, f"named_parameters=5: {NAMED}"),
    ("QSGD", {"named_parameters": {"head": 1}}, f"named_parameters: it contains 'head'; {NAMED}"),
    ("QSGD", {"named_parameters": [("head", "w")]}, f"named_parameters: it contains ('head', 'w'); {NAMED}"),
    ("QSGD", {"named_parameters": [np.ones(2)]}, f"named_parameters: it contains 'ndarray'; {NAMED}"),
    (
        "QSGD",
        {"named_parameters": [("head", np.ones(2)), ("head", np.ones(3))]},
        "named_parameters: 'head' appears twice",
    ),
    ("BinSGDM", {"beta": "0.9"}, "beta='0.9': use a number from 0"),
    ("BinSGDM", {"beta": True}, "beta=True: use a number from 0"),
    ("BinSGDM", {"server_bits": 9}, "server_bits=9: use an integer from 1 to 8"),
    ("BinSGDM", {"server_bits": "auto"}, "server_bits='auto': use an integer from 1 to 8"),
    ("Compressor", {"scheme": "qsgd"}, "scheme='qsgd': 'qsgd' lacks the number of bits; use qsgd-4"),
    ("Compressor", {"scheme": "zip"}, "scheme='zip': there is no method 'zip'; use qsgd-BITS"),
    ("Compressor", {"scheme": "fp16"}, "that is Horovod's own; use compression=hvd.Compression.fp16"),
    ("Compressor", {"scheme": None}, "scheme=None: use one of horovod_quant.schemes"),
    ("Compressor", {"scheme": QSGD}, "scheme=QSGD: that is a class; use an instance, QSGD()"),
    ("Compressor", {"scheme": BinSGDM()}, "it belongs to the optimizer BinSGDM; use hvq.BinSGDM(...)"),
    ("Compressor", {"scheme": "binsgdm"}, "it belongs to the optimizer BinSGDM; use hvq.BinSGDM(...)"),
]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_are_named(make: Callable[[Any], Any], message: str, frontend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(importlib.import_module(frontend))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("kind", "arguments", "message"), WRONG_TYPES, ids=[row[2] for row in WRONG_TYPES])
def test_arguments_of_another_type_are_named(
    kind: str, arguments: dict[str, Any], message: str, frontend: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(importlib.import_module(frontend), kind)(**arguments)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_users_may_mean_is_taken(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    assert hvq.QSGD(exclude=None, overrides=None).policy.exclude == []
    assert hvq.QSGD(exclude=iter(("b", "a"))).policy.exclude == ["a", "b"]
    several = {f"layer{number}" for number in range(50)}  # its order differs between workers
    assert hvq.QSGD(exclude=several).policy.exclude == sorted(several)
    numpys = hvq.QSGD(np.int32(4), seed=np.uint8(3), min_elements=np.int64(5), overlap=np.bool_(True))
    plain = hvq.QSGD(4, seed=3, min_elements=5)
    assert repr(vars(numpys.policy)) == repr(vars(plain.policy))
    assert numpys._arguments() == plain._arguments()
    assert hvq.QSGD(hierarchical=np.int64(1)).hierarchical == 1
    assert hvq.QSGD(hierarchical=1).hierarchical is not True
    assert hvq.QSGD(hierarchical=1, inside=np.int64(8)).policy.scheme == Hierarchical(QSGD(), 8)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ((), [[0, 1], [2, 3], [0, 2], [1, 3]]),
        ((True,), [[0, 1], [2, 3], [0, 2], [1, 3]]),
        ((2,), [[0, 1], [2, 3], [0, 2], [1, 3]]),
        ((4,), []),
        ((1,), []),
        ((False,), []),
    ],
    ids=str,
)
def test_process_sets_of_nodes(given: Any, ranks: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
    assert [each.ranks for each in hierarchical_process_sets(*given)] == ranks


@pytest.mark.parametrize("given", [0, -2, 2.0, "2"])
def test_nodes_of_no_number_are_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^ranks_per_node={given!r}: use True, False, or the number of work"
    ):
        hierarchical_process_sets(given)


def test_nodes_are_searched_again_only_if_a_process_set_is_gone() -> None:
    """A search asks all workers, and one alone may trace a function after process sets were added."""
    table, searches = {0: [0, 1]}, []
    hvd = SimpleNamespace(__name__="nodes", size=lambda: 2, rank=lambda: 0, global_process_set=None)
    basics = SimpleNamespace(
        _get_process_set_ids_and_ranks=lambda: dict(table), cross_rank=lambda: 0, local_size=lambda: 2
    )

    def gather(own: list[int]) -> list[list[int]]:
        searches.append(own)
        return [own, own]

    for change, expected in (({}, 1), ({1: [0]}, 1), ({0: [1, 0]}, 2)):
        table.update(change)
        nodes.find(hvd, basics, True, None, gather)
        assert len(searches) == expected, table


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_pickling_keeps_what_a_subclass_adds(frontend: str) -> None:
    hvq = importlib.import_module(frontend)
    compressor = hvq.QSGD(seed=3)
    compressor.note = "kept"
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(compressor))))
    assert (again.note, again.seed) == ("kept", 3)
    assert again.stats() == compressor.stats()
    assert again.state_dict() == {"exchanges": {}}


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("missing", ["framework", "horovod"])
def test_a_missing_package_gives_one_sentence_with_the_remedy(frontend: str, missing: str) -> None:
    package = frontend.rpartition(".")[2] if missing == "framework" else missing
    program = f"import sys; sys.modules[{package!r}] = None; import {frontend} as q; c = q.QSGD()"
    if (frontend, missing) == ("horovod_quant.torch", "horovod"):  # which DDP and FSDP2 do not need
        program += "; import torch; c.compress(torch.ones(3))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: {frontend} needs")
    assert ("pip install" if missing == "framework" else "install.md has the commands") in last


def test_carriers_of_different_names_have_different_signs() -> None:
    signs = {signs_of(f"layer{i}.weight") for i in range(1000)}
    # 1,000 draws from 65,536: 992 different ones expected, fewer than 980 in 1 of 10^5
    assert len(signs) > 980
    assert all(abs(sign) == 1 for sign in signs_of("x"))


def summed(workers: list[dict[str, str]]) -> list[int]:
    return [sum(signs) for signs in zip(*map(fingerprint_of, workers))]


def test_an_argument_that_differs_is_found() -> None:
    same = {**dict.fromkeys(COMMON, "1"), "bits": "4", "norm": "l2"}
    others = [same, same, {**same, "norm": "max"}, {**same, "seed": "7"}]
    assert different(same, summed(others), 4) == ["seed", "norm"]
    assert different(same, summed([same] * 3), 3) == []
    assert "seed=1, norm=l2 here, but not on all other workers" in disagreement(same, ["seed", "norm"])


def test_schemes_that_differ_are_found_whatever_their_arguments_are() -> None:
    own, other = (
        {**dict.fromkeys(COMMON, "1"), "compression": name, **fields}
        for name, fields in (("QSGD", {"bits": "4", "norm": "l2"}), ("Another", {"share": "0.5"}))
    )
    assert len(fingerprint_of(own)) == len(fingerprint_of(other))
    for mine in (own, other):
        assert different(mine, summed([own, other]), 2) == ["compression"]


def test_another_wire_format_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {**dict.fromkeys(COMMON, "1"), "compression": "QSGD", "bits": "4"}
    before = fingerprint_of(same)
    monkeypatch.setattr(agreement, "WIRE_VERSION", agreement.WIRE_VERSION + 1)
    now = fingerprint_of(same)
    assert different(same, [sum(signs) for signs in zip(before, now)], 2) == ["compression"]
    assert (
        f"compression=QSGD (wire format {agreement.WIRE_VERSION}) here, but not on all other workers"
        in disagreement(same, ["compression"])
    )


def test_more_arguments_than_slots_share_them() -> None:
    same = {**dict.fromkeys(COMMON, "1"), **{f"field{i}": "0" for i in range(FIELD_SLOTS + 1)}}
    other = {**same, f"field{FIELD_SLOTS}": "1"}
    assert different(same, summed([same, other]), 2) == [f"field0, field{FIELD_SLOTS}"]


def test_another_release_with_a_further_argument_is_found() -> None:
    same = {**dict.fromkeys(COMMON, "1"), "bits": "4"}
    newer = {**same, "rounding": "correlated"}
    assert different(newer, summed([same, newer]), 2) == ["rounding"]
    assert different(same, summed([same, newer]), 2) == [
        "an argument that this worker's scheme does not have"
    ]
