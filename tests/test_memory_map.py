"""The memory map: what each block holds, for whom, and how often it is shared."""

from fake_device import completion_reference, fake_engine, greedy

from pagedjax.beams.params import BeamSearchParams
from pagedjax.blocks.memory_map import BlockInfo

PROMPT = [3, 1, 4, 1, 5, 9]


def test_a_request_its_fork_and_what_is_left_of_others():
    engine = fake_engine(num_blocks=8)
    engine.add_request(PROMPT, greedy(), "x")
    engine.step()
    engine.fork("x", new_id="y")
    shared = engine.memory_map()
    assert shared.blocks[:3] == (
        BlockInfo(1, ("x", "y"), True, 0, (3, 1, 4, 1)),
        BlockInfo(2, ("x", "y"), False, 4, (5, 9)),
        BlockInfo(3, (), False, None, ()),
    )
    assert (shared.num_used_blocks, shared.num_shared_blocks, shared.num_saved_blocks) == (2, 2, 2)
    assert shared.num_wasted_slots == 2
    assert str(shared) == "22......\nA=x B=y"

    engine.step()  # both write: one copies
    first = completion_reference(PROMPT, 1)
    written = engine.memory_map()
    assert [info.holders for info in written.blocks[:3]] == [("x", "y"), ("y",), ("x",)]
    assert written.blocks[1].token_ids == written.blocks[2].token_ids == (5, 9, *first)
    assert str(written) == "2BA.....\nA=x B=y"

    engine.abort("x")
    engine.abort("y")
    cached = engine.memory_map()
    assert cached.blocks[0] == BlockInfo(1, (), True, 0, (3, 1, 4, 1))
    assert (cached.num_used_blocks, cached.num_wasted_slots) == (0, 0)
    assert str(cached) == ",......."


def test_completions_beams_and_pins():
    engine = fake_engine(num_blocks=30)
    pinned = engine.handle(engine.pin([7, 7, 7, 7, 7]))
    engine.step()
    engine.add_request(PROMPT, greedy(n=3), "n")
    engine.add_request([*PROMPT, 2], BeamSearchParams(beam_width=2, max_tokens=4), "beams")
    for _ in range(2):
        engine.step()
    holders = {name for info in engine.memory_map().blocks for name in info.holders}
    assert holders == {"pinned", "n[0]", "n[1]", "n[2]", "beams#0", "beams#1"}
    allocator = engine.scheduler.allocator
    memory_map = engine.memory_map()
    assert [info.ref_count for info in memory_map.blocks] == [allocator.ref_count(block) for block in range(1, 31)]
    assert memory_map.num_saved_blocks == allocator.num_references - allocator.num_used_blocks > 0
    for name in ("n", "beams"):
        engine.abort(name)
    pinned.free()
