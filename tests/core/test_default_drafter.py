"""The default drafter, held against its oracle, and what it promises of its drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from fastdraft import Datastore, DraftConfig, Engine, NgramTable, Offers, Source
from fastdraft.errors import DatastoreClosedError, InvalidValueError
from fastdraft.memory.ngrams import build
from oracles.acceptance_model import AcceptanceModel
from oracles.emission_rate import EmissionRate
from oracles.offers import Offer, OfferedDrafter, OfferModel
from oracles.token_weights import TokenWeights

motifs = st.lists(st.integers(0, 3), min_size=1, max_size=6)
runs = st.tuples(motifs, st.integers(1, 8), motifs).map(lambda r: r[0] * r[1] + r[2])
texts = st.lists(runs, max_size=3).map(lambda parts: list(chain(*parts))[:70])
# Offered tokens: the token, its parent counted back from the one before it, its confidence.
offered = st.lists(
    st.tuples(st.integers(0, 5), st.just(0) | st.integers(0, 4), st.floats(0, 1, width=32)),
    max_size=8,
)
# The offers of two kinds, whether they have confidences, and whether the second kind's tokens are
# drawn, and then are a chain.
KINDS = ("eagle", "runners-up")
offers_of_a_step = st.tuples(
    st.lists(offered, min_size=2, max_size=2), st.booleans(), st.booleans()
)
# How far the target follows a draft, what it says then, the draft's limit, and what is offered.
step = (st.integers(0, 20), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 9))
steps = st.lists(st.tuples(*step), max_size=10) | st.lists(
    st.tuples(*step, offers_of_a_step), max_size=8
)


@pytest.fixture(scope="module")
def corpus() -> Iterator[Datastore]:
    """A frozen store of runs that repeat, over the tokens of `texts`."""
    random = np.random.default_rng(3)
    documents = [np.tile(random.integers(0, 4, random.integers(2, 9)), 6) for _ in range(40)]
    with tempfile.TemporaryDirectory() as folder, Datastore() as live:
        for document in documents:
            live.add(document, prompt_size=random.integers(0, len(document)))
        live.save(Path(folder) / "corpus.fds")
        with Datastore.open(Path(folder) / "corpus.fds") as frozen:
            yield frozen


def case(**own: Any) -> Any:
    """An example with its own values and the usual ones."""
    usual: dict[str, Any] = {"prompt": [], "prediction": [], "documents": None, "lookahead": 4}
    usual |= {"tree_budget": None, "token_cost": 0.0, "names": False, "ngrams": None}
    return example(**usual | own)


@settings(max_examples=300, deadline=None)
@given(
    prompt=texts,
    prediction=st.just([]) | texts,
    documents=st.none() | st.lists(texts, max_size=4),
    steps=steps,
    lookahead=st.integers(1, 8) | st.just(20),
    tree_budget=st.none() | st.integers(1, 20),
    token_cost=st.just(0.0) | st.floats(0.001, 0.3),
    names=st.booleans(),
    ngrams=st.none() | st.lists(texts, min_size=2, max_size=4),
)
@case(  # so long a run that its latest ends are only known in part
    prompt=[0] * 39,
    steps=[(0, [1, 0], 0), (0, [0], 0)],
    lookahead=1,
)
@case(  # a copy that is left for longer than its drafter's patience, 32 tokens
    prompt=[*range(60)],
    prediction=[*range(100, 160)],
    steps=[
        (0, [*range(10, 16)], 9),
        (0, [*range(200, 234)], 9),
        *((0, [token], 9) for token in (16, *range(100, 106), *range(234, 268), 106)),
    ],
    tree_budget=12,
)
@case(  # a copy nearby, of two tokens, while a much longer one stands elsewhere
    prompt=[1, 2, 3, 4, 5, 53, 77, 54, 55, 88, *range(300, 350), *range(50, 58)],
    steps=[(0, [token], 9) for token in (1, 2, 3, 4, *range(50, 57))],
    tree_budget=12,
)
@case(  # stored texts that go on together for longer than is copied at first
    prompt=[1, 2, 3, 4],
    documents=[[*range(60)], [*range(40), *range(70, 90)]],
    steps=[(0, [5], 9), (50, [], 9)],
    lookahead=64,
    names=True,
)
@case(
    prompt=[1, 2, 3, 4],
    documents=[[*range(60)], [*range(40), *range(70, 90)]],
    steps=[(0, [5], 9), (90, [], 9)],
    lookahead=64,
    tree_budget=100,
    names=True,
)
@case(  # a confidence on the edge of two classes
    steps=[(0, [], 9, ([[], [(0, 0, float(np.float32(0.7)))]], True, False))],
    lookahead=1,
)
@case(  # offers deeper than the last depth that is its own
    steps=[(9, [5], 9, ([[(token % 5, 0, 0.5) for token in range(9)], []], True, False))] * 2,
    lookahead=20,
)
@case(  # a drawn chain that ends before what a table of n-grams would go on with
    steps=[
        (0, [], 0, ([[], []], False, False)),
        (0, [0], 5, ([[], [(token, 0, 0.0) for token in (1, 0, 1, 0)]], False, True)),
    ],
    lookahead=5,
    ngrams=[[0, 0], [0, 0]],
)
def test_drafts_are_the_oracles(
    corpus: Datastore,
    prompt: list[int],
    prediction: list[int],
    documents: list[list[int]] | None,
    steps: list[tuple[Any, ...]],
    lookahead: int,
    tree_budget: int | None,
    token_cost: float,
    names: bool,
    ngrams: list[list[int]] | None,
) -> None:
    table = None if ngrams is None else table_of(ngrams)
    stores = [] if documents is None else [Datastore(max_bytes=1 << 20), corpus]
    for document in documents or []:
        stores[0].add(document, prompt_size=len(document) // 2)
    if documents is not None and names:
        stores[0].add(ELSEWHERE)
    config = DraftConfig(
        lookahead=lookahead, tree_budget=tree_budget, token_cost=token_cost, ngrams=table
    )
    engine = Engine(config, datastores=stores)
    request = engine.add_request(prompt, prediction=prediction)
    drafter = OfferedDrafter(
        prompt,
        AcceptanceModel(engine.calibration().weights),
        lookahead=lookahead,
        tree=tree_budget is not None,
        prediction=prediction,
        stores=stores,
        named=TokenWeights.of(stores[0]) if stores else None,
        ngrams=table,
    )
    models = [OfferModel() for _ in KINDS]
    records = [[0.0, 0.0] for _ in KINDS]
    if any(len(step) > 3 for step in steps):
        for kind in KINDS:
            engine.propose(request, offers=Offers(kind, [0]))  # so that they are numbered in order
    rate = EmissionRate()
    most = tree_budget or lookahead
    for follow, more, within, *offered in steps:
        limit = most if within > 4 else min(most, within)
        offers: list[Offers] = []
        drafter.offers, drawn_ids = [], None
        for trees, confident, drawn in offered:
            for k, nodes in enumerate(trees):
                of_chain = drawn and k == 1
                tokens = [token for token, _, _ in nodes]
                parents = [
                    max(at - 1 - (0 if of_chain else back), -1)
                    for at, (_, back, _) in enumerate(nodes)
                ]
                sure = [confidence for _, _, confidence in nodes] if confident else None
                offers.append(Offers(KINDS[k], tokens, None, parents, sure, drawn=of_chain))
                if tokens:
                    source = Source.OFFER + k
                    known = Offer(tokens, parents, sure, models[k], source, records[k])
                    drafter.offers = [*drafter.offers, known]
                    drawn_ids = tokens if of_chain else None
        draft = engine.propose(request, limit=limit, offers=offers or None)
        drafter.follow(draft, limit, least=rate.price(token_cost), drawn=drawn_ids)
        assert len(draft) <= limit
        assert (np.diff(draft.probabilities) <= 0).all()
        for index, parent in enumerate(draft.parents):
            assert parent < index
            assert parent < 0 or draft.probabilities[index] <= draft.probabilities[parent]
            assert len(drafter.path_to(index)) <= lookahead
        # The target goes some way along the draft, and on by itself.
        emitted = drafter.path_to(follow % (len(draft) + 1) - 1) + more
        engine.observe(request, emitted)
        drafter.observe(emitted)
        if emitted:
            # No step emits more than a whole draft and a token.
            rate.add(min(len(emitted), most + 1), 1 + token_cost * len(draft))
    for name, weights in engine.calibration().weights.items():
        assert weights == pytest.approx(drafter.acceptance.weights[name], abs=1e-4)


# Enough text for a store to have weights that name tokens.
ELSEWHERE = [*range(1000, 2400)]
DOCUMENT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
OTHER = [10, 11, 12, 13, 14, 15, 26, 27, 28, 29]
PROMPT = [1, *DOCUMENT[:6]]


def table_of(texts: list[list[int]]) -> NgramTable:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "table.fdn", texts)
        return NgramTable.open(Path(folder) / "table.fdn")


def store_of(*documents: ArrayLike, fingerprint: bytes | None = None) -> Datastore:
    store = Datastore(max_bytes=1 << 20, fingerprint=fingerprint)
    for document in documents:
        store.add(document)
    return store


def frozen_of(folder: Path, *documents: ArrayLike) -> Datastore:
    with store_of(*documents) as store:
        store.save(folder / "frozen.fds")
    return Datastore.open(folder / "frozen.fds")


def drafted(engine: Engine, request: int) -> list[int]:
    return engine.propose(request, token_cost=0.0).tolist()


def test_a_request_sees_the_stores_that_it_was_given_and_no_others() -> None:
    engine = Engine(DraftConfig(lookahead=4), datastores=[store_of(DOCUMENT)])
    default = engine.add_request(PROMPT)
    own = engine.add_request(PROMPT, datastores=[store_of(OTHER)])
    none = engine.add_request(PROMPT, datastores=[])
    for _ in range(2):
        assert drafted(engine, default) == [16, 17, 18, 19]
        assert drafted(engine, own) == [26, 27, 28, 29]
        assert drafted(engine, none) == []
    tree = Engine(DraftConfig(lookahead=2, tree_budget=9), datastores=[store_of(DOCUMENT, OTHER)])
    draft = tree.propose(tree.add_request(PROMPT), token_cost=0)
    assert sorted(zip(draft.parents.tolist(), draft.tolist(), strict=True))[:2] == [
        (-1, 16),
        (-1, 26),
    ]
    assert sorted(draft.tolist()) == [16, 17, 26, 27]


@pytest.mark.parametrize("tree_budget", [None, 24])
def test_no_store_hides_what_another_one_has(tree_budget: int | None) -> None:
    prompt = list(range(100, 140))
    short = [
        store_of(*([1000 + i, prompt[-1], first + i] for i in range(60))) for first in (2000, 3000)
    ]
    long = store_of([*prompt[-20:], 7, 8, 9])
    config = DraftConfig(lookahead=3, tree_budget=tree_budget, token_cost=0)
    drafts = []
    for stores in permutations([*short, long]):
        engine = Engine(config, datastores=stores)
        draft = engine.propose(engine.add_request(prompt))
        path = [(-1, 7), (0, 8), (1, 9)]
        assert list(zip(draft.parents.tolist(), draft.tolist(), strict=True))[:3] == path
        # Both of the others have their share of what is left.
        if tree_budget is not None:
            assert {token // 1000 for token in draft.tolist()} == {0, 2, 3}
        drafts.append(draft.probabilities.tolist())
    assert all(draft == drafts[0] for draft in drafts)


@settings(max_examples=100, deadline=None)
@given(
    # For each length of a match: in which store it stands, and what follows it there.
    matches=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        min_size=32,
        max_size=32,
    ),
    order=st.permutations(range(4)),
    repeats=st.integers(0, 9),
    tree_budget=st.none() | st.integers(1, 40),
)
def test_the_order_of_the_stores_does_not_matter(
    matches: list[tuple[int, list[int]]],
    order: list[int],
    repeats: int,
    tree_budget: int | None,
) -> None:
    prompt = list(range(100, 140))
    stores = [store_of() for _ in order]
    for length, (store, following) in enumerate(matches, 1):
        stores[store].add([1000 + length, *prompt[-length:], *following])
    # The text repeats some of its end too, before another token.
    prompt = [*prompt[len(prompt) - repeats :], 5, *prompt]
    config = DraftConfig(lookahead=4, tree_budget=tree_budget, token_cost=0)
    drafts = []
    for given_stores in (stores, [stores[i] for i in order]):
        engine = Engine(config, datastores=given_stores)
        drafts.append(engine.propose(engine.add_request(prompt)))
    for name in ("token_ids", "parents", "probabilities", "sources"):
        one, other = (getattr(draft, name).tolist() for draft in drafts)
        assert one == other


def test_tokens_are_labelled_with_where_they_were_found() -> None:
    engine = Engine(DraftConfig(lookahead=3, token_cost=0))

    def sources(prompt: list[int], prediction: list[int], documents: list[list[int]]) -> set[int]:
        stores = [store_of(*documents)]
        request = engine.add_request(prompt, prediction=prediction, datastores=stores)
        return set(engine.propose(request).sources.tolist())

    assert sources(PROMPT, [], [DOCUMENT]) == {Source.DATASTORE}
    assert sources([*DOCUMENT, *PROMPT], [], []) == {Source.CONTEXT}
    # Matches as long in both: the text's own.
    assert sources([0, *DOCUMENT, *PROMPT], [], [[8, *DOCUMENT]]) == {Source.CONTEXT}
    assert sources(PROMPT, DOCUMENT[6:], []) == {Source.PREDICTION}
    # The service bills for what its caller predicted, wherever else it stands.
    assert sources(PROMPT, DOCUMENT[6:], [DOCUMENT]) == {Source.PREDICTION}
    assert sources([*DOCUMENT, *PROMPT], DOCUMENT[6:], []) == {Source.PREDICTION}


def test_stores_templates_and_running_requests_are_sources_of_their_own(tmp_path: Path) -> None:
    engine = Engine(DraftConfig(lookahead=3, token_cost=0))
    drafts = {
        Source.DATASTORE: {"datastores": [store_of(DOCUMENT)]},
        Source.READ_ONLY: {"read_only": [store_of(DOCUMENT)], "datastores": [store_of()]},
        Source.TEMPLATE: {"templates": DOCUMENT},
    }
    cases = [*drafts.items(), (Source.READ_ONLY, {"datastores": [frozen_of(tmp_path, DOCUMENT)]})]
    for source, given_to in cases:
        request = engine.add_request(PROMPT, **given_to)
        draft = engine.propose(request)
        assert set(draft.sources.tolist()) == {source}
        engine.observe(request, [*draft.token_ids.tolist(), 77])
        counts = engine.finish(request).accepted_by_source
        assert counts[source] == sum(counts) == len(draft) > 0
    # The text of another request that still runs, where the store is written or only read.
    store = store_of()
    writer = engine.add_request([50], datastores=[store])
    running = [
        engine.add_request(PROMPT, datastores=[store]),
        engine.add_request(PROMPT, datastores=[], read_only=[store]),
    ]
    engine.observe(writer, DOCUMENT)
    for request in running:
        assert set(engine.propose(request).sources.tolist()) == {Source.RUNNING}


def test_offers_of_all_kinds_are_counted_together() -> None:
    engine = Engine(DraftConfig(lookahead=3, token_cost=0))
    for kind in ("one", "other"):
        request = engine.add_request([1, 2])
        draft = engine.propose(request, offers=Offers(kind, [40, 41], confidences=[1.0, 1.0]))
        engine.observe(request, [*draft.token_ids.tolist(), 9])
        stats = engine.finish(request)
        assert stats.accepted_by_source == (0,) * 7 + (stats.accepted,)
        assert stats.accepted == len(draft.token_ids) > 0


def test_finished_requests_enter_live_stores_and_cancelled_ones_do_not(tmp_path: Path) -> None:
    live, other, frozen = store_of(), store_of(), frozen_of(tmp_path, OTHER)
    engine = Engine(DraftConfig(lookahead=4), datastores=[live, frozen])
    engine.cancel(engine.add_request(DOCUMENT))
    engine.finish(engine.add_request(DOCUMENT, datastores=[other]))
    assert (len(live), len(other)) == (0, len(DOCUMENT))
    request = engine.add_request(DOCUMENT[:3])
    engine.observe(request, DOCUMENT[3:])
    assert len(live) == 0
    engine.finish(request)
    assert (live.num_documents, len(live), len(frozen)) == (1, len(DOCUMENT), len(OTHER))
    # One request's output is drafted to the next.
    assert drafted(engine, engine.add_request(PROMPT))[:1] in ([16], [26])
    alone = engine.add_request(PROMPT, datastores=[live])
    assert drafted(engine, alone) == [16, 17, 18, 19]


def test_what_a_tenant_teaches_about_tokens_reaches_no_other() -> None:
    def taught(first: int) -> tuple[object, list[float], list[float]]:
        """An engine's calibration, and the probabilities of another tenant and of the same one,
        after a tenant's requests in which a token, `first`, is never emitted."""
        alice, bob = store_of(ELSEWHERE), store_of(ELSEWHERE)
        engine = Engine(DraftConfig(lookahead=3, token_cost=0))
        for _ in range(8):
            request = engine.add_request([first, 1, 2, 3, first], datastores=[alice])
            engine.propose(request)
            engine.observe(request, [4])
            engine.cancel(request)

        def probabilities(store: Datastore) -> list[float]:
            prompt = [500, 501, 502, 503, 500]
            request = engine.add_request(prompt, datastores=[store])
            return engine.propose(request).probabilities.tolist()

        return engine.calibration(), probabilities(bob), probabilities(alice)

    named, other = taught(500), taught(700)
    assert named[:2] == other[:2]
    assert named[2] != other[2]


