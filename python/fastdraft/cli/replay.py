"""`fastdraft replay`: recorded requests through a drafter, and what the drafts were worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fastdraft import Datastore, DraftConfig, Engine
from fastdraft.cli import demo_model, replay_report
from fastdraft.cli.peers import PEERS, EnginePeer, Peer, Unavailable
from fastdraft.cli.records import Record, RecordError, family_files, read_family
from fastdraft.cli.replay_progress import progress
from fastdraft.cli.replay_record import record
from fastdraft.cli.replay_run import FamilyResult, Run, replay_family, trace_request
from fastdraft.cli.replay_show import show_request
from fastdraft.datastore import fingerprint

__all__ = ["replay"]

DRAFTERS = ("default", "prompt-lookup", "ngram", "predicted-outputs")
TABLE_WIDTH = 120
"""Columns that the widest table takes; a narrower terminal breaks its lines."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.group(invoke_without_command=True)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="A JSON lines file of recorded requests, or a folder of such; may be repeated.",
)
@click.option(
    "--drafter",
    "drafters",
    type=click.Choice([*DRAFTERS, *PEERS]),
    multiple=True,
    default=["default"],
    show_default=True,
    help="What drafts; may be repeated.",
)
@click.option("--peers", is_flag=True, help="Add every peer that is installed.")
@click.option(
    "--token-cost",
    "token_costs",
    type=click.FloatRange(min=0.0),
    multiple=True,
    default=[0.02],
    show_default=True,
    help="What a draft token costs, as a fraction of a step; each one given is a run.",
)
@click.option(
    "--lookahead",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="The longest draft, in tokens.",
)
@click.option(
    "--tree-budget",
    type=click.IntRange(min=1),
    help="Draft trees of at most so many tokens, with the default drafter.",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many requests of a family run at a time, as in a server.",
)
@click.option(
    "--memory/--no-memory",
    default=True,
    help="Whether requests of a family may draft from its earlier ones.  [default: memory]",
)
@click.option(
    "--datastore",
    "datastores",
    type=_FILE,
    multiple=True,
    help="A frozen datastore that every request may draft from; may be repeated.",
)
@click.option("--prediction", is_flag=True, help="Give each record's reference as prediction.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="A tokenizer.json, or the folder of one.  [default: the demo model's]",
)
@click.option("--family", "names", multiple=True, help="Only this family; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many requests of each family.")
@click.option(
    "--show", "shown", metavar="ID", help="Show where the tokens of one request are from."
)
@click.option("--json", "json_file", type=_NEW_FILE, help="Write the results to this file.")
@click.option("--plot", type=_NEW_FILE, help="Draw the first run's tokens a step to this image.")
@click.option(
    "--against",
    type=_FILE,
    help="For --plot: results of --json to draw beside.  [default: the first other drafter]",
)
@click.pass_context
def replay(
    context: click.Context,
    data: tuple[Path, ...],
    drafters: tuple[str, ...],
    peers: bool,
    token_costs: tuple[float, ...],
    lookahead: int,
    tree_budget: int | None,
    at_once: int,
    memory: bool,
    datastores: tuple[Path, ...],
    prediction: bool,
    tokenizer: Path | None,
    names: tuple[str, ...],
    limit: int | None,
    shown: str | None,
    json_file: Path | None,
    plot: Path | None,
    against: Path | None,
) -> None:
    """Replay recorded requests and measure draft quality, exactly and without a model.

    A draft is accepted as far as the recorded output follows it. Requests are taken in the order of
    their file; each file is a family, which starts with an empty memory. The first output token
    comes with prefill and is not counted. Modelled speed is emitted tokens / (steps + token cost x
    drafted tokens). Times include the Python call.

    With --at-once N, N requests take their steps together, and a request enters the memory when it
    ends. Steps and token cost are still those of each request.
    """
    if context.invoked_subcommand is not None:
        return
    if not data:
        raise click.UsageError("Missing option '--data'.")
    if against is not None and plot is None:
        raise click.UsageError("--against needs --plot")
    if shown is not None and at_once > 1:
        raise click.UsageError("--show follows one request: it takes no --at-once")
    if "predicted-outputs" in drafters and not prediction:
        raise click.UsageError("--drafter predicted-outputs needs --prediction")
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.parent.is_dir():
            raise click.BadParameter(f"{file.parent} is not a directory", param_hint=option)
    if plot is not None:
        # Told now, not after the work.
        import matplotlib  # noqa: F401
    baseline = None
    if against is not None:
        baseline = replay_report.read_tokens_per_step(against, token_costs[0])

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    texts = _Tokenizer(tokenizer)
    families = _read(data, names, limit, texts, references=prediction)
    if shown is not None:
        families = _up_to(families, shown)
    stores = [_open(path, texts) for path in datastores]
    plans = [
        plan
        for name in dict.fromkeys(drafters)
        for plan in _plans(name, token_costs, lookahead, tree_budget, memory, stores)
    ]
    if peers:
        for name in PEERS:
            if name not in drafters:
                plans += _installed(name, token_costs, lookahead)
    if shown is not None:
        for plan in plans:
            _show(console, plan, families, texts, prediction)
        return

    runs = _run(plans, families, at_once, prediction)
    replay_report.show(console, runs)
    if json_file is not None:
        results = replay_report.as_json(runs)
        json_file.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    if plot is not None:
        _plot(plot, runs, baseline)


replay.add_command(record)


class _Tokenizer:
    """The tokenizer, loaded at the first text: records of token ids need none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._load = cache(self._loaded)

    def _loaded(self) -> Any:
        from tokenizers import Tokenizer

        path = self.path or demo_model.ensure()
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise click.ClickException(f"cannot load {path} as a tokenizer: {error}") from error

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        encodings = self._load().encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        text: str = self._load().decode(ids, skip_special_tokens=False)
        return text

    def fingerprint(self) -> bytes:
        """What tells this tokenizer's token ids from another's."""
        return fingerprint(self._load())

    @property
    def is_known(self) -> bool:
        """Whether the tokens of the records are this tokenizer's, as far as anyone has said."""
        return self.path is not None or self._load.cache_info().currsize > 0


def _open(path: Path, texts: _Tokenizer) -> Datastore:
    """A frozen store, refused where it says that its tokens are another tokenizer's."""
    store = Datastore.open(path)
    if store.fingerprint is None or not texts.is_known:
        return store
    return Datastore.open(path, fingerprint=texts.fingerprint())


@dataclass(frozen=True)
class _Plan:
    """One replay of every family.

    Attributes:
        drafter: Its name.
        token_costs: One, or several where the drafter does not act on it.
        lookahead: Its longest draft.
        tree_budget: The most nodes of its trees, None for chains.
        make: Makes the drafter for a family whose longest request has so many tokens.
    """

    drafter: str
    token_costs: tuple[float, ...]
    lookahead: int
    tree_budget: int | None
    make: Callable[[int], Peer]

    @property
    def title(self) -> str:
        """The drafter, and the cost where it acts on one."""
        if len(self.token_costs) > 1:
            return self.drafter
        return f"{self.drafter}, token cost {self.token_costs[0]:g}"


def _plans(
    name: str,
    token_costs: tuple[float, ...],
    lookahead: int,
    tree_budget: int | None,
    memory: bool,
    stores: list[Datastore],
) -> Iterator[_Plan]:
    costs = tuple(dict.fromkeys(token_costs))
    if name in PEERS:
        make_peer = PEERS[name]
        yield _Plan(name, costs, lookahead, None, lambda most: make_peer(lookahead, most))
        return
    configs = {
        "prompt-lookup": lambda: DraftConfig.prompt_lookup(num_tokens=lookahead),
        "ngram": lambda: DraftConfig.ngram(lookahead=lookahead),
        "predicted-outputs": lambda: DraftConfig.predicted_outputs(lookahead=lookahead),
    }
    if name in configs:
        config = configs[name]()
        yield _Plan(name, costs, config.lookahead, None, _engine_maker(config, memory, stores))
        return
    for cost in costs:
        config = DraftConfig(lookahead=lookahead, token_cost=cost, tree_budget=tree_budget)
        make = _engine_maker(config, memory, stores)
        yield _Plan(name, (cost,), lookahead, tree_budget, make)


def _engine_maker(
    config: DraftConfig, memory: bool, stores: list[Datastore]
) -> Callable[[int], Peer]:
    def make(_: int) -> Peer:
        live = [Datastore()] if memory else []
        return EnginePeer(Engine(config, datastores=[*live, *stores]), live)

    return make


def _installed(name: str, token_costs: tuple[float, ...], lookahead: int) -> Iterator[_Plan]:
    try:
        PEERS[name](lookahead, 1)
    except Unavailable as reason:
        click.echo(str(reason), err=True)
        return
    yield from _plans(name, token_costs, lookahead, None, False, [])


def _read(
    data: Sequence[Path],
    names: Sequence[str],
    limit: int | None,
    texts: _Tokenizer,
    *,
    references: bool,
) -> dict[str, list[Record]]:
    files = family_files(data)
    unknown = [name for name in names if name not in files]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(files)}", param_hint="--family"
        )
    chosen = {name: file for name, file in files.items() if not names or name in names}
    families = {}
    with progress(len(chosen)) as advance:
        for name, file in chosen.items():
            families[name] = read_family(file, texts.encode, limit=limit, references=references)
            if not families[name]:
                raise RecordError(f"{file} holds no records")
            advance(f"reading {name}", 1)
    return families


