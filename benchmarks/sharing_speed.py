"""Time that shared prefixes save: throughput of requests with one prefix (the paper's figure 16), and a chat's rounds.

Engines with and without the prefix cache share the params and run in turns; medians of the repetitions count.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from sharing_texts import CHAT_MESSAGES
from step_clock import StepClock, Turns
from tables import Report, section, table

PREFIX_LENGTHS = {"one-shot": 80, "five-shot": 341}
"""Tokens of the paper's translation prefixes (section 6.4)."""
SHORTEST, LONGEST = 20, 60
"""Of a task's input and of its output."""
VOCAB = (10, 49_000)
"""Ids to draw from: SmolLM2's without its special tokens."""
CHAT_TOKENS = 40


def fig16(
    new_llm: Callable[..., Any], *, num_requests: int, block_sizes: Sequence[int], repeat: int, prefixes: Sequence[str]
) -> Report:
    """Throughput with the prefix cache, and with a pinned prefix, over that without, for each prefix and block size."""
    results = []
    for block_size in block_sizes:
        options = {"block_size": block_size, "max_num_seqs": num_requests, "max_model_len": 512}
        options["num_blocks"] = num_requests * -(-512 // block_size)
        llms = {
            "off": new_llm(enable_prefix_caching=False, **options),
            "cache": new_llm(**options),
            "pinned": new_llm(**options),
        }
        results += [_shared_prefix(llms, name, block_size, num_requests, repeat) for name in prefixes]
    return Report("fig16", _fig16_text(results, repeat), {"results": results})


def _shared_prefix(llms: dict[str, Any], name: str, block_size: int, num_requests: int, repeat: int) -> dict[str, Any]:
    from pagedjax import SamplingParams

    rng = np.random.default_rng(0)
    prefix = rng.integers(*VOCAB, PREFIX_LENGTHS[name]).tolist()
    input_lens, output_lens = rng.integers(SHORTEST, LONGEST + 1, (2, num_requests))
    prompts = [prefix + rng.integers(*VOCAB, n).tolist() for n in input_lens]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens.tolist()
    ]
    pinned = llms["pinned"].pin_prefix(prefix)
    turns, cached, ids = Turns(), {}, {}
    clocks = {way: StepClock(llm.engine) for way, llm in llms.items()}
    for i in range(repeat + 1):
        for way, llm in llms.items():
            llm.reset_prefix_cache()  # of the inputs too; what is pinned stays
            clocks[way].clear()
            run = partial(llm.generate, prompts, params, use_tqdm=False)
            outputs = turns.time(way, run) if i > 0 else run()  # the first one compiles
            cached[way] = sum(output.num_cached_tokens for output in outputs)
            ids[way] = [output.outputs[0].token_ids for output in outputs]
            print(f"fig16: {name}, blocks of {block_size}, {way}: {i} of {repeat}", flush=True)
    pinned.free()
    host = {way: clock.close() for way, clock in clocks.items()}
    num_outputs, ways = int(output_lens.sum()), ("cache", "pinned")
    return {
        "prefix": name,
        "prefix_tokens": PREFIX_LENGTHS[name],
        "block_size": block_size,
        "num_requests": num_requests,
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_output_tokens": num_outputs,
        "num_cached_tokens": cached,
        "output_tokens_per_s": {way: num_outputs / turns.median(way) for way in llms},
        "ratio": {way: turns.ratio("off", way) for way in ways},
        "processor_ratio": {way: turns.processor_ratio("off", way) for way in ways},
        "num_same_ids": {way: sum(a == b for a, b in zip(ids["off"], ids[way], strict=True)) for way in ways},
        "profile": host,
        **turns.as_dict(),
    }


