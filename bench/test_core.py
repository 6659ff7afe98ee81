"""The engine's calls beside the peers': alone, beside stored text, warm and cold, in batches.

The text is source code; a request decodes it as it goes on, one token a step.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import harness
from context_memory import bytes_a_token
from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.memory.datastore import DatastoreWriter
from fastdraft.replay import PEERS, EnginePeer, Peer, Unavailable
from turns import Ids, Turn, chunks

# Some versions of numba warn of the lists that vLLM's n-gram proposer passes it.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type")

CONTEXTS = (1_000, 10_000, 100_000, 1_000_000)
LOOKAHEAD = 10  # the longest draft of the peers
DOCUMENT = 2_000
MILLION = 1_000_000
# What a step of a host reads and writes between two calls, and so drives out of the caches.
BETWEEN = np.zeros(2_000_000 // 8, np.int64)

InTurns = Callable[..., None]
Store = tuple[list[Datastore], list[Ids]]
"""What the engine is given, and the same documents for a peer."""


@pytest.fixture(scope="session", params=["alone", "live 1 M", "live 10 M", "frozen 10 M"])
def store(
    request: pytest.FixtureRequest, text: Ids, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    kind, _, millions = request.param.removesuffix(" M").partition(" ")
    documents = [*chunks(text, DOCUMENT, int(millions or 0) * MILLION // DOCUMENT)]
    if kind == "alone":
        yield [], documents
    elif kind == "live":
        yield [live_store(documents)], documents
    else:
        path = tmp_path_factory.mktemp("store") / "frozen.fds"
        with DatastoreWriter(path) as writer:
            for document in documents:
                writer.begin_document()
                writer.append(document)
        with Datastore.open(path) as frozen:
            yield [frozen], documents
    gc.collect()


def live_store(documents: list[Ids]) -> Datastore:
    store = Datastore()
    for document in documents:
        store.add(document)
    return store


def peer_with(name: str, longest: int, documents: list[Ids]) -> Peer:
    """A peer for requests of at most `longest` tokens that knows the documents, or Unavailable."""
    peer = PEERS[name](LOOKAHEAD, max(longest, DOCUMENT))
    for document in documents:
        request = peer.start(document[:1])
        request.observe(document[1:].tolist())
        request.finish()
    return peer


class Request:
    """The turn of a drafter that takes one request a round."""

    def __init__(self, peer: Peer, call: str, begin: Callable[[int], tuple[Ids, Ids]]) -> None:
        """call: "propose" or "observe"; begin: the prompt and what follows it, by round."""
        self._peer, self._call, self._texts = peer, call, begin
        self._request: Any = None

    def begin(self, number: int) -> Callable[..., Any]:
        if self._request is not None:
            self._request.finish()
        prompt, following = self._texts(number)
        self._request = self._peer.start(prompt)
        self._following = iter(following.tolist())
        if self._call == "observe" and isinstance(self._peer, EnginePeer):
            return self._peer.engine.observe
        return getattr(self._request, self._call)  # type: ignore[no-any-return]

    def step(self) -> tuple[Any, ...]:
        request, token = self._request, [next(self._following)]
        if self._call == "propose":
            request.observe(token)
            return (request.argument,)
        request.propose(request.argument)
        return (request.argument, token) if isinstance(self._peer, EnginePeer) else (token,)


def turns(
    names: list[str],
    call: str,
    texts: Callable[[int], tuple[Ids, Ids]],
    longest: int,
    store: Store,
    *,
    cold: bool = False,
) -> dict[str, Turn]:
    """Turns of an engine and of those named peers that are there, with the same stored text.

    longest: tokens of a request. cold: other data passes through the caches before each call.
    """
    datastores, documents = store
    drafters: dict[str, Peer] = {"fastdraft": EnginePeer(Engine(datastores=datastores))}
    for name in names:
        with contextlib.suppress(Unavailable):
            drafters[name] = peer_with(name, longest, documents)
    made = {}
    for name, peer in drafters.items():
        requests = Request(peer, call, texts)

        def step(step: Callable[[], tuple[Any, ...]] = requests.step) -> tuple[Any, ...]:
            arguments = step()
            if cold:
                BETWEEN[:] += 1
            return arguments

        made[name] = Turn(requests.begin, step)
        if name in ("transformers", "vllm"):  # These read the whole text for each draft.
            made[name].steps = 40
    return made


def code(text: Ids, context: int) -> Callable[[int], tuple[Ids, Ids]]:
    """Requests of one length from all over the text."""

    def texts(number: int) -> tuple[Ids, Ids]:
        start = number * 50_000 % MILLION
        return text[start : start + context], text[start + context :][:1000]

    return texts


NOTHING: Store = ([], [])


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("call", ["propose", "observe"])
def test_alone(in_turns: InTurns, text: Ids, context: int, call: str) -> None:
    in_turns(turns([*PEERS], call, code(text, context), context + 1000, NOTHING))


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("call", ["propose", "observe"])
def test_beside(in_turns: InTurns, text: Ids, store: Store, call: str, cold: bool) -> None:
    """A request of 100,000 tokens beside stored ones; Arctic has them in its global tree."""
    context = 100_000
    in_turns(turns(["arctic"], call, code(text, context), context + 1000, store, cold=cold))


FAMILIES = ("mtbench", "rag_qa", "gec", "agent_swe", "code_edit_aider_chat")


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded(in_turns: InTurns, request: pytest.FixtureRequest, family: str) -> None:
    """Recorded requests, with the answers of the first half of their family stored."""
    if (data := request.config.getoption("--data")) is None:
        pytest.skip("needs recorded requests: --data FOLDER")
    records = next(iter(harness.recorded_families(data, names=[family]).values()))
    half = len(records) // 2
    documents = [record.output_ids for record in records[:half]]
    asked = [record for record in records[half:] if len(record.output_ids) > 100]

    def texts(number: int) -> tuple[Ids, Ids]:
        record = asked[number % len(asked)]
        return record.prompt_ids, record.output_ids

    longest = max(len(record.prompt_ids) + len(record.output_ids) for record in records)
    made = turns(["arctic"], "propose", texts, longest, ([live_store(documents)], documents))
    for turn in made.values():
        turn.steps = 100
    in_turns(made)


class Rows:
    """Prompts of a batch of requests, and the tokens that follow them step by step."""

    def __init__(self, text: Ids, count: int, context: int) -> None:
        self.starts = [index * 7_001 for index in range(count)]
        self.prompts = [text[start : start + context] for start in self.starts]
        self._text, self._position = text, context

    def next(self) -> Ids:
        self._position += 1
        return self._text[[start + self._position for start in self.starts]]


@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("call", ["propose", "observe"])
def test_batch(in_turns: InTurns, text: Ids, rows: int, call: str) -> None:
    """Requests of 4,000 tokens beside a million stored ones, in one call or one after another.

    A draft token's share of a forward over 64 rows is a 64th of what it is over one, so that the
    drafts are about as long as one request's.
    """
    documents = [*chunks(text, DOCUMENT, MILLION // DOCUMENT)]
    ours = Rows(text, rows, 4_000)
    engine = Engine(datastores=[live_store(documents)])
    requests = [engine.add_request(prompt) for prompt in ours.prompts]
    offsets = np.arange(rows + 1, dtype=np.int32)
    token_cost = DraftConfig().token_cost / rows
    propose = partial(engine.propose_batch, token_cost=token_cost)

    def step() -> tuple[Any, ...]:
        if call == "propose":
            engine.observe_batch(requests, ours.next(), offsets)
            return (requests,)
        propose(requests)
        return requests, ours.next(), offsets

    timed = propose if call == "propose" else engine.observe_batch
    made = {"fastdraft": Turn(lambda _: timed, step, 40)}
    try:
        peer = peer_with("arctic", 8_000, documents)
    except Unavailable:
        in_turns(made)
        return
    theirs = Rows(text, rows, 4_000)
    started = [peer.start(prompt) for prompt in theirs.prompts]

    def propose_all() -> None:
        for request in started:
            request.propose(request.argument)

    def observe_all(emitted: list[int]) -> None:
        for request, token in zip(started, emitted, strict=True):
            request.observe([token])

    def their_step() -> tuple[Any, ...]:
        if call == "propose":
            observe_all(theirs.next().tolist())
            return ()
        propose_all()
        return (theirs.next().tolist(),)

    their_call = propose_all if call == "propose" else observe_all
    made["arctic"] = Turn(lambda _: their_call, their_step, 40)
    in_turns(made)


@pytest.mark.parametrize("context", CONTEXTS)
def test_observe_8_tokens(in_turns: InTurns, text: Ids, context: int) -> None:
    """As a step with accepted drafts makes it: eight tokens in one array."""
    engine = Engine()
    request, position = 0, 0

    def begin(number: int) -> Callable[..., Any]:
        nonlocal request, position
        request, position = engine.add_request(text[number * 50_000 :][:context]), context
        return engine.observe

    def step() -> tuple[Any, ...]:
        nonlocal position
        position += 8
        return request, text[position : position + 8]

    in_turns({"fastdraft": Turn(begin, step)})


@pytest.mark.parametrize("context", CONTEXTS)
def test_add_request(in_turns: InTurns, text: Ids, context: int) -> None:
    """Indexing a prompt. Each call has an engine or cache of its own, made untimed."""

    def turn(make: Callable[[], Callable[[Ids], Any]]) -> Turn:
        number = 0

        def step() -> tuple[Any, ...]:
            nonlocal number
            number += 101
            return make(), text[number : number + context]

        return Turn(lambda _: _start, step, 4)

    made = {"fastdraft": turn(lambda: Engine().add_request)}
    try:
        PEERS["arctic"](LOOKAHEAD, context)
    except Unavailable:
        pass
    else:
        made["arctic"] = turn(lambda: PEERS["arctic"](LOOKAHEAD, context).start)
    in_turns(made, 5)


def _start(start: Callable[[Ids], Any], prompt: Ids) -> None:
    start(prompt)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("drafter", ["fastdraft", *PEERS])
def test_bytes_a_token(
    text: Ids, context: int, drafter: str, add_figures: Callable[..., None]
) -> None:
    # A fresh process, of which the memory says what this alone takes.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            figure = pool.submit(bytes_a_token, drafter, text, context, LOOKAHEAD).result()
        except Unavailable as reason:
            pytest.skip(str(reason))
    add_figures(drafter, figure=figure)
