"""docs/new-scheme.md, docs/kernels.md and docs/architecture.md: their code runs, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import heavy_tailed, same_bits
from literature import EXAMPLES, TernGrad, load

from horovod_quant import simulator
from horovod_quant.kernels import reference
from horovod_quant.schemes import registry

ROOT = EXAMPLES.parent
PAGE = (ROOT / "docs" / "new-scheme.md").read_text()
KERNELS = (ROOT / "docs" / "kernels.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page's code, run from top to bottom."""
    file: Path = tmp_path_factory.mktemp("page") / "scheme_of_the_page.py"
    file.write_text("\n\n".join(BLOCKS))
    return load(file)


def test_the_code_runs_and_is_registered(page: Any) -> None:
    assert page.result.nmse > 1
    assert registry.families_of(page.TernGrad) == {"terngrad": {}}
    assert "TernGrad" not in registry._registered, "this test was to leave nothing behind"


def test_the_scheme_of_the_page_and_the_examples_are_one(page: Any) -> None:
    assert BLOCKS[0] in (EXAMPLES / "terngrad.py").read_text()
    groups = [[heavy_tailed(rank, 3000), heavy_tailed(rank + 9, 7)] for rank in range(3)]
    for clip in (2.5, 1, None):
        ours, theirs = (
            simulator.run(kind(clip), groups, step=4).decoded[2] for kind in (page.TernGrad, TernGrad)
        )
        assert all(same_bits(a, b) for a, b in zip(ours, theirs))
        assert np.any(ours[0])


def test_every_kernel_that_the_page_names_is_there() -> None:
    table = KERNELS[: KERNELS.index("- **One scale for a tensor**")]
    named = {
        name for row in re.findall(r"^\| .*", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert len(named) > 25
    assert named <= set(dir(reference))


def test_the_transport_of_the_page_on_architecture_runs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "architecture.md", "exec"), names)
    (expected,) = simulator.run(names["scheme"], [names["gradient"]], names=["w"]).decoded[0]
    assert same_bits(names["average"], expected)
