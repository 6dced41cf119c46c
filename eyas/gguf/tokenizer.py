"""tokenizer.json from a GGUF file's metadata: byte-level BPE and SentencePiece's BPE.

A file holds the vocabulary, but only the name of the rule that cuts words (WORD_SPLITS).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from eyas.errors import CorruptError, EyasError, MismatchError
from eyas.gguf.file import DAMAGED, GgufFile

# `tokenizer.ggml.token_type`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Expressions of the models' own tokenizer.json files; GPT-2's is built into ByteLevel.
GPT2 = ""
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT_4O.replace(_ENDING, "").replace(r"\p{N}{1,3}", r"\p{N}")
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How byte-level BPE cuts a text before it merges (`tokenizer.ggml.pre`)."""

    words: str
    digits_apart: bool = False
    whole_words: bool = False  # a word that is a token is never merged from its parts
    composes: bool = False  # accents are composed first (NFC)
    adds_bos: bool = False  # where the file does not say, as llama.cpp


WORD_SPLITS = {
    "gpt-2": WordSplit(GPT2),
    "smollm": WordSplit(GPT2, digits_apart=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2"),
        WordSplit(LLAMA_3, whole_words=True, adds_bos=True),
    ),
    "glm4": WordSplit(LLAMA_3, whole_words=True),
    "dbrx": WordSplit(LLAMA_3),
    "smaug-bpe": WordSplit(LLAMA_3),
    **dict.fromkeys(("gpt-4o", "llama4"), WordSplit(GPT_4O)),
    "refact": WordSplit(GPT2, digits_apart=True),
    "exaone4": WordSplit(GPT2),
    "seed-coder": WordSplit(QWEN_2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")),
    "qwen2": WordSplit(QWEN_2, composes=True),
    "tekken": WordSplit(TEKKEN, whole_words=True, adds_bos=True),
}
# Phi-3's added tokens strip the blanks after them, but for these; no file says so.
PHI_3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_of(file: GgufFile, ends: Collection[int] = ()) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json. ends: tokens that are control tokens whatever their
    type in the file. Raises MismatchError, CorruptError.
    """
    tokens, kinds = file.of_tokenizer("tokens"), file.of_tokenizer("token_type")
    if not tokens or not kinds or len(tokens) != len(kinds):
        raise CorruptError(f"{file.path} holds no whole vocabulary", DAMAGED)
    model = file.of_tokenizer("model")
    if model not in ("gpt2", "llama"):
        raise MismatchError(
            f"{file.path} has a tokenizer of the kind {model!r}",
            "eyas reads byte-level BPE (gpt2) and SentencePiece BPE (llama)",
        )
    try:
        tokenizer = (
            byte_level(file, tokens) if model == "gpt2" else sentence_piece(file, tokens, kinds)
        )
    except EyasError:
        raise
    except Exception as error:  # `tokenizers` raises it for a merge of unknown tokens
        raise CorruptError(f"{file.path} holds no whole tokenizer: {error}", DAMAGED) from error
    kinds = [CONTROL if number in ends else kind for number, kind in enumerate(kinds)]
    takes_blanks = file.architecture == "phi3" and model == "llama"
    for kind in (CONTROL, USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(
                    text,
                    special=kind == CONTROL,
                    normalized=False,
                    rstrip=takes_blanks and text not in PHI_3_KEEPS_BLANKS,
                )
                for text, found in zip(tokens, kinds, strict=True)
                if found == kind
            ]
        )
    named = named_tokens(file)
    split = WORD_SPLITS.get(file.of_tokenizer("pre"))
    usual = model == "llama" or (split is not None and split.adds_bos)
    if "bos_token" in named and file.of_tokenizer("add_bos_token", usual):
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.of_model("context_length"),
        **named,
    }


def named_tokens(file: GgufFile) -> dict[str, str]:
    """The texts of the tokens with a role, by tokenizer_config.json's names."""
    tokens = file.of_tokenizer("tokens") or ()
    return {
        f"{role}_token": tokens[number]
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (number := file.of_tokenizer(f"{key}_token_id")) is not None and number < len(tokens)
    }


def byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen). Raises MismatchError, CorruptError."""
    name = file.of_tokenizer("pre")
    if name not in WORD_SPLITS:
        raise MismatchError(
            f"{file.path} cuts words by {name!r}, whose rule eyas does not have",
            f"known: {', '.join(WORD_SPLITS)}; a file without a name is older than they are: "
            "convert the model again",
        )
    split = WORD_SPLITS[name]
    merges = [tuple(pair.split(" ", 1)) for pair in file.of_tokenizer("merges", ())]
    if not merges:
        raise CorruptError(f"{file.path} holds no tokenizer.ggml.merges", DAMAGED)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(tokens)},
            merges=merges,
            ignore_merges=split.whole_words,
        )
    )
    cuts: list[Any] = [pre.Digits(individual_digits=True)] if split.digits_apart else []
    if split.words:
        cuts.append(pre.Split(Regex(split.words), behavior="isolated"))
    cuts.append(pre.ByteLevel(add_prefix_space=False, use_regex=not split.words))
    tokenizer.pre_tokenizer = pre.Sequence(cuts)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """SentencePiece's BPE with bytes for unknown characters (Llama 2, Mistral). Raises
    CorruptError.
    """
    vocabulary = {text: number for number, text in enumerate(tokens)}
    scores = file.of_tokenizer("scores")
    if not scores or len(scores) != len(tokens):
        raise CorruptError(f"{file.path} holds no scores of its tokens", DAMAGED)
    ranked = {
        text: score
        for text, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == NORMAL
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_by_score(ranked, vocabulary),
            unk_token=tokens[file.of_tokenizer("unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.of_tokenizer("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def merges_by_score(
    scores: Mapping[str, float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece's merges: any two neighbours whose union is a token, by the union's score."""
    pairs = [
        (-score, vocabulary[text[:at]], text[:at], text[at:])
        for text, score in scores.items()
        for at in range(1, len(text))
        if text[:at] in vocabulary and text[at:] in vocabulary
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]
