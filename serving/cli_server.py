"""`pagedjax serve`. What it needs beyond the core is in the extra `serve`; it is imported when the command runs."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import pagedjax
from pagedjax.serving.cli_options import (
    BlockSize,
    Debug,
    Dtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumBlocks,
    Progress,
    Quantization,
    errors_in_one_line,
    given,
    needing_serve,
)

ApiKey = Annotated[str | None, typer.Option(envvar="PAGEDJAX_API_KEY", help="Key that requests must bring.")]


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: ApiKey = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API. Default: MODEL.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file in place of the model's template.")] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Answers in the making at once; beyond: HTTP 429.")] = 256,
    max_queue: Annotated[int, typer.Option(min=1, help="Completions pending at once; beyond: HTTP 429.")] = 2048,
    max_body_mib: Annotated[float, typer.Option(min=0.001, help="Largest request body.")] = 4.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the API; * for all.")
    ] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds for pending answers to end at a shutdown.")] = 30.0,
    stuck_after_s: Annotated[float, typer.Option(min=1, help="A longer step makes /health fail.")] = 120.0,
    warm_up: Annotated[str, typer.Option(help="Programs to compile at the start: all, plain or none.")] = "all",
    dtype: Dtype = None,
    quantization: Quantization = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of JAX's memory to take.")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Find the KV of earlier prompts.")] = True,
    preemption: Annotated[str | None, typer.Option(help="recompute, swap or auto.")] = None,
    num_swap_blocks: Annotated[int | None, typer.Option(help="Size of the host pool.")] = None,
    scheduling_policy: Annotated[str | None, typer.Option(help="fcfs, or priority: lower ones first.")] = None,
    num_decode_steps: Annotated[int | None, typer.Option(help="Most tokens per request and step.")] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Prepare a step while the device computes.")] = False,
    batch_invariant: Annotated[bool, typer.Option(help="No bit depends on what else runs (CPU).")] = False,
    seed: Annotated[int | None, typer.Option(help="Where seeds of requests without one come from.")] = None,
    progress: Progress = True,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, and a page with the chat and the live KV pool."""
    with errors_in_one_line(debug), needing_serve():
        from pagedjax.serving.app import Limits
        from pagedjax.serving.backend import Backend
        from pagedjax.serving.server import Server
        from pagedjax.serving.server import serve as run

        logging.basicConfig(
            level=logging.DEBUG if debug else logging.INFO, format="%(levelname)s %(name)s: %(message)s"
        )
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)
        if warm_up not in ("all", "plain", "none"):
            raise ValueError(f"--warm-up: got {warm_up!r}, expected all, plain or none")
        template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
        pool: dict[str, Any] = given(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        step = given(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        step |= given(num_decode_steps=num_decode_steps, scheduling_policy=scheduling_policy)
        memory = given(dtype=dtype, quantization=quantization, gpu_memory_utilization=gpu_memory_utilization)
        memory |= given(preemption=preemption, num_swap_blocks=num_swap_blocks, seed=seed)
        llm = pagedjax.LLM(
            model,
            progress=progress,
            warm_up={"all": "all", "plain": True, "none": False}[warm_up],
            enable_prefix_caching=prefix_caching,
            async_scheduling=async_scheduling,
            batch_invariant=batch_invariant,
            **pool,
            **step,
            **memory,
        )
        backend = Backend(
            llm,
            served_model_name or model,
            max_queue=max_queue,
            stuck_after_s=stuck_after_s,
            chat_template=template,
        )
        limits = Limits(
            api_key=api_key,
            max_calls=max_calls,
            max_body_bytes=int(max_body_mib * 2**20),
            cors_origins=tuple(cors_origin or ()),
        )
        server = Server(backend, limits, host=host, port=port)
        status = run(
            server,
            drain_s=drain_s,
            on_ready=lambda url: print(f"{backend.model_name} at {url} (OpenAI's API under {url}/v1)", file=sys.stderr),
        )
    if status:
        raise typer.Exit(status)
