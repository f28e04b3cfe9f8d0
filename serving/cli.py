"""The command line: `pagedjax generate` answers prompts together, `pagedjax chat` talks in the terminal, `pagedjax
plan` says what a model takes of the memory, `pagedjax convert` writes a model in another format.

Answers go to stdout, everything else to stderr. pagedjax loads jax when it is first needed, so `--help` is quick.
"""

import contextlib
import importlib
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import pagedjax
from pagedjax.serving import cli_bench, cli_server, cli_watch
from pagedjax.serving.cli_options import (
    AsChat,
    BlockSize,
    Debug,
    Dtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxTokens,
    Model,
    NumBlocks,
    Progress,
    Quantization,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    errors_in_one_line,
    given,
    one_line,
)

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    app(prog_name="pagedjax")


@app.command()
def generate(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False)] = None,
    file: Annotated[str | None, typer.Option(help="A file of prompts, one per line; - reads stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line.")] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    as_chat: AsChat = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    progress: Progress = True,
    debug: Debug = False,
) -> None:
    """Answer prompts, all of them together."""
    with errors_in_one_line(debug):
        # What can be wrong with the request is found before a model is loaded.
        texts = _read_prompts(prompts or [], file)
        params = pagedjax.SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ()
        )
        pool = given(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        step = given(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        weights = given(dtype=dtype, quantization=quantization)
        llm = pagedjax.LLM(model, progress=progress, **weights, **pool, **step)
        start = time.perf_counter()
        if as_chat is None:
            as_chat = bool(getattr(llm.tokenizer, "chat_template", None))
        if as_chat:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            results = llm.chat(conversations, params, use_tqdm=progress)
        else:
            results = llm.generate(texts, params, use_tqdm=progress)
        seconds = time.perf_counter() - start

        for text, result in zip(texts, results, strict=True):
            _print_result(text, result, as_json=as_json, bare=len(texts) == n == 1)
        sys.stdout.flush()
        completions = [completion for result in results for completion in result.outputs]
        _print_closing_line(llm, len(results), sum(len(c.token_ids) for c in completions), seconds)
        if num_failed := sum(completion.finish_reason == "error" for completion in completions):
            raise RuntimeError(f"{num_failed} of {len(completions)} answers ended with an error")


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    max_model_len: MaxModelLen = None,
    progress: Progress = True,
    debug: Debug = False,
) -> None:
    """Talk with a model. /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""
    with errors_in_one_line(debug):
        params = pagedjax.SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        # A conversation never has two requests in flight: this leaves fewer programs to compile.
        options = given(dtype=dtype, quantization=quantization, max_model_len=max_model_len)
        llm = pagedjax.LLM(model, progress=progress, max_num_seqs=1, **options)
        if not getattr(llm.tokenizer, "chat_template", None):
            raise ValueError(f"{model} has no chat template: use `pagedjax generate --no-chat`")
        history = beginning = [{"role": "system", "content": system}] if system else []
        num_answers, num_tokens, seconds = 0, 0, 0.0
        for line in _lines():
            if line == "/reset":
                history = beginning
                continue
            question = {"role": "user", "content": line}
            start = time.perf_counter()
            try:
                answer, num_new_tokens = _stream_answer(llm, [*history, question], params)
            except ValueError as error:  # such as a conversation that has become too long
                if not _is_interactive():
                    raise
                print(f"{one_line(error)} (/reset begins a new conversation)", file=sys.stderr)
                continue
            seconds += time.perf_counter() - start
            num_answers += 1
            num_tokens += num_new_tokens
            if answer:
                history = [*history, question, {"role": "assistant", "content": answer}]
        _print_closing_line(llm, num_answers, num_tokens, seconds)


@app.command()
def plan(
    model: Model,
    num_requests: Annotated[int | None, typer.Option(help="How many requests are to run at once.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of each of them, prompt and answer together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a GPU to plan for instead, such as 80GiB.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu or gpu. Default: this machine's.")] = None,
    compile: Annotated[bool, typer.Option(help="Ask XLA what the largest programs take.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    dtype: Dtype = None,
    quantization: Quantization = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of JAX's memory to take.")] = None,
    debug: Debug = False,
) -> None:
    """Show what a model would take of the memory, before anything is loaded. Exit status 1: it does not fit."""
    with errors_in_one_line(debug):
        sizes = given(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        sizes |= given(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        asked = given(num_requests=num_requests, context=context, platform=platform)
        asked |= given(dtype=dtype, quantization=quantization, gpu_memory_utilization=gpu_memory_utilization)
        memory_bytes = None if memory is None else _bytes_in(memory)
        result = pagedjax.LLM.plan(model, memory_bytes=memory_bytes, compile=compile, **asked, **sizes)
        print(json.dumps(result.as_dict()) if as_json else result)
    if not result.fits:
        raise typer.Exit(1)


@app.command()
def convert(
    model: Model,
    out: Annotated[str, typer.Argument(help="The folder to write: a new or an empty one.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights. Default: the checkpoint's own.")] = None,
    quantization: Quantization = None,
    format: Annotated[str, typer.Option(help="orbax, which restores onto many devices, or safetensors.")] = "orbax",
    overwrite: Annotated[bool, typer.Option(help="Replace a folder that pagedjax wrote.")] = False,
    progress: Progress = True,
    debug: Debug = False,
) -> None:
    """Write a model in another format or dtype, with its tokenizer, for `pagedjax generate OUT` and the others."""
    with errors_in_one_line(debug):
        from pagedjax.models.convert import convert as convert_model  # loads jax

        options: dict[str, Any] = {"format": format, "overwrite": overwrite, "progress": progress}
        convert_model(model, out, dtype=dtype, quantization=quantization, **options)
        print(out)


def _bytes_in(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"--memory: got {text!r}, expected a number of bytes with a unit, such as 80GiB or 141GB")
    number, unit, binary = match.groups()
    if not unit:
        raise ValueError(f"--memory: got {text!r}, expected a unit as well, such as 80GiB or 141GB")
    return int(float(number) * (1024 if binary else 1000) ** "-KMGT".index(unit.upper()))


def _read_prompts(prompts: list[str], file: str | None) -> list[str]:
    for i, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise ValueError(f"prompt {i} is empty")
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        prompts = prompts + [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ValueError("no prompts: give them as arguments, or one per line with --file")
    return prompts


def _print_result(prompt: str, result: Any, *, as_json: bool, bare: bool) -> None:
    if as_json:
        fields = ("index", "text", "token_ids", "finish_reason")
        outputs = [{name: getattr(completion, name) for name in fields} for completion in result.outputs]
        print(json.dumps({"prompt": prompt, "outputs": outputs}, ensure_ascii=False))
    elif bare:  # the answer alone, to be piped on
        print(result.outputs[0].text)
    else:
        print(f"> {prompt}")
        for completion in result.outputs:
            print(f"[{completion.index}] {completion.text}" if len(result.outputs) > 1 else completion.text)
        print()


def _print_closing_line(llm: Any, num_requests: int, num_tokens: int, seconds: float) -> None:
    stats = llm.stats()
    speed = f"{num_tokens / max(seconds, 1e-9):.1f} output tokens/s ({num_tokens} in {seconds:.1f} s)"
    blocks = f"peak {stats.peak_blocks_used} of {stats.num_blocks} blocks"
    print(f"{speed}, {num_requests} requests, {blocks}, {stats.num_preemptions} preemptions", file=sys.stderr)


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """What the user types, without empty lines, until the end of the input."""
    interactive = _is_interactive()
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and history, where the platform has them
            importlib.import_module("readline")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:  # drops the line, as in a shell
            if not interactive:
                raise
            print()
            continue
        if line == "/exit":
            return
        if line:
            yield line


def _stream_answer(llm: Any, messages: list[dict[str, str]], params: Any) -> tuple[str, int]:
    """Prints an answer while it arrives; returns its text and number of tokens. Ctrl-C ends it early."""
    stream = llm.stream(llm.render_chat(messages), params)
    text, num_tokens = "", 0
    interrupted = threading.Event()

    def interrupt(*_: Any) -> None:  # lets the step end: an exception inside it would cost the KV pool
        interrupted.set()
        stream.close()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        for output in stream:
            completion = output.outputs[0]
            print(completion.text[len(text) :], end="", flush=True)
            text, num_tokens = completion.text, len(completion.token_ids)
    finally:
        signal.signal(signal.SIGINT, previous)
        stream.close()
    print(flush=True)
    if interrupted.is_set() and not _is_interactive():  # nobody is there to go on with
        raise KeyboardInterrupt
    return text, num_tokens


app.command()(cli_server.serve)
app.command()(cli_watch.watch)
app.command()(cli_bench.bench_serve)
