"""What can never fit is refused, with the numbers. Host only."""

from pagedjax.config import EngineConfig
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request


def check_fits(group: SequenceGroup, config: EngineConfig, num_blocks: int) -> None:
    """Raises ValueError if a group's prompt, or the beams it will have, can never fit in the model's length and in
    `num_blocks`, those of the pool that are not pinned."""
    for request in group.requests:
        _check_prompt(request, config, num_blocks)
    if group.search is None:
        return
    width, request = group.max_num_seqs, group.requests[0]
    if width > config.max_num_running:
        raise ValueError(
            f"beam_width={width} is more than the {config.max_num_running} sequences of a step (max_num_seqs)"
        )
    if (most := most_blocks(group, config)) > num_blocks:
        raise ValueError(
            f"request {request.request_id!r} can never fit: {width} beams of {request.max_num_tokens} tokens may take "
            f"{most} blocks of {config.block_size}, and the pool has {num_blocks}"
        )


def most_blocks(group: SequenceGroup, config: EngineConfig) -> int:
    """What a group needs if it runs alone; parts of one that is not a search can run one after another."""
    request = group.requests[0]
    num_tokens = request.max_num_tokens - request.generates  # the last one needs no slot
    if group.search is None:
        return config.num_blocks_for(num_tokens)
    return config.num_blocks_for_beams(group.max_num_seqs, num_tokens, len(request.prompt_token_ids))


def _check_prompt(request: Request, config: EngineConfig, num_blocks: int) -> None:
    name, num_prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
    limit = config.max_prompt_len(generates=request.generates, num_blocks=num_blocks)
    if not 1 <= num_prompt <= limit:
        num_pinned = config.num_blocks - num_blocks
        raise ValueError(
            f"{name} can never fit: its prompt has {num_prompt} tokens ({config.num_blocks_for(num_prompt)} blocks "
            f"of {config.block_size}), expected 1 to {limit}: the pool has {config.num_blocks} blocks"
            + (f", of which {num_pinned} are pinned" if num_pinned else "")
            + f", and max_model_len is {config.max_model_len}"
            + (" with at least one token of output" if request.generates else "")
        )
    assert num_prompt <= request.max_num_tokens <= config.max_seq_len_in(num_blocks), f"{name}: max_num_tokens"
