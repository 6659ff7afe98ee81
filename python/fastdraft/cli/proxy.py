"""`fastdraft proxy`: predicted outputs before an inference server."""

from __future__ import annotations

import logging

import click

from fastdraft.integrations.http.servers import SERVERS

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
def proxy(
    backend: str,
    server: str | None,
    host: str,
    port: int,
    timeout: float,
    namespace_by_key: bool,
) -> None:
    """Serve OpenAI's `prediction` before a server that drafts with fastdraft.

    The text of a prediction becomes the token ids that the server's drafter takes, and a request's
    tools and JSON schema become templates to draft from. All else passes as it is.
    """
    from fastdraft.integrations.http.proxy import create, serve

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    app = create(
        backend,
        server=None if server is None else SERVERS[server],
        silence=timeout,
        namespace_by_key=namespace_by_key,
    )
    serve(app, host=host, port=port)
