"""Tokenizers from GGUF metadata, chat prompts with exactly one BOS, and the ids that end a text (case B56)."""

import json
import sys
from typing import Any

import pytest
from gguf import GGUFWriter
from tiny_models import save_tiny, tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pagedjax.models.catalogue import CATALOGUE
from pagedjax.models.gguf_loader import open_gguf
from pagedjax.models.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from pagedjax.models.load import load_checkpoint
from pagedjax.models.tokenizer import apply_chat_template, eos_token_ids, load_tokenizer
from pagedjax.paths import cache_dir

TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "The capital of France is Paris.",
    "  two  spaces   three",
    "trailing space ",
    "tabs\tand\r\nnew\n\n\nlines  \n",
    "don't we'll they've I'm he'd it's DON'T",
    "snake_case camelCase kebab-case HTTPServer",
    "def f(x):\n    return x ** 2  # square\n",
    '{"key": [true, null], \'a\': "b"}',
    "https://example.org/a?b=c&d=e#f",
    "crème brûlée naïve Zürich Ångström",
    "e\u0301 combining, ﬁ ligature",
    "漢字とかな 한국어 中文，标点。",
    "Привет, мир! Γειά σου",
    "שלום עולם مرحبا بالعالم",
    "ไทย हिन्दी",
    "🙂 👩‍👩‍👧 🏳️‍🌈 🇫🇷",
    "½ ² Ⅷ ١٢٣ 𝟘",
    "a🙂é漢ท🏳️‍🌈 z",
    "\u00a0nbsp\u2003em\u200bzero",
    "nul\x00 bell\x07",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b <|im_end|> c",
    "<think>yes</think> no",
    "<|im_start",
    "▁already ▁▁here",
    "<0x0A><s></s><unk>",
    "ĠGĊ",
    "x" * 50,
    "zqjk",
]
DIGITS = ["1234567890", "  12 and 3.14", "in 1999, 20% of 1,000,000", "a1b22c333 v2.0.1", "\n1\n 2\n  3", "² ½3 ٣4"]
CORPUS = [*TEXTS, *DIGITS, "the quick brown fox jumps over the lazy dog " * 3, "don't 1234 12 34 return x return"]
SPECIAL, USER = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>"]


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level vocabulary learned from the texts without any split, so that any split changes the result."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *USER], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def write(path, metadata, arch="llama"):
    writer = GGUFWriter(path, arch)
    metadata(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(path, byte_level, pre, arch="llama", merges=True, **flags):
    tokens, pairs = byte_level
    kinds = [3 if token in SPECIAL else 4 if token in USER else 1 for token in tokens]

    def metadata(writer):
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        if merges:
            writer.add_token_merges(pairs)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write(path, metadata, arch)


def reference(byte_level, splits, normalizer=None, ignore_merges=False):
    """A tokenizer of the same vocabulary with the split that the family's own tokenizer.json has."""
    tokens, pairs = byte_level
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(pair.split(" ")) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(USER)
    return tokenizer


def backend_of(tokenizer: Any) -> Any:
    return tokenizer.backend_tokenizer


def pieces(tokenizer, text):
    return [piece for piece, _ in backend_of(tokenizer).pre_tokenizer.pre_tokenize_str(text)]


# --- byte-level vocabularies


@pytest.mark.parametrize("pre", [None, *PRE_TOKENIZERS])
def test_byte_level_text_comes_back(tmp_path, byte_level, pre):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, pre))
    for text in [*TEXTS, *DIGITS]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = "é combining, ﬁ ligature" if pre == "qwen2" and "combining" in text else text
        assert tokenizer.decode(ids) == expected
        assert all(0 <= token < len(byte_level[0]) for token in ids)


SPLITS = {
    "gpt-2": ["Ġ123456", "Ġab", "Ġ", "Ġ12", "'t"],
    "smollm": ["Ġ", "1", "2", "3", "4", "5", "6", "Ġab", "ĠĠ", "1", "2", "'t"],
    "llama-bpe": ["Ġ", "123", "456", "Ġab", "Ġ", "Ġ", "12", "'t"],
    "qwen2": ["Ġ", "1", "2", "3", "4", "5", "6", "Ġab", "Ġ", "Ġ", "1", "2", "'t"],
}


