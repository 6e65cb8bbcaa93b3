"""The plots' names and details are there and readable; what the plots show is tested elsewhere."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from parallel.launching import ROOT

sys.path.append(str(ROOT / "scripts"))

import demonstration
from matplotlib import pyplot as plt
from reproduction import common, nuqsgd, transformer


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
