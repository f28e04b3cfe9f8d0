"""The command line, with a stand-in for the engine: what goes to stdout, what to stderr, and the exit code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from typer.testing import CliRunner

import pagedjax
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.serving import cli

ROOT = Path(__file__).parents[1]


class FakeStream:
    """Says an answer character by character, one token each."""

    def __init__(self, answer: str, interrupt_after: int | None):
        self.answer, self.interrupt_after = answer, interrupt_after
        self.num_said, self.is_closed = 0, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_said == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)
        if self.is_closed or self.num_said == len(self.answer):
            raise StopIteration
        self.num_said += 1
        text = self.answer[: self.num_said]
        completion = CompletionOutput(index=0, text=text, token_ids=list(text.encode()))
        return RequestOutput("0", None, [1], [completion], finished=text == self.answer)

    def close(self):
        self.is_closed = True


class FakeLLM:
    """Answers with the prompt, in capitals for a chat."""

    made: ClassVar[list["FakeLLM"]] = []
    chat_template = "{{ messages }}"
    finish_reason = "stop"
    error: BaseException | None = None
    interrupt_after: int | None = None

    def __init__(self, model, **options):
        self.model, self.options, self.calls = model, options, []
        self.tokenizer = SimpleNamespace(chat_template=self.chat_template)
        self.streams: list[FakeStream] = []
        FakeLLM.made.append(self)

    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append(("generate", prompts, params, use_tqdm))
        if self.error:
            raise self.error
        results = []
        for i, prompt in enumerate(prompts):
            outputs = [
                CompletionOutput(index=j, text=f"{prompt} é{j}", token_ids=[7, j], finish_reason=self.finish_reason)
                for j in range(params.n)
            ]
            results.append(RequestOutput(str(i), None, [1, 2], outputs, finished=True))
        return results

    def chat(self, messages, params, use_tqdm=True):
        return self.generate([conversation[-1]["content"].upper() for conversation in messages], params, use_tqdm)

    def render_chat(self, messages):
        return list("|".join(message["content"] for message in messages).encode())

    def stream(self, prompt, params):
        if len(prompt) > 400:
            raise ValueError(f"prompt has {len(prompt)} tokens,\nexpected at most 400")
        self.streams.append(FakeStream(f"echo {bytes(prompt).decode()}", self.interrupt_after))
        return self.streams[-1]

    def stats(self):
        return SimpleNamespace(num_blocks=64, peak_blocks_used=3, num_preemptions=1)


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    monkeypatch.setitem(vars(pagedjax), "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return monkeypatch


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


def assert_one_error_line(result, *words: str):
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pagedjax: error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


# --- generate ---


def test_one_prompt_prints_the_answer_alone_and_closes_with_one_line():
    result = run("generate", "m", "hello", "--no-chat")
    assert (result.exit_code, result.stdout) == (0, "hello é0\n")
    (line,) = result.stderr.splitlines()
    assert "output tokens/s (2 in " in line
    assert "1 requests, peak 3 of 64 blocks, 1 preemptions" in line


def test_several_prompts_are_shown_with_their_answers():
    result = run("generate", "m", "one", "two", "--n", "2", "--no-chat")
    assert result.stdout == "> one\n[0] one é0\n[1] one é1\n\n> two\n[0] two é0\n[1] two é1\n\n"
    assert "(8 in " in result.stderr


@pytest.mark.parametrize(
    ("template", "flags", "answer"),
    [("t", [], "HI é0"), (None, [], "hi é0"), ("t", ["--no-chat"], "hi é0"), (None, ["--chat"], "HI é0")],
)
def test_the_chat_template_is_used_when_there_is_one(fake_llm, template, flags, answer):
    fake_llm.setattr(FakeLLM, "chat_template", template)
    assert run("generate", "m", "hi", *flags).stdout == answer + "\n"


def test_json_lines():
    result = run("generate", "m", "one", 'a "b"', "--json", "--n", "2", "--no-chat")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["prompt"] == "one"
    assert second["prompt"] == 'a "b"'
    assert first["outputs"][1] == {"index": 1, "text": "one é1", "token_ids": [7, 1], "finish_reason": "stop"}
    assert "é" in result.stdout


def test_options_reach_the_engine_and_the_sampling_params():
    sampling = ["--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--seed", "3"]
    engine = ["--dtype", "float32", "--block-size", "8", "--num-blocks", "64", "--max-num-seqs", "2"]
    engine += ["--max-num-batched-tokens", "32", "--max-model-len", "128"]
    result = run("generate", "m", "x", *sampling, "--stop", "END", "--stop", "\n", *engine, "--no-progress")
    assert result.exit_code == 0, result.stderr
    (llm,) = FakeLLM.made
    assert llm.model == "m"
    sizes = {"block_size": 8, "num_blocks": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128}
    assert llm.options == {"progress": False, "dtype": "float32", **sizes}
    ((_, _, params, use_tqdm),) = llm.calls
    assert use_tqdm is False
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (9, 0.5, 0.9, 4, 3)
    assert params.stop_strings == ("END", "\n")


def test_options_that_nobody_gave_are_left_to_the_engine():
    run("generate", "m", "x")
    assert FakeLLM.made[0].options == {"progress": True}


def test_prompts_from_a_file_come_after_the_arguments(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufefftwo\r\n\r\n  three é\n".encode())
    run("generate", "m", "one", "--file", str(file), "--no-chat")
    assert FakeLLM.made[0].calls[0][1] == ["one", "two", "  three é"]


def test_prompts_from_stdin():
    result = run("generate", "m", "--file", "-", "--json", "--no-chat", stdin="one\ntwo\n")
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m"], ["no prompts"]),
        (["m", "ok", " "], ["prompt 2 is empty"]),
        (["m", "--file", "-"], ["no prompts"]),
        (["m", "--file", "missing.txt"], ["missing.txt", "No such file"]),
        (["m", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["m", "x", "--stop", ""], ["stop"]),
    ],
)
def test_a_bad_request_is_refused_before_a_model_is_loaded(arguments, words):
    assert_one_error_line(run("generate", *arguments, stdin=""), *words)
    assert FakeLLM.made == []


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"\xff\xfe\x00")
    assert_one_error_line(run("generate", "m", "--file", str(file)), "model.gguf", "UTF-8")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("model: got 'm',\n  expected a folder"), ["model: got 'm', expected a folder"]),
        (FileNotFoundError(2, "No such file or directory", "w.safetensors"), ["w.safetensors"]),
        (RuntimeError("no network"), ["no network"]),
        (KeyError("x"), ["KeyError: 'x'"]),
        (RuntimeError(), ["RuntimeError"]),
    ],
)
def test_an_error_is_one_line_and_a_traceback_needs_debug(fake_llm, error, words):
    fake_llm.setattr(FakeLLM, "error", error)
    assert_one_error_line(run("generate", "m", "x"), *words)
    debugged = run("generate", "m", "x", "--debug")
    assert debugged.exit_code == 2
    assert "Traceback" in debugged.stderr
    assert debugged.stderr.splitlines()[-1].startswith("pagedjax: error: ")


def test_failed_requests_are_an_error_after_all_answers_are_printed(fake_llm):
    fake_llm.setattr(FakeLLM, "finish_reason", "error")
    result = run("generate", "m", "one", "two", "--json")
    assert (result.exit_code, result.stdout.count("\n")) == (2, 2)
    assert result.stderr.splitlines()[-1] == "pagedjax: error: 2 of 2 answers ended with an error"


def test_ctrl_c_ends_quietly(fake_llm):
    fake_llm.setattr(FakeLLM, "error", KeyboardInterrupt())
    result = run("generate", "m", "x")
    assert (result.exit_code, result.output) == (130, "")


def test_a_closed_pipe_ends_quietly():
    program = f"""
