"""The plots' names and details are there and readable; what the plots show is tested elsewhere."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

import demonstration
import readme_picture
from matplotlib import pyplot as plt
from reproduction import common, eden, nuqsgd, transformer


def test_names_at_the_ends_of_curves_do_not_overlap() -> None:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.set(xscale="log", yscale="log")
    for configuration, ratio in zip(demonstration.CONFIGURATIONS, (1, 2, 7.2, 7.2, 3.8, 7.2, 9.5, 14, 1, 22)):
        steps = np.arange(1, 121)
        axes.plot(steps / ratio, 2 * np.exp(-steps / 20) + 0.03, label=configuration.title)
    demonstration.label_ends(axes)
    figure.draw_without_rendering()
    assert {text.get_text() for text in axes.texts} == {each.title for each in demonstration.CONFIGURATIONS}
    boxes = [text.get_bbox_patch().get_window_extent() for text in axes.texts]
    inside = axes.get_window_extent()
    for box in boxes:
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        assert inside.y0 <= box.y0
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    plt.close(figure)


def is_inside(figure: Any) -> bool:
    """True if no label or legend leaves the figure."""
    figure.draw_without_rendering()
    drawn, whole = figure.get_tightbbox(), figure.bbox_inches
    return drawn.x0 >= whole.x0 and drawn.x1 <= whole.x1 and drawn.y0 >= whole.y0 and drawn.y1 <= whole.y1


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, marks=() if claim in ("eden", "limits") else pytest.mark.extended)
        for claim in (*common.CLAIMS, *common.ON_DEMAND)
        if (ROOT / "docs" / "results" / f"{claim}.json").exists()
    ],
)
def test_texts_and_legends_are_inside_their_plots(claim: str, monkeypatch: Any) -> None:
    found = kept(monkeypatch)
    result = common.load(ROOT / "docs" / "results" / f"{claim}.json")
    assert result
    assert len(common.module_of(claim).draw(result["figures"], Path("unused"))) == len(found)
    for figure in found:
        assert is_inside(figure)
        plt.close(figure)


def test_labels_of_the_readmes_picture_are_inside_their_axes(monkeypatch: Any) -> None:
    found = kept(monkeypatch)
    assert readme_picture.main() == 0
    (figure,) = found
    assert is_inside(figure)
    for axes in figure.axes:
        box = axes.get_window_extent()
        for label in axes.texts:
            extent = label.get_window_extent()
            assert box.x0 <= extent.x0, label
            assert extent.x1 <= box.x1, label
    plt.close(figure)


def test_the_detail_of_edens_losses_has_few_lines(monkeypatch: Any) -> None:
    found = kept(monkeypatch)
    eden.draw(common.load(ROOT / "docs" / "results" / "eden.json")["figures"], Path("unused"))
    (inset,) = found[-1].axes[0].child_axes
    assert len(inset.lines) == len(eden.CLOSE)
    for figure in found:
        plt.close(figure)


def kept(monkeypatch: Any) -> list[Any]:
    """The figures that are written, instead of files."""
    found: list[Any] = []
    monkeypatch.setattr(common, "save_plot", lambda figure, path: found.append(figure))
    return found


def test_losses_of_the_transformer_have_a_legend_and_a_detail(monkeypatch: Any) -> None:
    found = kept(monkeypatch)
    figures = common.load(ROOT / "docs" / "results" / "transformer.json")["figures"]
    transformer.draw_losses(figures["trainings"], transformer.TRAININGS, Path("unused"))
    (figure,) = found
    titles = [each.title for each in transformer.TRAININGS]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == titles
    (inset,) = figure.axes[0].child_axes
    assert 2 <= len(inset.lines) < len(titles)  # not the worse ones, nor the longer one
    assert max(abs(value) for line in inset.lines for value in line.get_ydata()) < 5
    plt.close(figure)


def test_losses_of_nuqsgd_are_inside_but_for_what_is_said_to_break_down(monkeypatch: Any) -> None:
    found = kept(monkeypatch)
    figures = common.load(ROOT / "docs" / "results" / "nuqsgd.json")["figures"]
    nuqsgd._draw_losses(figures, nuqsgd.LARGER, Path("unused"))
    (figure,) = found
    said = 0
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.lines:
            assert min(line.get_ydata()) > low
        broken = [line for line in axes.lines if max(line.get_ydata()) > high]
        assert len(axes.texts) == len(broken)
        said += len(broken)
    assert said == 1
    plt.close(figure)
