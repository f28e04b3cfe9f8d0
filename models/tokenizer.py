"""Tokenizers, chat prompts and the ids that end a text, for a model folder or a GGUF file. Host only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pagedjax.models.checks import require
from pagedjax.models.config import as_token_ids
from pagedjax.models.gguf_loader import open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# A chat template is a small program that comes with the checkpoint and reads what a user sent: these are what its
# own `raise_exception` and its operations on a message of an unforeseen form raise.
_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder or GGUF file; ValueError that says why when there is none."""
    path = Path(path)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(open_gguf(path))
    if not has_tokenizer(path):
        raise ValueError(f"{path} has no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # a damaged file makes transformers and tokenizers raise anything, bare Exception too
        raise ValueError(f"the tokenizer in {path} could not be loaded: {error}") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds tokenizer files at all."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    tools: Any = None,
    **template_kwargs: Any,
) -> list[int]:
    """The prompt ids of a conversation, [{"role": ..., "content": ...}, ...], with exactly one BOS.

    The template decides what the prompt holds. A BOS that it writes is kept, and not doubled by a tokenizer that adds
    one on its own; a template that writes none gets the BOS of a tokenizer that adds one. (A model whose tokenizer
    adds none, with a template that writes none, was trained without.)
    `chat_template` is used in place of the tokenizer's; `tools`, a list as in OpenAI's API, and `template_kwargs`
    (documents, ...) reach the template.

    Raises ValueError for messages or tools of another form, without a template, when the template refuses the messages
    and when it makes nothing of the tools: a model that never saw them would answer as if there were none.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError(f"messages: got {messages!r}, expected a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}]: got {message!r}, expected an object with a role")
    if not chat_template and not tokenizer.chat_template:
        raise ValueError("this model's tokenizer has no chat template: pass one, or use a plain prompt")
    _check_tools(tools)
    conversation = [dict(message) for message in messages]
    options = {**template_kwargs, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    options["chat_template"] = chat_template or None
    try:
        text = tokenizer.apply_chat_template(conversation, tools=list(tools) if tools else None, **options)
        ignores_tools = tools and text == tokenizer.apply_chat_template(conversation, **options)
    except _TEMPLATE_FAILURES as error:
        raise ValueError(f"the chat template refused these messages: {error}") from error
    if ignores_tools:
        raise ValueError(f"tools: got {len(tools or ())}, expected none: this chat template does not show them")
    assert isinstance(text, str)
    return _with_one_bos(tokenizer, tokenizer.encode(text, add_special_tokens=False))


def eos_token_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    config_ids: Sequence[int] = (),
    generation_config: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Every id that ends a text: the union of what three places say, each id once, in this order:

    1. `eos_token_id` of `generation_config.json` (an id, a list or null; the file may be absent),
    2. `eos_token_id` of `config.json`, or the ids in a GGUF file's metadata (`config_ids`),
    3. the tokenizer's EOS.

    They often differ (end of text in one, end of turn in another), and each is meant to end generation.
    """
    stated = (generation_config or {}).get("eos_token_id")
    ids = [*as_token_ids(stated, "eos_token_id in generation_config.json"), *config_ids]
    if tokenizer is not None:
        ids += as_token_ids(tokenizer.eos_token_id, "the tokenizer's eos_token_id")
    return tuple(dict.fromkeys(ids))


def _check_tools(tools: Any) -> None:
    """Each is {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}."""
    is_list = isinstance(tools, list | tuple)
    require(tools is None or is_list, "tools", tools, "a list of tools, each a JSON object, or None")
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}]"
        require(isinstance(tool, Mapping), field, tool, "an object")
        require(tool.get("type") == "function", f"{field}.type", tool.get("type"), "'function'")
        function = tool.get("function")
        require(isinstance(function, Mapping), f"{field}.function", function, "an object with a name")
        name, description, schema = (function.get(key) for key in ("name", "description", "parameters"))
        require(isinstance(name, str) and name != "", f"{field}.function.name", name, "text")
        require(isinstance(description, str | None), f"{field}.function.description", description, "text or none")
        require(isinstance(schema, Mapping | None), f"{field}.function.parameters", schema, "a JSON schema or none")


def _with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        return ids
    adds_bos = tokenizer.encode("")[:1] == [bos]  # asked, not read off a flag: post-processors differ
    num_leading = next((index for index, token in enumerate(ids) if token != bos), len(ids))
    return ([bos] if num_leading or adds_bos else []) + ids[num_leading:]
