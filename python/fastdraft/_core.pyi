"""
The C++ core of fastdraft.
"""
from __future__ import annotations
import collections.abc
import fastdraft.calibration
import fastdraft.config
import fastdraft.continuations
import fastdraft.stats
import numpy
import numpy.typing
import typing
__all__: list[str] = ['BackOff', 'CONFIDENCE_CLASSES', 'Datastore', 'DatastoreWriter', 'Draft', 'DraftBatch', 'Engine', 'FEATURES', 'MAX_REQUEST_TOKENS', 'MOST_WEIGHT', 'OFFER_RANGES', 'Offers', 'STEP_RANGES', 'StepLatency', 'Successors', 'check_config']
class Draft:
    """
    The tokens guessed for one step of a request, as read-only columns.
    """
    def __len__(self) -> int:
        ...
    def __repr__(self) -> str:
        ...
    def _repr_html_(self) -> str:
        ...
    def tolist(self) -> list[int]:
        """
        The drafted tokens as a list.
        """
    @property
    def parents(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        For each token the index of its parent in the request's draft, int32; -1 for the last token of the request's text. A chain is -1, 0, 1, ...
        """
    @property
    def probabilities(self) -> numpy.typing.NDArray[numpy.float32]:
        """
        The calibrated probability that the token and all before it on its path are accepted, float32; 1 where the drafter does not estimate it.
        """
    @property
    def sources(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Where each token was found, a fastdraft.Source, uint8.
        """
    @property
    def token_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        The drafted tokens, int32.
        """
class DraftBatch:
    """
    The drafts of a batch, as flat read-only columns: row r's tokens are offsets[r] to offsets[r + 1].
    """
    def __len__(self) -> int:
        ...
    def __repr__(self) -> str:
        ...
    def tolist(self) -> list[list[int]]:
        """
        The drafted tokens as a list for each row.
        """
    @property
    def offsets(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Where each row begins, and the end of the last, int32, one more than rows.
        """
    @property
    def parents(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        For each token the index of its parent in the request's draft, int32; -1 for the last token of the request's text. A chain is -1, 0, 1, ...
        """
    @property
    def probabilities(self) -> numpy.typing.NDArray[numpy.float32]:
        """
        The calibrated probability that the token and all before it on its path are accepted, float32; 1 where the drafter does not estimate it.
        """
    @property
    def sources(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Where each token was found, a fastdraft.Source, uint8.
        """
    @property
    def token_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        The drafted tokens, int32.
        """
class Datastore:
    """
    The core of fastdraft.Datastore.
    """
    @typing.overload
    def __init__(self, *, max_bytes: typing.SupportsInt | typing.SupportsIndex, fingerprint: bytes | None) -> None:
        ...
    @typing.overload
    def __init__(self, *, path: bytes, fingerprint: bytes | None) -> None:
        ...
    def __len__(self) -> int:
        """
        The tokens held.
        """
    def _dump(self, position: typing.SupportsInt | typing.SupportsIndex, most: typing.SupportsInt | typing.SupportsIndex) -> tuple[bytes, int]:
        """
        The text from a position on, for `_load`, at most so many tokens, and its end.
        """
    def _find(self, token_ids: numpy.typing.ArrayLike, most: typing.SupportsInt | typing.SupportsIndex, links: typing.SupportsInt | typing.SupportsIndex, least: typing.SupportsInt | typing.SupportsIndex) -> list[tuple[int, int, bool]]:
        ...
    def _load(self, text: bytes, grow: collections.abc.Callable[[], None] | None) -> None:
        """
        Adds the documents that `_dump` gave.
        """
    def _save(self, path: bytes) -> None:
        ...
    def add(self, token_ids: numpy.typing.ArrayLike, *, prompt_size: typing.SupportsInt | typing.SupportsIndex | None = None, grow: collections.abc.Callable[[], None] | None = None) -> None:
        """
        Adds a document to a live store.
        
        token_ids: a list or a row of integers, 0 or greater. One of 4,194,303 or more, as no vocabulary
            has, ends what is drafted.
        prompt_size: the tokens from here on are a model's output, which later outputs are more like than
            prompts are; by default none are.
        grow: called, from 128 tokens to the next, before the oldest text would have to leave; it may raise
            the store's limit, and then nothing leaves.
        
        The oldest text leaves as far as `max_bytes` asks. Once a prompt, of 32 tokens or more, has come
        again, all prompts keep about as many samples: an old one may enter again in place of leaving, or
        the document be left out where its prompt has more than others. What of the document's beginning already stands
        in the store as a document's beginning is not stored again: from 32 tokens on, to the token. The
        turns of a chat, each of which repeats the ones before, are thus stored once.
        
        O(1) amortised a token. Requests that look something up meanwhile wait for microseconds. Raises
        InvalidValueError, DatastoreClosedError, DatastoreError for a frozen store, or MemoryLimitError
        where the machine has no memory, and then the document's first tokens were added.
        """
    def close(self) -> None:
        """
        Frees the memory or the file. To requests the store is empty from now on.
        
        Closing a closed store does nothing.
        """
    def limit(self, max_bytes: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Sets the limit of a live store, and returns it; the oldest text leaves as needed.
        
        max_bytes: the new limit. The index keeps its memory, and the latest 1,364 tokens stay: where that
            is more, it is the limit. Closing the store frees all.
        
        Raises InvalidValueError below 0, DatastoreError for a frozen store, or DatastoreClosedError.
        """
    def read(self, position: typing.SupportsInt | typing.SupportsIndex, most: typing.SupportsInt | typing.SupportsIndex) -> numpy.typing.NDArray[numpy.int32]:
        """
        The tokens from `position` on, to the document's end, at most `most`.
        
        Returns an int32 array, empty where the position has left the store. Raises InvalidValueError or
        DatastoreClosedError.
        """
    @property
    def _bytes(self) -> int:
        ...
    @property
    def begin(self) -> int:
        """
        The first position held.
        """
    @property
    def closed(self) -> bool:
        """
        Whether it was closed.
        """
    @property
    def end(self) -> int:
        """
        The position after the last one held.
        """
    @property
    def fingerprint(self) -> bytes | None:
        """
        The fingerprint of the tokenizer that its tokens are of, 32 bytes, or None.
        """
    @property
    def frozen(self) -> bool:
        """
        Whether it is a file, to which nothing can be added.
        """
    @property
    def max_bytes(self) -> int:
        """
        The limit of `bytes`; of a frozen store the file's size.
        """
    @property
    def num_documents(self) -> int:
        """
        The documents whose beginning is held.
        """
class DatastoreWriter:
    """
    The core of fastdraft.datastore.DatastoreWriter.
    """
    def __init__(self, *, path: bytes, fingerprint: bytes | None, segment_tokens: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def append(self, token_ids: numpy.typing.ArrayLike, *, output: bool = False) -> None:
        """
        Appends tokens to the document.
        
        token_ids: a list or a row of integers, 0 or greater.
        output: whether a model wrote them; such text resembles answers more than other text does.
        
        O(1) a token; where a segment is full it is indexed and written, which takes seconds. Raises
        InvalidValueError, DatastoreError where the file cannot be written, or DatastoreClosedError.
        """
    def append_all(self, source: Datastore) -> None:
        """
        Appends all documents of a store, frozen or live.
        
        source: the store. A document that goes on in another segment of a file is two, the second with the
            first one's last 64 tokens.
        
        O(1) a token. Raises DatastoreError where the file cannot be written, or DatastoreClosedError.
        """
    def begin_document(self) -> None:
        """
        What is appended next is another document.
        
        Raises DatastoreClosedError after `finish` or `discard`.
        """
    def discard(self) -> None:
        """
        Removes what was written so far; does nothing after `finish`.
        """
    def finish(self) -> None:
        """
        Completes the file and puts it in its place.
        
        Raises DatastoreError where it cannot be written, or DatastoreClosedError.
        """
    @property
    def num_documents(self) -> int:
        """
        The documents so far that are not empty.
        """
    @property
    def num_tokens(self) -> int:
        """
        The tokens appended so far.
        """
class BackOff:
    """
    When to try again what does not seem to pay.
    
    It is tried after `first` steps, and after twice as many each time that it still does not pay, `last`
    at most.
    """
    def __init__(self, first: typing.SupportsInt | typing.SupportsIndex, last: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def asks(self, pays: bool) -> bool:
        """
        Whether to do it in this step, where it seems to pay or not. To be asked once a step.
        """
class StepLatency:
    """
    The core of fastdraft.StepLatency.
    """
    def __init__(self, device_type: str, sizes: numpy.typing.ArrayLike = (), *, a_row: bool = False) -> None:
        ...
    def best_widths(self, rows: typing.SupportsInt | typing.SupportsIndex, widest: typing.SupportsInt | typing.SupportsIndex = 65) -> tuple[numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.int64]]:
        """
        What to pay for drafts when a forward may be padded to a width that is cheaper.
        
        rows: the rows of the forward.
        widest: the most tokens a row; no more than the largest of the sizes where these are of each row.
        
        Returns the seconds of a step that has room for 1 .. `widest` tokens a row, float64, and the width
        to give its forward, int64; both of shape (widest,). O(widest). Raises InvalidValueError.
        """
    def observe(self, rows: typing.SupportsInt | typing.SupportsIndex, width: typing.SupportsFloat | typing.SupportsIndex, seconds: typing.SupportsFloat | typing.SupportsIndex, *, prompt_tokens: typing.SupportsFloat | typing.SupportsIndex = 0.0, one_graph: bool = False) -> None:
        """
        Learns from a step of `rows` rows of `width` tokens that took `seconds`.
        
        Where the rows differ in length, `width` is their mean. A step that took no time teaches nothing. A
        forward that reads prompts too teaches what its tokens take, if not as exactly: `prompt_tokens` says
        how many of all its tokens are theirs. `one_graph` says that the forward ran in one graph as a
        whole. O(1). Raises InvalidValueError.
        """
    def seconds_by_tokens(self, rows: typing.SupportsInt | typing.SupportsIndex, widest: typing.SupportsInt | typing.SupportsIndex = 65, *, hopeful: bool = False) -> numpy.typing.NDArray[numpy.float64]:
        """
        What a step takes by the tokens of all its rows, for batches whose rows differ in length.
        
        hopeful: less where little is known, so that it will be tried.
        
        Returns seconds, float64 of shape (rows * widest,): entry n - 1 for a forward over n tokens, which
        takes at least what one token a row takes. It is what `propose_batch` takes as its `cost`.
        O(rows * widest). Raises InvalidValueError.
        """
    def seconds_in_one_graph(self, rows: typing.SupportsInt | typing.SupportsIndex, width: typing.SupportsInt | typing.SupportsIndex) -> float:
        """
        What a step takes where each row has `width` tokens and all run in one graph.
        
        Raises InvalidValueError.
        """
    def wants_plain_step(self, rows: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether the next step should go without drafts, to learn what that costs.
        
        To be asked once a step. One that is not measured then is wanted again some steps later. Raises
        InvalidValueError.
        """
class Offers:
    """
    What a drafter of one kind guesses for the next step of each row of a batch.
    
    Row r's tokens are token_ids[offsets[r]:offsets[r + 1]], a chain or a tree, 1,024 at most. A row
    without tokens has no offer. The engine weighs them with its own evidence: how much more likely a
    token becomes that is offered, and how much less another one, is learned for each kind from what
    the target emits.
    """
    @staticmethod
    def of_rows(kind: str, rows: collections.abc.Iterable[numpy.typing.ArrayLike], *, parents: collections.abc.Iterable[numpy.typing.ArrayLike] | None = None, confidences: collections.abc.Iterable[numpy.typing.ArrayLike] | None = None, time: typing.SupportsFloat | typing.SupportsIndex = 0.0, drawn: bool = False) -> Offers:
        """
        The same from a list for each row.
        """
    def __init__(self, kind: str, token_ids: numpy.typing.ArrayLike, offsets: numpy.typing.ArrayLike | None = None, parents: numpy.typing.ArrayLike | None = None, confidences: numpy.typing.ArrayLike | None = None, time: typing.SupportsFloat | typing.SupportsIndex = 0.0, drawn: bool = False) -> None:
        """
        Copies what a drafter guesses.
        
        kind: the drafter's name, such as "eagle".
        token_ids: the tokens of all rows, one row after another.
        offsets: where each row begins, and the end of the last: one more than rows. By default all tokens
            are one row.
        parents: for each token the index of its parent in the row, before its own; -1 for the last token
            of the request's text. By default each row is a chain.
        confidences: how sure the drafter is of each token where those before it are right, from 0 to 1,
            such as its probability. They need not be calibrated. By default it does not say.
        time: what making the offers took, for all rows together: in the unit of the cost curve, or with a
            constant token cost as a fraction of a step without drafts.
        drawn: whether each token was drawn at random from the drafter's distribution, to be verified
            against it by `verify_rejection`. A row with such an offer, a chain, drafts just that: to choose
            among drawn tokens, or to cut them by what they are, would bias the output. So ask `wants` first.
        
        Raises InvalidValueError for columns of different lengths.
        """
    def __repr__(self) -> str:
        ...
    @property
    def confidences(self) -> numpy.typing.NDArray[numpy.float32] | None:
        """
        How sure the drafter is of each token, float32; None where it does not say.
        """
    @property
    def drawn(self) -> bool:
        """
        Whether the tokens were drawn at random.
        """
    @property
    def kind(self) -> str:
        """
        The drafter's name.
        """
    @property
    def offsets(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        Where each row begins, and the end, int64.
        """
    @property
    def parents(self) -> numpy.typing.NDArray[numpy.int32] | None:
        """
        Each token's parent in its row, int32; None where rows are chains.
        """
    @property
    def time(self) -> float:
        """
        What making the offers took.
        """
    @property
    def token_ids(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        The tokens of all rows, int32.
        """
class Successors:
    """
    The likeliest next tokens at the positions that the target has seen lately.
    
    A verification computes logits for each token of a draft, rejected ones too. `learn` keeps the
    likeliest tokens of each; where a text comes to such tokens again, `offers` makes a tree of them for
    `Engine.propose_batch`, together with the runners-up of the text's last position. Useful for drafts
    that are trees, where a draft token costs little.
    
    After Token Recycling (Luo et al., 2024, arXiv:2408.08696) and LogitSpec (Liu et al., 2025,
    arXiv:2507.01449).
    
    Requests share what they learn from: give requests that must not see each other one each. Calls from
    several threads take turns.
    """
    @staticmethod
    def learn_each(tables: collections.abc.Iterable[Successors], offsets: numpy.typing.ArrayLike, contexts: numpy.typing.ArrayLike, token_ids: numpy.typing.ArrayLike, probabilities: numpy.typing.ArrayLike) -> None:
        """
        The same for several tables in one call, without the GIL.
        
        tables: one for each request, for example.
        offsets: table i learns rows offsets[i] to offsets[i + 1] - 1 of the arrays: integers, one more than
            tables, that rise from 0 to the number of rows.
        """
    @staticmethod
    def offers_each(tables: collections.abc.Iterable[Successors], ends: numpy.typing.ArrayLike, *, nodes: typing.SupportsInt | typing.SupportsIndex = 48, kind: str = 'successors') -> Offers:
        """
        The same from a table for each row, in one call without the GIL.
        
        Raises InvalidValueError as `offers`, or where there is not one table for each row.
        """
    def __init__(self, *, slots: typing.SupportsInt | typing.SupportsIndex = 32768) -> None:
        """
        Makes an empty table.
        
        slots: contexts that the table has room for, rounded up to a power of two; each takes 72 bytes.
            Newer contexts push out older ones.
        
        Raises InvalidValueError where `slots` is below 1 or above 2**24.
        """
    def learn(self, contexts: numpy.typing.ArrayLike, token_ids: numpy.typing.ArrayLike, probabilities: numpy.typing.ArrayLike) -> None:
        """
        Learns what may follow. Of equal contexts the last row counts.
        
        contexts: (rows, 2) integers, the last two tokens at a position; -1 for one that does not exist.
        token_ids: (rows, n) integers, n at most 8: tokens that may follow, different ones in each row; a
            negative one ends its row.
        probabilities: (rows, n), how likely each is, from 0 to 1.
        
        Raises InvalidValueError for a wrong shape, id or probability. Nothing is learned then.
        """
    def offers(self, ends: numpy.typing.ArrayLike, *, nodes: typing.SupportsInt | typing.SupportsIndex = 48, kind: str = 'successors') -> Offers:
        """
        What may follow texts, a tree for each: about 10 us.
        
        ends: (rows, 3) integers, the last three tokens of each text; -1 for one that does not exist. A row
            whose last one is -1 gets no tree.
        nodes: the most tokens of a tree, 1 to 48: the first ones on the most probable paths.
        kind: of the offers.
        
        Raises InvalidValueError: `ends` has another shape or ids below -1, or `nodes` is out of range.
        """
    @property
    def num_bytes(self) -> int:
        """
        The memory of the table.
        """
    @property
    def slots(self) -> int:
        """
        How many contexts the table has room for.
        """
class Engine:
    """
    Drafts for any number of requests, and learns from them what to draft.
    
    One engine serves a process. Calls on different requests may come from several threads at
    once; calls on one request wait for each other. `add_request`, `propose_batch`,
    `observe_batch`, `continue_batch` and `finish` release the GIL; `propose` and `observe` are too short for that.
    
    >>> engine = Engine()
    >>> request = engine.add_request([1, 2, 3, 4, 1, 2])
    >>> engine.propose(request, token_cost=0.0, limit=3).tolist()
    [3, 4, 1]
    >>> engine.observe(request, [3, 4, 9])
    >>> engine.finish(request).mean_accepted_tokens
    3.0
    """
    def __deepcopy__(self, memo: dict) -> typing.Any:
        """
        The engine itself: it is shared, as a lock is.
        """
    def __init__(self, config: fastdraft.config.DraftConfig | None = None, *, datastores: collections.abc.Sequence[Datastore] = (), calibration: fastdraft.calibration.Calibration | None = None) -> None:
        """
        Makes an engine.
        
        config: how it drafts, by default DraftConfig().
        datastores: what requests are drafted from besides their own text, where they are given no
            datastores of their own. A finished request's text enters the live ones. Other engines may share
            them. Only the default drafter draws on them.
        calibration: what an earlier engine learned, to begin with instead of the prior.
        
        Raises InvalidValueError for datastores of two tokenizers, or a calibration for a drafter that
        learns nothing, and DatastoreClosedError.
        """
    def __reduce__(self) -> typing.Any:
        """
        Raises TypeError: an engine belongs to its process.
        """
    def __repr__(self) -> str:
        ...
    def add_request(self, prompt_ids: numpy.typing.ArrayLike, *, prediction: numpy.typing.ArrayLike | None = None, datastores: collections.abc.Sequence[Datastore] | None = None, templates: numpy.typing.ArrayLike | None = None, read_only: collections.abc.Sequence[Datastore] | None = None) -> int:
        """
        Starts a request and returns its id.
        
        prompt_ids: the prompt's tokens, a list or a row of integers (numpy, array, ...), 0 or greater;
            may be empty. Copied.
        prediction: text that the caller expects in the output, in the same form; it is drafted from
            without being part of the prompt. Its tokens must be below the config's `vocabulary`.
        datastores: the Datastores that the request may be drafted from, and whose live ones it enters when
            it is finished; by default the engine's. It sees no others.
        templates: text that parts of the output may look like, one after another: see `fastdraft.templates`
            for those of tool calls. It is drafted from as the prompt is, by this request alone, and only by
            the default drafter. Its tokens must be below the config's `vocabulary`.
        read_only: further Datastores that the request may be drafted from, and does not enter.
        
        O(tokens). Raises InvalidValueError (datastores of two tokenizers too), DatastoreClosedError,
        RequestLimitError or MemoryLimitError, and then nothing was added.
        """
    def calibration(self) -> fastdraft.calibration.Calibration:
        """
        What the engine has learned so far, from all its requests.
        
        Raises InvalidValueError where the drafter learns nothing: all but the default one.
        """
    def cancel(self, request: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Ends a request whose output nobody wants, and frees its memory.
        
        Nothing of it enters a datastore. Raises UnknownRequestError for an id that is not running.
        """
    def continue_batch(self, requests: numpy.typing.ArrayLike, emitted_ids: numpy.typing.ArrayLike, offsets: numpy.typing.ArrayLike, out: fastdraft.continuations.Continuations, *, drafted: numpy.typing.ArrayLike | None = None, places: numpy.typing.ArrayLike | None = None) -> None:
        """
        `observe_batch`, and then what each row may go on with, for a host that does not wait for drafts.
        
        Row r emitted emitted_ids[offsets[r]:offsets[r + 1]]. Its continuations, a tree of the tokens most
        likely to follow, are written in place to row places[r] of `out`, row r by default. They hold for
        the text up to these tokens: by the time they arrive the host may have emitted more, walks down the
        tree by those, and drafts what lies below. The config's `tree_budget` and `lookahead` bound the
        tree's nodes and depth, as `out` does; no cost cuts it.
        
        out: the arrays, of any memory. Nobody else may touch them during the call.
        drafted: for each row how many draft tokens the target verified in this step, for `stats`, since
            the host makes its drafts of earlier continuations; by default none. The engine learns from
            the emitted tokens and its own last guess, whatever was verified.
        places: which rows of `out` to write.
        
        A row that fails costs that row alone, as in `observe_batch`: it gets no continuations, all others
        are served, and then the first error is raised with all of them in `error.rows`. Where the arguments
        are wrong as a whole InvalidValueError is raised before any change.
        
        O(nodes) a row. Releases the GIL.
        """
    def finish(self, request: typing.SupportsInt | typing.SupportsIndex) -> fastdraft.stats.DraftStats:
        """
        Ends a request, frees its memory, and returns its counts.
        
        Its prompt and output enter the live datastores that it was given, but for the read-only ones; one
        that was closed meanwhile is left out. Raises UnknownRequestError for an id that is not running, so for a second `finish` too.
        """
    def num_tokens(self, request: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        The tokens of a running request, prompt and output. Raises UnknownRequestError.
        """
    def observe(self, request: typing.SupportsInt | typing.SupportsIndex, emitted_ids: numpy.typing.ArrayLike) -> None:
        """
        Takes the tokens that the target emitted in a step.
        
        They are the accepted draft tokens and the recovered or bonus token, never a count: the engine
        compares them with its latest draft itself. No tokens mean that the step was given up: the draft is
        forgotten and nothing is counted.
        
        O(1) amortised a token. Raises UnknownRequestError, InvalidValueError or RequestLimitError before
        any change. On MemoryLimitError the request holds, and has counted, the tokens that still fitted;
        the message says how many.
        """
    def observe_batch(self, requests: numpy.typing.ArrayLike, emitted_ids: numpy.typing.ArrayLike, offsets: numpy.typing.ArrayLike, *, drafted: numpy.typing.ArrayLike | None = None) -> None:
        """
        `observe` for a batch: row r emitted emitted_ids[offsets[r]:offsets[r + 1]].
        
        drafted: for each row how many of its draft tokens the target verified, for a host that has cut
            drafts; by default all.
        
        A row that fails costs that row alone. All others are observed; then the error of the first row
        that failed is raised, what `observe` raises, with the errors of all such rows in `error.rows`, by
        their index. Where the arguments are wrong as a whole, as offsets that fall, InvalidValueError is
        raised before any change, and its `rows` is empty.
        
        A request that has several rows takes them in their order, as it would from several calls.
        """
    def propose(self, request: typing.SupportsInt | typing.SupportsIndex, *, limit: typing.SupportsInt | typing.SupportsIndex | None = None, token_cost: typing.SupportsFloat | typing.SupportsIndex | None = None, cost: typing.Annotated[numpy.typing.ArrayLike, numpy.float64] | None = None, offers: Offers | collections.abc.Sequence[Offers] | None = None) -> Draft:
        """
        The draft for the request's next step.
        
        It is empty where nothing matches or nothing pays. It changes nothing that later drafts depend on,
        but `observe` compares the emitted tokens with the latest draft, so propose once a step.
        
        limit: the most tokens to draft, besides the config's lookahead or tree_budget; 0 drafts nothing. A host that
            has room for fewer tokens passes a limit and does not cut the draft itself.
        token_cost: what a further token in a forward costs, as a fraction of a forward over one token; by
            default the config's.
        cost: instead of it, the step cost as a row of times: cost[n - 1] is the time of a target forward
            over n tokens, in any unit. It goes on past its end with its last slope.
        offers: what others guess, of one row: `Offers`, or several of different kinds. Only the default
            drafter takes them.
        
        O(lookahead). Raises UnknownRequestError or InvalidValueError.
        """
    def propose_batch(self, requests: numpy.typing.ArrayLike, *, limits: numpy.typing.ArrayLike | None = None, token_cost: typing.SupportsFloat | typing.SupportsIndex | None = None, cost: typing.Annotated[numpy.typing.ArrayLike, numpy.float64] | None = None, padded: bool = False, offers: Offers | collections.abc.Sequence[Offers] | None = None) -> DraftBatch:
        """
        The drafts for the next step of a batch, chosen together.
        
        The tokens most likely to be accepted anywhere in the batch are drafted, as many as pay.
        
        requests: ids, a list or a row of integers.
        limits: for each request the most tokens to draft, or None.
        token_cost, cost: as in `propose`; the forward runs over all rows, len(requests) tokens without
            drafts.
        padded: whether the forward pads every row to the longest draft, so that each row pays for it.
        offers: what others guess: `Offers` with a row for each request, or several of different kinds, 4
            at most. Only the default drafter takes them. A row's wrong offer is left out and counted by
            `num_refused_offers`.
        
        A request that is not running, as one that another thread has just ended, gets an empty draft.
        
        O(requests * lookahead), with a sort of the candidates for a cost curve. Raises InvalidValueError.
        """
    def stats(self, request: typing.SupportsInt | typing.SupportsIndex) -> fastdraft.stats.DraftStats:
        """
        The counts of a running request. Raises UnknownRequestError.
        """
    def wants(self, kind: str, requests: numpy.typing.ArrayLike, *, time: typing.SupportsFloat | typing.SupportsIndex = 0.0, limits: numpy.typing.ArrayLike | None = None, token_cost: typing.SupportsFloat | typing.SupportsIndex | None = None, cost: typing.Annotated[numpy.typing.ArrayLike, numpy.float64] | None = None, padded: bool = False, expected: typing.Annotated[numpy.typing.ArrayLike, numpy.float64] | None = None) -> numpy.typing.NDArray[numpy.bool]:
        """
        Whether it pays to make an offer for the next step, for each request; bool (requests,).
        
        Ask before a drafter of your own runs, once a step. Offers pay where the tokens that they add to the
        engine's own drafts are worth the time that making and verifying them takes. That is learned from
        the steps that had offers. Now and then the answer is yes to learn whether it still holds. The last
        drafts of the requests are forgotten; a request that is not running gets no.
        
        kind: of the offers, as in `Offers`.
        time: what making them takes, for all rows together, as in `Offers`.
        limits, token_cost, cost, padded: as in `propose_batch`.
        expected: for each request how many tokens the drafter expects to be accepted of its offer; they
            need not be calibrated. By default it does not say.
        
        O(requests * lookahead). Releases the GIL. Raises InvalidValueError.
        """
    @property
    def config(self) -> fastdraft.config.DraftConfig:
        """
        The configuration that the engine was made with.
        """
    @property
    def num_bytes(self) -> int:
        """
        The bytes that the indexes of all running requests hold.
        """
    @property
    def num_foreign(self) -> int:
        """
        How many tokens of datastores were left out of drafts since they are not below the config's `vocabulary`. More than 0: a datastore of another tokenizer, or one with ids that stand for images.
        """
    @property
    def num_refused_offers(self) -> int:
        """
        How many rows' offers were left out of batches since they were wrong: too long, foreign ids, bad parents or confidences.
        """
    @property
    def num_requests(self) -> int:
        """
        How many requests are running.
        """
    @property
    def offer_kinds(self) -> tuple:
        """
        The kinds of offers that the engine has met, in order: a draft token of kind i has the source Source.OFFER + i.
        """
def check_config(config: fastdraft.config.DraftConfig) -> None:
    """
    Raises InvalidValueError that names the first field of a DraftConfig that is out of range.
    """
CONFIDENCE_CLASSES: list = [(0.10000000149011612, 0.23750001192092896), (0.20000000298023224, 0.3125), (0.30000001192092896, 0.38749998807907104), (0.4000000059604645, 0.46250003576278687), (0.5, 0.5374999642372131), (0.6000000238418579, 0.612500011920929), (0.699999988079071, 0.6875), (0.800000011920929, 0.762499988079071), (0.8999999761581421, 0.8375000357627869), (0.949999988079071, 0.8937499523162842), (0.9900000095367432, 0.9275000095367432), (1.0, 0.9462500214576721)]
FEATURES: list = [('context_length', 10), ('store_length', 10), ('rival_length', 10), ('context_count', 5), ('store_count', 5), ('latest', 9), ('copy', 12), ('prediction', 12), ('both_lengths', 100), ('share', 36), ('length_and_rival', 100), ('output', 40), ('path', 125)]
MAX_REQUEST_TOKENS: int = 67108862
MOST_WEIGHT: int = 1000
OFFER_RANGES: list = [(-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (-1000.0, 1000.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 16777216.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0)]
STEP_RANGES: list = [(0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0), (0.0, 200.0), (0.0, 2048.0), (0.0, 2048.0), (0.0, 16.0)]
