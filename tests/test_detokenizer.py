"""Text arrives token by token and is still exactly what decoding everything at once gives."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from pagedjax.text.detokenizer import Detokenizer

UNKNOWN = "\ufffd"


def byte_level_spelling(data: bytes) -> str:
    """How a byte-level vocabulary writes bytes: the pre-tokenizer knows it for whole characters, here for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in data)


def byte_level_tokenizer(decoder=None) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; then pieces with whole and with half characters, then added tokens."""
    emoji = "🙂".encode()
    pieces = [b"to the k", b"la", b"rin", b"et", b" now", b"xENDy", b"ab", b"abc", b"abcd", "é漢".encode()]
    pieces += [emoji[:2], emoji[2:], b" " + emoji[:3], emoji[3:] + b"a", UNKNOWN.encode(), b"\xff\xfe", b" "]
    vocab = {byte_level_spelling(bytes([byte])): byte for byte in range(256)}
    for piece in pieces:
        vocab.setdefault(byte_level_spelling(piece), len(vocab))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["added one", "été", "漢 added"])
    return tokenizer


def sentencepiece_tokenizer() -> tokenizers.Tokenizer:
    """As converted from SentencePiece: ▁ for a space, single bytes as a fallback, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "▁to",
        "▁the",
        "▁k",
        "la",
        "rin",
        "et",
        "▁now",
        "▁▁",
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "abcd",
        "é",
        "漢▁",
    ]
    pieces += [UNKNOWN, "<0x", "<0xZZ>"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["▁added"])
    return tokenizer


def wordpiece_tokenizer(decoder=None) -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "[CLS]", "the", "a", "##a", "##b", "abc", "##abc", ".", "é", "▁x", "▁", "x▁y"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoder or decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]"])
    return tokenizer


class PlainPython:
    """A tokenizer without the Rust library behind it, as seen from the methods that transformers promises."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.id_to_token

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace(" a", "a") if clean_up_tokenization_spaces else text


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
TOKENIZERS = {
    "byte-level": BYTE_LEVEL,
    "byte-level in a sequence": byte_level_tokenizer(decoders.Sequence([decoders.ByteLevel()])),
    "sentencepiece": SENTENCEPIECE,
    "wordpiece": wordpiece_tokenizer(),
    "metaspace": wordpiece_tokenizer(decoders.Metaspace()),
    "transformers byte-level": PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL),
    "transformers sentencepiece": PreTrainedTokenizerFast(tokenizer_object=SENTENCEPIECE),
    "plain Python": PlainPython(SENTENCEPIECE),
}
SIZES = {"byte-level": 280, "sentencepiece": 282, "wordpiece": 15, "metaspace": 15}  # a few ids more than they know

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def decode(tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return tokenizer.decode(list(ids), skip_special_tokens=skip)
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def random_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, with single bytes of real text mixed in so that half characters often become whole."""
    size = next((size for key, size in SIZES.items() if key in name), SIZES["sentencepiece"])
    offset = 0 if "byte-level" in name else 3
    any_id = st.integers(0, size - 1).map(lambda i: [i])
    if size < 256:
        return st.lists(any_id, max_size=24).map(flat)
    text = st.text("aé漢🙂ท\u200d " + UNKNOWN, min_size=1, max_size=2).map(lambda s: [offset + b for b in s.encode()])
    late = st.integers(256, size - 1).map(lambda i: [i])
    return st.lists(any_id | text | late, max_size=24).map(flat)


def earliest_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The rule, word by word: the first character that completes one; of those, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def naive(tokenizer, ids, stops=(), include=False, skip=True) -> tuple[str, str | None, int]:
    """Decodes everything after every token: (text, stop string, number of tokens)."""
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count], skip)
        if match := earliest_match(text, stops):
            start, stop = match
            return text[: start + len(stop) * include], stop, count
    return decode(tokenizer, ids, skip), None, len(ids)


