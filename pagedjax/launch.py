"""Gives a scheduled step to the device: tables built, blocks moved, and the program called that it needs."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagedjax.batch import build_batch
from pagedjax.beams.groups import BeamCandidates
from pagedjax.beams.rows import build_beam_rows
from pagedjax.config import EngineConfig
from pagedjax.model_runner import ModelRunner
from pagedjax.sampling.decode_loop import build_decode_rows
from pagedjax.sampling.extras import build_extras
from pagedjax.sampling.log_entries import StepLogprobs
from pagedjax.scheduling.output import SchedulerOutput
from pagedjax.scheduling.request import Request

logger = logging.getLogger(__name__)


@dataclass
class LaunchedStep:
    """A step that the device computes, or has computed."""

    scheduled: SchedulerOutput
    tokens: Any
    """i32[S] for `ModelRunner.fetch`, or as many of these as the step has decodes."""
    candidates: Iterable[BeamCandidates] = ()
    failed: dict[Request, Exception] = field(default_factory=dict)
    logprobs: StepLogprobs | None = None
    updated: list[Request] = field(default_factory=list)
    """Who got a token, once for each: known when the tokens are there."""


def launch(runner: ModelRunner, scheduled: SchedulerOutput, config: EngineConfig, vocab_size: int) -> LaunchedStep:
    """Launches a step. A plain one is not waited for: the device computes it while the host goes on."""
    batch = build_batch(scheduled, config)
    extras = build_extras(scheduled, config.extras_buckets, vocab_size)
    beams = build_beam_rows(scheduled, config.extras_buckets) if scheduled.beams else None
    if scheduled.swap_in:
        runner.swap_in(scheduled.swap_in)
    if scheduled.copies:
        runner.copy_blocks(scheduled.copies)
    if scheduled.num_decodes:
        stops = [request.eos_token_ids | request.stop_token_ids for request in scheduled.sampling]
        rows = build_decode_rows(scheduled.num_decodes, stops, len(batch.logits_indices))
        return LaunchedStep(scheduled, runner.run_decodes(batch, rows))
    if extras is None and beams is None:
        return LaunchedStep(scheduled, runner.run(batch))
    result = runner.run_with(batch, extras, beams)
    step = LaunchedStep(scheduled, result.token_ids)
    if extras is not None:
        step.failed = extras.failed
        step.logprobs = StepLogprobs(scheduled.sampling, extras.prompt, result.logprobs, result.prompt_logprobs)
    if beams is not None:
        step.candidates = beams.split(result.beams)
    for request, error in step.failed.items():
        logger.error("request %r ends with an error: %s", request.request_id, error, exc_info=error)
    return step
