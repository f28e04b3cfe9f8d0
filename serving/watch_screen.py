"""The KV pool of a server as text: what its messages say (`Pool`), and a screen of it for any size of a terminal.

Each block is one sign: the letter of the request that holds it, small while the block is partly filled, or how many
share it; "," for a free block that the prefix cache can find and "." for a free one. Colours only repeat the letters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

Json = dict[str, Any]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Light ones, for black text; nine, so that letter and colour together come again only after 234 keys.
COLOURS = (
    "#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#bc80bd",
)  # fmt: skip
BARS = " ▁▂▃▄▅▆▇"
MAX_EVENTS = 50
LEGEND = ("A full", "a partly filled", "3 shared by 3", "* by more than 9", ", free, cached", ". free")


@dataclass(frozen=True)
class Block:
    """A physical block."""

    num_filled: int
    """Tokens whose KV is in it."""
    is_cached: bool
    """Whether the prefix cache can find it."""
    holders: tuple[int, ...]
    """Keys of those who hold it; empty for a free one."""


@dataclass(frozen=True)
class Watched:
    """A sequence that is alive, or what holds KV without one ("pinned", "held")."""

    key: int
    name: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class Pool:
    """A server's pool after a message."""

    block_size: int
    blocks: tuple[Block, ...]
    """Block 1 first."""
    sequences: tuple[Watched, ...]
    numbers: tuple[str, ...]
    """What the statistics say, in words."""
    events: tuple[str, ...] = ()
    """What happened lately, oldest first."""


def letter_of(key: int) -> str:
    """Keys count up: two sequences have the same one only if 25 others have come between them."""
    return LETTERS[(key - 1) % len(LETTERS)]


def style_of(key: int) -> str:
    """Its colour, for rich."""
    return f"black on {COLOURS[(key - 1) % len(COLOURS)]}"


def advance(pool: Pool | None, name: str, message: Json) -> Pool:
    """The pool after a "map" or "step" message. ValueError for what is neither, or a step before any map."""
    try:
        sequences = tuple(map(_sequence, message["requests"]))
        numbers = _numbers(message["stats"])
        if name == "map":
            size, blocks = int(message["block_size"]), tuple(map(_block, message["blocks"]))
        elif name == "step" and pool is not None:
            size, changed = pool.block_size, list(pool.blocks)
            for number, *block in message["changed"]:
                changed[number - 1] = _block(block)
            blocks = tuple(changed)
        else:
            raise ValueError(f"event {name!r}")
        news = [*(pool.events if pool else ()), *map(_event, message["events"])]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"not what a pagedjax server says of its pool: {type(error).__name__}: {error}") from error
    return Pool(size, blocks, sequences, numbers, tuple(news[-MAX_EVENTS:]))


def _block(block: Sequence[Any]) -> Block:
    num_filled, is_cached, _, holders = block
    return Block(int(num_filled), bool(is_cached), tuple(map(int, holders)))


def _sequence(entry: Json) -> Watched:
    index = int(entry["index"])
    counts = [int(entry[name]) for name in ("num_prompt_tokens", "num_output_tokens", "num_blocks")]
    name = printable(str(entry["id"])) + (f"[{index}]" if index else "")
    return Watched(int(entry["key"]), name, printable(str(entry["state"])), *counts)


def _numbers(stats: Json) -> tuple[str, ...]:
    used = stats["num_used_blocks"]
    hit_rate = stats["hit_rate"]
    return (
        f"used {used:,}",
        f"free {stats['num_free_blocks']:,}",
        f"cached {stats['num_cached_blocks']:,}",
        f"shared {stats['num_shared_blocks']:,} (saves {stats['num_saved_blocks']:,})",
        f"waste {stats['waste']:.1%}",
        "hit rate -" if hit_rate is None else f"hit rate {hit_rate:.1%}",
        f"running {stats['num_running']:,}",
        f"waiting {stats['num_waiting']:,}",
        f"preemptions {stats['num_preemptions']:,}",
        f"copies {stats['num_block_copies']:,}",
        f"steps {stats['num_steps']:,}",
        f"{stats['tokens_per_s']:,.1f} tokens/s",
    )


def _event(event: Json) -> str:
    kind = event["kind"]
    if kind == "copy":
        return f"copy-on-write: block {int(event['from'])} to {int(event['to'])}"
    how = f" ({event['how']})" if "how" in event else ""
    return printable(f"{kind} {letter_of(int(event['key']))}{how}")


