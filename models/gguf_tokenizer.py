"""Builds the tokenizer that a GGUF file describes in its metadata.

A GGUF file holds the vocabulary, the merges (or scores) and the special ids, and only names the way text is split
before merging. transformers can do this too, but its path imports torch, and it splits `smollm` text like GPT-2.
"""

from collections.abc import Sequence

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagedjax.models.gguf_loader import metadata_value

# How the vocabularies of these families were learned: the split of their own `tokenizer.json`.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = ("default", "gpt-2", "gpt2")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = (*_GPT2, "smollm", *_LLAMA3, "qwen2")


def tokenizer_from_gguf(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer of an open GGUF file, with its special tokens, BOS rule and chat template.

    `add_bos_token`, when the file does not say, is what llama.cpp takes: true for SentencePiece-style vocabularies
    and Llama 3's, false otherwise. Raises ValueError for an unknown tokenizer model or pre-tokenizer, and when the
    tokens or merges are missing.
    """
    model = metadata_value(reader, "tokenizer.ggml.model")
    pre = metadata_value(reader, "tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata_value(reader, "tokenizer.ggml.tokens", [])
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing in the GGUF file")
    if model == "gpt2":
        backend = _byte_level_bpe(tokens, metadata_value(reader, "tokenizer.ggml.merges", []), pre)
    elif model == "llama":
        scores = metadata_value(reader, "tokenizer.ggml.scores", [])
        backend = _sentencepiece_bpe(tokens, scores, metadata_value(reader, "tokenizer.ggml.add_space_prefix", True))
    else:
        raise ValueError(f"tokenizer.ggml.model: got {model!r}, expected 'gpt2' or 'llama'")
    _add_special_tokens(backend, tokens, metadata_value(reader, "tokenizer.ggml.token_type", []))

    def token_of(key: str) -> str | None:
        token_id = metadata_value(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"tokenizer.ggml.{key}_token_id: got {token_id}, expected less than {len(tokens)}")
        return tokens[token_id]

    add_bos = model == "llama" or pre in _LLAMA3
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding"),
        add_bos_token=metadata_value(reader, "tokenizer.ggml.add_bos_token", add_bos),
        add_eos_token=metadata_value(reader, "tokenizer.ggml.add_eos_token", False),
        chat_template=metadata_value(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    """GPT-2's byte-level BPE with the split that `pre` names."""
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: got {pre!r}, expected one of {', '.join(PRE_TOKENIZERS)}")
    if not merges:
        raise ValueError("tokenizer.ggml.merges is missing in the GGUF file: a gpt2 tokenizer cannot be built without")
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it stands, also where the merges alone would not lead there.
    try:
        model = BPE(vocab=vocab, merges=_split_merges(merges), ignore_merges=pre in _LLAMA3)
    except Exception as error:
        raise ValueError(f"the tokenizer in the GGUF file is broken: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "smollm":  # every digit on its own, then GPT-2's split of what lies between
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    else:
        pattern = Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT)
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as Qwen's own tokenizer.json
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(tokens: Sequence[str], scores: Sequence[float], add_space_prefix: bool) -> Tokenizer:
    """SentencePiece's BPE: spaces are U+2581, unknown characters fall back to byte tokens `<0x..>`."""
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores: got {len(scores)} numbers, expected one for each of {len(tokens)} tokens"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = "<unk>" if "<unk>" in vocab else None
    merges = _merges_from_scores(vocab, scores)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    scheme = "first" if add_space_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list that stands for SentencePiece's rule: any two tokens that join to a token, best score first.

    Equal scores go to the longer left part, then the longer right one, as in transformers.
    """
    merges = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                rank = (-scores[index], -len(left), -len(right), index)
                merges.append((rank, (left, right)))
    return [pair for _, pair in sorted(merges)]


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """ "ab c" -> ("ab", "c"); a token never holds a space, it is spelled Ġ in byte-level vocabularies."""
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ValueError(f"tokenizer.ggml.merges: got {merge!r}, expected two tokens with one space between")
        pairs.append((left, right))
    return pairs


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens become special (matched whole, left out of text); user-defined ones are matched whole."""
    if types and len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type: got {len(types)} types, expected one for each of {len(tokens)} tokens"
        )
    by_type = list(zip(tokens, types, strict=True)) if types else []
    control = [
        AddedToken(token, normalized=False, special=True) for token, kind in by_type if kind == TokenType.CONTROL
    ]
    user = [
        AddedToken(token, normalized=False, special=False) for token, kind in by_type if kind == TokenType.USER_DEFINED
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user)
