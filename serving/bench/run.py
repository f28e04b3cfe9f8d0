"""`bench_serve`: requests with random arrivals to a server with OpenAI's API, and what came of them."""

import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tqdm import tqdm

from pagedjax.sampling.checks import check_float, check_int
from pagedjax.serving.bench.arrivals import plan_requests, send_all
from pagedjax.serving.bench.client import PATHS, Client, Outcome, message_of
from pagedjax.serving.bench.lengths import Lengths, draw_lengths, shorten
from pagedjax.serving.bench.metrics import Objectives, summarize
from pagedjax.serving.bench.plots import check_matplotlib, write_plots
from pagedjax.serving.bench.prompts import KINDS, Maker, find_maker
from pagedjax.serving.bench.report import BenchResult, RateResult
from pagedjax.serving.urls import server_url

Number = float | int
CHAT_RESERVE = 64
"""Tokens of the context that are left for what a chat template adds."""
LONGEST_S = 86400.0


def bench_serve(
    url: str,
    *,
    rates: Sequence[Number] = (1.0,),
    num_requests: int = 100,
    lengths: str = "sharegpt",
    means: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    endpoint: str = "completions",
    prompts: str = "auto",
    vocab_size: int | None = None,
    max_concurrency: int | None = None,
    slo_ttft_s: Number | None = None,
    slo_tpot_s: Number | None = None,
    slo_e2e_s: Number | None = None,
    ignore_eos: bool = True,
    extra_body: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout_s: Number = 600.0,
    output: str | Path | None = None,
    plots: bool = True,
    progress: bool = True,
) -> BenchResult:
    """Sends `num_requests` requests at each of `rates` (a second, Poisson; infinity: all at once), one rate after
    another, and measures how they are answered.

    `url` is a server's, with or without /v1. `lengths` and `means` are those of `draw_lengths`, shortened to the
    server's context where /v1/models says it. `model` is the server's first one by default. `prompts`, and `vocab_size`
    for random token ids, are those of `find_maker`. Answers are greedy and run to their full length (`ignore_eos`,
    vLLM's and ours; False leaves the field out for servers that do not know it); `extra_body` adds fields or changes
    these. The `slo_*` are what a request must keep to for the goodput. With `max_concurrency` no more requests are in
    flight; at a finite rate the wait counts, at an infinite one latencies begin when a request is sent. With `output`,
    a folder, every request is written to results.json, and figures beside it.

    Raises ValueError that names a bad argument, OSError if the server cannot be reached or the folder not written, and
    RuntimeError if the server refuses a trial request. Failures while it is measured are counted.
    """
    options = _Options(
        url=server_url(url),
        rates=_checked_rates(rates),
        num_requests=num_requests,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        prompts=prompts,
        vocab_size=vocab_size,
        max_concurrency=max_concurrency,
        objectives=Objectives(
            ttft_s=_seconds("slo_ttft_s", slo_ttft_s),
            tpot_s=_seconds("slo_tpot_s", slo_tpot_s),
            e2e_s=_seconds("slo_e2e_s", slo_e2e_s),
        ),
        fields={"temperature": 0.0, **({"ignore_eos": True} if ignore_eos else {}), **(extra_body or {})},
        seed=seed,
        timeout_s=_seconds("timeout_s", timeout_s) or 0.0,
        progress=progress,
    )
    options.check()
    drawn = draw_lengths(lengths, num_requests, seed=seed, means=means)
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)  # better now than after the run
        if plots:
            check_matplotlib()
    result = asyncio.run(_bench(options, drawn))
    if output is not None:
        result.write(Path(output))
        if plots:
            write_plots(result, Path(output))
    return result


def parse_rates(text: str) -> list[float]:
    """Rates as on a command line: "1,2,4" or "inf". Raises ValueError."""
    try:
        return _checked_rates([float(part) for part in text.split(",")])
    except ValueError as error:
        raise ValueError(f"rates: got {text!r}, expected requests a second, such as 1,2,4 or inf") from error


@dataclass(frozen=True, kw_only=True)
class _Options:
    """`bench_serve`'s arguments, checked."""

    url: str
    rates: Sequence[float]
    num_requests: int
    model: str | None
    api_key: str | None = field(repr=False)
    endpoint: str
    prompts: str
    vocab_size: int | None
    max_concurrency: int | None
    objectives: Objectives
    fields: Mapping[str, Any]
    seed: int
    timeout_s: float
    progress: bool

    def check(self) -> None:
        check_int("num_requests", self.num_requests, 1)
        check_int("seed", self.seed, 0)
        if self.max_concurrency is not None:
            check_int("max_concurrency", self.max_concurrency, 1)
        if self.vocab_size is not None:
            check_int("vocab_size", self.vocab_size, 2)
        if self.endpoint not in PATHS:
            raise ValueError(f"endpoint must be one of {', '.join(PATHS)}, got {self.endpoint!r}")
        if self.prompts not in KINDS:
            raise ValueError(f"prompts must be one of {', '.join(KINDS)}, got {self.prompts!r}")

    def settings(self, model: str) -> dict[str, Any]:
        """For results.json: everything but the key and what each result says itself."""
        hidden = ("api_key", "rates", "progress", "model", "objectives")
        settings = {name: value for name, value in vars(self).items() if name not in hidden}
        return {"model": model, **settings, "objectives": asdict(self.objectives)}


