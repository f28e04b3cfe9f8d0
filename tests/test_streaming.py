"""Streams: what they say is what `generate` says, whoever steps the engine, and however they end nothing is left."""

import asyncio
import contextlib
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from test_detokenizer import BYTE_LEVEL, SENTENCEPIECE, UNKNOWN
from tiny_engine import (
    VOCAB_SIZE,
    assert_clean,
    greedy,
    naive_greedy,
    prompt_of,
    run_all,
    text_of,
    tiny_llm,
    unchecked_llm,
)
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.sampling.params import SamplingParams

RANDOM = {"temperature": 20.0, "seed": 7, "ignore_eos": True}
Read = Callable[[LLM, Any, SamplingParams], list[RequestOutput]]


def read_stream(llm: LLM, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    return list(llm.stream(prompt, params))


def read_astream(llm: LLM, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    async def main():
        return [output async for output in llm.astream(prompt, params)]

    return asyncio.run(main())


both = pytest.mark.parametrize("read", [read_stream, read_astream])


def final(outputs: list[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return seen(outputs[-1])


def seen(output: RequestOutput) -> list[tuple[str, list[int], str | None]]:
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


def generated(llm: LLM, prompt: Any, params: SamplingParams) -> list[tuple[str, list[int], str | None]]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return seen(output)


def deltas(outputs: list[RequestOutput], index: int = 0) -> list[str]:
    """What a caller prints, by the rule in the README."""
    printed, new = "", []
    for output in outputs:
        text = output.outputs[index].text
        assert text.startswith(printed)
        new.append(text[len(printed) :])
        printed = text
    return new


def check(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    assert_clean(llm.engine)
    assert not llm.engine.inboxes


# What a stream says.


@both
@pytest.mark.parametrize("params", [greedy(12), greedy(12, n=3), SamplingParams(**RANDOM, max_tokens=9, n=2)])
def test_every_step_has_an_output_and_the_last_is_the_result(read: Read, params):
    llm = tiny_llm()
    outputs = read(llm, prompt_of(30), params)  # more than a step's budget: the first step gives nothing
    assert final(outputs) == generated(llm, prompt_of(30), params)
    for i in range(params.n):
        lengths = [len(output.outputs[i].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
        assert "".join(deltas(outputs, i)) == outputs[-1].outputs[i].text
    lengths = [sum(len(completion.token_ids) for completion in output.outputs) for output in outputs]
    assert lengths == sorted(set(lengths)), "an output without a new token"
    assert max(b - a for a, b in itertools.pairwise([0, *lengths])) <= params.n, "a step without an output"
    check(llm)


def byte_tokenizer() -> Tokenizer:
    """Every one of the tiny model's ids is a byte of "é🙂", so half characters are everywhere."""
    bytes_ = "é🙂".encode()
    spelled = BYTE_LEVEL.id_to_token
    vocab = {f"{spelled(bytes_[i % len(bytes_)])}{'a' * (i // len(bytes_))}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@both
@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), BYTE_LEVEL, SENTENCEPIECE])
def test_b37_deltas_are_the_text_and_never_half_a_character(read: Read, tokenizer):
    llm = tiny_llm(tokenizer=tokenizer)
    params = SamplingParams(**RANDOM, max_tokens=20, n=2)
    outputs = read(llm, prompt_of(9), params)
    assert final(outputs) == generated(llm, prompt_of(9), params)
    for i, completion in enumerate(outputs[-1].outputs):
        whole = tokenizer.decode(completion.token_ids)
        assert "".join(deltas(outputs, i)) == whole
        assert all(whole.startswith(output.outputs[i].text) for output in outputs)
    check(llm)


def test_b37_an_emoji_in_pieces(monkeypatch):
    """The ids of "a🙂é漢ท🏳️‍🌈 z", one in a step."""
    ids = list("a🙂é漢ท🏳️‍🌈 z".encode())
    llm = tiny_llm(tokenizer=BYTE_LEVEL)
    says(monkeypatch, llm, ids)
    outputs = read_stream(llm, [1, 2], greedy(len(ids)))
    assert [delta for delta in deltas(outputs) if delta] == list("a🙂é漢ท🏳️‍🌈 z")
    says(monkeypatch, llm, ids)
    outputs = read_stream(llm, [1, 2], greedy(3))  # two of the emoji's four bytes
    assert deltas(outputs) == ["a", "", UNKNOWN]
    check(llm)


@both
def test_b39_stop_strings_hold_text_back_and_show_it_again(read: Read, monkeypatch):
    llm = tiny_llm()
    for text, params, expected in [
        ("to the klarinet now", greedy(40, stop="larinet"), ["to the k", "stop"]),
        ("to the kla", greedy(10, stop="larinet"), ["to the kla", "length"]),
        ("to the kla now", greedy(14, stop="larinet"), ["to the kla now", "length"]),
        ("aEND", greedy(9, stop="END", include_stop_str_in_output=True), ["aEND", "stop"]),
    ]:
        says(monkeypatch, llm, list(text.encode()))
        outputs = read(llm, [1, 2], params)
        new = deltas(outputs)
        assert ["".join(new), outputs[-1].outputs[0].finish_reason] == expected
        held = next(i for i, char in enumerate(text) if text[i:].startswith(("la", "E")))
        assert new[held] == "", "the beginning of a possible stop string was sent"
    check(llm)


def says(monkeypatch, llm: LLM, ids: list[int]) -> None:
    """Makes the model say these ids, to one request."""
    run, tokens = llm.engine.runner.__class__.run, iter(ids)

    def run_and_say(batch):
        sampled = np.array(run(llm.engine.runner, batch))
        sampled[0] = next(tokens)
        return sampled

    monkeypatch.setattr(llm.engine.runner, "run", run_and_say)


@both
def test_one_token(read: Read):
    llm = tiny_llm()
    (output,) = read(llm, prompt_of(5), greedy(1))
    assert output.finished
    check(llm)


@both
def test_default_params(read: Read):
    llm = tiny_llm()
    assert list(llm.stream(prompt_of(5)))[-1].finished
    check(llm)


# Several users of one engine.


def take(stream: Iterator[RequestOutput], num: int) -> list[RequestOutput]:
    return [next(stream) for _ in range(num)]


def expect(outputs: list[RequestOutput], prompt: list[int], num_tokens: int) -> None:
    ids = naive_greedy(prompt, num_tokens)
    assert [output.outputs[0].token_ids for output in outputs] == [ids[:n] for n in range(1, num_tokens + 1)]
    assert outputs[-1].outputs[0].text == text_of(ids)
    final(outputs)


@pytest.mark.parametrize("num_blocks", [60, 9])  # with 9 there are preemptions
def test_interleaved_streams_lose_and_double_nothing(num_blocks):
    llm = tiny_llm(num_blocks=num_blocks)
    prompts = [prompt_of(length, length) for length in (5, 20, 8)]
    streams = [llm.stream(prompt, greedy(10)) for prompt in prompts]
    outputs: list[list[RequestOutput]] = [[], [], []]
    outputs[2] += take(streams[2], 2)
    outputs[0] += take(streams[0], 1)
    outputs[2] += list(streams[2])  # this one to its end; the others have most of theirs by now
    for i in (1, 0, 0, 1, 1):
        outputs[i] += take(streams[i], 1)
    for i in (0, 1):
        outputs[i] += list(streams[i])
    for i in range(3):
        expect(outputs[i], prompts[i], 10)
        assert list(streams[i]) == []
    check(llm)


def test_a_stream_beside_generate_beside_the_engine():
    llm = tiny_llm()
    first, second, mine = prompt_of(5, 1), prompt_of(8, 2), prompt_of(6, 3)
    llm.engine.add_request(mine, greedy(6), "mine")
    one = llm.stream(first, greedy(14))
    outputs = take(one, 2)
    by_hand = llm.engine.step()  # the stream's output of this step goes to the stream
    assert [output.request_id for output in by_hand] == ["mine"]
    assert len(by_hand[0].outputs[0].token_ids) == 3
    two = llm.stream(second, greedy(4))
    (output,) = llm.generate(prompt_of(7), greedy(9), use_tqdm=False)  # ends all but the first stream
    assert output.outputs[0].token_ids == naive_greedy(prompt_of(7), 9)
    assert llm.engine.has_unfinished()
    expect(list(two), second, 4)
    outputs += take(one, 11)
    (last,) = llm.engine.step()  # held for the one who had added it, until his own next step
    assert (last.request_id, last.finished) == ("mine", True)
    assert last.outputs[0].token_ids == naive_greedy(mine, 6)
    assert llm.engine.step() == []
    expect(outputs + list(one), first, 14)
    check(llm)


def test_an_engine_stepped_by_hand_to_its_end_leaves_the_streams_their_outputs():
    llm = tiny_llm()
    stream = llm.stream(prompt_of(5), greedy(7))
    llm.engine.add_request(prompt_of(6), greedy(3), "mine")
    while llm.engine.has_unfinished():
        assert {output.request_id for output in llm.engine.step()} <= {"mine"}
    expect(list(stream), prompt_of(5), 7)
    check(llm)


def test_an_abort_by_hand_is_the_last_output():
    llm = tiny_llm()
    stream = llm.stream(prompt_of(5), greedy(20))
    (output,) = take(stream, 1)
    llm.engine.abort(output.request_id)
    (output,) = stream
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    check(llm)


def test_an_id_may_be_used_again_while_its_last_output_is_unread():
    llm = tiny_llm()
    stream = llm.stream(prompt_of(5), greedy(2))
    (output,) = take(stream, 1)
    llm.engine.step()
    llm.engine.add_request(prompt_of(6), greedy(3), output.request_id)
    stream.close()
    assert run_all(llm.engine)[output.request_id].outputs[0].token_ids == naive_greedy(prompt_of(6), 3)
    check(llm)


def test_streams_and_generations_in_threads(monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)
    outputs: dict[int, Any] = {}

    def work(i):
        if i % 2:
            outputs[i] = list(llm.stream(prompt_of(5 + i, i), greedy(8)))
        else:
            outputs[i] = llm.generate(prompt_of(5 + i, i), greedy(8), use_tqdm=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        assert outputs[i][-1].outputs[0].token_ids == naive_greedy(prompt_of(5 + i, i), 8)
    check(llm)


def watch_for_overlaps(monkeypatch, llm: LLM) -> None:
    """Fails a call of the engine that begins during another one, in whatever thread."""
    busy = threading.Lock()

    def alone(call):
        def guarded(*arguments, **options):
            assert busy.acquire(blocking=False), "two calls of the engine at a time"
            try:
                return call(*arguments, **options)
            finally:
                busy.release()

        return guarded

    for name in ("add_request", "abort", "step"):
        monkeypatch.setattr(llm.engine, name, alone(getattr(llm.engine, name)))


# How a stream ends early.


@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["close", "drop", "exception"])
def test_b61_an_early_end_leaves_nothing(how, n, num_read):
    llm = tiny_llm()
    other = llm.stream(prompt_of(6), greedy(8))
    outputs = take(other, 1)
    stream = llm.stream(prompt_of(30), greedy(20, n=n, stop="a long one that holds text back"))
    take(stream, num_read)
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "exception":
        with contextlib.suppress(RuntimeError):
            for _ in stream:
                raise RuntimeError("the caller's")
    del stream
    assert len(llm.engine.outputs.groups) == 1
    expect(outputs + list(other), prompt_of(6), 8)
    check(llm)


def test_a_stream_in_a_reference_cycle_is_collected_in_the_middle_of_a_step(monkeypatch):
    llm = tiny_llm()
    cycle: list[Any] = [llm.stream(prompt_of(5), greedy(30))]
    cycle.append(cycle)
    other = llm.stream(prompt_of(6), greedy(8))
    outputs = take(other, 1)
    watch_for_overlaps(monkeypatch, llm)
    run = llm.engine.runner.run

    def collect_and_run(batch):
        gc.collect()
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", collect_and_run)
    del cycle
    outputs += take(other, 1)
    assert len(llm.engine.outputs.groups) == 1
    expect(outputs + list(other), prompt_of(6), 8)
    check(llm)


def test_a_signal_handler_may_close_a_stream(monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)
    stream = llm.stream(prompt_of(40), greedy(20))
    run = llm.engine.runner.run

    def run_and_interrupt(batch):
        sampled = run(batch)
        signal.raise_signal(signal.SIGINT)
        return sampled

    monkeypatch.setattr(llm.engine.runner, "run", run_and_interrupt)
    previous = signal.signal(signal.SIGINT, lambda *_: stream.close())
    try:
        assert list(stream) == []  # in the middle of its prompt
    finally:
        signal.signal(signal.SIGINT, previous)
    assert llm.stats().num_steps == 1
    check(llm)


BAD = {
    "empty": ([], greedy(3), "empty"),
    "not in the vocabulary": ([VOCAB_SIZE], greedy(3), "vocabulary"),
    "too long": ([1] * 500, greedy(3), "can never fit"),
    "no prompt": (None, greedy(3), "prompt must be"),
    "a list": ([[1, 2], [3]], greedy(3), "flat list"),
    "no params": ([1], {"n": 2}, "params must be"),
    "stop token": ([1], greedy(3, stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_when_the_stream_is_made(name):
    prompt, params, message = BAD[name]
    llm = unchecked_llm()
    with pytest.raises(ValueError, match=message):
        llm.stream(prompt, params)
    check(llm)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_one_task_alone(name):
    prompt, params, message = BAD[name]
    llm = unchecked_llm()

    async def read(prompt, params):
        return [output async for output in llm.astream(prompt, params)]

    async def main():
        tasks = [read(prompt_of(5), greedy(6)), read(prompt, params), read(prompt_of(7), greedy(6))]
        return await asyncio.gather(*tasks, return_exceptions=True)

    one, error, two = cast(Any, asyncio.run(main()))
    assert isinstance(error, ValueError)
    with pytest.raises(ValueError, match=message):
        raise error
    expect(one, prompt_of(5), 6)
    expect(two, prompt_of(7), 6)
    check(llm)


def fails_in_step(monkeypatch, llm: LLM, number: int) -> None:
    run, steps = llm.engine.runner.run, iter(range(1000))

    def run_or_fail(batch):
        if next(steps) == number:
            raise RuntimeError("planted")
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", run_or_fail)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_failing_step_ends_the_stream_that_asked_for_it(number, monkeypatch):
    llm = tiny_llm()
    streams = [llm.stream(prompt_of(5), greedy(9)), llm.stream(prompt_of(6), greedy(9))]
    fails_in_step(monkeypatch, llm, number)
    outputs = take(streams[0], number)
    with pytest.raises(RuntimeError, match="planted"):
        next(streams[0])
    assert list(streams[0]) == []
    assert len(outputs) == number
    expect(list(streams[1]), prompt_of(6), 9)  # its tokens are computed again
    check(llm)


# asyncio.


def test_many_tasks_share_the_engine_and_the_loop_stays_responsive(monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)
    main_thread, threads, run = threading.get_ident(), set(), llm.engine.runner.run

    def slow_run(batch):
        threads.add(threading.get_ident())
        time.sleep(0.02)
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", slow_run)

    async def read(i):
        await asyncio.sleep(0.01 * i)  # some arrive during a step
        return [output async for output in llm.astream(prompt_of(5 + i, i), greedy(6))]

    async def main():
        tasks = [asyncio.create_task(read(i)) for i in range(12)]
        num_turns = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            num_turns += 1
        assert num_turns > 2 * llm.stats().num_steps, "the loop stood still"
        assert len(asyncio.all_tasks()) == 1
        return [task.result() for task in tasks]

    for i, outputs in enumerate(asyncio.run(main())):
        expect(outputs, prompt_of(5 + i, i), 6)
    assert main_thread not in threads
    assert llm.stats().num_steps < 12 * 6 / 2, "steps were not shared"
    check(llm)


@pytest.mark.parametrize("moment", ["before its turn", "in a step", "between steps", "alone"])
def test_cancelling_a_task_aborts_its_request(moment, monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)
    started, run = threading.Event(), llm.engine.runner.run

    def slow_run(batch):
        started.set()
        time.sleep(0.02)
        return run(batch)

    monkeypatch.setattr(llm.engine.runner, "run", slow_run)

    async def read(prompt, num_tokens, pause=0.0):
        outputs = []
        async for output in llm.astream(prompt, greedy(num_tokens, n=2)):
            outputs.append(output)
            await asyncio.sleep(pause)
        return outputs

    async def main():
        others = [] if moment == "alone" else [asyncio.create_task(read(prompt_of(6, i), 6)) for i in range(2)]
        doomed = asyncio.create_task(read(prompt_of(20), 40, pause=1000 if moment == "between steps" else 0))
        if moment == "before its turn":
            await asyncio.sleep(0)
        else:
            while not started.is_set() or (moment == "between steps" and llm.stats().num_output_tokens < 8):
                await asyncio.sleep(0.001)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return [await other for other in others]

    for i, outputs in enumerate(asyncio.run(main())):
        assert final(outputs) == generated(llm, prompt_of(6, i), greedy(6, n=2))
    check(llm)


def test_leaving_an_async_loop_aborts_the_request():
    llm = tiny_llm()

    async def main():
        async for _ in llm.astream(prompt_of(5), greedy(30)):
            break
        check(llm)  # at once, as nobody steps
        async with contextlib.aclosing(llm.astream(prompt_of(5), greedy(30))) as stream:
            await anext(stream)
        check(llm)
        assert [output async for output in stream] == []
        llm.astream(prompt_of(5), greedy(30))  # never read
        return [output async for output in llm.astream(prompt_of(7), greedy(3))]

    expect(asyncio.run(main()), prompt_of(7), 3)
    check(llm)


def test_tasks_left_at_the_end_of_the_loop():
    llm = tiny_llm()

    async def read():
        async for _ in llm.astream(prompt_of(5), greedy(50)):
            pass

    async def main():
        tasks = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0.02)
        return len(tasks)

    assert asyncio.run(main()) == 3
    check(llm)
    expect(read_astream(llm, prompt_of(7), greedy(3)), prompt_of(7), 3)  # and another loop begins


def test_b67_a_failing_step_reaches_every_waiting_stream(monkeypatch):
    llm = tiny_llm()
    fails_in_step(monkeypatch, llm, 3)

    async def read(i):
        return [output async for output in llm.astream(prompt_of(5, i), greedy(9))]

    async def main():
        results = await asyncio.gather(*map(read, range(4)), return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1
        return results, await read(5)

    failed, after = asyncio.run(main())
    assert [str(error) for error in failed] == ["planted"] * 4
    expect(after, prompt_of(5, 5), 9)
    check(llm)


def test_a_failing_step_that_nobody_waits_for_any_more_is_not_reported(monkeypatch, caplog):
    llm = tiny_llm()
    started, go = threading.Event(), threading.Event()

    def wait_and_fail(batch):
        started.set()
        assert go.wait(10)
        raise RuntimeError("planted")

    monkeypatch.setattr(llm.engine.runner, "run", wait_and_fail)

    async def main():
        task = asyncio.create_task(anext(llm.astream(prompt_of(5), greedy(9))))
        while not started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        go.set()

    asyncio.run(main())
    gc.collect()
    assert caplog.text == ""
    check(llm)


def test_generate_and_stream_beside_tasks(monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)

    async def read(i):
        return [output async for output in llm.astream(prompt_of(5, i), greedy(12))]

    async def main():
        tasks = [asyncio.create_task(read(i)) for i in range(3)]
        await asyncio.sleep(0.01)
        expect(list(llm.stream(prompt_of(9), greedy(5))), prompt_of(9), 5)  # blocks the loop, but harms nobody
        (output,) = await asyncio.to_thread(llm.generate, prompt_of(8), greedy(6), use_tqdm=False)
        assert output.outputs[0].token_ids == naive_greedy(prompt_of(8), 6)
        return await asyncio.gather(*tasks)

    for i, outputs in enumerate(asyncio.run(main())):
        expect(outputs, prompt_of(5, i), 12)
    check(llm)


def test_event_loops_in_two_threads(monkeypatch):
    llm = tiny_llm()
    watch_for_overlaps(monkeypatch, llm)
    outputs: dict[int, list[list[RequestOutput]]] = {}

    async def read(i):
        return [output async for output in llm.astream(prompt_of(5, i), greedy(8))]

    async def main(k):
        return await asyncio.gather(*(read(10 * k + i) for i in range(3)))

    def work(k):
        outputs[k] = asyncio.run(main(k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        for i in range(3):
            expect(outputs[k][i], prompt_of(5, 10 * k + i), 8)
    check(llm)