def stream(tokenizer, chunks, stops=(), include=False, skip=True) -> tuple[list[str], str | None, int]:
    """The text after every chunk and at the end, with the promises of `text` checked: (texts, stop, tokens taken)."""
    detokenizer = Detokenizer(tokenizer, stops, include_stop_str=include, skip_special_tokens=skip)
    texts, stop = [detokenizer.text], None
    for chunk in chunks:
        stop = detokenizer.append(chunk)
        texts.append(detokenizer.text)
        if stop is not None:
            break
        so_far = decode(tokenizer, flat(chunks[: len(texts) - 1]), skip)
        held = max((k for s in stops for k in range(1, len(s)) if so_far.endswith(s[:k])), default=0)
        assert len(detokenizer.text) <= len(so_far) - held
    detokenizer.finish()
    texts.append(detokenizer.text)
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    return texts, stop, detokenizer.num_tokens


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[i] for i in ids]


def byte_ids(text: str | bytes) -> list[int]:
    return list(text if isinstance(text, bytes) else text.encode())


def pieces(*texts: str) -> list[list[int]]:
    vocab = BYTE_LEVEL.get_vocab()
    return [[vocab[byte_level_spelling(text.encode())]] for text in texts]


# --- characters ---


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_any_ids_give_the_text_of_a_full_decode(name, data, skip):
    tokenizer, ids = TOKENIZERS[name], data.draw(random_ids(name))
    texts, stop, num_tokens = stream(tokenizer, one_by_one(ids), skip=skip)
    assert (texts[-1], stop, num_tokens) == (decode(tokenizer, ids, skip), None, len(ids))


@given(data=st.binary(max_size=40))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(data):
    assert stream(BYTE_LEVEL, one_by_one(data))[0][-1] == BYTE_LEVEL.decode(list(data))


@given(ids=st.lists(st.integers(0, 255), max_size=12) | st.text(max_size=6).map(byte_ids))
def test_byte_level_text_is_shown_as_soon_as_a_character_is_whole(ids):
    texts, _, _ = stream(BYTE_LEVEL, one_by_one(ids))
    for count, text in enumerate(texts[:-1]):
        assert text.startswith(BYTE_LEVEL.decode(ids[:count]).rstrip(UNKNOWN))


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_characters_split_over_tokens(name):
    ids = byte_ids("a🙂é漢ท🏳️‍🌈 z")
    if name == "sentencepiece":
        ids = [3 + byte for byte in ids]
    texts, _, _ = stream(TOKENIZERS[name], one_by_one(ids))
    assert texts[-1] == "a🙂é漢ท🏳️‍🌈 z"
    assert not any(UNKNOWN in text for text in texts)


def test_completions_do_not_disturb_each_other():
    ids = [byte_ids("a🙂é漢"), byte_ids("🏳️‍🌈ท z")]
    detokenizers = [Detokenizer(BYTE_LEVEL) for _ in ids]
    for pair in zip(*ids, strict=False):
        for detokenizer, token_id in zip(detokenizers, pair, strict=True):
            detokenizer.append([token_id])
            assert UNKNOWN not in detokenizer.text
    assert detokenizers[0].text == "a🙂é漢"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_output_cut_inside_an_emoji(name, kept):
    offset = 0 if name == "byte-level" else 3
    ids = [offset + byte for byte in b"a" + "🙂".encode()[:kept]]
    detokenizer = Detokenizer(TOKENIZERS[name])
    detokenizer.append(ids)
    assert UNKNOWN not in detokenizer.text
    detokenizer.finish()
    assert detokenizer.text == decode(TOKENIZERS[name], ids)
    assert detokenizer.text.startswith("a" if offset == 0 else UNKNOWN)
    assert UNKNOWN in detokenizer.text


def test_an_invalid_byte_is_shown_once_it_is_known_to_be_invalid():
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.append([0xE2])
    assert detokenizer.text == ""
    detokenizer.append(byte_ids("a"))
    assert detokenizer.text == UNKNOWN + "a"


