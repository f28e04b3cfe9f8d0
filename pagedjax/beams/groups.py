"""What a step of beam search does to its sequences: who goes on, from whom, and with which token. Host only."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request


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
    for i, (beam, token_id) in enumerate(chosen):
        parent = parents[beam]
        child = _beam(group, i, parent, [*parent.token_ids, token_id])
        child.block_table = parent.block_table.fork() if beam in used else parent.block_table
        child.block_names = parent.block_names.copy()
        children.append(child)
        used.add(beam)
    for beam, parent in enumerate(parents):
        if beam not in used:
            parent.block_table.free()
    group.requests = children
    return True


def restore_beams(group: SequenceGroup) -> None:
    """Makes a group's sequences anew from its search, without KV, if an interrupt came between the two."""
    assert group.search is not None
    parent, outputs = group.requests[0], group.search.token_ids
    expected = [[*parent.prompt_token_ids, *token_ids] for token_ids in outputs]
    if expected and [request.token_ids for request in group.requests] != expected:
        group.requests = [_beam(group, i, parent, token_ids) for i, token_ids in enumerate(expected)]


def _beam(group: SequenceGroup, index: int, parent: Request, token_ids: list[int]) -> Request:
    arrival = (*group.root, index)
    child = replace(parent, request_id=f"{group.name}#{index}", arrival=arrival, token_ids=token_ids)
    child.group = group
    return child
