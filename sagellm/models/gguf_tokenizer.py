"""From the vocabulary of a GGUF file to tokenizer.json. Token ids equal llama.cpp's (`llama-vocab.cpp`)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.models.base import ModelError
from sagellm.models.gguf_file import GGUFFile, shortest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["KINDS", "write_tokenizer"]

CONTROL, USER_DEFINED = 3, 4  # token types of llama.cpp; the text of both is never split
SPACE = "▁"  # in place of a space in vocabularies of SentencePiece

# How text is cut before merges apply, by `tokenizer.ggml.pre`: first pattern first, each on the pieces that are left.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"  # as llama.cpp has them, not as the models' makers


def _cased(contractions: str, digits: str) -> str:
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
    first = "|".join(word + contractions for word in words)
    return rf"{first}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_DIGIT = r"\p{N}"
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_LLAMA3.replace("{1,3}", ""),)),
    "tekken": (_cased("", ""),),
    "gpt-4o": (_cased(_CONTRACTIONS + "?", "{1,3}"),),
}
KINDS = tuple(_PATTERNS)
# Names in generation_config.json and in the file.
SAMPLING = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
# A piece that is a token is not built by merges.
_WHOLE_PIECES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_ADD_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # where the file does not say


def write_tokenizer(file: GGUFFile, folder: Path, longest: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    Args:
        longest: tokens of context.

    Raises:
        ModelError: a kind of tokenizer that cannot be converted, or one that does not fit the embedding.
    """
    kind, tokens = file.need("tokenizer.ggml.model"), file.need("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{file.path} has a tokenizer of kind {kind!r}; allowed are gpt2 (byte-level BPE) and llama.")
    rows = int(file.tensors["token_embd.weight"].shape[1])
    if len(tokens) > rows:
        raise ModelError(f"{file.path} has a tokenizer of {len(tokens)} tokens and an embedding of only {rows}.")
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentence_pieces(file, tokens)
    _add_special(file, tokenizer, tokens)
    special = _special_tokens(file, tokens)
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = kind == "llama" or file.get("tokenizer.ggml.pre") in _ADD_BOS
    if add_bos and "bos_token" in special:
        _prepend(tokenizer, special["bos_token"])
    # `Tokenizer.save` raises no OSError if the disk is full.
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    # Tokens that are left out of the text of answers, beside those that have a name.
    types = file.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    config["additional_special_tokens"] = [token for token in control if token not in special.values()]
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=1))
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(number for number in ends if number is not None))
    generation = {"bos_token_id": file.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends}
    for name, key in SAMPLING.items():
        if (value := file.get(f"general.sampling.{key}")) is not None:
            generation[name] = shortest(value) if isinstance(value, float) else value
    _write(folder / "generation_config.json", json.dumps(generation, indent=1))


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _byte_level(file: GGUFFile, tokens: list[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = file.get("tokenizer.ggml.pre", "missing")
    if pre not in _PATTERNS:
        raise ModelError(
            f"{file.path} cuts text by the rules {pre!r} (tokenizer.ggml.pre), which are unknown here; known are "
            f"{', '.join(sorted(_PATTERNS))}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_PIECES)
    except Exception as error:
        raise file.damaged(f"its merges do not fit its tokens: {error}") from None
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(file: GGUFFile, tokens: list[str]) -> "Tokenizer":
    """Pairs merge by the score of the token that they make, as in SentencePiece's BPE."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, types = file.need("tokenizer.ggml.scores"), file.need("tokenizer.ggml.token_type")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    whole = {CONTROL, USER_DEFINED, 2, 6}  # unknown, bytes: never made by a merge
    parts = {token for token, kind in zip(tokens, types, strict=True) if kind not in whole}
    ranked = []
    for token in parts:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                ranked.append((-scores[vocabulary[token]], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary, merges=[merge[3:] for merge in ranked], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _add_special(file: GGUFFile, tokenizer: "Tokenizer", tokens: list[str]) -> None:
    from tokenizers import AddedToken

    types = file.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Map the names of special tokens in transformers to their texts."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in names.items():
        number = file.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            continue
        if not 0 <= number < len(tokens):
            raise file.damaged(f"tokenizer.ggml.{key}_token_id is {number}, with {len(tokens)} tokens")
        found[name] = tokens[number]
    return found


def _prepend(tokenizer: "Tokenizer", bos: str) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