def _up_to(families: dict[str, list[Record]], name: str) -> dict[str, list[Record]]:
    """The family of the request of that id, up to it: it may draft from those before."""
    for family, records in families.items():
        for place, each in enumerate(records):
            if each.id == name:
                return {family: records[: place + 1]}
    raise click.BadParameter(f"no request has the id {name!r}", param_hint="--show")


def _longest(records: Sequence[Record]) -> int:
    return max(len(each.prompt_ids) + len(each.output_ids) for each in records)


def _run(
    plans: Sequence[_Plan], families: dict[str, list[Record]], at_once: int, prediction: bool
) -> list[Run]:
    runs = []
    total = sum(len(each.output_ids) for records in families.values() for each in records)
    with progress(total * len(plans)) as advance:
        for plan in plans:
            results: dict[str, FamilyResult] = {}
            for name, records in families.items():
                title = f"{plan.title}: {name}"
                advance(title, 0)
                results[name] = replay_family(
                    plan.make(_longest(records)),
                    records,
                    at_once=at_once,
                    prediction=prediction,
                    on_request=partial(advance, title),
                )
            runs += [
                Run(plan.drafter, cost, plan.lookahead, plan.tree_budget, at_once, results)
                for cost in plan.token_costs
            ]
    return runs


def _show(
    console: Console,
    plan: _Plan,
    families: dict[str, list[Record]],
    texts: _Tokenizer,
    prediction: bool,
) -> None:
    ((_, records),) = families.items()
    peer = plan.make(_longest(records))
    replay_family(peer, records[:-1], prediction=prediction)
    origins, result = trace_request(peer, records[-1], prediction=prediction)
    decode = texts.decode if texts.is_known else None
    show_request(console, plan.title, records[-1], origins, result, decode)


def _plot(path: Path, runs: Sequence[Run], baseline: tuple[str, dict[str, float]] | None) -> None:
    run = runs[0]
    other = next((other for other in runs if other.drafter != run.drafter), None)
    if baseline is None and other is not None:
        steps = {name: each.tokens_per_step for name, each in other.families.items()}
        baseline = (other.drafter, steps)
    try:
        replay_report.plot(path, run, baseline)
    except (ValueError, OSError) as error:
        raise click.ClickException(f"cannot draw {path}: {error}") from error