async def _bench(options: _Options, drawn: Lengths) -> BenchResult:
    async with _connected(options) as http:
        model, max_model_len = await _find_model(http, options.model)
        client = Client(http, model, endpoint=options.endpoint, fields=options.fields, timeout_s=options.timeout_s)
        maker = await find_maker(client, options.prompts, options.vocab_size)
        lengths = shorten(drawn, max_model_len, CHAT_RESERVE if options.endpoint == "chat" else 0)
        results = [await _run(client, lengths, number, maker, options) for number in range(len(options.rates))]
    notes = _notes(options, model, max_model_len, lengths, maker)
    return BenchResult(settings=options.settings(model), notes=notes, results=results)


async def _run(client: Client, lengths: Lengths, number: int, maker: Maker, options: _Options) -> RateResult:
    rate = options.rates[number]
    planned = plan_requests(lengths.pairs, rate, maker, seed=options.seed, number=number)
    with tqdm(total=len(planned), desc=f"{rate:g} req/s", unit=" requests", disable=not options.progress) as bar:
        shown: set[str] = set()

        def show(outcome: Outcome) -> None:
            bar.update()
            if options.progress and outcome.error is not None and outcome.error not in shown:
                shown.add(outcome.error)  # the first of a kind; the report counts them
                bar.write(f"{outcome.error}: {outcome.detail}", file=sys.stderr)

        outcomes = await send_all(
            client,
            planned,
            max_concurrency=options.max_concurrency,
            is_closed_loop=math.isinf(rate) and options.max_concurrency is not None,
            on_outcome=show,
        )
    return RateResult(rate=rate, summary=summarize(outcomes, options.objectives), outcomes=outcomes)


def _connected(options: _Options) -> httpx2.AsyncClient:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    return httpx2.AsyncClient(
        base_url=options.url,
        headers=headers,
        timeout=options.timeout_s,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def _find_model(http: httpx2.AsyncClient, name: str | None) -> tuple[str, int | None]:
    """The model's name, and the tokens of its context if the server says them (ours and vLLM's do)."""
    try:
        response = await http.get("/v1/models")
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        raise ConnectionError(f"no server answers at {http.base_url}: {error}") from error
    if response.status_code in (401, 403):
        raise PermissionError(f"the server refuses the API key: {message_of(response.text)}")
    try:
        cards = {card["id"]: card for card in response.json()["data"]} if response.status_code == 200 else {}
    except (ValueError, KeyError, TypeError):
        cards = {}
    if name is None and not cards:
        raise ValueError(f"model: {http.base_url} does not say what it serves (/v1/models), so it must be given")
    found = name or next(iter(cards))
    if cards and found not in cards:
        raise ValueError(f"model: got {found!r}, but the server has {', '.join(cards)}")
    longest = cards.get(found, {}).get("max_model_len")
    return found, longest if isinstance(longest, int) else None


def _notes(options: _Options, model: str, max_model_len: int | None, lengths: Lengths, maker: Maker) -> list[str]:
    prompt, output = lengths.pairs.mean(axis=0)
    context = "a context that it does not say" if max_model_len is None else f"a context of {max_model_len} tokens"
    notes = [
        f"{model} at {options.url}, {options.endpoint}, with {context}",
        f"Lengths: {lengths.source}; here {prompt:.1f} prompt and {output:.1f} output tokens in the mean",
        f"Prompts: {maker.source}",
    ]
    if lengths.num_shortened:
        notes.append(f"{lengths.num_shortened} of {len(lengths.pairs)} requests were shortened to the context")
    if options.max_concurrency is not None:
        waits = "; latencies begin when a request is sent" if any(map(math.isinf, options.rates)) else ""
        notes.append(f"At most {options.max_concurrency} requests in flight{waits}")
    return notes


def _checked_rates(rates: Sequence[Number]) -> list[float]:
    if not rates:
        raise ValueError("rates must be at least one number of requests a second, got none")
    for rate in rates:
        if rate != math.inf:
            check_float("rates", rate, 1e-3, 1e6)
    return [float(rate) for rate in rates]


def _seconds(name: str, value: Number | None) -> float | None:
    if value is None:
        return None
    check_float(name, value, 1e-6, LONGEST_S)
    return float(value)
