"""After a failed step or an interrupt anywhere: no output is lost, none comes twice, and nothing is left behind."""

import contextlib
import sys
from typing import Any

import pytest
from fake_device import DeviceError, beam_reference, completion_reference, device_of, fake_engine, greedy
from tiny_engine import ascii_tokenizer, assert_clean, prompt_of, text_of, tiny_engine, tiny_llm
from tiny_engine import greedy as tiny_greedy

from pagedjax.beams.params import BeamSearchParams
from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput

PROMPT = [3, 1, 4, 1, 5, 9]
ALL = {"async_scheduling": True, "num_decode_steps": 3, "preemption": "swap", "scheduling_policy": "priority"}


class Interrupts:
    """Interrupts the package's own code at every `stride`-th line that it runs, one interrupt for each."""

    def __init__(self, line: int) -> None:
        self.line, self.count = line, 0

    def step(self, engine: LLMEngine) -> list[RequestOutput]:
        sys.settrace(self._trace)
        try:
            return engine.step()
        finally:
            sys.settrace(None)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if "/pagedjax/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("options", [{}, ALL])
@pytest.mark.parametrize("offset", [1, 40, 79])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(options, offset):
    expected = {"a": completion_reference(PROMPT, 5), "n": completion_reference(PROMPT[1:], 4)}
    stopped = completion_reference(PROMPT[2:], 12)
    expected["stop"] = stopped[: stopped.index(stopped[3]) + 1]
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    expected_beams = [hypothesis.token_ids for hypothesis in beam_reference(PROMPT[3:], beams, 3)]
    line = offset
    while True:
        engine, interrupts = fake_engine(num_blocks=9, num_swap_blocks=16, **options), Interrupts(line)
        engine.add_request(PROMPT, greedy(5), "a")
        engine.add_request(PROMPT[1:], greedy(4, n=2), "n")
        engine.add_request(PROMPT[2:], greedy(12, stop_token_ids=[stopped[3]]), "stop")
        engine.add_request(PROMPT[3:], beams, "beams")
        outputs: dict[str, RequestOutput] = {}
        for _ in range(100):
            try:
                finished = [output for output in interrupts.step(engine) if output.finished]
            except KeyboardInterrupt:
                finished = []
            assert not outputs.keys() & {output.request_id for output in finished}, line
            outputs |= {output.request_id: output for output in finished}
            if not engine.has_unfinished():
                break
        for name, token_ids in expected.items():
            assert [c.token_ids for c in outputs[name].outputs] == [token_ids] * (1 + (name == "n")), line
            assert {c.finish_reason for c in outputs[name].outputs} == {"stop" if name == "stop" else "length"}, line
        assert [tuple(c.token_ids) for c in outputs["beams"].outputs] == expected_beams, line
        engine.scheduler.check_integrity()
        assert engine.stats().num_free_blocks == 9, line
        assert not engine.outputs.groups, line
        assert not engine.outputs.names, line
        if interrupts.count < line:
            break  # it has run to its end
        line += 117
    assert line > 2000


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}])
def test_two_failures_in_a_row_lose_no_output(options):
    engine = fake_engine(**options)
    engine.add_request(PROMPT, greedy(1), "short")
    engine.add_request(PROMPT[1:], greedy(6), "long")
    outputs: dict[str, RequestOutput] = {}
    for step in range(40):
        device_of(engine).fails = step in (1, 2, 4, 5)
        with contextlib.suppress(DeviceError):
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished():
            break
    assert outputs["short"].outputs[0].token_ids == completion_reference(PROMPT, 1)
    assert outputs["long"].outputs[0].token_ids == completion_reference(PROMPT[1:], 6)
    assert engine.stats().num_finished == 2


def test_a_fork_after_a_failure_keeps_the_outputs_of_the_step_before():
    engine = fake_engine(async_scheduling=True)
    engine.add_request(PROMPT, greedy(2), "short")
    engine.add_request(PROMPT[1:], greedy(8), "long")
    engine.step()
    engine.step()
    engine.add_request(PROMPT[2:], greedy(0), "alone")  # not plain: the tokens in flight are resolved before it fails
    device_of(engine).fails = True
    with pytest.raises(DeviceError):
        engine.step()
    fork = engine.fork("long")
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert outputs["short"].outputs[0].token_ids == completion_reference(PROMPT, 2)
    assert outputs[fork].outputs[0].token_ids == outputs["long"].outputs[0].token_ids
    assert engine.outputs.groups == {}


def test_text_is_whole_after_a_step_that_was_resolved_and_then_failed():
    engine = tiny_engine(tokenizer=ascii_tokenizer(), async_scheduling=True)
    engine.add_request(prompt_of(5), tiny_greedy(3, n=2), "x")
    for _ in range(3):
        engine.step()
    engine.add_request(prompt_of(4), tiny_greedy(2, logprobs=1), "with logprobs")

    def fails(*_: object) -> Any:
        raise DeviceError

    run_with, engine.runner.run_with = engine.runner.run_with, fails  # type: ignore[method-assign]
    with pytest.raises(DeviceError):
        engine.step()
    engine.runner.run_with = run_with
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert all(c.text == text_of(c.token_ids) and len(c.token_ids) == 3 for c in outputs["x"].outputs)
    assert_clean(engine)


def test_more_completions_than_rows_keep_their_kv():
    llm = tiny_llm(max_num_seqs=4)
    with llm.sequence(prompt_of(5)) as root:
        (branches,) = llm.expand(root, tiny_greedy(3, n=5))
        assert [len(branch) for branch in branches] == [8] * 5
        assert all(branch.num_resident_tokens == 7 for branch in branches)
        for branch in branches:
            branch.free()
    assert_clean(llm.engine)


def test_what_is_kept_is_there_at_the_end_and_no_placeholder_is_ever_seen():
    engine = fake_engine(async_scheduling=True, num_decode_steps=3)
    engine.add_request(PROMPT, greedy(9), "x", keeps_kv=True)
    for _ in range(3):
        engine.step()
    with pytest.raises(ValueError, match="'x' has not ended yet"):
        engine.take_kept("x")
    assert all(token >= 0 for block in engine.memory_map().blocks for token in block.token_ids)
    while engine.has_unfinished():
        engine.step()
    (kept,) = engine.take_kept("x")
    assert kept.token_ids == PROMPT + completion_reference(PROMPT, 9)


def test_b22_an_id_is_free_after_an_abort_with_outputs_to_come():
    engine = fake_engine(async_scheduling=True)
    engine.add_request(PROMPT, greedy(9), "x")
    engine.step()
    engine.step()
    engine.memory_map()  # makes an output that the next step would return
    assert engine.abort("x") is not None
    engine.add_request(PROMPT[1:], greedy(2), "x")
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert all(output.prompt_token_ids == PROMPT[1:] for output in outputs)
    assert outputs[-1].outputs[0].token_ids == completion_reference(PROMPT[1:], 2)
