"""`pagedjax watch`: the KV pool of a running server in a terminal."""

from typing import Annotated

import typer

from pagedjax.serving.cli_options import Debug, errors_in_one_line, needing_serve


def watch(
    url: Annotated[str, typer.Argument(help="Of a server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="PAGEDJAX_API_KEY", help="Key of the server.")] = None,
    once: Annotated[bool, typer.Option("--once", help="One picture, also for pipes.")] = False,
    debug: Debug = False,
) -> None:
    """Watch the KV pool of a server of ours: its blocks, who holds them, what happens to them."""
    with errors_in_one_line(debug), needing_serve():
        from pagedjax.serving.watch import watch as run

        run(url, api_key, once=once)