def test_a_replacement_character_from_the_model_is_text():
    detokenizer = Detokenizer(BYTE_LEVEL)
    detokenizer.append(byte_ids(UNKNOWN))
    assert detokenizer.text == UNKNOWN


def test_one_wrong_byte_changes_its_whole_run_of_byte_tokens():
    ids = [3 + byte for byte in "é".encode() + b"\xff"] + [SENTENCEPIECE.get_vocab()["a"]]
    assert stream(SENTENCEPIECE, one_by_one(ids))[0] == ["", "", "", "", UNKNOWN * 3 + "a", UNKNOWN * 3 + "a"]


def test_special_tokens_are_left_out_or_kept():
    vocab = BYTE_LEVEL.get_vocab()
    ids = [vocab["<s>"], *byte_ids("a"), vocab["</s>"]]
    assert stream(BYTE_LEVEL, [ids])[0][-1] == "a"
    assert stream(BYTE_LEVEL, [ids], skip=False)[0][-1] == "<s>a</s>"


def test_finish_twice_and_nothing_at_all():
    detokenizer = Detokenizer(BYTE_LEVEL, ["stop"])
    detokenizer.append([])
    detokenizer.finish()
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.num_tokens) == ("", 0)


# --- stop strings ---

stop_lists = st.lists(st.text("abcé漢🙂 ", min_size=1, max_size=4), max_size=4)


@every_tokenizer
@given(data=st.data(), stops=stop_lists, include=st.booleans(), skip=st.booleans())
def test_any_ids_and_stop_strings_end_where_the_naive_search_ends(name, data, stops, include, skip):
    tokenizer, ids = TOKENIZERS[name], data.draw(random_ids(name))
    texts, stop, num_tokens = stream(tokenizer, one_by_one(ids), stops, include, skip)
    assert (texts[-1], stop, num_tokens) == naive(tokenizer, ids, stops, include, skip)


@given(
    text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), data=st.data()
)
def test_how_the_text_is_split_over_tokens_does_not_matter(text, stops, data):
    ids = byte_ids(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    chunks = [ids[start:end] for start, end in itertools.pairwise(cuts)]
    texts, stop, num_tokens = stream(BYTE_LEVEL, chunks, stops)
    assert (texts[-1], stop, num_tokens) == naive(BYTE_LEVEL, ids, stops)


def test_merged_tokens_stop_where_single_characters_do():
    for stops in (["ab", "abc"], ["bc", "abcd"], ["d", "abcd"], ["abcd", "c"]):
        whole = stream(BYTE_LEVEL, pieces("abcd"), stops)
        single = stream(BYTE_LEVEL, one_by_one(byte_ids("abcd")), stops)
        assert whole[0][-1] == single[0][-1]
        assert whole[1] == single[1]


def test_stop_string_over_several_tokens():
    texts, stop, num_tokens = stream(BYTE_LEVEL, pieces("to the k", "la", "rin", "et", " now"), ["larinet"])
    assert texts == ["", "to the k", "to the k", "to the k", "to the k", "to the k"]
    assert (stop, num_tokens) == ("larinet", 4)


def test_what_was_held_back_is_shown_when_the_output_ends():
    texts, stop, _ = stream(BYTE_LEVEL, pieces("to the k", "la"), ["larinet"])
    assert (texts, stop) == (["", "to the k", "to the k", "to the kla"], None)


def test_what_was_held_back_is_shown_when_it_goes_on_otherwise():
    texts, _, _ = stream(BYTE_LEVEL, pieces("to the k", "la", " now", "la"), ["larinet"])
    assert texts == ["", "to the k", "to the k", "to the kla now", "to the kla now", "to the kla nowla"]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabcd", ["ab", "abc"], ("x", "ab")),
        ("xabcd", ["abc", "ab"], ("x", "ab")),
        ("xabcd", ["bc", "abcd"], ("xa", "bc")),
        ("xabcd", ["cd", "abcd"], ("x", "abcd")),  # complete at the same character: the longest
        ("abab!", ["abab!", "b!"], ("", "abab!")),
        ("aab", ["ab"], ("a", "ab")),
        ("abd abc", ["abc"], ("abd ", "abc")),
        ("a漢🙂b", ["漢🙂"], ("a", "漢🙂")),
        ("no match", ["matches", "x"], ("no match", None)),
        ("y" * 50 + "x" * 250, ["x" * 200], ("y" * 50, "x" * 200)),
    ],
)
def test_which_stop_string_wins(text, stops, expected):
    texts, stop, _ = stream(BYTE_LEVEL, one_by_one(byte_ids(text)), stops)
    assert (texts[-1], stop) == expected
    with_stop, _, _ = stream(BYTE_LEVEL, one_by_one(byte_ids(text)), stops, include=True)
    assert with_stop[-1] == expected[0] + (stop or "")


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xEND")])
def test_stop_string_inside_one_token(include, expected):
    assert stream(BYTE_LEVEL, pieces("xENDy"), ["END"], include) == (["", expected, expected], "END", 1)