@pytest.mark.parametrize(("pre", "expected"), SPLITS.items(), ids=SPLITS.keys())
def test_each_family_splits_numbers_its_own_way(tmp_path, byte_level, pre, expected):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, pre))
    assert pieces(tokenizer, " 123456 ab  12't") == expected


def test_smollm_splits_like_its_own_tokenizer(tmp_path, byte_level):
    """SmolLM's tokenizer.json: Digits(individual), then ByteLevel with GPT-2's regex."""
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, "smollm"))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    oracle = reference(byte_level, splits)
    for text in [*TEXTS, *DIGITS]:
        assert tokenizer.encode(text) == oracle.encode(text).ids, text


def test_qwen2_normalises_like_its_own_tokenizer(tmp_path, byte_level):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert isinstance(backend_of(tokenizer).normalizer, normalizers.NFC)


def test_llama3_takes_a_whole_word_that_is_a_token(tmp_path, byte_level):
    tokens, merges = byte_level
    tokens = [*tokens, "qxz"]  # no merge leads there
    for pre, expected in (("llama-bpe", ["qxz"]), ("qwen2", ["q", "x", "z"])):
        tokenizer = load_tokenizer(write_byte_level(tmp_path / f"{pre}.gguf", (tokens, merges), pre))
        ids = tokenizer.encode("qxz", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == expected


@pytest.mark.oracle
@pytest.mark.parametrize("pre", [None, "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_equals_transformers(tmp_path, byte_level, pre):
    pytest.importorskip("torch", reason="transformers reads GGUF tokenizers through torch")
    from transformers import AutoTokenizer

    path = write_byte_level(tmp_path / "t.gguf", byte_level, pre, add_bos_token=False)
    ours, oracle = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    # Two known differences, each tested above against the family's own tokenizer: smollm's digits, qwen2's NFC.
    # And llama-bpe's whole words, which transformers does not take.
    texts = [*TEXTS, *([] if pre == "smollm" else DIGITS)]
    if pre == "smollm":
        texts = [text for text in texts if not any(character.isnumeric() for character in text)]
    if pre == "qwen2":
        texts = [text for text in texts if "combining" not in text]
    if pre == "llama-bpe":
        backend_of(oracle).model = backend_of(ours).model
    for text in texts:
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.decode(ids) == oracle.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == oracle.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert len(ours) == len(oracle)


def test_special_and_user_defined_tokens(tmp_path, byte_level):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, "gpt-2"))
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "<think>", "b", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer) == len(byte_level[0])


@pytest.mark.parametrize(
    ("pre", "flags", "adds"),
    [
        ("gpt-2", {}, False),
        ("smollm", {}, False),
        ("qwen2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ],
)
def test_who_adds_bos(tmp_path, byte_level, pre, flags, adds):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, pre, **flags))
    assert tokenizer.encode("a") == [1] * adds + tokenizer.encode("a", add_special_tokens=False)


def test_eos_is_added_when_the_file_says_so(tmp_path, byte_level):
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, "gpt-2", add_eos_token=True))
    assert tokenizer.encode("a")[-1] == 2


# --- what cannot be built


def test_missing_merges(tmp_path, byte_level):
    path = write_byte_level(tmp_path / "t.gguf", byte_level, "gpt-2", merges=False)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.merges is missing"):
        load_tokenizer(path)


def test_unknown_pre_tokenizer(tmp_path, byte_level):
    path = write_byte_level(tmp_path / "t.gguf", byte_level, "tekken")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre: got 'tekken', expected one of default, gpt-2"):
        load_tokenizer(path)


REFUSED = {
    "no tokenizer": (lambda writer: None, r"tokens is missing"),
    "wordpiece": (
        lambda writer: (writer.add_tokenizer_model("bert"), writer.add_token_list(["a"])),
        r"tokenizer.ggml.model: got 'bert', expected 'gpt2' or 'llama'",
    ),
    "no scores": (
        lambda writer: (writer.add_tokenizer_model("llama"), writer.add_token_list(["a"])),
        r"scores: got 0 numbers, expected one for each of 1 tokens",
    ),
    "broken merge": (
        lambda writer: (
            writer.add_tokenizer_model("gpt2"),
            writer.add_token_list(["a", "b", "ab"]),
            writer.add_token_merges(["ab"]),
        ),
        r"merges: got 'ab', expected two tokens with one space between",
    ),
    "types too short": (
        lambda writer: (
            writer.add_tokenizer_model("gpt2"),
            writer.add_token_list(["a", "b", "ab"]),
            writer.add_token_merges(["a b"]),
            writer.add_token_types([1]),
        ),
        r"token_type: got 1 types, expected one for each of 3 tokens",
    ),
    "bos out of range": (
        lambda writer: (
            writer.add_tokenizer_model("gpt2"),
            writer.add_token_list(["a", "b", "ab"]),
            writer.add_token_merges(["a b"]),
            writer.add_bos_token_id(9),
        ),
        r"bos_token_id: got 9, expected less than 3",
    ),
}