def _fig16_text(results: Sequence[dict[str, Any]], repeat: int) -> str:
    rows = []
    for r in results:
        speed, ratio, cached = r["output_tokens_per_s"], r["ratio"], r["num_cached_tokens"]
        rows.append(
            [
                f"{r['prefix']}, {r['prefix_tokens']} tokens, blocks of {r['block_size']}",
                *(f"{speed[way]:.1f}" for way in ("off", "cache", "pinned")),
                *(f"**{ratio[way]:.2f}x**" for way in ("cache", "pinned")),
                *(f"{r['processor_ratio'][way]:.2f}x" for way in ("cache", "pinned")),
                *(f"{cached[way] / r['num_prompt_tokens']:.0%}" for way in ("cache", "pinned")),
                *(f"{r['num_same_ids'][way]} of {r['num_requests']}" for way in ("cache", "pinned")),
                f"{r['profile']['cache']['host_share']:.1%}",
            ]
        )
    columns = ["prefix", "off, tok/s", "cache, tok/s", "pinned, tok/s", "cache / off", "pinned / off"]
    columns += ["cache, processor time", "pinned, processor time"]
    columns += ["prompt found, cache", "pinned", "same ids as off, cache", "pinned", "host's share, cache"]
    first = results[0]
    return section(
        "Figure 16: one prefix for all requests",
        f"{first['num_requests']} requests together, each the prefix and {SHORTEST} to {LONGEST} tokens of its own, as "
        f"many out; output tokens per second, medians of {repeat} runs of each engine in turns. Every run starts with "
        "an empty cache; the pinned prefix stays. Processor time: the same ratio, of the seconds that all threads ran. "
        "Greedy; on near ties of random prompts rounding decides, so that ids may differ.",
        table(columns, rows),
    )


def chat(new_llm: Callable[..., Any], *, num_rounds: int, repeat: int, block_size: int) -> Report:
    """Time to the first token in each round of a conversation, with the prefix cache and without, in turns."""
    options = {"block_size": block_size, "max_num_seqs": 1, "max_model_len": 2048, "num_blocks": 2048 // block_size}
    llms = {
        "cache": new_llm(warm_up=True, **options),
        "off": new_llm(enable_prefix_caching=False, warm_up=True, **options),
    }
    rounds: list[dict[str, Any]] = []
    for i in range(repeat):
        for llm in llms.values():
            llm.reset_prefix_cache()
        messages: list[dict[str, str]] = []
        for k, message in enumerate(CHAT_MESSAGES[:num_rounds]):
            messages.append({"role": "user", "content": message})
            prompt = llms["cache"].render_chat(messages)
            answers = {}
            for way, llm in llms.items():
                ttft, output = _first_token(llm, prompt)
                answers[way] = output.outputs[0].text
                if i == 0 and way == "cache":
                    rounds.append({"num_prompt_tokens": len(prompt), "ttft_s": {name: [] for name in llms}})
                    rounds[k] |= {"num_cached_tokens": output.num_cached_tokens, "is_same": True}
                rounds[k]["ttft_s"][way].append(ttft)
            rounds[k]["is_same"] &= answers["cache"] == answers["off"]
            messages.append({"role": "assistant", "content": answers["cache"]})
            print(f"chat: {i + 1}, round {k + 1}, {answers['cache']!r:.60}", flush=True)
    for each in rounds:
        each["num_computed_tokens"] = each["num_prompt_tokens"] - each["num_cached_tokens"]
        each["ttft_median_s"] = {way: statistics.median(times) for way, times in each["ttft_s"].items()}
    return Report("chat", _chat_text(rounds, repeat, block_size), {"rounds": rounds, "block_size": block_size})


def _first_token(llm: Any, prompt: list[int]) -> tuple[float, Any]:
    """Seconds from the request to its first token, and its last output."""
    from pagedjax import SamplingParams

    start = time.perf_counter()
    outputs = iter(llm.stream({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=CHAT_TOKENS)))
    last = next(outputs)
    seconds = time.perf_counter() - start
    for output in outputs:
        last = output
    return seconds, last


def _chat_text(rounds: Sequence[dict[str, Any]], repeat: int, block_size: int) -> str:
    rows = []
    for k, r in enumerate(rounds, start=1):
        ours, without = r["ttft_median_s"]["cache"], r["ttft_median_s"]["off"]
        counts = [r["num_prompt_tokens"], r["num_cached_tokens"], r["num_computed_tokens"]]
        rows.append([k, *counts, f"{1e3 * ours:.0f}", f"{1e3 * without:.0f}", f"**{without / ours:.1f}x**"])
    columns = ["round", "prompt tokens", "cached", "computed", "ms to first token", "without cache", "without / with"]
    differing = [k for k, r in enumerate(rounds, start=1) if not r["is_same"]]
    same = f"differ in the rounds {differing}" if differing else "are the same"
    return section(
        f"A chat of {len(rounds)} rounds",
        f"SmolLM2-135M-Instruct, its chat template, greedy, up to {CHAT_TOKENS} new tokens a round, blocks of "
        f"{block_size}; medians of {repeat} conversations, both engines in turns. The answers with and without the "
        f"cache {same}.",
        table(columns, rows),
    )
