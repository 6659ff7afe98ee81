"""The examples run as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from forks import Forks

FOLDER = Path(__file__).parents[2] / "examples" / "python"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
MOST_LINES = 60

PRINTS = {
    "memory.py": r"second time: \d\d",
    "own_loop.py": r"(?s)one two three four five.*DraftStats\(steps=",
    "predicted_outputs.py": r"[1-9]\d* tokens of it accepted",
    "quick_start.py": r"tokens per forward pass",
    "rollouts.py": r"epoch 2: .* [1-9]\d* from earlier epochs",
    "replay_a_log.py": r"<ReplayResult of fastdraft, lookahead 64, 1 families, token cost 0\.05",
}


@pytest.fixture(scope="module")
def variables(short_demo_cache: Path) -> dict[str, str]:
    """The environment of an example, where the demo model has its first layers alone."""
    return {**os.environ, "FASTDRAFT_CACHE": str(short_demo_cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def forks(variables: dict[str, str]) -> Iterator[Forks]:
    with closing(Forks(["torch", "transformers"], variables)) as forks:
        yield forks


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs(
    script: str, forks: Forks, variables: dict[str, str], tmp_path: Path
) -> None:
    if script == "same_training.py":
        pytest.importorskip(
            "trl", reason="same_training.py needs trl; tests/hosts runs it with TRL"
        )
    if script == "openai_client.py":
        missing = [
            need
            for need, there in (
                ("the package openai", importlib.util.find_spec("openai") is not None),
                ("a server, whose address is in VLLM_URL", "VLLM_URL" in os.environ),
            )
            if not there
        ]
        if missing:
            pytest.skip(f"{script} needs {' and '.join(missing)}; tests/hosts runs it with both")
    printed = forks.run(FOLDER / script, variables=variables, log=tmp_path / "log", timeout=300)
    assert re.search(PRINTS.get(script, "accepted"), printed), printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short_and_says_what_to_install(script: str) -> None:
    source = (FOLDER / script).read_text("utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    assert re.search(r"Needs [\w ]*(fastdraft|openai)", source)


def test_the_notebook_shows_coloured_text(tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / "coloured_text.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = json.dumps(notebook)
    assert "border-bottom:2px dotted" in shown and "set_schedule" in shown
    assert "accepted" in shown and "token cost 0.02" in shown


def test_the_list_of_examples_is_whole() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    listed = set(re.findall(r"\]\((.+?)\)", text))
    assert listed == {*SCRIPTS, "coloured_text.ipynb"}
