"""A server under 64 clients at once, many of them rude: nothing of it may be wrong, leak or grow.

    python benchmarks/serving_load.py [--minutes 5] [--clients 64] [--seed S] [--output FOLDER]

The clients read streams and whole answers, read slowly, leave before the first token, in the middle and while text is
held back, with a goodbye or a reset, and send what must be refused (`serving_users.py`). The pool is so small that
requests wait for blocks. An error is whatever is the server's fault: a status of 500 and more, a stream
that breaks, a status other than the one expected.

Afterwards every text and token is compared with that of the same request alone in an engine of this process, as
`soak_check.py` does: where one differs, moving the two tokens' logits by the tolerance must give it. All KV blocks must
be free, nothing may have been compiled, and the server's memory of the last minute is compared with that of the second.
Prints a table, and exits with 1 if anything was wrong. Needs Linux.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from serving_process import ServerProcess, server_process
from serving_users import Case, Seen, Sizes, Users, draw_cases, held_back_case
from soak_check import Reference
from soak_user import Asked, Done
from tables import Report, publish, section, table

from pagedjax import CompletionOutput, RequestOutput, SamplingParams

SIZES = Sizes(prompt_chars=400, output_tokens=80)
ENGINE = {"max_model_len": 512, "block_size": 16, "num_blocks": 160, "max_num_seqs": 48}
"""48 sequences of up to 180 tokens, which a block holds 16 of, do not fit."""
SAMPLE_S = 2.0
IDLE_TIMEOUT_S = 60.0
MAX_GROWTH_MB = 32.0
"""Of the mean of a minute; a leak of 100 KB a request would be more."""

Metrics = dict[str, float]


@dataclass
class Watch:
    """What the server looked like from outside, every `SAMPLE_S` seconds."""

    server: ServerProcess | None
    times_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    most_running: float = 0.0
    most_waiting: float = 0.0

    async def run(self, http: httpx2.AsyncClient) -> None:
        """Until it is cancelled."""
        start = time.monotonic()
        while True:
            if self.server is not None:
                self.times_s.append(time.monotonic() - start)
                self.rss_mb.append(self.server.rss_mb())
            metrics = await read_metrics(http)
            self.most_running = max(self.most_running, metrics["vllm:num_requests_running"])
            self.most_waiting = max(self.most_waiting, metrics["vllm:num_requests_waiting"])
            await asyncio.sleep(SAMPLE_S)

    def minutes_mb(self, duration_s: float) -> tuple[float, float] | None:
        """Mean memory of the second minute and of the last one, or of as large shares of a run of less than three."""
        minute = min(60.0, duration_s / 3)
        second = [mb for at, mb in zip(self.times_s, self.rss_mb, strict=True) if minute <= at < 2 * minute]
        last = [mb for at, mb in zip(self.times_s, self.rss_mb, strict=True) if duration_s - minute <= at < duration_s]
        return (statistics.mean(second), statistics.mean(last)) if second and last else None


@dataclass
class Result:
    """What came of a run."""

    users: Users
    watch: Watch
    duration_s: float
    metrics: Metrics
    """Of the idle server at the end."""
    num_compiled: int
    problems: list[str]


async def load(
    url: str,
    is_over: Callable[[float], bool],
    *,
    num_clients: int,
    sizes: Sizes,
    num_cases: int = 40,
    seed: int = 0,
    server: ServerProcess | None = None,
) -> Result:
    """Clients at work until `is_over`, which is given the seconds so far, and an idle server after it."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
        held_back = await held_back_case(http, sizes)
        users = Users(http, draw_cases(num_cases, sizes, seed), held_back, random.Random(seed))
        before = await read_metrics(http)
        watch, start = Watch(server), time.monotonic()
        watching = asyncio.create_task(watch.run(http))

        async def client() -> None:
            while not is_over(time.monotonic() - start):
                await users.act()

        await asyncio.gather(*(client() for _ in range(num_clients)))
        duration_s = time.monotonic() - start
        watching.cancel()
        problems = [*users.problems, *await wait_until_idle(http)]
        metrics = await read_metrics(http)
    num_compiled = int(metrics["pagedjax:num_programs"] - before["pagedjax:num_programs"])
    return Result(users, watch, duration_s, metrics, num_compiled, problems)


async def wait_until_idle(http: httpx2.AsyncClient) -> list[str]:
    """What is left when nobody asks for anything."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        metrics = await read_metrics(http)
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        busy = {name: metrics[name] for name in names if metrics[name]}
        num_held = metrics["pagedjax:num_blocks"] - metrics["pagedjax:num_free_blocks"]
        health = (await http.get("/health")).status_code
        if not busy and not num_held and health == 200:
            return []
        if time.monotonic() > deadline:
            return [f"the idle server has {busy}, {num_held:g} blocks in use, /health {health}"]
        await asyncio.sleep(0.2)


async def read_metrics(http: httpx2.AsyncClient) -> Metrics:
    """The samples of /metrics that stand alone, by name; counters without their "_total"."""
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = [sample for family in families if family.type in ("gauge", "counter") for sample in family.samples]
    return {sample.name.removesuffix("_total"): sample.value for sample in samples}


class CachedReference(Reference):
    """Computes each case alone once, however many read its answer."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._tokenizer = llm.tokenizer
        self._asked: dict[Case, Asked] = {}
        self._known: dict[Any, RequestOutput] = {}

    def check_seen(self, seen: Seen) -> str | None:
        """What is wrong with what somebody read, if anything is."""
        case = seen.case
        if case not in self._asked:
            params = SamplingParams(**case.params)
            prompt = list(self._tokenizer(case.body["prompt"])["input_ids"])
            self._asked[case] = Asked(case.kind, prompt, params, seed=params.seed)
        outputs = [
            CompletionOutput(i, each.text, each.token_ids, each.finish_reason, each.stop_reason)
            for i, each in sorted(seen.choices.items())
        ]
        output = RequestOutput("", None, seen.prompt_token_ids, outputs)
        return self.check(Done(self._asked[case], output, seen.is_whole))

    def _alone(self, asked: Asked, known: Sequence[int], bias: dict[int, float] | None = None) -> RequestOutput:
        key = (id(asked), tuple(known), tuple((bias or {}).items()))
        if key not in self._known:
            self._known[key] = super()._alone(asked, known, bias)
        return self._known[key]


