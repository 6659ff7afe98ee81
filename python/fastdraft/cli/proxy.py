"""`fastdraft proxy`: predicted outputs before an inference server."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import click

from fastdraft.cli.options import NEW_FILE, writing
from fastdraft.replay import RecordWriter
from fastdraft.replay.importers import Importer
from fastdraft.replay.records import JsonLine
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.serving.http.servers import SERVERS

__all__ = ["proxy"]


@click.command()
@click.option("--backend", required=True, metavar="URL", help="The server's URL, without /v1.")
@click.option(
    "--server",
    type=click.Choice(list(SERVERS)),
    help="Which server it is.  [default: what it says of itself in /v1/models]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="The port to listen at; 0 takes a free one.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds without a byte from the server after which a request fails.",
)
@click.option(
    "--namespace-by-key",
    is_flag=True,
    help="Requests draft from the memory of their own key alone, whatever namespace they name.",
)
@click.option(
    "--record",
    type=NEW_FILE,
    help="Append each request with its answer to this file, for `fastdraft replay`.",
)
@click.option(
    "--record-ids",
    "model",
    metavar="MODEL",
    help="Record no text, but hashed token ids: MODEL is a folder with the tokenizer of the model "
    "that answers, or its name on the Hugging Face hub.",
)
def proxy(
    backend: str,
    server: str | None,
    host: str,
    port: int,
    timeout: float,
    namespace_by_key: bool,
    record: Path | None,
    model: str | None,
) -> None:
    """Serve OpenAI's `prediction` before a server that drafts with fastdraft.

    The text of a prediction becomes the token ids that the server's drafter takes, and a request's
    tools and JSON schema become templates to draft from. All else passes as it is.

    With --record, requests with their answers are appended to a file that `fastdraft replay` reads:
    their whole text, or with --record-ids token ids under a key that is thrown away.
    """
    from fastdraft.serving.http.proxy import create, serve
    from fastdraft.serving.http.recorder import Recorder

    if model is not None and record is None:
        raise click.UsageError("--record-ids needs --record")
    write = None if record is None else _recording(record, model)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    app = create(
        backend,
        server=None if server is None else SERVERS[server],
        silence=timeout,
        namespace_by_key=namespace_by_key,
    )
    serve(app if write is None else Recorder(app, write), host=host, port=port)


def _recording(file: Path, model: str | None) -> Callable[[bytes, bytes], None]:
    """What writes a request and its answer to a file: as they are, or as hashed token ids."""
    with writing(file):
        writer = RecordWriter(file)
    if model is None:
        return lambda request, answer: writer.append_exchange(request.decode(), answer.decode())
    texts = TextTokenizer(model)
    texts.encode([""])  # an error of loading comes now, not at a request
    importer, numbers, key = Importer(texts), count(1), secrets.token_bytes()
    run = secrets.token_hex(4)  # tells sessions from those of another run

    @cache
    def hashed(token: int) -> int:
        digest = blake2b(token.to_bytes(4, "little"), key=key, digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1

    def ids(fields: dict[str, Any], kind: str) -> list[int] | None:
        found = fields.get(f"{kind}_ids")
        if found is None and fields.get(kind) is not None:
            (found,) = texts.encode([fields[kind]])
        return None if found is None else [hashed(token) for token in found]

    def write(request: bytes, answer: bytes) -> None:
        number = next(numbers)
        line = json.dumps({"request": request.decode(), "response": answer.decode()}).encode()
        for fields in importer(JsonLine(number, f"{run}, request {number}", line, len(line))):
            writer.append(
                prompt_ids=ids(fields, "prompt"),
                output_ids=ids(fields, "output"),
                reference_ids=ids(fields, "reference"),
                session=fields["session"],
            )

    return write