def printable(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


@dataclass(frozen=True)
class Screen:
    """A pool for rich, in the width and, where there is one, the height that it is given."""

    title: str
    pool: Pool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width, options.height, ascii_only=options.ascii_only):
            line.truncate(options.max_width)
            line.no_wrap = True
            line.overflow = "crop"
            yield line

    def lines(self, width: int, height: int | None = None, ascii_only: bool = False) -> list[Text]:
        """At most `height` of them. What is left out is counted."""
        pool = self.pool
        head = [Text(self.title, style="bold"), *map(Text, _flow(pool.numbers, width))]
        legend = [Text(line, style="dim") for line in _flow(LEGEND, width)]
        sequences = [_sequence_line(each) for each in pool.sequences]
        events = [Text(event, style="dim") for event in reversed(pool.events)]
        if height is None:
            grid = _grid(pool, width, None, ascii_only)
            return [*head, Text(), *grid, *legend, *_below(sequences, None), *_below(events, None)]
        if height < len(head) + len(legend) + 8:  # the map goes before its explanation
            legend = []
        rest = max(1, height - len(head) - len(legend))
        num_event_lines = min(len(events) + 1, rest // 4, 6)
        lines_for_all = len(_grid(pool, width, None, ascii_only=True))
        num_sequence_lines = min(len(sequences) + 1, max(rest // 3, rest - num_event_lines - lines_for_all))
        grid = _grid(pool, width, max(1, rest - num_event_lines - num_sequence_lines), ascii_only)
        below = [*_below(sequences, num_sequence_lines), *_below(events, num_event_lines, count_rest=False)]
        return [*head, *grid, *legend, *below][:height]


def _flow(items: Iterable[str], width: int) -> list[str]:
    """Items in lines of `width`; none is broken."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 3 <= width:
            lines[-1] += f" | {item}"
        else:
            lines.append(item)
    return lines


def _grid(pool: Pool, width: int, max_lines: int | None, ascii_only: bool) -> list[Text]:
    """The blocks in rows, each with the number of its first; with room for it how far partly filled ones are."""
    label = len(str(len(pool.blocks))) + 1
    lines: list[Text] = []
    for cell in (1,) if ascii_only else (2, 1):
        per_row = max(1, (width - label) // cell)
        per_row -= per_row % 10 if per_row > 10 else 0  # rows begin at 1, 61, 121, ...
        if max_lines is None or -(-len(pool.blocks) // per_row) <= max_lines:
            break
    num_rows = -(-len(pool.blocks) // per_row)
    is_cut = max_lines is not None and num_rows > max_lines
    for row in range(max_lines - 1 if is_cut and max_lines else num_rows):
        start = row * per_row
        line = Text(f"{start + 1:>{label - 1}} ", style="dim")
        for block in pool.blocks[start : start + per_row]:
            line.append(*_cell(pool, block, cell))
        lines.append(line)
    if is_cut:
        lines.append(Text(f"{len(lines) * per_row:,} of {len(pool.blocks):,} blocks shown", style="italic"))
    return lines


def _cell(pool: Pool, block: Block, width: int) -> tuple[str, str]:
    """A block's sign and, two characters wide, its bar; and their style."""
    if not block.holders:
        return ("," if block.is_cached else ".").ljust(width), "not bold"
    num_holders, is_full = len(block.holders), block.num_filled >= pool.block_size
    letter = letter_of(block.holders[0])
    sign = letter if is_full else letter.lower()
    if num_holders > 1:
        sign = str(num_holders) if num_holders < 10 else "*"
    # A bar only where a block is partly filled: at least an eighth if anything is in it, never a whole one.
    bar = 0 if is_full else -(-7 * block.num_filled // pool.block_size)
    style = f"not dim {style_of(block.holders[0])}"
    return sign + BARS[bar] * (width - 1), f"bold {style}" if num_holders > 1 else style


def _sequence_line(each: Watched) -> Text:
    line = Text.assemble((f" {letter_of(each.key)} ", style_of(each.key)), f" {each.state:<9} ")
    tokens = f"{each.num_prompt_tokens}+{each.num_output_tokens} tokens"
    return line.append(f"{tokens:<16}{each.num_blocks:>4} blocks  {each.name}")


def _below(lines: list[Text], max_lines: int | None, count_rest: bool = True) -> list[Text]:
    """An empty line and as many of the others as there is room for."""
    if not lines or max_lines == 0:
        return []
    if max_lines is None or len(lines) < max_lines:
        return [Text(), *lines]
    if not count_rest:
        return [Text(), *lines[: max_lines - 1]]
    shown = lines[: max(0, max_lines - 2)]
    return [Text(), *shown, Text(f"... and {len(lines) - len(shown)} more", style="italic")][:max_lines]