def test_requests_that_only_read_a_store_teach_it_nothing_about_tokens() -> None:
    def probabilities(reads: bool) -> list[float]:
        store = store_of(ELSEWHERE)
        engine = Engine(DraftConfig(lookahead=3, token_cost=0))
        teacher = {"read_only": [store]} if reads else {}
        for _ in range(8):
            request = engine.add_request([7, 1, 2, 3, 7], datastores=[], **teacher)
            engine.propose(request)
            engine.observe(request, [4])
            engine.cancel(request)
        learner = engine.add_request([7, 1, 2, 3, 7], datastores=[store])
        return engine.propose(learner).probabilities.tolist()

    assert probabilities(reads=True) == probabilities(reads=False)


def test_engines_share_a_store() -> None:
    store = store_of()
    giving = Engine(DraftConfig.prompt_lookup(), datastores=[store])
    taking = Engine(DraftConfig(lookahead=4), datastores=[store])
    request = taking.add_request(PROMPT)
    assert drafted(taking, request) == []
    lookup = giving.add_request(DOCUMENT)
    giving.finish(lookup)
    assert drafted(taking, request) == [16, 17, 18, 19]
    # Only the default drafter draws on stores.
    assert drafted(giving, giving.add_request(PROMPT)) == []


def test_requests_go_on_when_a_store_of_theirs_is_closed() -> None:
    closing, kept = store_of(DOCUMENT), store_of()
    engine = Engine(DraftConfig(lookahead=4), datastores=[closing, kept])
    request = engine.add_request(PROMPT)
    assert drafted(engine, request) == [16, 17, 18, 19]
    closing.close()
    assert drafted(engine, request) == []
    engine.observe(request, [16, 17])
    assert engine.finish(request).emitted == 2
    assert kept.read(kept.find([*DOCUMENT[:6]])[0].next, 9).tolist() == [16, 17]
    assert drafted(engine, engine.add_request(PROMPT)) == [16, 17]
    with pytest.raises(DatastoreClosedError, match="the datastore at index 1 is closed"):
        engine.add_request(PROMPT, datastores=[kept, closing])
    with pytest.raises(DatastoreClosedError, match="the datastore at index 0 is closed"):
        Engine(datastores=[closing])
    assert engine.num_requests == 1


