"""What the commands share: options by their names, and errors in one line."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(help="A model folder, a .gguf file, a catalogue name or a hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answers. Default: a fresh one.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")]
AsChat = Annotated[bool | None, typer.Option("--chat/--no-chat", help="Use a chat template. Default: if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="Of weights and cache: auto, float32, bfloat16, ...")]
Quantization = Annotated[str | None, typer.Option(help="int8: weights and activations of the layers in int8.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per KV block.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks in the pool. Default: what fits the memory.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests that run in one step.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens computed in one step.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer together.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@contextlib.contextmanager
def errors_in_one_line(debug: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # a reader that has enough, as in `| head`; typer ends quietly, as it does on Ctrl-C
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"pagedjax: error: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(2) from error


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # Of the others (KeyError: 'x') the kind says more than the text.
    explains_itself = isinstance(error, ValueError | OSError | RuntimeError) and text
    return text if explains_itself else f"{type(error).__name__}: {text}"


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def needing_serve() -> Iterator[None]:
    """A ModuleNotFoundError becomes one that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error.name} is not installed: pip install 'pagedjax[serve]'") from error
