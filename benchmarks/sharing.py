"""What sharing of KV blocks saves: memory within requests, time between them, and beam search beside transformers'.

    python benchmarks/sharing.py [--parts fig15 fig16 chat beams] [--output FOLDER] [--quick]
    python benchmarks/sharing.py --parts beams --oracle HF_FOLDER

fig15 and fig16 are the figures of the PagedAttention paper (arXiv 2309.06180), with its numbers beside ours where it
has any. Lengths come from `--traces`, ../shared/traces where that is there, or are drawn; the table says which. Each
part prints a Markdown table; `--output` keeps them, and all that was measured as JSON. Ratios are of one run, in which
what is compared runs in turns.

`--oracle` needs torch (`pip install -e '.[oracle]'`) and the folder that
`python benchmarks/peers/export_hf.py smollm2-135m-instruct HF_FOLDER` writes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sharing_beams import MAX_TOKENS, NO_ORACLE, beams
from sharing_memory import BLOCK_SIZE, fig15
from sharing_speed import PREFIX_LENGTHS, chat, fig16
from sharing_texts import BEAM_PROMPTS, CHAT_MESSAGES
from tables import Report, publish
from traces import MAX_TOKENS as MAX_MODEL_LEN
from traces import ORIGINS, default_folder, load_trace


@cache
def checkpoint(model: str) -> tuple[Any, Any, Any]:
    """Module, params and tokenizer, once for all engines."""
    import pagedjax

    return pagedjax.load(model)


def new_llm(model: str, **options: Any) -> Any:
    """An engine on the shared params; its programs compile when they are first needed, unless it is told to warm up."""
    import pagedjax

    module, params, tokenizer = checkpoint(model)
    return pagedjax.LLM(module, params=params, tokenizer=tokenizer, **{"warm_up": False, **options})


def run_fig15(args: argparse.Namespace) -> Report:
    num_beams = {"Alpaca": args.alpaca_beams, "ShareGPT": args.sharegpt_beams}
    new = partial(
        new_llm,
        args.model,
        block_size=BLOCK_SIZE,
        max_num_seqs=96,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )
    return fig15(
        [load_trace(name, args.traces) for name in ORIGINS],
        new,
        num_parallel=args.parallel_requests,
        num_beam_requests=num_beams,
    )


def run_fig16(args: argparse.Namespace) -> Report:
    return fig16(
        partial(new_llm, args.model),
        num_requests=4 if args.quick else args.prefix_requests,
        block_sizes=args.block_sizes,
        repeat=args.repeat,
        prefixes=list(PREFIX_LENGTHS),
    )


def run_chat(args: argparse.Namespace) -> Report:
    num_rounds = 2 if args.quick else len(CHAT_MESSAGES)
    return chat(partial(new_llm, args.model), num_rounds=num_rounds, repeat=args.repeat, block_size=BLOCK_SIZE)


def run_beams(args: argparse.Namespace) -> Report:
    return beams(
        partial(new_llm, args.model),
        args.oracle,
        num_prompts=2 if args.quick else len(BEAM_PROMPTS),
        max_tokens=4 if args.quick else MAX_TOKENS,
        batch_sizes=[2] if args.quick else args.batch_sizes,
        repeat=args.repeat,
        block_size=args.beam_block_size,
    )


PARTS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "fig15": run_fig15,
    "fig16": run_fig16,
    "chat": run_chat,
    "beams": run_beams,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a folder or a .gguf file")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write PART.md and PART.json there as well")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether it works")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine that medians are taken of")
    parser.add_argument("--traces", type=Path, default=default_folder(), help="folder of the traces (fig15)")
    parser.add_argument("--parallel-requests", type=int, default=2000, help="of each trace; 0: none (fig15)")
    parser.add_argument("--alpaca-beams", type=int, default=48, help="requests of beam search; 0: none (fig15)")
    parser.add_argument("--sharegpt-beams", type=int, default=12, help="requests of beam search; 0: none (fig15)")
    parser.add_argument("--prefix-requests", type=int, default=24, help="requests with one prefix (fig16)")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64], help="64 is LLM's on a CPU (fig16)")
    parser.add_argument("--beam-block-size", type=int, help="default: LLM's (beams)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[5, 10, 20], help="of transformers (beams)")
    parser.add_argument("--oracle", type=Path, metavar="HF_FOLDER", help="compare with transformers (beams)")
    args = parser.parse_args(argv)
    if args.traces is not None and not args.traces.is_dir():
        parser.error(f"--traces: there is no folder {args.traces}")
    if args.oracle is not None and not (find_spec("torch") and (args.oracle / "config.json").is_file()):
        parser.error(f"--oracle: no torch, or no model in {args.oracle}. {NO_ORACLE}")
    if args.quick:
        args.repeat, args.parallel_requests, args.alpaca_beams, args.sharegpt_beams = 1, 50, 2, 0
    return args


def main() -> None:
    args = parse_args()
    command = " ".join(["python benchmarks/sharing.py", *sys.argv[1:]])
    for name in args.parts:
        publish(PARTS[name](args), command, args.output)


if __name__ == "__main__":
    main()
