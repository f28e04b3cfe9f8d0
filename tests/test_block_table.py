"""Block tables: growth, forks, copy-on-write, and what happens after free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.blocks.allocator import BlockAllocator
from pagedjax.blocks.table import BlockTable, UseAfterFreeError


def table_of(num_tokens: int, num_blocks: int = 8, block_size: int = 4) -> BlockTable:
    table = BlockTable(BlockAllocator(num_blocks), block_size)
    assert table.append(num_tokens) == ()
    return table


def test_a_table_grows_by_blocks():
    table = table_of(5)
    assert (list(table.blocks), table.num_tokens) == ([1, 2], 5)
    assert table.append(3) == ()
    assert len(table) == 2, "the last block had room"
    assert table.append(1) == ()
    assert list(table.blocks) == [1, 2, 3]


def test_no_room_is_a_return_value_and_changes_nothing():
    table = table_of(5, num_blocks=3)
    assert table.append(8) is None
    assert (list(table.blocks), table.num_tokens, table.allocator.num_free_blocks) == ([1, 2], 5, 1)
    assert table.append(7) == ()


def test_a_fork_shares_all_blocks_and_copies_nothing():
    parent = table_of(6)
    child = parent.fork()
    assert (child.blocks, child.num_tokens) == (parent.blocks, 6)
    assert [parent.allocator.ref_count(block) for block in (1, 2)] == [2, 2]
    assert parent.allocator.num_used_blocks == 2


def test_b08_the_partly_filled_block_is_copied_and_the_last_holder_writes_in_place():
    first = table_of(6)
    second, third = first.fork(), first.fork()
    assert second.append(1) == ((2, 3),)
    assert third.append(1) == ((2, 4),)
    assert first.append(1) == (), "the last holder copied"
    assert [list(table.blocks) for table in (first, second, third)] == [[1, 2], [1, 3], [1, 4]]
    assert first.allocator.ref_count(1) == 3, "the full block is still shared"


def test_a_full_block_is_never_copied():
    first = table_of(8)
    second = first.fork()
    assert second.append(1) == ()
    assert first.append(1) == ()
    assert [list(table.blocks) for table in (first, second)] == [[1, 2, 4], [1, 2, 3]]


def test_b08_a_copy_without_a_free_block_is_refused_and_nothing_changes():
    first = table_of(6, num_blocks=2)
    second = first.fork()
    assert second.append(1) is None
    assert list(second.blocks) == [1, 2]
    first.free()
    assert second.append(1) == (), "now it is the last holder"


def test_a_block_that_was_full_for_another_loses_its_name_when_it_is_written():
    parent = table_of(8)
    child = parent.fork(6)
    parent.allocator.name(2, b"eight tokens")
    parent.free()
    assert parent.allocator.find(b"eight tokens") == 2
    assert child.append(1) == (), "it is the last holder"
    assert parent.allocator.find(b"eight tokens") is None
    parent.allocator.check_integrity([child.blocks])


def test_a_part_can_be_forked():
    parent = table_of(10)
    child = parent.fork(6)
    assert (list(child.blocks), child.num_tokens) == ([1, 2], 6)
    assert child.append(1) == ((2, 4),), "the parent has more in that block"
    assert list(parent.fork(0).blocks) == []
    with pytest.raises(ValueError, match=r"num_tokens must be in \[0, 10\], got 11"):
        parent.fork(11)


@pytest.mark.parametrize("use", [lambda t: t.append(1), lambda t: t.fork(), lambda t: t.free()])
def test_after_free_everything_is_refused(use):
    table = table_of(5)
    child = table.fork()
    table.free()
    assert (table.is_freed, len(table), table.num_tokens) == (True, 0, 0)
    with pytest.raises(UseAfterFreeError, match="freed"):
        use(table)
    assert child.append(1) == (), "the child is not touched"


def test_the_tail_is_handed_out_first():
    table = table_of(12)
    for name, block in zip((b"a", b"b", b"c"), table.blocks, strict=True):
        table.allocator.name(block, name)
    table.free()
    taken = [table.allocator.allocate() for _ in range(8)]
    assert taken == [4, 5, 6, 7, 8, 3, 2, 1], "blocks without a name first, then from the tail"
    assert table.allocator.find(b"a") is None


@given(
    st.lists(st.tuples(st.sampled_from(["append", "fork", "free"]), st.integers(0, 9), st.integers(0, 12)), max_size=60)
)
def test_any_sequence_of_operations(operations):
    """Against a model where each table is the list of what was written, and a copy copies it."""
    allocator = BlockAllocator(20)
    contents: dict[int, list[int]] = {}
    tables: list[tuple[BlockTable, list[int]]] = [(BlockTable(allocator, 4), [])]
    written = iter(range(10_000))
    for operation, which, amount in operations:
        if not tables:
            break
        table, expected = tables[which % len(tables)]
        match operation:
            case "fork":
                num_tokens = min(amount, table.num_tokens)
                tables.append((table.fork(num_tokens), expected[:num_tokens]))
            case "free":
                table.free()
                del tables[which % len(tables)]
            case "append":
                copies = table.append(amount)
                if copies is None:
                    continue
                for source, target in copies:
                    contents[target] = list(contents[source])
                for position in range(len(expected), len(expected) + amount):
                    block = table.blocks[position // 4]
                    slots = contents.setdefault(block, [0] * 4)
                    slots[position % 4] = next(written)
                    expected.append(slots[position % 4])
        allocator.check_integrity(each.blocks for each, _ in tables)
        for each, tokens in tables:
            assert [contents[each.blocks[i // 4]][i % 4] for i in range(each.num_tokens)] == tokens