@pytest.mark.parametrize("damaged", [2**16 - 5, 20, 2**16 - 100])
def test_damaged_tokens_of_a_store_are_not_drafted(tmp_path: Path, damaged: int) -> None:
    frozen_of(tmp_path, DOCUMENT).close()
    content = (tmp_path / "frozen.fds").read_bytes()
    tokens = np.array(DOCUMENT, np.uint16).tobytes()
    assert content.count(tokens) == 1
    wrong = np.array([*DOCUMENT[:7], damaged, *DOCUMENT[8:]], np.uint16).tobytes()
    (tmp_path / "damaged.fds").write_bytes(content.replace(tokens, wrong))
    store = Datastore.open(tmp_path / "damaged.fds")
    store.save(tmp_path / "saved.fds")
    for one in (store, Datastore.open(tmp_path / "saved.fds")):
        engine = Engine(datastores=[one])
        assert drafted(engine, engine.add_request(PROMPT)) == [16]
        assert drafted(engine, engine.add_request([*PROMPT, 16])) == []


def test_stores_of_two_tokenizers_are_refused() -> None:
    one, two = bytes(range(32)), bytes(reversed(range(32)))
    first, second = store_of(fingerprint=one), store_of(fingerprint=two)
    unmarked = store_of()
    both = f"got the fingerprints {one.hex()} and {two.hex()}"
    with pytest.raises(InvalidValueError, match=both):
        Engine(datastores=[first, unmarked, second])
    engine = Engine(datastores=[first, store_of(fingerprint=one), unmarked])
    with pytest.raises(InvalidValueError, match=both):
        engine.add_request(PROMPT, datastores=[first, second])
    with pytest.raises(
        InvalidValueError, match="datastores must differ, got one twice, at index 2"
    ):
        engine.add_request(PROMPT, datastores=[first, unmarked, first])
    assert engine.num_requests == 0
    engine.add_request(PROMPT, datastores=[second])


