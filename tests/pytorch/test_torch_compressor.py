"""What needs no other worker: pickling, the optimizer. (The rest is in test_frontend.py and tests/parallel.)"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any, Callable

import numpy as np
import pytest
import torch

import horovod_quant.torch as hvq
from horovod_quant.kernels import reference
from horovod_quant.schemes.base import Decoded
from horovod_quant.torch.control import ControlTensor
from horovod_quant.torch.memory import Destination, HostMemory

BAD_ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], beta=-0.1), "beta=-0.1"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], lr=float("nan")), "lr=nan"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], weight_decay=-1.0), "weight_decay=-1.0"),
    (
        lambda: hvq.optim.BinSGDM([torch.zeros(3)], clip_norm=0.0),
        "clip_norm=0.0: use a positive, finite number",
    ),
    (lambda: hvq.optim.BinSGDM([{"params": [torch.zeros(3)], "beta": 1.0}]), "beta=1.0: use a number from 0"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], beta="0.9"), "beta='0.9': use a number from 0"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], lr="0.1"), "lr='0.1': use a finite, non-negative number"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], lr=None), "lr=None: use a finite, non-negative number"),
    (
        lambda: hvq.optim.BinSGDM([torch.zeros(3)], weight_decay=None),
        "weight_decay=None: use a finite, non-negative number",
    ),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], clip_norm="1"), "clip_norm='1': use a positive"),
    (lambda: hvq.optim.BinSGDM([torch.zeros(3)], seed=None), "seed=None: use an integer from 0"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_of_the_optimizer_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_misspelt_pattern_is_found_at_construction_when_the_names_are_given() -> None:
    named = torch.nn.Linear(40, 40).named_parameters()
    with pytest.raises(
        ValueError, match="'wieght' matches no parameter; the parameters are 'weight', 'bias'"
    ):
        hvq.QSGD(exclude="wieght", named_parameters=named)


@pytest.mark.parametrize("make", [hvq.QSGD, hvq.NUQSGD, hvq.GlobalQSGD, hvq.BinSGDM])
def test_pickling_keeps_the_arguments_and_drops_the_rest(make: Callable[..., hvq.Compressor]) -> None:
    model = torch.nn.Linear(40, 40)
    compressor = make(seed=5, min_elements=7, exclude="bias", named_parameters=model.named_parameters())
    other = pickle.loads(pickle.dumps(compressor))
    assert (other.policy.scheme, other.seed, other.policy.min_elements) == (compressor.policy.scheme, 5, 7)
    assert other.policy.exclude == ["bias"]
    assert len(pickle.dumps(compressor)) < 1000


def test_a_refused_group_is_not_added() -> None:
    optimizer = hvq.optim.BinSGDM([torch.zeros(3)])
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": [torch.zeros(4)], "lr": -1})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"exchanges": {"weight": -1}},
        {"exchanges": {"weight": 1.5}},
        {"exchanges": {}, "more": 1},
        [("exchanges", {})],
    ],
)
def test_another_state_is_refused(state: Any) -> None:
    compressor = hvq.QSGD()
    with pytest.raises(ValueError, match="use what a compressor's state_dict"):
        compressor.load_state_dict(state)
    assert compressor.state_dict() == {"exchanges": {}}


def test_an_unknown_caller_is_told_what_to_give() -> None:
    with pytest.raises(RuntimeError, match="named_parameters=model.named_parameters()"):
        hvq.QSGD().compress(torch.ones(2000))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_flat_array_shares_the_tensors_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    memory = HostMemory(reference)
    memory.flat(tensor)[7] = memory.flat(torch.ones(1, dtype=dtype))[0]
    assert tensor[1, 2] == 1
    assert tensor.sum() == 1


def stepped(kind: Any, shapes: tuple[tuple[int, ...], ...] = ((40,), (3, 20)), **options: Any) -> Any:
    """An optimizer with state."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = kind(parameters, lr=0.01, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    entries = {index: {k: v for k, v in own.items() if k != name} for index, own in state["state"].items()}
    return {**state, "state": entries}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: stepped(torch.optim.Adam).state_dict(),
            "'betas'.* not 'beta', 'seed': it is the state of another optimizer; use what the state_dict",
        ),
        (
            lambda: stepped(torch.optim.SGD).state_dict(),
            "not 'beta', 'seed': it is the state of another optimizer",
        ),
        (
            lambda: without(stepped(hvq.optim.BinSGDM).state_dict(), "scale"),
            "have 'step', 'momentum', but not 'scale'",
        ),
        (
            lambda: stepped(hvq.optim.BinSGDM, ((40,), (3, 21))).state_dict(),
            "the momentum of parameter 1 has shape \\[3, 21\\], but the parameter has \\[3, 20\\]",
        ),
        (lambda: {}, "state_dict={}: use what the state_dict\\(\\) of a BinSGDM returned"),
        (lambda: None, "state_dict=None: use what"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_nothing_changes(
    make: Callable[[], Any], message: str
) -> None:
    optimizer = stepped(hvq.optim.BinSGDM, seed=4)
    before = pickle.dumps(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make())
    assert pickle.dumps(optimizer.state_dict()) == before
    optimizer.step()


def test_a_state_from_before_there_was_clip_norm_is_taken() -> None:
    saved = stepped(hvq.optim.BinSGDM, seed=4).state_dict()
    for group in saved["param_groups"]:
        del group["clip_norm"]
    optimizer = stepped(hvq.optim.BinSGDM, seed=4)
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_the_optimizer_works_whatever_the_default_device_is() -> None:
    optimizer = stepped(hvq.optim.BinSGDM, clip_norm=1.0)
    torch.set_default_device("meta")
    try:
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(parameter.isfinite().all() for parameter in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_carriers_memory_is_used_again_once_its_answer_was_read(dtype: torch.dtype) -> None:
    control_tensor = ControlTensor(dtype)
    first = control_tensor.filled((1.0, -1.0))
    assert first.tolist() == [1, 1, -1]
    assert first.dtype == dtype
    first *= 2
    assert control_tensor.answer(first) is None
    control_tensor.learn(first, (2.0, [2, 2, -2]))
    again = control_tensor.filled((1.0, -1.0))
    assert again is first
    assert again.tolist() == [1, 1, -1]
    again *= 2
    assert control_tensor.answer(again) == (2.0, [2, 2, -2])
    control_tensor.filled((1.0, -1.0)).mul_(3)
    assert control_tensor.answer(again) is None


def test_a_carrier_that_did_not_come_back_is_left_to_who_has_it() -> None:
    control_tensor = ControlTensor(torch.float32)
    lost = control_tensor.filled((1.0,))
    other = control_tensor.filled((-1.0,))
    assert lost.tolist() == [1, 1]
    assert other.tolist() == [1, -1]
    assert control_tensor.answer(lost) is None
    assert control_tensor.filled((1.0,)) is not other
    assert other.tolist() == [1, -1]


def test_decoding_to_what_is_not_contiguous_works_whatever_the_default_device_is() -> None:
    destination = torch.zeros(5, 3).t()
    torch.set_default_device("meta")
    try:
        decoded = Decoded(1, lambda index, factor, out: np.copyto(out, factor))
        HostMemory(reference).decode(decoded, [0], 2.0, [Destination(destination, None)])
    finally:
        torch.set_default_device(None)
    assert (destination == 2).all()


def quadratic(optimizer_of: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, steps: int) -> float:
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 2000, dtype=dtype))
    optimizer = optimizer_of([weights])
    for _ in range(steps):
        optimizer.zero_grad()
        (weights.float() - 0.25).pow(2).sum().backward()
        optimizer.step()
    return (weights.detach().float() - 0.25).abs().mean().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_binsgdm_minimizes_on_one_worker(dtype: torch.dtype) -> None:
    assert quadratic(lambda p: hvq.optim.BinSGDM(p, lr=0.01), dtype, 200) < 0.06


