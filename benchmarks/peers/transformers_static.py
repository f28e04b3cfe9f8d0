"""The workload through transformers' `generate`: one static batch after another, padded on the left. Needs torch.

    python transformers_static.py HF_FOLDER DTYPE WORKLOAD_JSON RESULT_JSON [BATCH_SIZE]

A row that has its tokens idles until the longest of its batch is done: only tokens that were asked for count.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module
from pathlib import Path

START = time.perf_counter()
os.environ["HF_HUB_OFFLINE"] = "1"
PAD = 0


def main() -> None:
    folder, dtype, workload_file, result_file, *rest = sys.argv[1:]
    work = json.loads(Path(workload_file).read_text())
    prompts, lengths = work["prompts"], work["output_lengths"]
    batch_size = int(rest[0]) if rest else len(prompts)

    torch = import_module("torch")
    model_class = import_module("transformers").AutoModelForCausalLM
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = model_class.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.pad_token_id = PAD
    startup = time.perf_counter() - START

    def generate(rows: list[list[int]], num_outputs: int) -> None:
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_outputs,
                min_new_tokens=num_outputs,
                do_sample=False,
            )

    generate(prompts[:1], 4)  # first use of everything
    start = time.perf_counter()
    generate(prompts[:1], work["single_length"])
    single = time.perf_counter() - start
    start = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        generate(prompts[first : first + batch_size], max(lengths[first : first + batch_size]))
    wall = time.perf_counter() - start
    result = {
        "engine": f"transformers {import_module('transformers').__version__}, static batches of {batch_size}",
        "dtype": dtype,
        "output_tokens_per_s": sum(lengths) / wall,
        "total_tokens_per_s": (sum(lengths) + sum(map(len, prompts))) / wall,
        "single_request_tokens_per_s": work["single_length"] / single,
        "startup_s": startup,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