def test_what_the_target_refuses_is_no_longer_drafted_and_what_it_takes_is_again() -> None:
    engine = Engine(DraftConfig(lookahead=16))
    request = engine.add_request([7] * 50)
    assert len(engine.propose(request)) == 16
    for fresh in range(1000, 1200):
        engine.propose(request)
        engine.observe(request, [fresh, 7, 7, 7])
    assert len(engine.propose(request)) == 0
    for _ in range(200):
        engine.propose(request)
        engine.observe(request, [7] * 8)
    assert len(engine.propose(request)) == 16


def test_steps_without_a_draft_teach_too() -> None:
    engine = Engine()
    request = engine.add_request([1, 2] * 9)
    before = engine.propose(request, token_cost=0).probabilities[0]
    for _ in range(20):
        engine.observe(request, [])
        assert len(engine.propose(request, token_cost=10)) == 0
        assert len(engine.propose(request, limit=0)) == 0
        engine.observe(request, [1, 2])
    assert engine.propose(request, token_cost=0).probabilities[0] > before


@pytest.mark.parametrize(("token_cost", "rows"), [(0.05, 1), (0.2, 1), (0.3, 1), (0.1, 8)])
def test_what_is_certain_is_drafted_as_long_as_it_pays(token_cost: float, rows: int) -> None:
    engine = Engine(DraftConfig(token_cost=token_cost))
    requests = [engine.add_request([n % 100 for n in range(300)]) for _ in range(rows)]
    done, steps, drafted = [300] * rows, 0, 0
    while done[0] < 20_000:
        drafts = engine.propose_batch(requests).tolist()
        steps, drafted = steps + 1, drafted + sum(map(len, drafts))
        emitted = []
        for row, draft in enumerate(drafts):
            assert draft == [(done[row] + i) % 100 for i in range(len(draft))]
            emitted.append([*draft, (done[row] + len(draft)) % 100])
            done[row] += len(draft) + 1
        offsets = np.cumsum([0, *map(len, emitted)])
        engine.observe_batch(requests, np.array(list(chain(*emitted))), offsets)
    slope = token_cost / (1 + token_cost * (rows - 1))
    possible = 65 * rows / (1 + slope * 64 * rows)
    assert (sum(done) - 300 * rows) / (steps + slope * drafted) > 0.98 * possible