def compare(seen: Sequence[Seen], reference: CachedReference) -> list[str]:
    """What is wrong with what was read; each different thing once."""
    different = {each.key(): each for each in seen if each.choices}
    wrong = [(each, reference.check_seen(each)) for each in different.values()]
    return [f"{each.case.body}: {text}"[:1000] for each, text in wrong if text is not None]


def memory_problems(watch: Watch, duration_s: float, most_growth_mb: float) -> list[str]:
    """Whether the server's memory grew."""
    minutes = watch.minutes_mb(duration_s)
    if minutes is None or minutes[1] - minutes[0] <= most_growth_mb:
        return []
    return [f"the memory grew from {minutes[0]:.1f} to {minutes[1]:.1f} MB, by more than {most_growth_mb:g} MB"]


def report(result: Result, reference: CachedReference, num_clients: int) -> Report:
    """The tables, and what was wrong."""
    users, metrics = result.users, result.metrics
    minutes = result.watch.minutes_mb(result.duration_s)
    num_whole = sum(seen.is_whole for seen in users.seen)
    num_choices = sum(len(seen.choices) for seen in users.seen)
    facts = {
        "seconds": round(result.duration_s, 1),
        "clients at once": num_clients,
        "whole answers, compared": num_whole,
        "parts of answers, compared": len(users.seen) - num_whole,
        "completions in them": num_choices,
        "different ones among them": reference.num_checked,
        "tokens in these": reference.num_tokens,
        "near ties in these": reference.num_near_ties,
        "most sequences running": int(result.watch.most_running),
        "most sequences waiting": int(result.watch.most_waiting),
        "output tokens of the server": int(metrics["vllm:generation_tokens"]),
        "preemptions": int(metrics["vllm:num_preemptions"]),
        "blocks in use at the end": int(metrics["pagedjax:num_blocks"] - metrics["pagedjax:num_free_blocks"]),
        "programs compiled under load": result.num_compiled,
        "slowest /health and the like, s": round(users.slowest_look_s, 2),
        "memory, second minute, MB": "-" if minutes is None else round(minutes[0], 1),
        "memory, last minute, MB": "-" if minutes is None else round(minutes[1], 1),
        "problems": len(result.problems),
    }
    markdown = section(
        "The server under load",
        table(["what clients did, and what they got", "times"], sorted(users.counts.items())),
        table(["", ""], list(facts.items())),
        "\n".join(f"- {problem}" for problem in result.problems[:50]) or "Nothing was wrong.",
    )
    data = {"counts": dict(users.counts), "facts": facts, "problems": result.problems}
    data |= {"rss_mb": result.watch.rss_mb, "times_s": result.watch.times_s}
    return Report("serving_load", markdown, data)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cases", type=int, default=40, help="different requests among those that are right")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="of a server of this model that runs already, with a pool of its own size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth-mb", type=float, default=MAX_GROWTH_MB)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write serving_load.md and .json there as well")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {"num_clients": args.clients, "sizes": SIZES, "num_cases": args.cases, "seed": args.seed}

    def is_over(seconds: float) -> bool:
        return seconds >= 60 * args.minutes

    if args.url is not None:
        result = asyncio.run(load(args.url, is_over, **options))
    else:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
        with server_process(args.model, flags) as server:
            result = asyncio.run(load(server.url, is_over, **options, server=server))
        if server.status != 0:
            result.problems.append(f"the server ended with {server.status} when it was told to stop")
        result.problems += [f"the server's log: {line}" for line in server.errors]
    result.problems += memory_problems(result.watch, result.duration_s, args.max_growth_mb)
    reference = CachedReference(reference_llm(args.model))
    result.problems += compare(result.users.seen, reference)
    command = " ".join(["python benchmarks/serving_load.py", *sys.argv[1:]])
    publish(report(result, reference, args.clients), command, args.output)
    return 1 if result.problems else 0


def reference_llm(model: str) -> Any:
    """An engine in which each request is alone."""
    import pagedjax

    sizes: dict[str, Any] = {
        "max_model_len": ENGINE["max_model_len"],
        "max_num_seqs": 4,
        "block_size": ENGINE["block_size"],
    }
    return pagedjax.LLM(model, **sizes, enable_prefix_caching=False, warm_up=False, progress=False)


if __name__ == "__main__":
    sys.exit(main())
