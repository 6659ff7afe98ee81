"""The options of a request, as clients send them and as hosts pass them on."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from fastdraft import Engine
from fastdraft.errors import InvalidValueError
from fastdraft.serving.request_options import (
    MOST_CORPUS_IDS,
    MOST_IDS,
    UNLIMITED,
    RequestOptions,
    request_options,
)


def test_nothing_said_is_the_default() -> None:
    assert request_options({}) == RequestOptions()
    other = {"temperature": 3, "fast": 1, "prediction": 5, 7: 8}
    assert request_options(other) == RequestOptions()
    ids = ("prediction_token_ids", "fastdraft_template_ids", "fastdraft_corpus_token_ids")
    for name in (*ids, "fastdraft_namespace", "fastdraft_corpus_id", "fastdraft_lookahead"):
        assert request_options({name: None}) == RequestOptions()


def test_all_options() -> None:
    got = request_options(
        json.loads(
            """{"prediction_token_ids": [1, 2], "fastdraft_template_ids": [], "fastdraft": "on",
            "fastdraft_remember": true, "fastdraft_namespace": "näme", "fastdraft_corpus_id": "c",
            "fastdraft_corpus_token_ids": [2147483647], "fastdraft_lookahead": 3}"""
        )
    )
    ids = (got.prediction, got.templates, got.corpus)
    assert [None if each is None else each.tolist() for each in ids] == [[1, 2], [], [UNLIMITED]]
    assert all(each is not None and each.dtype == np.int32 for each in ids)
    assert (got.lookahead, got.remember, got.namespace, got.corpus_id) == (3, True, "näme", "c")
    Engine().add_request([1], prediction=got.corpus)


@pytest.mark.parametrize("value", [False, 0, np.False_.item()])
def test_values_that_switch_off(value: object) -> None:
    assert request_options({"fastdraft_remember": value}).remember is False
    assert request_options({"fastdraft": value, "fastdraft_lookahead": 4}).lookahead == 0
    assert request_options({"fastdraft": "off"}).lookahead == 0


@pytest.mark.parametrize("value", ["false", "off", "no", "0", "true", "", None, 2, -1, 0.0, [], {}])
def test_an_opt_out_never_fails_open(value: object) -> None:
    with pytest.raises(InvalidValueError, match=r"^fastdraft_remember must be True or False, got"):
        request_options({"fastdraft_remember": value})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("fastdraft", "of", "must be 'on' or 'off', got 'of'"),
        ("fastdraft", None, "must be 'on' or 'off', got None"),
        ("fastdraft", 0.0, "must be 'on' or 'off', got 0.0"),
        ("fastdraft_lookahead", 0, "must be at least 1, got 0; to draft nothing, say fastdraft"),
        ("fastdraft_lookahead", "4", "must be an integer, got '4'"),
        ("fastdraft_lookahead", True, "must be an integer, got True"),
        ("fastdraft_lookahead", 2.0, "must be an integer, got 2.0"),
        ("fastdraft_namespace", 5, "must be a text of 1 to 256 characters, got 5"),
        ("fastdraft_namespace", "", "must be a text of 1 to 256 characters, got ''"),
        ("fastdraft_namespace", "a" * 257, "must be a text of 1 to 256 characters, got 'aaaa"),
        ("fastdraft_namespace", "\ud800", r"must be a text of 1 to 256 characters, got '\ud800'"),
        ("fastdraft_namespace", ["a"], "must be a text of 1 to 256 characters, got ['a']"),
        ("fastdraft_corpus_id", 5, "must be a text of 1 to 256 characters, got 5"),
        ("prediction_token_ids", "abc", "must be a list of token ids, got 'abc'"),
        ("prediction_token_ids", 5, "must be a list of token ids, got 5"),
        ("prediction_token_ids", {"a": 1}, "must be a list of token ids, got {'a': 1}"),
        ("prediction_token_ids", ["abc"], "must be a list of token ids, got ['abc']"),
        ("prediction_token_ids", [1, 2.5], "must be a list of token ids, got [1, 2.5]"),
        ("prediction_token_ids", [1, None], "must be a list of token ids, got [1, None]"),
        ("prediction_token_ids", [[1, 2]], "must be a list of token ids, got [[1, 2]]"),
        ("prediction_token_ids", [[1], 2], "must be a list of token ids, got [[1], 2]"),
        ("prediction_token_ids", [True], "must be a list of token ids, got [True]"),
        ("prediction_token_ids", [10**40], "must be a list of token ids, got [1"),
        ("prediction_token_ids", [1, 10**12], f"must be token ids of 0 to {UNLIMITED}, got 10000"),
        ("prediction_token_ids", [2**31], f"must be token ids of 0 to {UNLIMITED}, got 2147483648"),
        ("prediction_token_ids", [2**63], f"must be token ids of 0 to {UNLIMITED}, got 922337203"),
        ("fastdraft_template_ids", [5, -1], f"must be token ids of 0 to {UNLIMITED}, got -1"),
        ("fastdraft_corpus_token_ids", [1], "needs a fastdraft_corpus_id, got none"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match="^" + re.escape(f"{name} {reason}")):
        request_options({name: value})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fastdraft_rember", "fastdraft_rember is not a known option; is it fastdraft_reme"),
        ("fastdraft-namespace", "fastdraft-namespace is not a known option; is it fastdraft_"),
        ("predictions", "predictions is not a known option; is it prediction_token_ids?"),
        ("prediction_tokens", "prediction_tokens is not a known option; is it prediction_token_i"),
        ("fastdraft_\ud800", r"fastdraft_\ud800 is not a known option"),
        ("FASTDRAFT", "FASTDRAFT is not a known option; is it fastdraft?"),
        ("fastdraft_cache_salt", "fastdraft_cache_salt is not a known option"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match="^" + re.escape(reason)):
        request_options({name: 1})


def test_a_host_has_names_of_its_own() -> None:
    params = {"fastdraft_cache_salt": "s", "fastdraft_lookahead": 2}
    assert request_options(params, own=["fastdraft_cache_salt"]).lookahead == 2


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("prediction_token_ids", MOST_IDS),
        ("fastdraft_template_ids", MOST_IDS),
        ("fastdraft_corpus_token_ids", MOST_CORPUS_IDS),
    ],
)
@pytest.mark.parametrize("kind", [list, np.asarray])
def test_lists_of_token_ids_have_an_end(name: str, most: int, kind: Any) -> None:
    ids = kind([7] * most)
    request_options({name: ids, "fastdraft_corpus_id": "c"})
    message = f"^{name} must be at most {most} token ids, got {most + 1}$"
    with pytest.raises(InvalidValueError, match=message):
        request_options({name: kind([7] * (most + 1)), "fastdraft_corpus_id": "c"})


def test_messages_are_short() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for name in ("prediction_token_ids", "fastdraft_namespace", "fastdraft_remember", "fastdraft"):
        for value in (deep, "a" * 10_000, {"a" * 10_000: deep}):
            with pytest.raises(InvalidValueError) as caught:
                request_options({name: value})
            assert len(str(caught.value)) < 200
    with pytest.raises(InvalidValueError) as caught:
        request_options({"fastdraft" + "a" * 10_000: 1})
    assert len(str(caught.value)) < 200
