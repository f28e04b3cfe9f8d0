"""What a step of beam search does to its sequences: who goes on, from whom, and with which token. Host only."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pagedjax.scheduling.group import SequenceGroup


class BeamCandidates(NamedTuple):
    """The likeliest continuations of all beams of one search together, best first."""

    scores: Sequence[float]
    """Log-probability of the beam's outputs with the token; -inf where there are no more."""
    beams: Sequence[int]
    tokens: Sequence[int]


def advance_beams(group: SequenceGroup, candidates: BeamCandidates) -> bool:
    """Replaces the sequences of a group by the best continuations; False, and nothing has changed, if it was the last
    step. No KV moves: children fork their parent's table, and the first one takes it over."""
    assert group.search is not None
    chosen = group.search.advance(*candidates)
    if group.search.is_done:
        return False
    parents, children = group.requests, []
    used: set[int] = set()
    for beam, token_id in chosen:
        parent = parents[beam]
        children.append(
            replace(
                parent,
                request_id=f"{group.name}#{len(children)}",
                arrival=(*group.arrival[:1], len(children)),
                token_ids=[*parent.token_ids, token_id],
                block_table=parent.block_table.fork() if beam in used else parent.block_table,
                block_names=parent.block_names.copy(),
            )
        )
        children[-1].group = group
        used.add(beam)
    for beam, parent in enumerate(parents):
        if beam not in used:
            parent.block_table.free()
    group.requests = children
    return True