import sys, pagedjax
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_cli import FakeLLM
pagedjax.LLM = FakeLLM
from pagedjax.serving.cli import main
sys.argv = ["pagedjax", "generate", "m", "--json", "--file", "-"]
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, stderr=-1, text=True, cwd=ROOT, env={**os.environ}
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write("a prompt\n" * 5000)
    process.stdin.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize(
    "arguments", [[], ["generate"], ["generate", "m", "--nonsense"], ["generate", "m", "--n", "x"]]
)
def test_wrong_usage(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


# --- chat ---


def test_chat_streams_answers_and_keeps_the_history():
    result = run("chat", "m", "--system", "S", stdin="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "echo S|one\necho S|one|echo S|one|two\necho S|three\n"
    assert "3 requests, peak 3 of 64 blocks" in result.stderr


def test_chat_ends_with_its_input():
    assert run("chat", "m", stdin="one").stdout == "echo one\n"
    nothing = run("chat", "m", stdin="")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "0 requests" in nothing.stderr


def test_chat_needs_a_chat_template(fake_llm):
    fake_llm.setattr(FakeLLM, "chat_template", None)
    assert_one_error_line(run("chat", "m", stdin="one\n"), "m has no chat template")


def test_chat_on_a_terminal_goes_on_after_a_refused_message(fake_llm):
    result = run_on_terminal(fake_llm, ["x" * 500, "two"])
    assert result.exit_code == 0
    assert result.stdout == "echo two\n\n"
    assert "500 tokens, expected at most 400 (/reset begins a new conversation)" in result.stderr


def test_chat_from_a_pipe_ends_at_a_refused_message():
    assert_one_error_line(run("chat", "m", stdin="x" * 500 + "\ntwo\n"), "500 tokens")


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(fake_llm):
    handler = signal.getsignal(signal.SIGINT)  # a shell's background job has another one than a foreground job
    fake_llm.setattr(FakeLLM, "interrupt_after", 6)
    result = run_on_terminal(fake_llm, ["one", "two"])
    assert (result.exit_code, result.stdout) == (0, "echo o\necho o\n\n")
    assert [stream.is_closed for stream in FakeLLM.made[0].streams] == [True, True]
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_at_the_prompt_drops_the_line(fake_llm):
    result = run_on_terminal(fake_llm, [KeyboardInterrupt(), "two"])
    assert (result.exit_code, result.stdout) == (0, "\necho two\n\n")


def test_ctrl_c_ends_a_chat_from_a_pipe(fake_llm):
    fake_llm.setattr(FakeLLM, "interrupt_after", 6)
    result = run("chat", "m", stdin="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (130, "echo o\n")


def run_on_terminal(monkeypatch, typed: list[str | BaseException]):
    """As if `typed` were entered at a terminal, then Ctrl-D."""
    entries = iter(typed)

    def read(prompt):
        assert prompt == "> "
        entry = next(entries, EOFError())
        if isinstance(entry, BaseException):
            raise entry
        return entry

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(cli, "_is_interactive", lambda: True)
    return run("chat", "m")


# --- the process ---


def test_help_does_not_load_jax():
    program = """
import atexit, runpy, sys
atexit.register(lambda: print([name for name in ("jax", "flax", "transformers") if name in sys.modules]))
sys.argv = ["pagedjax", "--help"]
runpy.run_module("pagedjax", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate" in done.stdout
    assert "chat" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
