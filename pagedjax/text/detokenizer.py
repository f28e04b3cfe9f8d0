"""From token ids to text while they arrive: exact characters, stop strings, a cost per token that does not grow.

The text is the one that `tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)` gives for
all ids together. What one id adds to it is found out once per tokenizer and remembered: a token then costs a dictionary
access and not a decode.
"""

import codecs
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

_UNKNOWN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Text of one completion, token by token.

    The first character that completes one of the stop strings ends the text; if it completes several, the longest
    counts. That rule is the same however the characters are split over tokens. Tokens after the match are not taken.
    Stop strings that the first `min_tokens` tokens complete do not count.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`tokenizer` is one of transformers or of the tokenizers library."""
        self._decoder = _decoder_for(tokenizer, skip_special_tokens)()
        self._stop_strings = tuple(stop_strings)
        self._first_chars = frozenset(stop[0] for stop in self._stop_strings)
        self._min_tokens = min_tokens
        self._min_end = 0  # where in `_held`, or behind it, the text of the first `min_tokens` tokens ends
        self._include_stop_str = include_stop_str
        self._shown: list[str] = []
        self._held = ""  # the end of the text, as long as it may be the beginning of a stop string
        self._finished = False
        self.num_tokens = 0
        """Tokens taken so far, up to and with the one that completed a stop string."""

    @property
    def is_finished(self) -> bool:
        """Whether the text has ended."""
        return self._finished

    @property
    def text(self) -> str:
        """What may be shown so far. It only grows and never ends inside a character or a possible stop string."""
        if len(self._shown) != 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0]

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Adds tokens; returns the stop string that ended the text, or None."""
        assert not self._finished, "the text has ended"
        for token_id in token_ids:
            new = self._decoder.push(token_id)
            self.num_tokens += 1
            if not self._stop_strings:
                if new:
                    self._shown.append(new)
            elif stop := self._search(new):
                return stop
        return None

    def finish(self) -> None:
        """No more tokens will come: shows what was held back, half characters as U+FFFD as a full decode does."""
        if not self._finished:
            self._finished = True
            self._shown.append(self._held + self._decoder.flush())

    def _search(self, new: str) -> str | None:
        """Shows what can no longer be part of a stop string, or ends the text at the one that is complete."""
        self._held += new
        # Whatever a match in the new text began with is held back, so the search never has to look at older text.
        seen = self._held + self._decoder.peek()
        if self.num_tokens <= self._min_tokens:
            self._min_end = len(seen)
        if self._first_chars.isdisjoint(seen):
            begin = len(self._held)
        elif match := self._first_match(seen):
            start, stop = match
            self._shown.append(seen[: start + len(stop)] if self._include_stop_str else seen[:start])
            self._finished = True
            return stop
        else:
            begin = self._begin_of_partial(self._held)
        if begin:
            self._shown.append(self._held[:begin])
            self._held = self._held[begin:]
            self._min_end = max(0, self._min_end - begin)
        return None

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        starts = ((seen.find(stop, max(0, self._min_end - len(stop) + 1)), stop) for stop in self._stop_strings)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(matches)[1:] if matches else None  # the earliest end; of these the earliest start, so the longest

    def _begin_of_partial(self, seen: str) -> int:
        """Where the longest end of `seen` begins that is the beginning of a stop string."""
        for i, char in enumerate(seen):
            if char in self._first_chars and any(stop.startswith(seen[i:]) for stop in self._stop_strings):
                return i
        return len(seen)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What a token adds to a text that has begun: UTF-8, or part of a character; special tokens as written."""
    (known,) = _decoder_for(tokenizer, False).args
    return known.bytes_of(token_id)


@functools.lru_cache(maxsize=16)  # what ids mean is learned once per tokenizer, not once per completion
def _decoder_for(tokenizer: Any, skip_special_tokens: bool) -> "functools.partial[_ByteLevelDecoder | _PieceDecoder]":
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):  # one in plain Python, such as SentencePiece's own
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        decode = functools.partial(tokenizer.decode, **options)
        return functools.partial(_PieceDecoder, _TextOfToken(decode, tokenizer.convert_ids_to_tokens))
    if isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        return functools.partial(_ByteLevelDecoder, _BytesOfToken(backend, skip_special_tokens))
    decode = functools.partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return functools.partial(_PieceDecoder, _TextOfToken(decode, backend.id_to_token))


class _BytesOfToken(dict[int, bytes]):
    """The bytes that a token of a byte-level vocabulary stands for, filled as ids are met."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._id_to_token = backend.id_to_token
        added = backend.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        # GPT-2's alphabet: printable bytes stand for themselves, the others, in order, for the characters from 256 on.
        alphabet = {ord(char) for char in ByteLevel.alphabet()}
        others = [byte for byte in range(256) if byte not in alphabet]
        self._byte_of = {chr(byte): byte for byte in alphabet if byte < 256}
        self._byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}

    def __missing__(self, token_id: int) -> bytes:
        # A padded vocabulary of the model has ids that the tokenizer does not know: they have no text.
        token = "" if token_id in self._skipped else self._id_to_token(token_id) or ""
        in_alphabet = all(char in self._byte_of for char in token)
        # Added tokens may hold any characters; those that do are taken as they are.
        self[token_id] = bytes(self._byte_of[char] for char in token) if in_alphabet else token.encode()
        return self[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        return self[token_id]


class _ByteLevelDecoder:
    """Tokens are bytes, and the text is their UTF-8."""

    def __init__(self, bytes_of: _BytesOfToken) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that is certain now and was not before."""
        return self._utf8.decode(self._bytes_of[token_id])

    def peek(self) -> str:
        """Whole characters that end the text if no token comes, and may turn into others if one does."""
        return ""

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        return self._utf8.decode(b"", final=True)


class _TextOfToken(dict[int, str | None]):
    """The text that a token adds after another one; None if that depends on the tokens around it."""

    def __init__(self, decode: Callable[[list[int]], str], id_to_token: Callable[[int], str | None]) -> None:
        self.decode = decode
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> str | None:
        # Alone a token may lose its leading space or show a continuation mark, after another (itself) it does not.
        alone = self.decode([token_id])
        piece = self.decode([token_id, token_id])[len(alone) :]
        token = self._id_to_token(token_id) or ""
        is_byte = _BYTE_TOKEN.fullmatch(token) is not None and alone != token
        self[token_id] = None if is_byte or _UNKNOWN in alone + piece else piece
        return self[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        if (piece := self[token_id]) is not None:
            return piece.encode()
        token = self._id_to_token(token_id) or ""
        is_byte = _BYTE_TOKEN.fullmatch(token) is not None
        return bytes.fromhex(token[3:5]) if is_byte else self.decode([token_id]).encode()


class _PieceDecoder:
    """Tokens are pieces of text, and some are single bytes, as in SentencePiece.

    One wrong byte turns its whole run of byte tokens into U+FFFD, so a run is certain only when a piece has followed.
    """

    def __init__(self, text_of: _TextOfToken) -> None:
        self._text_of = text_of
        self._before: list[int] = []  # the last piece before the run; empty while there was none
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        piece = self._text_of[token_id]
        if piece is None:
            self._run.append(token_id)
            return ""
        if not piece:  # a skipped special token does not even end a run
            return ""
        text = self.flush()
        if not self._before:
            piece = self._text_of.decode([token_id])
        self._before = [token_id]
        return text + piece

    def peek(self) -> str:
        return self._decode_run().rstrip(_UNKNOWN)  # a wrong or unfinished run ends with it

    def flush(self) -> str:
        text = self._decode_run()
        self._before = self._before or self._run[-1:]
        self._run = []
        return text

    def _decode_run(self) -> str:
        if not self._run:
            return ""
        decode = self._text_of.decode
        return decode(self._before + self._run)[len(decode(self._before)) :]
