"""Keeps what happens over any number of steps in bounded memory. Host only."""

import numpy as np
from jaxtyping import Float64

from pagedjax.simulation.results import Timeline

Row = tuple[float, int, int, int, int, int]
"""Seconds, and the values that they are the weight of, in the order of `Timeline`."""


class TimelineRecorder:
    """Sums over stretches of `stride` rows. When there are twice `max_stretches`, each two become one."""

    def __init__(self, max_stretches: int = 2048) -> None:
        self.max_stretches = max_stretches
        self.stride = 1
        self._rows: list[Row] = []
        self._stretches: list[Float64[np.ndarray, " row"]] = []
        """Of each: its seconds, and the values summed over them."""

    def add(self, row: Row) -> None:
        """The next step, or the next idle time."""
        self._rows.append(row)
        if len(self._rows) == self.stride:
            self._close_stretch()

    def _close_stretch(self) -> None:
        rows = np.array(self._rows, np.float64)
        self._rows.clear()
        rows[:, 1:] *= rows[:, :1]
        self._stretches.append(rows.sum(axis=0))
        if len(self._stretches) == 2 * self.max_stretches:
            pairs = np.stack(self._stretches)
            self._stretches = list(pairs[0::2] + pairs[1::2])
            self.stride *= 2

    def timeline(self) -> Timeline:
        """All that was added."""
        if self._rows:
            self._close_stretch()
        sums = np.stack(self._stretches) if self._stretches else np.zeros((0, 6))
        seconds = sums[:, 0]
        values = sums[:, 1:] / sums[:, :1]
        return Timeline(
            end_s=seconds.cumsum(),
            seconds=seconds,
            num_requests=values[:, 0],
            num_sequences=values[:, 1],
            num_used_blocks=values[:, 2],
            num_context_tokens=values[:, 3],
            num_empty_slots=values[:, 4],
        )
