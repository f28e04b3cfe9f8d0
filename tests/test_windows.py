"""Groups of layers and their windows on the host: what is given up, what is found again, and what is counted."""

import random
from typing import Any

import pytest
from fake_device import completion_reference, fake_engine, greedy, run
from tiny_engine import unchecked

from pagedjax.blocks.allocator import NULL_BLOCK, BlockAllocator
from pagedjax.blocks.table import BlockTable, first_seen
from pagedjax.config import EngineConfig
from pagedjax.engine import LLMEngine
from pagedjax.models.layer_groups import LayerGroups, group_layers

FULL_AND_WINDOW = (None, 6)


def table_with(windows: tuple[int | None, ...], block_size: int = 4) -> BlockTable:
    return BlockTable(BlockAllocator(64), block_size, windows)


# --- which layers share tables


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None,) * 3, LayerGroups((None,), ((0, 0), (0, 1), (0, 2)), 3)),
        ((4,) * 2, LayerGroups((4,), ((0, 0), (0, 1)), 2)),
        ((4, None, 4, None), LayerGroups((4, None), ((0, 0), (1, 0), (0, 1), (1, 1)), 2)),
        # Five local layers for each global one: groups as large as the rarer kind, and the last one is not full.
        (
            (8, 8, 8, None, 8, 8, None),
            LayerGroups((8, 8, None, 8), ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (3, 0), (2, 1)), 2),
        ),
    ],
)
def test_layers_of_one_window_are_grouped(windows, expected):
    assert group_layers(windows) == expected


@pytest.mark.parametrize("windows", [(None, 8) * 5, (8,) * 22 + (None,) * 4, (3, 5, None, 5, 5)])
def test_no_two_layers_of_a_group_have_one_place(windows):
    groups = group_layers(windows)
    assert len(set(groups.places)) == len(windows)
    assert all(groups.windows[group] == window for (group, _), window in zip(groups.places, windows, strict=True))
    assert max(pool for _, pool in groups.places) == groups.num_pools - 1


# --- tables


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_block_goes_when_no_token_sees_it_any_more(window, block_size):
    """B10: key j is visible iff i - W < j <= i, and so a block whose last slot is j may go from i = j + W on."""
    for position in range(40):
        visible = [j for j in range(position + 1) if position - window < j]
        assert first_seen(position, window, block_size) == visible[0] // block_size


