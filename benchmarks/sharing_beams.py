"""Beam search beside transformers': the same ids and scores, and tokens of best hypotheses per second in one run."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from sharing_texts import BEAM_PROMPTS
from step_clock import StepClock, Turns
from tables import Report, section, table

WIDTH = 4
MAX_TOKENS = 32
PAD = 0

NO_ORACLE = (
    "`--oracle HF_FOLDER` compares with transformers. It needs torch (`pip install -e '.[oracle]'`) and the model as a "
    "Hugging Face folder, which `python benchmarks/peers/export_hf.py smollm2-135m-instruct HF_FOLDER` writes."
)


class Hypothesis(NamedTuple):
    """One output of either."""

    token_ids: list[int]
    score: float


class Oracle:
    """transformers' `generate(num_beams=4, num_return_sequences=4)` on the same weights."""

    def __init__(self, folder: Path, eos_token_ids: Sequence[int]) -> None:
        self.torch = import_module("torch")
        self.torch.set_num_threads(len(os.sched_getaffinity(0)))
        transformers = import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=self.torch.float32)
        self.model = model.eval()
        self.model.generation_config.pad_token_id = PAD
        self.eos_token_ids = list(eos_token_ids)
        self.version = transformers.__version__

    def search(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[Hypothesis]]:
        """One static batch, padded on the left."""
        torch, width = self.torch, max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                eos_token_id=self.eos_token_ids,
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = zip(out.sequences[:, width:].tolist(), out.sequences_scores.tolist(), strict=True)
        flat = [Hypothesis(self._without_padding(row), score) for row, score in rows]
        return [flat[start : start + WIDTH] for start in range(0, len(flat), WIDTH)]

    def search_all(self, prompts: Sequence[Sequence[int]], max_tokens: int, batch: int) -> list[list[Hypothesis]]:
        """One static batch after another; prompts of about one length together, which is best for it."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, list[Hypothesis]] = {}
        for start in range(0, len(prompts), batch):
            chosen = order[start : start + batch]
            found |= zip(chosen, self.search([prompts[i] for i in chosen], max_tokens), strict=True)
        return [found[i] for i in range(len(prompts))]

    def _without_padding(self, row: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(row) if token in self.eos_token_ids), len(row) - 1)
        return row[: end + 1]


def beams(
    new_llm: Callable[..., Any],
    oracle_folder: Path | None,
    *,
    num_prompts: int,
    max_tokens: int,
    batch_sizes: Sequence[int],
    repeat: int,
    block_size: int | None,
) -> Report:
    """Ours; with an oracle both, its batch sizes and ours in turns."""
    from pagedjax import BeamSearchParams

    llm = new_llm(max_num_seqs=WIDTH * num_prompts, max_model_len=512, block_size=block_size)
    prompts = [llm.tokenizer.encode(text) for text in BEAM_PROMPTS[:num_prompts]]
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=max_tokens, detokenize=False)

    def ours() -> list[list[Hypothesis]]:
        llm.reset_prefix_cache()
        outputs = llm.beam_search(prompts, params, use_tqdm=False)
        return [[Hypothesis(each.token_ids, float(each.score or 0)) for each in output.outputs] for output in outputs]

    oracle = None if oracle_folder is None else Oracle(oracle_folder, llm.engine.runner.model.config.eos_token_ids)
    ways: dict[str, Callable[[], list[list[Hypothesis]]]] = {"pagedjax": ours}
    if oracle is not None:
        for batch in sorted(batch_sizes):
            ways[f"transformers, batch {batch}"] = lambda batch=batch: oracle.search_all(prompts, max_tokens, batch)
    ours()  # compiles
    clock = StepClock(llm.engine)
    turns, num_tokens, last = Turns(), {}, {}
    for _ in range(repeat):
        for way, run in ways.items():
            last[way] = turns.time(way, run)
            num_tokens[way] = sum(len(each[0].token_ids) for each in last[way])
            print(f"beams: {way}: {turns.wall[way][-1]:.2f} s, {num_tokens[way]} tokens", flush=True)
    data: dict[str, Any] = {
        "num_prompts": num_prompts,
        "num_prompt_tokens": sum(map(len, prompts)),
        "width": WIDTH,
        "max_tokens": max_tokens,
        "block_size": llm.engine.config.block_size,
        "tokens_per_s": {way: num_tokens[way] / turns.median(way) for way in ways},
        "processor_ratio": {way: turns.processor_ratio(way, "pagedjax") for way in ways},
        **turns.as_dict(),
        "profile": clock.close(),
        "transformers": oracle.version if oracle is not None else None,
    }
    if oracle is not None:
        data["compared"] = {way: compare(last["pagedjax"], found) for way, found in last.items() if way != "pagedjax"}
    return Report("beams", _beams_text(data, repeat), data)


def compare(ours: Sequence[Sequence[Hypothesis]], theirs: Sequence[Sequence[Hypothesis]]) -> dict[str, Any]:
    """How many hypotheses of all prompts have the same ids at the same rank, and how far scores are apart."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    differing = [(a, b) for a, b in pairs if list(a.token_ids) != list(b.token_ids)]
    return {
        "num_hypotheses": len(pairs),
        "num_same_ids": len(pairs) - len(differing),
        "max_score_difference": max(abs(a.score - b.score) for a, b in pairs),
        "score_differences_where_ids_differ": [abs(a.score - b.score) for a, b in differing],
    }


def _beams_text(data: dict[str, Any], repeat: int) -> str:
    speeds: dict[str, float] = data["tokens_per_s"]
    rows = [
        [way, f"{speed:.1f}", f"**{speeds['pagedjax'] / speed:.2f}x**", f"{data['processor_ratio'][way]:.2f}x"]
        for way, speed in speeds.items()
    ]
    profile = data["profile"]
    parts = ", ".join(f"{name} {profile[f'{name}_ms']:.2f}" for name in ("schedule", "advance", "resolve", "process"))
    device = profile["run_ms"] + profile["run_with_ms"] + profile["copy_blocks_ms"]
    paragraphs = [
        f"{data['num_prompts']} prompts ({data['num_prompt_tokens']} tokens), max_tokens {data['max_tokens']}, blocks "
        f"of {data['block_size']}, f32; tokens of the best hypotheses per second, medians of {repeat} runs in turns. "
        "pagedjax takes all prompts in one call, warm; transformers one static batch after another, prompts sorted by "
        "length.",
        table(["", "tok/s", "pagedjax / this", "processor time, this / pagedjax"], rows),
        f"A step of ours: {profile['step_ms']:.1f} ms, of which {device:.1f} in the runner; host "
        f"{profile['host_share']:.1%} ({parts} ms).",
    ]
    if "compared" in data:
        agreement = "; ".join(
            f"{way}: {c['num_same_ids']} of {c['num_hypotheses']} hypotheses have the same ids at the same rank, the "
            f"largest difference of scores is {c['max_score_difference']:.1e}"
            for way, c in data["compared"].items()
        )
        paragraphs.append(f"Against transformers {data['transformers']}, same weights. {agreement}.")
    else:
        paragraphs.append(f"Not compared: {NO_ORACLE}")
    return section(f"Beam search, width {data['width']}", *paragraphs)
