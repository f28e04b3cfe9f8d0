"""Where the wall time of an engine's steps goes, where steps may be launched while the device computes others."""

import time
from collections.abc import Callable
from typing import Any

LAUNCHES = ("run", "run_decodes", "run_with", "copy_blocks", "swap_in", "swap_out")


class HostClock:
    """Seconds since `clear`, measured by wrapping the engine's own calls until `close`.

    `launch`: in calls of the runner, which give the device its work and wait only where its queue is full. `wait`: for
    the tokens of a step. `host`: all the rest of the steps, which is Python: schedule, build the batch, resolve,
    process. `exposed`: the part of it in which the device had nothing to do, at most: when a step is launched and the
    one before is done, the time since the device was last seen at work, which is asked after each part of a step.
    Without `async_scheduling` that is all of `host` but what follows the last step.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._runner = engine, engine.runner
        self._last: Any = None  # what the step in flight computes last
        self._busy_at = 0.0
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self.clear()
        self._wrap(engine, "step", self._step)
        self._wrap(engine, "_resolve", self._resolve)
        self._wrap(engine.scheduler, "schedule", self._schedule)
        for name in LAUNCHES:
            self._wrap(engine.runner, name, self._launch)

    def clear(self) -> None:
        """Starts again from zero."""
        self.seconds = dict.fromkeys(("step", "launch", "wait", "exposed"), 0.0)
        self.num_steps = 0
        self._busy_at = time.perf_counter()

    def close(self) -> None:
        """The engine as it was."""
        for owner, names in (
            (self._engine, ("step", "_resolve")),
            (self._engine.scheduler, ("schedule",)),
            (self._runner, LAUNCHES),
        ):
            for name in names:
                delattr(owner, name)  # the method again

    def per_step(self) -> dict[str, float]:
        """Milliseconds of a mean step by part, and shares of its time."""
        host = self.seconds["step"] - self.seconds["launch"] - self.seconds["wait"]
        parts = {**self.seconds, "host": host}
        total, num_steps = max(self.seconds["step"], 1e-9), max(self.num_steps, 1)
        return {f"{name}_ms": 1e3 * seconds / num_steps for name, seconds in parts.items()} | {
            "host_share": host / total,
            "exposed_share": self.seconds["exposed"] / total,
        }

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args: wrapper(method, *args))

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        start = self._look()
        outputs = step(*args)
        self.seconds["step"] += self._look() - start
        self.num_steps += 1
        return outputs

    def _schedule(self, schedule: Callable[..., Any], *args: Any) -> Any:
        scheduled = schedule(*args)
        self._look()
        return scheduled

    def _launch(self, launch: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        if not self._is_busy():
            self.seconds["exposed"] += start - self._busy_at
        result = launch(*args)
        self._busy_at = time.perf_counter()
        self.seconds["launch"] += self._busy_at - start
        if result is not None:
            self._last = _last_of(result)
        return result

    def _resolve(self, resolve: Callable[..., Any], *args: Any) -> Any:
        import jax

        if self._engine._in_flight is not None:
            start, tokens = self._look(), self._engine._in_flight.tokens
            jax.block_until_ready(tokens)
            end = self._look()
            if self._last is _last_of(tokens):  # nothing was launched behind it: the device was at work until now
                self._busy_at = end
            self.seconds["wait"] += end - start
        return resolve(*args)

    def _look(self) -> float:
        """Asks whether the device is at work; the time."""
        now = time.perf_counter()
        if self._is_busy():
            self._busy_at = now
        return now

    def _is_busy(self) -> bool:
        return self._last is not None and hasattr(self._last, "is_ready") and not self._last.is_ready()


def _last_of(tokens: Any) -> Any:
    return tokens[-1] if isinstance(tokens, list) else tokens