def test_a_table_gives_up_what_its_window_has_passed_and_other_rows_keep_it():
    table = table_with(FULL_AND_WINDOW)
    table.append(10)
    assert [list(row) for row in table.rows] == [[1, 2, 3], [4, 5, 6]]
    table.give_up_passed()  # from position 8 on 3 to 8 are seen
    assert [list(row) for row in table.rows] == [[1, 2, 3], [4, 5, 6]]
    table.append(3)
    table.give_up_passed()
    assert [list(row) for row in table.rows] == [[1, 2, 3, 7], [NULL_BLOCK, 5, 6, 8]]
    assert table.allocator.ref_count(4) == 0
    table.allocator.check_integrity([table.blocks])
    table.free()
    assert table.allocator.num_free_blocks == 64


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [4, 7, 16])
def test_a_long_sequence_holds_a_constant_number_of_blocks(window, block_size):
    table, held = table_with((window,), block_size), set()
    for num_tokens in range(1, 10 * window + 1):
        table.give_up_passed()
        assert table.append(1) is not None
        if num_tokens > 2 * max(window, block_size):
            held.add(len(table.blocks))
    assert held == {-(-(window - 1) // block_size) + 1}


def test_what_lies_behind_the_window_is_not_reached():
    table = table_with((4,))
    for _ in range(20):
        table.give_up_passed()
        table.append(1)
    assert list(table.rows[0][:3]) == [NULL_BLOCK] * 3
    assert [n for n in range(21) if table.reaches(n)] == [0, *range(15, 21)], (
        "from 15 on only 12 and later ones are seen"
    )
    assert not table.reaches(21)
    table.truncate(14)
    assert not table.reaches(14)


def test_each_row_copies_its_shared_block():
    first = table_with(FULL_AND_WINDOW)
    first.append(6)
    second = first.fork()
    assert second.append(1) == ((2, 5), (4, 6))
    assert first.append(1) == ()


def test_no_room_for_all_rows_changes_nothing():
    table = BlockTable(BlockAllocator(5), 4, FULL_AND_WINDOW)
    table.append(8)
    assert table.append(1) is None
    assert (len(table), table.num_tokens, table.allocator.num_free_blocks) == (2, 8, 1)


# --- counts


def config_with(windows: tuple[int | None, ...], **options: Any) -> EngineConfig:
    sizes: dict[str, Any] = {
        "num_blocks": 20,
        "max_model_len": 400,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
    }
    return EngineConfig(windows=windows, **sizes | options)


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (6, None, 9), (1,)])
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_no_sequence_ever_holds_more_than_is_counted(windows, budget):
    """Whatever the chunks are."""
    config = config_with(windows, max_num_batched_tokens=budget, max_num_seqs=1, num_blocks=1000)
    for first_chunk in range(1, budget + 1):
        table, num_tokens, chunk = BlockTable(BlockAllocator(1000), 4, windows), 0, first_chunk
        while num_tokens < 60:
            table.give_up_passed()
            table.append(chunk)
            num_tokens, chunk = num_tokens + chunk, budget
            assert len(table.blocks) <= config.num_blocks_for(num_tokens)


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (10, 10, None), (1,), (24, None)])
@pytest.mark.parametrize("budget", [8, 40])
def test_as_many_requests_as_are_counted_run_at_once(windows, budget):
    """Admitted together, and none is preempted; one more would need more."""
    rng = random.Random(f"{windows} {budget}")
    for _ in range(6):
        num_prompt, num_outputs = rng.randint(1, 40), rng.randint(30, 60)
        options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": 100}
        options |= {"num_decode_steps": rng.choice([1, 3]), "enable_prefix_caching": False}
        count = rng.randint(1, 8)
        config = fake_engine(windows=windows, **options).config
        num_tokens = num_prompt + num_outputs - 1
        num_blocks = config.num_blocks_for_requests(count, num_tokens) + (count - 1) * len(windows)
        engine = fake_engine(num_blocks, windows=windows, **options)
        for i in range(count):
            engine.add_request([1 + i] * num_prompt, greedy(num_outputs))
        most_running = 0
        while engine.has_unfinished():
            engine.step()
            most_running = max(most_running, engine.stats().num_running)
        assert engine.stats().num_preemptions == 0
        assert most_running == count or num_outputs < count * -(-num_prompt // (budget - count + 1))


def test_windows_share_one_budget():
    """As many as fit: what the window of each sees, and one chunk, not one for each."""
    config = config_with((None, 6), num_blocks=1000, max_num_batched_tokens=64, max_num_seqs=16)
    assert config.num_blocks_for_requests(1, 40) == config.num_blocks_for(40) == 20
    assert config.num_blocks_for_requests(8, 40) == 8 * 10 + 8 * (2 + 2) + 17
    assert config_with((None,)).num_blocks_for_requests(8, 40) == 80


def test_a_pool_without_a_block_for_each_group_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 2, one for each group of layers, got 1"):
        EngineConfig(num_blocks=1, max_model_len=8, windows=(None, 4))


def test_a_window_fits_texts_of_any_length():
    assert config_with((None,)).max_seq_len == 20 * 4 + 1
    assert config_with((6,)).max_seq_len == 400
    assert config_with((None, 6)).max_seq_len == 4 * (20 - (2 + 3)) + 1  # 15 blocks, and 5 for what the window holds
    assert config_with((6,), num_blocks=3).max_seq_len == 3 * 4 + 1, "less than window and chunk: as without one"
    assert config_with((None, 6)).max_blocks_per_seq == 15


@pytest.mark.parametrize("windows", [(), (0,), (4, "x"), (True,), [4]])
def test_bad_windows_are_refused(windows):
    with pytest.raises(ValueError, match="windows"):
        unchecked("pagedjax.config").EngineConfig(num_blocks=4, max_model_len=8, windows=windows)


# --- the engine


def ask(engine: LLMEngine, prompt: list[int], max_tokens: int = 4) -> int:
    """Cached tokens; the outputs are those of the request alone."""
    name = engine.add_request(prompt, greedy(max_tokens))
    output = run(engine)[name]
    assert output.outputs[0].token_ids == completion_reference(prompt, max_tokens, windows=engine.config.windows)
    return output.num_cached_tokens


def test_an_engine_holds_a_window_of_blocks():
    engine = fake_engine(num_blocks=200, windows=(8,), max_model_len=200)
    name = engine.add_request([1, 2, 3], greedy(120))
    held = []
    while engine.has_unfinished():
        engine.step()
        for request in engine.scheduler.requests(engine.scheduler.running):
            assert request.request_id == name
            held.append(len(request.block_table.blocks))
    assert set(held[20:]) == {-(-7 // 4) + 1}
    assert engine.stats().peak_blocks_used <= 4
    assert engine.stats().num_free_blocks == 200


@pytest.mark.parametrize("windows", [(6,), (None, 6)])
def test_a_hit_needs_what_the_window_sees_and_no_more(windows):
    engine = fake_engine(num_blocks=200, windows=windows)
    prompt = list(range(1, 27))
    assert ask(engine, prompt) == 0
    assert ask(engine, prompt) == 24
    assert ask(engine, prompt[:18]) == 16, "what the window passed can be found while nobody has taken the block"
    first = {info.first_position for info in engine.memory_map().blocks if info.is_cached and info.layer_group == 0}
    assert first == set(range(0, 28, 4))


def test_a_block_that_the_window_misses_shortens_the_hit():
    """A pool in which what was passed is taken by others: hits end where the window would see what is gone."""
    engine = fake_engine(num_blocks=12, windows=(6,), max_model_len=64)
    prompt = list(range(1, 31))
    assert ask(engine, prompt) == 0
    assert ask(engine, [9] * 24) == 0
    found = {info.first_position for info in engine.memory_map().blocks if info.token_ids[:1] > (9,)}
    assert not found & {0, 4, 8}, "the first blocks went to the other one"
    assert ask(engine, prompt) == 28
    assert ask(engine, prompt[:10]) == 0


def test_a_pinned_prefix_is_found_at_its_last_full_block():
    """Whatever the last chunk was: the blocks that the window sees from there are kept."""
    for length in range(12, 30):
        engine = fake_engine(num_blocks=60, windows=(5, None), max_num_batched_tokens=3, max_num_seqs=2)
        prompt = [*range(1, length + 1)]
        pinned = engine.pin(prompt)
        run(engine)
        held = [sum(block != NULL_BLOCK for block in row) for row in pinned.block_table.rows]
        assert held[0] <= 2, "of the window's row what is seen from the last full block on"
        assert ask(engine, [*prompt, 31, 30]) >= length // 4 * 4


def test_a_text_cut_by_its_caller_is_computed_again_where_the_window_has_passed():
    engine = fake_engine(num_blocks=60, windows=(4,), enable_prefix_caching=False)
    name = engine.add_request([1, 2, 3], greedy(20), keeps_kv=True)
    run(engine)
    (kept,) = engine.take_kept(name)
    engine.scheduler.kv.shorten(kept, 9)
    handle = engine.handle(kept)
    prompt = handle.token_ids
    again = engine.add_request(handle, greedy(4))
    output = run(engine)[again]
    assert output.outputs[0].token_ids == completion_reference(prompt, 4, windows=(4,))
    assert output.num_cached_tokens == 0