@pytest.mark.parametrize(("metadata", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_built_is_named(tmp_path, metadata, message):
    path = write(tmp_path / "t.gguf", metadata)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


# --- SentencePiece-style vocabularies


@pytest.fixture(scope="module")
def sentencepiece():
    """<unk>, <s>, </s>, 256 byte tokens, then pieces learned from the texts, better scores first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    ascii_only = [text for text in CORPUS if text.isascii()]  # the rest falls back to bytes
    tokenizer.train_from_iterator(ascii_only * 3, trainers.BpeTrainer(vocab_size=250, show_progress=False))
    vocab = tokenizer.get_vocab()
    # and three of one score, where zqj must win over jk
    learned = [*sorted(vocab, key=vocab.__getitem__), "zq", "jk", "zqj"]
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*base, *learned]
    scores = [0.0] * len(base) + [-float(rank // 5) for rank in range(len(learned) - 3)] + [-1e3] * 3
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * len(learned)


def write_sentencepiece(path, sentencepiece, **flags):
    tokens, scores, kinds = sentencepiece

    def metadata(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write(path, metadata)


def test_sentencepiece_text_comes_back(tmp_path, sentencepiece):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "t.gguf", sentencepiece))
    for text in [*TEXTS, *DIGITS]:
        if any(mark in text for mark in ("<", "▁")) or text.startswith((" ", "\u00a0")) or text == "":
            continue  # special tokens are not text, U+2581 is a space, and a leading space becomes the prefix
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert 0 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_unknown_characters_are_bytes(tmp_path, sentencepiece):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "t.gguf", sentencepiece))
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


def test_space_prefix(tmp_path, sentencepiece):
    with_prefix = load_tokenizer(write_sentencepiece(tmp_path / "a.gguf", sentencepiece))
    without = load_tokenizer(write_sentencepiece(tmp_path / "b.gguf", sentencepiece, add_space_prefix=False))
    first = with_prefix.encode("the", add_special_tokens=False), without.encode(" the", add_special_tokens=False)
    assert first[0] == first[1] != without.encode("the", add_special_tokens=False)
    assert without.decode(without.encode("  the"), skip_special_tokens=True) == "  the"


@pytest.mark.oracle
def test_sentencepiece_equals_transformers(tmp_path, sentencepiece):
    pytest.importorskip("torch", reason="transformers reads GGUF tokenizers through torch")
    from transformers import AutoTokenizer

    path = write_sentencepiece(tmp_path / "t.gguf", sentencepiece)
    ours, oracle = load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*TEXTS, *DIGITS]:
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.decode(ids) == oracle.decode(ids)


# --- the embedded model's real vocabulary


@pytest.fixture(scope="module")
def smollm_path():
    path = cache_dir() / "models" / CATALOGUE["smollm2-135m-instruct"].member.rpartition("/")[2]
    if not path.is_file():
        pytest.skip(f"{path} is not there: pagedjax.models.catalogue.resolve('smollm2-135m-instruct') fetches it")
    return path


def test_smollm_chat_prompt(smollm_path):
    tokenizer = load_tokenizer(smollm_path)
    ids = apply_chat_template(tokenizer, [{"role": "user", "content": "What is 12+3?"}])
    text = str(tokenizer.decode(ids))
    assert text.endswith("<|im_start|>user\nWhat is 12+3?<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3  # system, user, assistant
    assert eos_token_ids(tokenizer) == (2,)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  12")) == ["ĠĠ", "1", "2"]


@pytest.mark.oracle
def test_smollm_equals_transformers(smollm_path):
    pytest.importorskip("torch", reason="transformers reads GGUF tokenizers through torch")
    from transformers import AutoTokenizer

    ours = tokenizer_from_gguf(open_gguf(smollm_path))
    oracle = AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)
    for text in TEXTS:
        if any(character.isnumeric() for character in text):
            continue  # split digit by digit here and in SmolLM's own tokenizer, not there
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.decode(ids) == oracle.decode(ids)
    messages = [{"role": "user", "content": "Hi"}]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert apply_chat_template(ours, messages) == expected


# --- chat prompts (B56)

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users here') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"
)
WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "user": 3, "assistant": 4, "hi": 5, "you": 6}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]


def word_tokenizer(template=None, adds_bos=False, **special):
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("template", "writes_bos"),
    [(BOS_TEMPLATE, True), (PLAIN_TEMPLATE, False), ("{{ bos_token }}" + BOS_TEMPLATE, True)],
)
def test_exactly_one_bos(template, writes_bos, adds_bos):
    """From the template, from the tokenizer, or from both; and no EOS behind the prompt."""
    ids = apply_chat_template(word_tokenizer(template, adds_bos), CHAT)
    assert ids == [1] * (writes_bos or adds_bos) + [3, 5, 4, 6]


def test_completions_keep_the_tokenizers_default():
    assert word_tokenizer(adds_bos=True).encode("hi") == [1, 5, 2]
    assert word_tokenizer(adds_bos=False).encode("hi") == [5]


def test_a_bos_inside_the_conversation_stays():
    tokenizer = word_tokenizer(PLAIN_TEMPLATE, adds_bos=True)
    assert apply_chat_template(tokenizer, [{"role": "user", "content": "hi <s> you"}]) == [1, 3, 5, 1, 6]


def test_without_a_bos_token():
    tokenizer = word_tokenizer(PLAIN_TEMPLATE, bos_token=None)
    assert apply_chat_template(tokenizer, CHAT) == [3, 5, 4, 6]


def test_generation_prompt_and_template_argument():
    tokenizer = word_tokenizer(STRICT_TEMPLATE)
    assert apply_chat_template(tokenizer, CHAT[:1]) == [5, 4]
    assert apply_chat_template(tokenizer, CHAT[:1], add_generation_prompt=False) == [5]
    assert apply_chat_template(tokenizer, CHAT[:1], chat_template=PLAIN_TEMPLATE) == [3, 5]
    assert apply_chat_template(tokenizer, CHAT[:1], chat_template="{{ word }}", word="you") == [6]


BAD_CHATS = {
    "no template": (None, CHAT, "no chat template"),
    "role refused": (STRICT_TEMPLATE, CHAT, "the chat template refused these messages: only users here"),
    "content missing": (PLAIN_TEMPLATE, [{"role": "user"}], "the chat template refused these messages"),
    "content null": (PLAIN_TEMPLATE, [{"role": "user", "content": None}], "the chat template refused these messages"),
    "syntax": ("{% for %}", CHAT, "the chat template refused these messages"),
    "empty": (PLAIN_TEMPLATE, [], "messages: got"),
    "no role": (PLAIN_TEMPLATE, [*CHAT, {"content": "hi"}], r"messages\[2\]: got .* expected an object with a role"),
    "role a number": (PLAIN_TEMPLATE, [{"role": 1, "content": "hi"}], r"messages\[0\]"),
}


@pytest.mark.parametrize(("template", "messages", "error"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_bad_chats_are_value_errors(template, messages, error):
    with pytest.raises(ValueError, match=error):
        apply_chat_template(word_tokenizer(template), messages)


# --- tools

TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% if tool.function.parameters %}"
    "{{ tool.function.parameters | tojson }} {% endif %}{% endfor %}"
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }} {% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)
PLAIN_TOOL = {"type": "function", "function": {"name": "you"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "you",
        "description": "Says who.",
        "parameters": {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]},
    },
}


def test_tools_reach_the_template():
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "you", "arguments": {}}}]},
        {"role": "tool", "content": "me"},
    ]
    text = str(tokenizer.decode(apply_chat_template(tokenizer, messages, tools=[TOOL])))
    start, schema, rest = text.partition(json.dumps(TOOL["function"]["parameters"]))
    assert (start, schema != "", rest) == ("you ", True, " user hi assistant you tool me ")
    for none in (None, [], ()):
        text = tokenizer.decode(apply_chat_template(tokenizer, messages, tools=none))
        assert text == "user hi assistant you tool me "


def byte_tokenizer(template):
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def function(**changes):
    return {"type": "function", "function": TOOL["function"] | changes}


BAD_TOOLS = {
    "one, not a list": (TOOL, "tools: got .* expected a list of tools, each a JSON object, or None"),
    "text": ("you", "tools: got 'you', expected a list"),
    "names": (["you"], r"tools\[0\]: got 'you', expected an object"),
    "no type": ([TOOL, {"function": {"name": "you"}}], r"tools\[1\].type: got None, expected 'function'"),
    "another type": ([{"type": "retrieval"}], r"tools\[0\].type: got 'retrieval'"),
    "no function": ([{"type": "function"}], r"tools\[0\].function: got None, expected an object with a name"),
    "no name": ([{"type": "function", "function": {}}], r"tools\[0\].function.name: got None, expected text"),
    "empty name": ([function(name="")], r"tools\[0\].function.name: got '', expected text"),
    "description": ([function(description=1)], r"tools\[0\].function.description: got 1, expected text or none"),
    "schema as text": (
        [function(parameters="{}")],
        r"tools\[0\].function.parameters: got '{}', expected a JSON schema",
    ),
}


@pytest.mark.parametrize(("tools", "message"), BAD_TOOLS.values(), ids=BAD_TOOLS.keys())
def test_bad_tools_are_value_errors(tools, message):
    with pytest.raises(ValueError, match=message):
        apply_chat_template(word_tokenizer(TOOL_TEMPLATE), CHAT, tools=tools)


def test_tools_that_a_template_does_not_show_are_refused():
    with pytest.raises(ValueError, match="tools: got 1, expected none: this chat template does not show them"):
        apply_chat_template(word_tokenizer(PLAIN_TEMPLATE), CHAT, tools=[PLAIN_TOOL])
    with pytest.raises(ValueError, match="the chat template refused these messages: only users here"):
        apply_chat_template(word_tokenizer(STRICT_TEMPLATE), CHAT, tools=[PLAIN_TOOL])


# --- ids that end a text (B56)


@pytest.mark.parametrize(
    ("generation_config", "config_ids", "expected"),
    [
        ({"eos_token_id": [7, 9]}, (7,), (7, 9, 2)),
        ({"eos_token_id": 9}, (7, 2), (9, 7, 2)),
        ({"eos_token_id": None}, (7,), (7, 2)),
        ({}, (), (2,)),
        (None, (2,), (2,)),
    ],
)
def test_eos_union(generation_config, config_ids, expected):
    assert eos_token_ids(word_tokenizer(), config_ids, generation_config) == expected


def test_eos_without_a_tokenizer():
    assert eos_token_ids(None, (7,), {"eos_token_id": [7, 9]}) == (7, 9)
    assert eos_token_ids(word_tokenizer(eos_token=None)) == ()
    with pytest.raises(ValueError, match=r"eos_token_id in generation_config.json: got '</s>'"):
        eos_token_ids(None, (), {"eos_token_id": "</s>"})


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({"eos_token_id": [7, 9]}, (7, 9, 2)), ({"eos_token_id": None}, (7, 2)), (None, (7, 2))],
)
def test_a_folder_gives_the_union(tmp_path, generation_config, expected):
    folder, _ = save_tiny(tmp_path)
    word_tokenizer(BOS_TEMPLATE).save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.eos_token_ids == expected
    assert checkpoint.tokenizer is not None
    assert apply_chat_template(checkpoint.tokenizer, CHAT) == [1, 3, 5, 4, 6]


def test_bos_token_as_an_object(tmp_path):
    """Older tokenizer_config.json files hold special tokens as objects."""
    word_tokenizer(BOS_TEMPLATE, adds_bos=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config["bos_token"] = {"__type": "AddedToken", "content": "<s>", **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token == "<s>"
    assert apply_chat_template(tokenizer, CHAT) == [1, 3, 5, 4, 6]


def test_a_folder_without_a_tokenizer(tmp_path):
    folder, _ = save_tiny(tmp_path, **tiny())
    with pytest.raises(ValueError, match=r"has no tokenizer: expected one of tokenizer.json"):
        load_tokenizer(folder)


def test_torch_is_not_needed(tmp_path, byte_level, monkeypatch):
    """Importing torch anywhere on the way raises."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    tokenizer = load_tokenizer(write_byte_level(tmp_path / "t.gguf", byte_level, "smollm"))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
