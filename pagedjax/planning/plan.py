"""The memory plan of an engine: numbers, and the table that people read."""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagedjax.config import EngineConfig
from pagedjax.models.config import Quantization
from pagedjax.planning.memory import Memory


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What an engine takes of the memory that there is, and how many requests fit. All sizes are in bytes.

    Its text is a table. `pagedjax.LLM.plan` makes one, and `LLM.memory_plan` is that of an engine.
    """

    dtype: str
    """Of weights and pool."""
    config: EngineConfig
    """The engine's options with every None decided."""
    memory: Memory
    num_params: int
    weight_bytes: int
    quantization: Quantization | None = None
    """What of the weights is in int8."""
    weights_in_place: bool
    """Whether the weights are in memory already, and so no part of what is available."""
    block_bytes: int
    """A KV block, all layers together."""
    pool_bytes: int
    """All blocks of the pool and the null block."""
    host_pool_bytes: int
    """Blocks on the host for requests that are swapped out."""
    step_bytes: int
    """What is kept free for the programs of a step: an upper bound, or the largest program if that were more."""
    extras_bytes: int
    """What a step takes on top of that if all its rows ask for penalties, masks and log-probabilities."""
    programs: dict[str, int] = field(default_factory=dict)
    """What XLA says that the largest programs of a step take beside weights and pool, by name. Empty if they were not
    compiled, or if the backend does not say."""
    num_requests: int | None = None
    """How many requests are asked for; None if nobody asks."""
    context: int
    """Tokens of each, prompt and output together."""
    max_context: int
    """The longest that the model can be run with."""
    changes: tuple[str, ...] = ()
    """What to change if it does not fit, with numbers; empty if it does."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.block_bytes * len(self.config.windows) // self.config.block_size

    @property
    def program_bytes(self) -> int | None:
        """The largest of `programs`, or None."""
        return max(self.programs.values(), default=None)

    @property
    def required_bytes(self) -> int:
        """What has to fit in the memory: without weights that are there already, on a CPU with the pool of the host.

        Extras count on a GPU alone, where what is not there ends a step; a CPU has no full steps of them by accident.
        """
        is_cpu = self.memory.platform == "cpu"
        shared = self.host_pool_bytes if is_cpu else self.extras_bytes
        return (0 if self.weights_in_place else self.weight_bytes) + self.pool_bytes + shared + self.step_bytes

    @property
    def left_bytes(self) -> int | None:
        """What is left of the memory, negative if that is too little; None if it is not known."""
        return None if self.memory.available_bytes is None else self.memory.available_bytes - self.required_bytes

    @property
    def fits_memory(self) -> bool:
        """Whether the engine can be made. It is refused otherwise."""
        on_host = self.memory.platform == "cpu" or self.memory.host_bytes is None
        host_fits = on_host or self.host_pool_bytes <= (self.memory.host_bytes or 0)
        return host_fits and (self.left_bytes is None or self.left_bytes >= 0)

    @property
    def fits_requests(self) -> bool:
        """Whether as many requests as are asked for run at once, without one being preempted."""
        return self.num_requests is None or self.max_requests(self.context) >= self.num_requests

    @property
    def fits(self) -> bool:
        """Both."""
        return self.fits_memory and self.fits_requests

    def num_blocks_for(self, num_requests: int, context: int) -> int:
        """Blocks with which so many requests of `context` tokens are admitted together and none is ever preempted: the
        last token needs no slot, and each admission leaves everyone who runs room to grow."""
        num_growing = (num_requests - 1) * len(self.config.windows)  # by a block for each group of layers
        return self.config.num_blocks_for_requests(num_requests, max(1, context - 1)) + num_growing

    def blocks_per_request(self, context: int) -> int:
        """Blocks that a request of `context` tokens fills."""
        return self.config.num_blocks_for(max(1, context - 1))

    def max_requests(self, context: int) -> int:
        """How many requests of `context` tokens run at once, without one being preempted."""
        if context > self.config.max_model_len:
            return 0
        counts = range(1, self.config.max_num_running + 1)
        return bisect_right(counts, self.config.num_blocks, key=lambda count: self.num_blocks_for(count, context))

    def max_context_for(self, num_requests: int) -> int:
        """The most tokens that each of so many requests can have; 0 if they cannot run at once at all."""
        if num_requests > self.config.max_num_running:
            return 0
        contexts = range(1, self.config.max_model_len + 1)
        return bisect_right(contexts, self.config.num_blocks, key=partial(self.num_blocks_for, num_requests))

    def check(self) -> None:
        """Raises ValueError, with the numbers and with what to change, if the engine does not fit the memory."""
        if not self.fits_memory:
            parts = [f"{label} {size(value)}" for label, value, _ in self._parts() if value]
            what = f"available are {size(self.memory.available_bytes)} ({self.memory.source})"
            if self.left_bytes is None or self.left_bytes >= 0:
                what = f"the host has {size(self.memory.host_bytes)} for its pool"
            raise ValueError(
                f"not enough memory: {', '.join(parts)}; together {size(self.required_bytes)}, and {what}. "
                f"To change: {'; or '.join(self.changes)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The numbers as what JSON can hold."""
        names = ("dtype", "num_params", "weight_bytes", "kv_bytes_per_token", "block_bytes", "pool_bytes")
        names += ("host_pool_bytes", "step_bytes", "extras_bytes", "programs", "program_bytes", "required_bytes")
        names += ("left_bytes", "num_requests", "context", "fits_memory", "fits_requests", "fits", "changes")
        sizes = (
            "num_blocks",
            "num_swap_blocks",
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
        )
        return (
            {"platform": self.memory.platform, "available_bytes": self.memory.available_bytes}
            | {name: getattr(self, name) for name in names}
            | {name: getattr(self.config, name) for name in sizes}
            | {"max_requests": {length: self.max_requests(length) for length in self._lengths()}}
        )

    def __str__(self) -> str:
        rows = self._parts()
        rows += [("together", self.required_bytes, ""), ("available", self.memory.available_bytes, self.memory.source)]
        if self.left_bytes is not None:
            rows.append(("left" if self.left_bytes >= 0 else "missing", abs(self.left_bytes), ""))
        lines = [f"{label:<14}{size(value):>11}  {note}".rstrip() for label, value, note in rows]
        lengths = self._lengths()
        widths = [max(len(f"{length:,}"), 5) for length in lengths]
        counts = map(self.max_requests, lengths)
        lines += [
            "",
            "tokens of each" + "".join(f"  {length:>{width},}" for length, width in zip(lengths, widths, strict=True)),
            "requests      " + "".join(f"  {count:>{width},}" for count, width in zip(counts, widths, strict=True)),
        ]
        if self.num_requests is not None and self.fits:
            lines += ["", f"Room for {self.asked} at once."]
        elif not self.fits:
            problem = f"No room for {self.asked}." if not self.fits_requests else "It does not fit the memory."
            lines += ["", f"{problem} To change:", *(f"- {change}" for change in self.changes)]
        return "\n".join(lines)

    @property
    def asked(self) -> str:
        """The requests that are asked for, in words."""
        num_requests = self.num_requests or 1
        return f"{num_requests:,} request{'s' * (num_requests > 1)} of {self.context:,} tokens"

    def _lengths(self) -> list[int]:
        """The asked length, and powers of 4 up to the longest."""
        longest = self.config.max_model_len
        return sorted({min(self.context, longest), longest, *(4**k for k in range(4, 12) if 4**k < longest)})

    def _parts(self) -> list[tuple[str, int, str]]:
        config = self.config
        kind = f"int8 and {self.dtype}" if self.quantization is not None else self.dtype
        weights = f"{self.num_params / 1e6:,.1f} M in {kind}" + (", there already" * self.weights_in_place)
        per_token = f"{size(self.kv_bytes_per_token)} a token"
        pool = f"{config.num_blocks:,} blocks of {config.block_size} tokens, {per_token}"
        if config.windows != (None,):
            shown = ", ".join("all" if window is None else f"{window:,}" for window in config.windows)
            pool += f"; a block for each group of layers, which see {shown} tokens back"
        step = f"{max(config.mixed_buckets[-1], config.decode_buckets[-1]):,} tokens, {config.max_num_running:,} rows"
        if self.programs:
            step += "; compiled: " + ", ".join(f"{name} {size(value)}" for name, value in self.programs.items())
        parts = [("weights", self.weight_bytes, weights), ("KV pool", self.pool_bytes, pool)]
        if self.host_pool_bytes:
            parts.append(("host pool", self.host_pool_bytes, f"{self.host_pool_bytes // self.block_bytes:,} blocks"))
        parts.append(("step", self.step_bytes, step))
        optional = ", not counted" * (self.memory.platform == "cpu")
        return [*parts, ("extras", self.extras_bytes, f"penalties, masks, log-probabilities of all rows{optional}")]


def size(num_bytes: int | None) -> str:
    """Bytes for people: "1.5 GiB"."""
    if num_bytes is None:
        return "unknown"
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"
