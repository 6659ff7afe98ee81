"""Representations, signatures that inspect finds, and errors that say what to do."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastdraft.config
from fastdraft import (
    Datastore,
    Draft,
    DraftBatch,
    DraftConfig,
    Engine,
    memory,
    verification,
)
from fastdraft.memory.datastore import DatastoreWriter

REPEATS = [1, 2, 3, 4, 1, 2]


def test_an_engine_says_how_it_drafts_and_what_it_holds() -> None:
    engine = Engine()
    shown = "<Engine DraftConfig(lookahead=64, token_cost=0.02), "
    assert repr(engine) == shown + "0 requests running, 0 bytes>"
    engine.add_request(range(2000))
    assert repr(engine).startswith(shown + "1 request running, ")
    assert repr(engine).endswith(" kB>")

    class Mine(Engine):
        pass

    assert repr(Mine()).startswith("<Mine DraftConfig(")


def test_a_draft_shows_its_tokens() -> None:
    engine = Engine(DraftConfig(tree_budget=4))
    request = engine.add_request([*REPEATS, 9, 1, 2])
    assert repr(engine.propose(request, limit=0)) == "<Draft of no tokens>"
    draft = engine.propose(request, token_cost=0.0)
    tokens = ", ".join(map(str, draft.tolist()))
    parents = ", ".join(map(str, draft.parents.tolist()))
    assert repr(draft).startswith(f"<Draft [{tokens}], parents=[{parents}], probabilities=[0.")
    assert repr(draft).endswith(", sources=context>")
    batch = engine.propose_batch([request, request], token_cost=0.0, limits=[1, 0])
    assert repr(batch) == f"<DraftBatch of 2 rows, 1 token: [[{batch.tolist()[0][0]}], []]>"
    long = Engine(DraftConfig(lookahead=40))
    shown = repr(long.propose(long.add_request(REPEATS * 20), token_cost=0.0))
    assert shown.count("...") == 2


def test_stores_say_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.fds"
    with DatastoreWriter(path) as writer:
        writer.begin_document()
        writer.append(range(1000))
        assert (
            repr(writer) == f"<DatastoreWriter to {str(path)!r}, 1,000 tokens in 1 document so far>"
        )
    live = Datastore(max_bytes=1 << 20)
    live.add([1, 2, 3])
    assert repr(live).startswith("<Datastore, live, 3 tokens in 1 document, ")
    assert repr(live).endswith(" of at most 1.0 MB>")
    with Datastore.open(path) as frozen:
        assert repr(frozen).startswith("<Datastore, frozen, 1,000 tokens in 1 document, ")
    assert repr(frozen) == "<Datastore, closed>"


def test_configurations_show_what_was_chosen() -> None:
    for config in (
        DraftConfig(),
        DraftConfig(tree_budget=32, max_bytes=5),
        DraftConfig.ngram(order=3),
        DraftConfig.prompt_lookup(),
        DraftConfig.predicted_outputs(),
    ):
        assert eval(repr(config), vars(fastdraft.config).copy()) == config
    assert repr(DraftConfig()) == "DraftConfig(lookahead=64, token_cost=0.02)"


def test_a_calibration_says_how_well_it_fits() -> None:
    engine = Engine()
    assert repr(engine.calibration()).startswith("<Calibration, ")
    request = engine.add_request(REPEATS * 10)
    for token in (3, 4, 1, 2, 3, 4):
        engine.propose(request, token_cost=0.0)
        engine.observe(request, [token])
    learned = engine.calibration()
    tokens = sum(bucket.count for bucket in learned.reliability)
    assert f" of {tokens:,} tokens, predicted and observed acceptance differ by 0." in repr(learned)
    assert "steps=6, emitted=6" in repr(engine.stats(request))


def test_signatures_have_kinds_and_defaults() -> None:
    found = inspect.signature(Engine.propose_batch).parameters
    assert found["requests"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert found["limits"].kind is inspect.Parameter.KEYWORD_ONLY
    assert found["padded"].default is False
    assert inspect.signature(Engine).parameters["datastores"].default == ()
    assert next(iter(inspect.signature(Engine().propose).parameters)) == "request"


@pytest.mark.parametrize("module", [fastdraft, memory, verification])
def test_all_that_is_public_has_a_signature(module: Any) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        # Drafts are made by engines alone.
        if not callable(value) or value in (Draft, DraftBatch):
            continue
        if inspect.isclass(value) and issubclass(value, (int, tuple)):
            continue
        inspect.signature(value)
        for member, function in inspect.getmembers(value, inspect.isroutine):
            if not member.startswith("_"):
                inspect.signature(function)


STORE = Datastore(max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (STORE, "got one Datastore: write datastores=[store]"),
        (["x.fds"], "got a path: write Datastore.open('x.fds')"),
        ([Path("x.fds")], "got a path: write Datastore.open('x.fds')"),
        ("x.fds", "got a path: write datastores=[Datastore.open('x.fds')]"),
        ([STORE, 4], "got 4 in it"),
        (4, "datastores must be a list of Datastores, got 4"),
    ],
)
def test_wrong_datastores_say_what_to_write(given: Any, message: str) -> None:
    for call in (
        lambda: Engine(datastores=given),
        lambda: Engine().add_request([1], datastores=given),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert message in str(error.value)


def test_stores_come_in_lists_and_tuples() -> None:
    for given in ([STORE], (STORE,), [], ()):
        Engine(datastores=given).add_request([1], datastores=given)


def test_a_store_of_a_path_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"open a file by Datastore.open\('x.fds'\)"):
        Datastore("x.fds")
    with pytest.raises(TypeError, match=r"store.add\(token_ids\)"):
        Datastore(np.arange(3))


@pytest.mark.parametrize(
    ("module", "missing", "message"),
    [
        ("fastdraft.hf", "torch", "fastdraft.hf needs torch, which is not installed: pip install"),
        ("fastdraft.hf", "transformers", "pip install 'fastdraft[hf]'"),
        ("fastdraft.verification", "torch", "fastdraft.verification needs torch"),
    ],
)
def test_a_part_without_its_package_says_what_to_install(
    module: str, missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as error:
        importlib.import_module(module)
    assert message in str(error.value)
