"""Runs the real scheduler, allocator and prefix cache under a virtual clock: capacity planning. Host only."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.sampling.params import SamplingParams
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.simulation.cost import MAX_SECONDS, StepLoad, StepTime
from pagedjax.simulation.results import SimulationResult
from pagedjax.simulation.timeline import TimelineRecorder
from pagedjax.simulation.workload import MAX_TOKEN_ID, SimulatedRequest

Observer = Callable[[float, Scheduler, SchedulerOutput], None]
"""Called with the time in seconds at which a step starts, when it has its blocks and before it ends."""

SIMULATED = {"num_decode_steps": 1, "async_scheduling": False, "scheduling_policy": "fcfs"}
"""What a simulation does not know: the other values of these fields of a config are refused."""
NUM_IDS = MAX_TOKEN_ID + 1
FIRST_SAMPLED_ID, LAST_ID = NUM_IDS, 2**31 - 1
"""Sampled tokens count up from the first, and prompts that are like nothing begin with ids that count down from the
last, `NUM_IDS` of both before they come again: no two outputs in the pool are alike. An id is an int32."""
_num_computed = attrgetter("num_computed_tokens")
_has_ended = attrgetter("finish_reason")


def simulate(
    requests: Iterable[SimulatedRequest],
    config: EngineConfig,
    step_time: StepTime,
    *,
    observe: Observer | None = None,
) -> SimulationResult:
    """What an engine with `config` does with `requests`, if its steps take `step_time` seconds: nothing is computed but
    what runs when, which is the engine's own scheduler's choice. The same arguments give the same result.

    `requests` come in order of arrival. They are taken one by one as they can be of use, so a generator of millions
    takes no memory but the result's, 40 bytes each. A step that starts when a request has arrived may admit it.

    Raises ValueError for requests that are out of order, for one that can never fit, for a step time that is not a
    number of seconds above 0, and for a `config` with what is not simulated (`SIMULATED`, and preemption="auto").
    """
    for name, value in SIMULATED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} must be {value!r} in a simulation, got {getattr(config, name)!r}")
    if config.preemption == "swap" and not config.num_swap_blocks:
        raise ValueError('num_swap_blocks must be at least 1 with preemption="swap", got 0')
    if config.preemption == "auto":
        raise ValueError('preemption must be "recompute" or "swap" in a simulation, where nothing is measured')
    simulation = _Simulation(requests, config, step_time, observe)
    while simulation.advance():
        pass
    return simulation.result()


class _Simulation:
    def __init__(
        self,
        requests: Iterable[SimulatedRequest],
        config: EngineConfig,
        step_time: StepTime,
        observe: Observer | None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.step_time = step_time
        self.observe = observe
        self.now = 0.0
        self.num_steps = self.num_tokens = self.num_sampled = self.num_batched_requests = 0
        self.timeline = TimelineRecorder()
        self.arrivals = _in_order(requests)
        self.next_arrival = next(self.arrivals, None)
        self.params: dict[int, SamplingParams] = {}
        self.filler = [0] * config.max_model_len
        self.arrival_s, self.first_token_s, self.finish_s = array("d"), array("d"), array("d")
        self.prompt_lens, self.output_lens = array("q"), array("q")
        self.without_token: dict[Request, None] = {}
        """First sequences of requests that have not got a token yet."""
        self.num_unfinished: dict[int, int] = {}
        """Completions of a request that have not ended, if it has several."""

    def advance(self) -> bool:
        """One step, or the wait for the next request; False when all are done."""
        self._add_arrived()
        if not self.scheduler.has_unfinished:
            if self.next_arrival is None:
                return False
            idle_s = self.next_arrival.arrival_s - self.now
            self.timeline.add((idle_s, 0, 0, 0, 0, 0))
            self.now = self.next_arrival.arrival_s
            return True
        scheduled = self.scheduler.schedule()
        if self.observe is not None:
            self.observe(self.now, self.scheduler, scheduled)
        self._pass_time(scheduled)
        # As many ids as are sampled, and no list of them.
        first = FIRST_SAMPLED_ID + self.num_sampled % NUM_IDS
        self.num_sampled += len(scheduled.sampling)
        self.scheduler.update(scheduled, range(first, first + len(scheduled.sampling)))
        self._note_times(scheduled)
        return True

    def result(self) -> SimulationResult:
        """What came out."""
        cache = self.scheduler.kv.prefix_cache
        return SimulationResult(
            arrival_s=np.array(self.arrival_s),
            first_token_s=np.array(self.first_token_s),
            finish_s=np.array(self.finish_s),
            num_prompt_tokens=np.array(self.prompt_lens, np.int64),
            num_output_tokens=np.array(self.output_lens, np.int64),
            end_s=self.now,
            num_steps=self.num_steps,
            num_computed_tokens=self.num_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_lookup_tokens=cache.num_query_tokens if cache else 0,
            num_cached_tokens=cache.num_hit_tokens if cache else 0,
            peak_blocks_used=self.scheduler.allocator.peak_blocks_used,
            mean_requests_per_step=self.num_batched_requests / max(self.num_steps, 1),
            timeline=self.timeline.timeline(),
        )

    def _add_arrived(self) -> None:
        """Queues those that have arrived, but no more than a step could admit: what is behind them in line does not
        matter yet, and may be many."""
        while self.next_arrival is not None and self.next_arrival.arrival_s <= self.now:
            if len(self.scheduler.waiting) >= self.config.max_num_running:
                return
            self._add(self.next_arrival)
            self.next_arrival = next(self.arrivals, None)

    def _add(self, simulated: SimulatedRequest) -> None:
        index, prompt_len, n = len(self.arrival_s), simulated.prompt_len, simulated.n
        num_tokens = prompt_len + simulated.output_len
        if num_tokens > self.config.max_seq_len:
            raise ValueError(
                f"requests[{index}]: prompt and output_len are {prompt_len} + {simulated.output_len} tokens, but no "
                f"more than {self.config.max_seq_len} fit: num_blocks={self.config.num_blocks} of "
                f"block_size={self.config.block_size}, max_model_len={self.config.max_model_len}"
            )
        if isinstance(simulated.prompt, int):
            prompt = [LAST_ID - index % NUM_IDS, *self.filler[1:prompt_len]]
        else:
            prompt = list(simulated.prompt)
        params = self._params_of(n)
        # The seed has no other use: it says which request this is.
        sequences = [Request(f"{index}[{k}]", prompt, params, (index, k), num_tokens, index, k) for k in range(n)]
        self.scheduler.add(SequenceGroup(sequences))
        self.without_token[sequences[0]] = None
        if n > 1:
            self.num_unfinished[index] = n
        self.arrival_s.append(simulated.arrival_s)
        self.first_token_s.append(math.nan)
        self.finish_s.append(math.nan)
        self.prompt_lens.append(prompt_len)
        self.output_lens.append(simulated.output_len)

    def _params_of(self, n: int) -> SamplingParams:
        if n not in self.params:
            self.params[n] = SamplingParams(n=n, max_tokens=None, ignore_eos=True, detokenize=False)
        return self.params[n]

    def _pass_time(self, scheduled: SchedulerOutput) -> None:
        num_tokens, num_sequences = scheduled.num_tokens, len(scheduled.num_new_tokens)
        # Whoever runs is in the step, so these are all tokens in the tables.
        num_context = num_tokens + sum(map(_num_computed, scheduled.num_new_tokens))
        num_swapped = len(scheduled.swap_out) + len(scheduled.swap_in)
        seconds = self.step_time(StepLoad(num_tokens, num_sequences, num_context, num_swapped))
        if not 0.0 < seconds < MAX_SECONDS:
            raise ValueError(f"step_time must give seconds above 0 and below {MAX_SECONDS:g}, got {seconds!r}")
        allocator, num_requests = self.scheduler.allocator, len(self.scheduler.running)
        # A block with room in it has one holder by now: whoever writes has a copy of his own.
        num_empty = allocator.num_references * self.config.block_size - num_context
        row = (seconds, num_requests, num_sequences, allocator.num_used_blocks, num_context, num_empty)
        self.timeline.add(row)
        self.now += seconds
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_batched_requests += num_requests

    def _note_times(self, scheduled: SchedulerOutput) -> None:
        """Gives the time to those that got their first token, or their last. Set and filter look at each sequence,
        which is most of what this costs: so they are C."""
        for request in self.without_token.keys() & scheduled.sampling:
            del self.without_token[request]
            self.first_token_s[request.seed] = self.now
        for request in filter(_has_ended, scheduled.sampling):
            index = request.seed
            if self.num_unfinished.get(index, 1) > 1:
                self.num_unfinished[index] -= 1
            else:
                self.num_unfinished.pop(index, None)
                self.finish_s[index] = self.now


def _in_order(requests: Iterable[SimulatedRequest]) -> Iterator[SimulatedRequest]:
    """The requests; ValueError where one comes before the one in front of it."""
    last = 0.0
    for i, request in enumerate(requests):
        if request.arrival_s < last:
            raise ValueError(f"requests[{i}].arrival_s must be in order, got {request.arrival_s} after {last}")
        last = request.arrival_s
        yield request
