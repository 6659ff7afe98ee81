"""The documentation's images: they show the committed results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

import plots
from fastdraft.cli.app import app

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
TEXT = "{http://www.w3.org/2000/svg}text"


def description(image: Path) -> str:
    (found,) = ElementTree.parse(image).getroot().iter(DESCRIPTION)
    return found.text or ""


@pytest.mark.parametrize("name", plots.PLOTS)
def test_an_image_shows_the_committed_results(name: str, tmp_path: Path) -> None:
    data, draw = plots.PLOTS[name]
    image, redrawn = plots.IMAGES / f"{name}.svg", tmp_path / f"{name}.svg"
    assert description(image) == plots.as_text(data()), "run `make plots`"
    with plots.style():
        figure = draw()
        plots.saved(figure, redrawn, plots.as_text(data()))
    # Every value is a point of a line that is drawn.
    drawn = {
        round(float(value), 4)
        for axes in figure.axes
        for line in axes.get_lines()
        for value in (*line.get_xdata(), *line.get_ydata())
    }
    shown = json.loads(description(redrawn))
    assert {value for points in shown.values() for value in points.values()} <= drawn
    texts = [
        [text.text for text in ElementTree.parse(file).getroot().iter(TEXT)]
        for file in (image, redrawn)
    ]
    assert texts[0] == texts[1], "run `make plots`"
    assert image.stat().st_size < 60_000


def test_the_coloured_answer_is_the_sample_s(tmp_path: Path) -> None:
    image = tmp_path / "answer.svg"
    options = ["replay", "--sample", "--show", "edit-1", "--svg", str(image)]
    assert CliRunner().invoke(app, options).exit_code == 0
    assert image.read_bytes() == (plots.IMAGES / "coloured-answer.svg").read_bytes(), "`make plots`"


def test_a_figure_is_recomputed_by_hand() -> None:
    runs = json.loads((plots.RESULTS / "replay.json").read_text())["runs"]
    ours = {run["token_cost"]: run["geometric_mean"] for run in runs if run["drafter"] == "default"}
    drawn = plots.speed_by_token_cost()["fastdraft"]
    assert drawn == pytest.approx(ours, rel=1e-3)
