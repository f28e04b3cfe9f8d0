"""`pagedjax bench-serve`: how an OpenAI-compatible server answers requests that come as users send them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedjax.serving.cli_options import Debug, Progress, errors_in_one_line, needing_serve


def bench_serve(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")],
    rates: Annotated[
        str, typer.Option(help="Requests a second (Poisson), one run after another; inf: all at once.")
    ] = "1",
    num_requests: Annotated[int, typer.Option(min=1, help="For each rate.")] = 100,
    lengths: Annotated[
        str, typer.Option(help="sharegpt or alpaca (the paper's means), IN,OUT (other means), or a trace's CSV.")
    ] = "sharegpt",
    means: Annotated[
        str | None, typer.Option(help="IN,OUT: mean tokens to which the lengths of a CSV are scaled.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first one that the server has.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["PAGEDJAX_API_KEY", "OPENAI_API_KEY"], help="Key of the server.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str, typer.Option(help="auto, ids (random token ids) or text.")] = "auto",
    vocab_size: Annotated[int | None, typer.Option(min=2, help="For prompts of random token ids.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight.")] = None,
    slo_ttft_s: Annotated[float | None, typer.Option(help="Goodput: seconds to the first token.")] = None,
    slo_tpot_s: Annotated[float | None, typer.Option(help="Goodput: seconds for each further token.")] = None,
    slo_e2e_s: Annotated[float | None, typer.Option(help="Goodput: seconds to the last token.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length; not every server knows it.")] = True,
    extra_body: Annotated[str, typer.Option(help="JSON object of more fields for every request.")] = "{}",
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="For one request.")] = 600.0,
    output: Annotated[Path | None, typer.Option(help="Folder for results.json and figures.")] = None,
    plots: Annotated[bool, typer.Option(help="Figures too, with --output; they need matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    progress: Progress = True,
    debug: Debug = False,
) -> None:
    """Measure a server: latencies, throughput and goodput under Poisson arrivals. Ends with 1 if requests failed."""
    with errors_in_one_line(debug), needing_serve():
        from pagedjax.serving.bench.report import print_report
        from pagedjax.serving.bench.run import bench_serve as run
        from pagedjax.serving.bench.run import parse_rates

        result = run(
            url,
            rates=parse_rates(rates),
            num_requests=num_requests,
            lengths=lengths,
            means=means,
            model=model,
            api_key=api_key,
            endpoint=endpoint,
            prompts=prompts,
            vocab_size=vocab_size,
            max_concurrency=max_concurrency,
            slo_ttft_s=slo_ttft_s,
            slo_tpot_s=slo_tpot_s,
            slo_e2e_s=slo_e2e_s,
            ignore_eos=ignore_eos,
            extra_body=_json_object(extra_body),
            seed=seed,
            timeout_s=timeout_s,
            output=output,
            plots=plots,
            progress=progress and sys.stderr.isatty(),
        )
        if as_json:
            print(json.dumps(result.as_dict(), indent=2))
        else:
            print_report(result)
    if any(each.summary.failures for each in result.results):
        raise typer.Exit(1)


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body: expected a JSON object, got {text!r:.80}")
    return value
