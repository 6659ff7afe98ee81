"""What tests of several folders share, and is made once."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fastdraft import step_latency
from slow_tests import TESTS, is_quick_room, is_slow
from step_clock import StepClock

LAYERS = 2

# No case fails for the time that it takes on a busy machine.
settings.register_profile("untimed", deadline=None)
# `make campaign` runs all random cases with it, over and over.
settings.register_profile("campaign", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not even import slow files: what they import may be missing."""
    if config.option.markexpr != "not slow" or collection_path == TESTS:
        return None
    if collection_path.is_dir():
        return not is_quick_room(collection_path) or None
    return (collection_path.name.startswith("test_") and is_slow(collection_path)) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if is_slow(item.path):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after xdist's own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses names that differ from process to process, and keeps an `xdist_group` in one process.

    Workers that collect different names run nothing. A name that holds an address always differs.
    The workers find what depends on an order or a time: each has a hash seed of its own. pytest
    9.2 does not read the ids that xdist 3.8 sets for groups:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    for item in items:
        if re.search(r"\b0x[0-9a-f]{6}", item.nodeid):
            raise pytest.UsageError(f"the name of a test holds an address: {item.nodeid}")
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        if "_nodeid" in vars(item):
            item._id = type(item._id).parse(item._nodeid)  # type: ignore[attr-defined]
        grouped = item.get_closest_marker("xdist_group") is not None
        assert grouped == ("@" in item.nodeid.rpartition("]")[2]), item.nodeid


@pytest.fixture(autouse=True)
def step_clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """The clock by which drafts are timed: no test depends on a measured time."""
    clock = StepClock()
    monkeypatch.setattr(step_latency, "clock", clock)
    if "fastdraft.hf" in sys.modules:
        from fastdraft.hf.draft_models.stage import Stage
        from fastdraft.hf.static import StaticModel
        from fastdraft.hf.step import CachedModel

        forward = clock.timing_forwards(CachedModel.forward)
        monkeypatch.setattr(CachedModel, "forward", forward)
        called = clock.timing_compilations(StaticModel._called)
        monkeypatch.setattr(StaticModel, "_called", called)
        monkeypatch.setattr(Stage, "_forward", clock.timing_drafts(Stage._forward))
    return clock


@pytest.fixture(scope="session")
def short_demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for FASTDRAFT_CACHE that holds the demo model's first layers in its place.

    The tokenizer, the sizes and the other files are its own: decoding takes the same way, in a
    quarter of the time. What the whole model says is tested in tests/cli.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    from fastdraft.demo import ensure_model

    whole = ensure_model()
    short = tmp_path_factory.mktemp("cache") / whole.name
    shutil.copytree(whole, short, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((short / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:LAYERS]
    (short / "config.json").write_text(json.dumps(config))
    with safe_open(whole / "model.safetensors", "pt") as weights:
        kept = {
            name: weights.get_tensor(name)
            for name in weights.keys()  # noqa: SIM118
            if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < LAYERS
        }
    save_file(kept, short / "model.safetensors", metadata={"format": "pt"})
    return short.parent