def test_tokens_after_the_match_are_not_taken():
    detokenizer = Detokenizer(BYTE_LEVEL, ["END"])
    assert detokenizer.append([*byte_ids("aEND"), *byte_ids("more")]) == "END"
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 4)


def test_an_emoji_of_byte_tokens_stops_at_its_last_byte():
    ids = [SENTENCEPIECE.get_vocab()["a"], *(3 + byte for byte in "🙂".encode()), SENTENCEPIECE.get_vocab()["b"]]
    assert stream(SENTENCEPIECE, one_by_one(ids), ["🙂"])[1:] == ("🙂", 5)


def test_no_more_is_held_back_than_may_begin_a_stop_string():
    detokenizer = Detokenizer(BYTE_LEVEL, ["aab", "xyz"])
    shown = []
    for token_id in byte_ids("aaaxyab"):
        detokenizer.append([token_id])
        shown.append(detokenizer.text)
    assert shown == ["", "", "a", "aaa", "aaa", "aaaxy", "aaaxyab"]


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
    include=st.booleans(),
)
def test_stop_strings_that_the_first_tokens_complete_do_not_count(text, stops, min_tokens, include):
    detokenizer = Detokenizer(BYTE_LEVEL, stops, min_tokens=min_tokens, include_stop_str=include)
    stop = detokenizer.append(byte_ids(text))
    detokenizer.finish()
    ends = range(min_tokens + 1, len(text) + 1)  # a character is a token here
    matches = [(end, max(found, key=len)) for end in ends if (found := [s for s in stops if text[:end].endswith(s)])]
    end, expected = matches[0] if matches else (len(text), None)
    assert (stop, detokenizer.num_tokens) == (expected, end)
    assert detokenizer.text == text[: end if include or expected is None else end - len(expected)]


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(4, ("a", "🙂", 5)), (5, ("a", "🙂b", 6)), (6, ("a🙂b", None, 6))]
)
def test_a_stop_string_may_begin_before_min_tokens(min_tokens, expected):
    ids = [SENTENCEPIECE.get_vocab()["a"], *(3 + byte for byte in "🙂".encode()), SENTENCEPIECE.get_vocab()["b"]]
    detokenizer = Detokenizer(SENTENCEPIECE, ["🙂", "🙂b"], min_tokens=min_tokens)
    stop = detokenizer.append(ids)
    detokenizer.finish()
    assert (detokenizer.text, stop, detokenizer.num_tokens) == expected


# --- cost ---


def test_a_token_costs_the_same_after_many():
    """Also the worst case for windows: nothing but replacement characters, which look like half characters."""
    detokenizer = Detokenizer(BYTE_LEVEL, ["never"])
    chunk = pieces(UNKNOWN)[0] * 200

    def num_calls() -> int:
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        detokenizer.append(chunk)
        sys.setprofile(None)
        return calls

    detokenizer.append(chunk)
    early = num_calls()
    detokenizer.append(byte_ids("word ") * 20_000)
    assert num_calls() <= early