def test_binsgdm_decays_weights_and_moves_by_lr() -> None:
    weights = torch.nn.Parameter(torch.full((500,), 2.0))
    optimizer = hvq.optim.BinSGDM([weights], lr=0.1, weight_decay=0.5)
    weights.grad = torch.ones(500)
    optimizer.step()
    assert torch.allclose(weights, torch.full((500,), 2.0 * (1 - 0.1 * 0.5) - 0.1))


def test_binsgdm_reports_a_broken_gradient_and_keeps_its_state() -> None:
    weights = torch.nn.Parameter(torch.zeros(500))
    optimizer = hvq.optim.BinSGDM([weights], lr=0.1)
    weights.grad = torch.full((500,), float("nan"))
    optimizer.step()
    assert bool(weights.isnan().all())
    assert bool((optimizer.state[weights]["momentum"] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("unit", [1.0, 3.0, 2.0**-16])
def test_binsgdm_moves_by_averages_whatever_their_unit(dtype: torch.dtype, unit: float) -> None:
    averages = torch.tensor([0.5, -0.25, 0.0, float("nan"), 0.125])
    weights = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    optimizer = hvq.optim.BinSGDM([weights], lr=0.5)
    weights.grad = (averages * unit).to(dtype)
    optimizer.mark_exchanged(weights, largest=torch.tensor(0.5))
    optimizer.step()
    moved = torch.tensor([-0.25, 0.125, 0.0, float("nan"), -0.0625])
    assert torch.allclose(weights.detach().float(), moved, rtol=2e-3, equal_nan=True)
    weights.grad = (averages * unit).to(dtype)  # as bits of the next step
    optimizer.mark_exchanged(weights)
    optimizer.step()
    moved += torch.tensor([-0.5, 0.5, 0.0, 0.0, -0.5])
    assert torch.allclose(weights.detach().float(), moved, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("elements", [0, 3])
def test_averages_of_zero_move_nothing(elements: int) -> None:
    weights = torch.nn.Parameter(torch.ones(elements))
    optimizer = hvq.optim.BinSGDM([weights], lr=0.5)
    weights.grad = torch.zeros(elements)
    optimizer.mark_exchanged(weights, largest=hvq.optim.largest_magnitude(weights.grad))
    optimizer.step()
    assert torch.equal(weights.detach(), torch.ones(elements))


def test_binsgdms_state_is_updated_whatever_the_layout_of_a_loaded_one() -> None:
    weights = torch.nn.Parameter(torch.zeros(2, 3, 4, 4))
    optimizer = hvq.optim.BinSGDM([weights], beta=0.9)
    saved = optimizer.state_dict()
    kept = torch.arange(96.0).reshape(weights.shape)
    for name in ("momentum", "scale"):
        saved["state"][0][name] = kept.to(memory_format=torch.channels_last)
    optimizer.load_state_dict(saved)
    weights.grad = torch.ones_like(weights)
    optimizer.step()
    for name in ("momentum", "scale"):
        torch.testing.assert_close(optimizer.state[weights][name], 0.9 * kept + 0.1)


def test_binsgdms_state_survives_saving_and_copying() -> None:
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 300, dtype=torch.float16))
    optimizer = hvq.optim.BinSGDM([weights], lr=0.1)
    weights.grad = torch.linspace(-1, 2, 300, dtype=torch.float16)
    optimizer.step()
    twin = torch.nn.Parameter(weights.detach().clone())
    loaded = hvq.optim.BinSGDM([twin], lr=0.5)
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert loaded.state[twin]["momentum"].dtype is torch.float32
    copied = copy.deepcopy(optimizer)
    for other, parameter in ((loaded, twin), (copied, copied.param_groups[0]["params"][0])):
        parameter.grad = weights.grad.clone()
        other.step()
    optimizer.step()
    assert torch.equal(twin, weights)
    assert torch.equal(copied.param_groups[0]["params"][0], weights)


def test_an_element_that_never_had_a_gradient_stays() -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(50, 8, padding_idx=0)
    before = embedding.weight.detach().clone()
    optimizer = hvq.optim.BinSGDM(embedding.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        embedding(torch.arange(40)).pow(2).sum().backward()
        optimizer.step()
    moved = (embedding.weight != before).any(dim=1)
    assert moved.tolist() == [0 < row < 40 for row in range(50)]
