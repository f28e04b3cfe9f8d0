"""Sending requests when they are due, whether or not earlier ones have been answered (an open loop)."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from pagedjax.serving.bench.client import Client, Outcome, Planned
from pagedjax.serving.bench.lengths import Pairs
from pagedjax.serving.bench.prompts import Maker
from pagedjax.simulation.workload import poisson_requests


def plan_requests(pairs: Pairs, rate: float, maker: Maker, *, seed: int = 0, number: int = 0) -> list[Planned]:
    """Requests of these lengths with Poisson arrivals of `rate` a second; all at once if it is infinite.

    The arrivals are those of `pagedjax.poisson_requests`, for the simulator, with the same seed. The prompts are others
    for each `number` of a run: those that came before would be found in a prefix cache.
    """
    rng = np.random.default_rng((seed, number))
    if math.isinf(rate):
        arrivals = [0.0] * len(pairs)
    else:
        arrivals = [request.arrival_s for request in poisson_requests(pairs.tolist(), rate, seed=seed)]
    return [
        Planned(arrival_s=arrival_s, prompt=maker.make(num_prompt, rng), num_output_tokens=num_output)
        for arrival_s, (num_prompt, num_output) in zip(arrivals, pairs.tolist(), strict=True)
    ]


async def send_all(
    client: Client,
    planned: Sequence[Planned],
    *,
    max_concurrency: int | None = None,
    is_closed_loop: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Sends each request at its time and waits for all answers, which come in the order of the requests.

    Times are absolute, so what delays one request does not move those behind it. With `max_concurrency` a request waits
    for a free place. That counts as part of its latency, as it does for whoever waits, but not in a closed loop, where
    nobody comes before there is a place.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send(each: Planned) -> Outcome:
        async with places:
            if is_closed_loop:
                each = replace(each, arrival_s=loop.time() - start_s)
            outcome = await client.send(each, start_s)
        on_outcome(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for each in sorted(planned, key=lambda each: each.arrival_s):
            if (delay_s := start_s + each.arrival_s - loop.time()) > 0:
                await asyncio.sleep(delay_s)
            tasks.append(group.create_task(send(each)))
    return [task.result() for task in tasks]
