"""`fastdraft replay`: recorded requests through a drafter, and what the drafts were worth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

import fastdraft
from fastdraft.cli.options import (
    FILE,
    NEW_FILE,
    NUMBER,
    command_line,
    open_checked,
    ray_option,
    write_text,
)
from fastdraft.demo import ensure_model
from fastdraft.memory.datastore import Datastore
from fastdraft.memory.ngrams import NgramTable
from fastdraft.replay import (
    DRAFTERS,
    PEERS,
    Record,
    RecordError,
    Trace,
    Unavailable,
    family_files,
    read_families,
    report,
    settings_of,
)
from fastdraft.replay import replay as replay_families
from fastdraft.replay.answer import LONGEST, families_table, gpu_table, head, sentence
from fastdraft.replay.calls import Reader
from fastdraft.replay.cluster import Cluster
from fastdraft.replay.costs import GPUS, MODELS, cost_curve
from fastdraft.replay.display import plain, progress
from fastdraft.replay.forms import Row, mapped
from fastdraft.replay.measurement import describe_machine, write_results
from fastdraft.replay.page import MOST_TOKENS, choose, page
from fastdraft.replay.picture import picture
from fastdraft.replay.plot import check_image, plot_speeds
from fastdraft.replay.records import Encode
from fastdraft.replay.results import as_json
from fastdraft.replay.samples import SAMPLE, Pieces
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["replay"]

TABLE_WIDTH = 120
"""Columns that the widest table takes; a narrower terminal breaks its lines."""


def _mapped(text: str) -> Row:
    try:
        return mapped(text)
    except RecordError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("logs", metavar="LOGS...", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--map",
    "row",
    metavar="NAME=JMESPATH,...",
    callback=lambda *given: None if given[-1] is None else _mapped(given[-1]),
    help="Your own form: where in each line messages (or prompt) and answer are, such as "
    "'messages=input.messages, answer=output.content'; also id, conversation, session, model.",
)
@click.option("--sample", is_flag=True, help="Replay the few requests that come with fastdraft.")
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
    "--model",
    "model",
    type=click.Choice(list(MODELS)),
    help="Instead of --token-cost: the computed cost of draft tokens of such a model on --gpu; "
    "of a mixture the first ones are dear.",
)
@click.option(
    "--gpu",
    type=click.Choice(list(GPUS)),
    default="H100 SXM",
    show_default=True,
    help="For --model.",
)
@click.option(
    "--lookahead",
    type=NUMBER,
    help="The longest draft, in tokens.  [default: 64; 16 for drafters that take no --token-cost]",
)
@click.option(
    "--tree-budget",
    type=NUMBER,
    help="Draft trees of at most this many tokens, with the default drafter.",
)
@click.option(
    "--at-once",
    type=NUMBER,
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
    type=FILE,
    multiple=True,
    help="A frozen datastore that every request may draft from; may be repeated.",
)
@click.option(
    "--ngrams",
    type=FILE,
    help="A table of n-grams that the default drafter may draft from, of `fastdraft ngrams build`."
    "  [default: the common one, where the tokenizer is known]",
)
@click.option("--no-ngrams", is_flag=True, help="Draft from no table of n-grams.")
@click.option("--prediction", is_flag=True, help="Give each record's reference as prediction.")
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="The model that answered: a folder with its tokenizer, or its name on the Hugging Face "
    "hub.  [default: the demo model's]",
)
@click.option(
    "--show",
    "shown",
    metavar="[ID]",
    is_flag=False,
    flag_value="",
    help="Show where the tokens of one request are from; without ID, of the first.",
)
@click.option(
    "--svg", type=NEW_FILE, help="With --show: also draw the coloured text to this image."
)
@click.option(
    "--html",
    type=NEW_FILE,
    help="Write a page for a browser: the answer and its tables, and the requests step by step.",
)
@click.option("--json", "json_file", type=NEW_FILE, help="Write the results to this file.")
@click.option(
    "--plot", type=NEW_FILE, help="Draw the modelled speeds of all runs to this image, by family."
)
@ray_option
def replay(
    logs: tuple[Path, ...],
    row: Row | None,
    sample: bool,
    drafters: tuple[str, ...],
    peers: bool,
    token_costs: tuple[float, ...],
    model: str | None,
    gpu: str,
    lookahead: int | None,
    tree_budget: int | None,
    at_once: int,
    memory: bool,
    datastores: tuple[Path, ...],
    ngrams: Path | None,
    no_ngrams: bool,
    prediction: bool,
    tokenizer: str | None,
    shown: str | None,
    svg: Path | None,
    html: Path | None,
    json_file: Path | None,
    plot: Path | None,
    address: str | None,
) -> None:
    """Replay recorded requests and measure draft quality, exactly and without a model.

    LOGS are files of any form in which model calls lie, or folders of them: bodies of requests and
    answers, exports of tracers, sessions of agents, files of trainers, logs of servers; as JSON,
    JSON lines or Parquet, packed or not (.gz, .zst). Each call counts once. What was left out is
    printed first. Messages become tokens by the chat template of the model that --tokenizer names.

    A draft is accepted as far as the recorded output follows it. Requests are taken in the order of
    their file; each file is a family, which starts with an empty memory. The first output token
    comes with prefill and is not counted. Modelled speed is emitted tokens / (steps + token cost x
    drafted tokens). Times include the Python call.

    With --at-once N, N requests take their steps together, and a request enters the memory when it
    ends. Steps and token cost are still those of each request.

    With --ray, the families are replayed side by side on a cluster. The counts are the same.
    """
    if sample == bool(logs):
        raise click.UsageError("give either LOGS or --sample")
    if sample and tokenizer is not None:
        raise click.UsageError("--sample has the text of its tokens: it takes no --tokenizer")
    if svg is not None and shown is None:
        raise click.UsageError("--svg draws one request: it needs --show")
    if no_ngrams and ngrams is not None:
        raise click.UsageError("give either --ngrams or --no-ngrams")
    if "predicted-outputs" in drafters and not prediction:
        raise click.UsageError("--drafter predicted-outputs needs --prediction")

    # Refuse an image that cannot be drawn, or a missing matplotlib, before the work.
    if plot is not None:
        check_image(plot)

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    pieces = Pieces()
    texts = TextTokenizer(tokenizer or ensure_model)
    read: list[str] = []
    if sample:
        families = _read([SAMPLE], pieces.encode, references=prediction)
    else:
        reader = Reader(texts, row=row)
        families = _read(logs, texts.encode, references=prediction, reader=reader)
        read = _summary(reader, texts, tokenizer)
        for line in read:
            click.echo(plain(line), err=shown is not None)
    if shown is not None:
        families = _up_to(families, shown)
    # The records' tokenizer is known if they hold text, or if the user names it.
    is_known = tokenizer is not None or texts.is_loaded
    decode = pieces.decode if sample else texts.decode if is_known else None
    stores = [open_checked(Datastore, path, texts if is_known else None) for path in datastores]
    table = None
    if ngrams is not None:
        table = open_checked(NgramTable, ngrams, texts if is_known else None)
    elif is_known and not no_ngrams and "default" in drafters:
        table = texts.common_ngrams()
    curves: list[tuple[float, ...] | None] = [None]
    if model is not None:
        longest = max(LONGEST, lookahead or 0, tree_budget or 0)
        curves = [cost_curve(each, gpu, at_once, longest) for each in MODELS[model]]
    settings = [
        setting
        for name in dict.fromkeys(drafters)
        for curve in curves
        for setting in settings_of(
            name,
            token_costs=token_costs,
            curve=curve,
            lookahead=lookahead,
            tree_budget=tree_budget,
            memory=memory,
            datastores=stores,
            ngrams=table,
        )
    ]
    for name in PEERS if peers else ():
        if name not in drafters:
            found = settings_of(name, token_costs=token_costs, curve=curves[0], lookahead=lookahead)
            try:
                found[0].make(1)
            except Unavailable as reason:
                click.echo(str(reason), err=True)
            else:
                settings += found
    total = sum(len(each.output_ids) for records in families.values() for each in records)
    followed: dict[str, set[str]] = {}
    if shown is not None:
        followed = {name: {records[-1].id} for name, records in families.items()}
    elif html is not None:
        followed = choose(families, MOST_TOKENS // len(settings))
    traces: list[Trace] = []
    with ExitStack() as stack:
        cluster = None if address is None else stack.enter_context(Cluster(address))
        results = replay_families(
            settings,
            families,
            at_once=at_once,
            prediction=prediction,
            on_request=stack.enter_context(progress(total * len(settings))),
            traced=followed,
            decode=decode,
            on_trace=traces.append,
            cluster=cluster,
        )
    tables = []
    if shown is None:
        tables = [families_table(results)]
        if "default" in drafters:
            with progress(1) as advance:
                advance("computing the table of GPUs", 0)
                models = list(MODELS) if model is None else [model]
                tables.insert(0, gpu_table(families, models))
        report.show(console, sentence(results[0]), tables)
    else:
        for trace in traces:
            report.show_request(console, trace)
    if svg is not None:
        write_text(svg, picture(traces[0]))
    if json_file is not None:
        about = {
            "fastdraft": fastdraft.__version__,
            "machine": describe_machine(),
            "command": command_line(),
        }
        write_results(json_file, {**about, "runs": as_json(results)})
    if plot is not None:
        plot_speeds(plot, results)
    if html is not None:
        requests = 1 if shown is not None else sum(map(len, families.values()))
        title = f"{requests:,} recorded requests, replayed"
        begin = head(read, sentence(results[0]), tables) if tables else ""
        write_text(html, page(traces, title=title, requests=requests * len(settings), head=begin))


def _read(
    paths: Sequence[Path], encode: Encode, *, references: bool, reader: Reader | None = None
) -> dict[str, list[Record]]:
    """The records of each family. Raises RecordError, which says what to do, without any."""
    files = family_files(paths, of_any_form=reader is not None)
    size = sum(file.stat().st_size for file in files.values())
    with progress(size) as advance:
        return read_families(
            paths,
            encode,
            references=references,
            convert=reader,
            on_line=lambda name, size: advance(f"reading {name}", size),
        )


def _summary(reader: Reader, texts: TextTokenizer, tokenizer: str | None) -> list[str]:
    """Sentences on the basis of the counts: calls, what was left out, and the tokenizer."""
    found = reader.summary()
    if not texts.is_loaded:
        return found
    models = ", ".join(f"{name} ({count:,})" for name, count in reader.models.most_common(3))
    if tokenizer is not None:
        found.append(f"tokenizer: {tokenizer}" + (f"; the log names {models}" if models else ""))
    else:
        found.append("tokenizer: that of the demo model, SmolLM2-135M-Instruct")
        found.append(
            f"warning: the log names {models}: --tokenizer MODEL counts in its tokens"
            if models
            else "warning: --tokenizer MODEL counts in the tokens of the model that answered"
        )
    if texts.calls_as_text:
        found.append(
            f"warning: this chat template writes no tool calls: {texts.calls_as_text:,} messages "
            "have theirs as most models write them"
        )
    return found


def _up_to(families: dict[str, list[Record]], name: str) -> dict[str, list[Record]]:
    """The family of the request of that id, up to it: it may draft from those before."""
    for family, records in families.items():
        for index, each in enumerate(records):
            if name in ("", each.id):
                return {family: records[: index + 1]}
    raise click.BadParameter(f"no request has the id {name!r}", param_hint="--show")
