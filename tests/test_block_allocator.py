"""The allocator against a naive model: holders written down one by one, everything recounted after each operation."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedjax.blocks.allocator import BlockAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences take, share and give back blocks at random; `tables` is all that the naive model knows."""

    def __init__(self):
        super().__init__()
        self.tables: list[list[int]] = []

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks):
        self.num_blocks = num_blocks
        self.allocator = BlockAllocator(num_blocks)
        self.peak = 0

    def num_used(self):
        return len({block for table in self.tables for block in table})

    @rule()
    def start_sequence(self):
        self.tables.append([])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def append_block(self, data):
        table = data.draw(st.sampled_from(self.tables))
        held = {block for other in self.tables for block in other}
        block = self.allocator.allocate()
        if len(held) == self.num_blocks:
            assert block is None
        else:
            assert block in set(range(1, self.num_blocks + 1)) - held
            table.append(block)
            self.peak = max(self.peak, self.num_used())

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork_sequence(self, data):
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.allocator.fork(block)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_sequence(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block in table:
            self.allocator.free(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def free_last_block(self, data):
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.allocator.free(table.pop())

    @rule(block=st.integers(-2, 14), operation=st.sampled_from(["free", "fork"]))
    def misuse_is_refused(self, block, operation):
        if not any(block in table for table in self.tables):
            with pytest.raises(AssertionError, match=f"nobody holds block {block}"):
                getattr(self.allocator, operation)(block)

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "allocator"):
            return
        flat = [block for table in self.tables for block in table]
        for block in range(1, self.num_blocks + 1):
            assert self.allocator.ref_count(block) == flat.count(block)
        assert self.allocator.num_free_blocks == self.num_blocks - self.num_used()
        assert self.allocator.peak_blocks_used == self.peak
        self.allocator.check_integrity(self.tables)

    def teardown(self):
        while self.tables:
            for block in self.tables.pop():
                self.allocator.free(block)
        if hasattr(self, "allocator"):
            self.allocator.check_integrity([])
            assert self.allocator.num_free_blocks == self.num_blocks


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=max(100, settings().max_examples), stateful_step_count=50)


def test_the_last_block_freed_is_the_next_one_given():
    allocator = BlockAllocator(3)
    assert [allocator.allocate() for _ in range(4)] == [1, 2, 3, None]
    allocator.free(1)
    allocator.free(3)
    assert [allocator.allocate() for _ in range(3)] == [3, 1, None]
    assert allocator.peak_blocks_used == 3


def test_a_shared_block_is_free_when_its_last_holder_has_gone():
    allocator = BlockAllocator(1)
    assert allocator.allocate() == 1
    allocator.fork(1)
    allocator.free(1)
    assert (allocator.ref_count(1), allocator.num_free_blocks, allocator.allocate()) == (1, 0, None)
    allocator.free(1)
    assert (allocator.ref_count(1), allocator.num_free_blocks, allocator.allocate()) == (0, 1, 1)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1], [2]], "block 1 has ref count 2"),  # a holder was forgotten
        ([[1], [1]], "not all blocks"),  # block 2 leaked: neither free nor held
        ([[1, 2], [1, 3]], "both free and in a table"),  # block 3 is used after free
        ([[1, 2], [1, 0]], "not all blocks"),  # the null block in a table
    ],
)
def test_check_integrity_finds_tables_that_disagree(tables, message):
    allocator = BlockAllocator(3)
    allocator.allocate()
    allocator.fork(1)
    allocator.allocate()
    allocator.check_integrity([[1, 2], [1]])
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity(tables)


def test_check_integrity_finds_a_block_that_is_free_and_none():
    allocator = BlockAllocator(2)
    allocator._free[0] = None  # a block cannot be in it twice
    with pytest.raises(AssertionError, match="not all blocks"):
        allocator.check_integrity([])
