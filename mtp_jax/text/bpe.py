"""Training a small byte-level BPE in the published form, so that published chat templates work on it."""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mtp_jax.errors import UserError
from mtp_jax.text.chat_template import ChatTemplate
from mtp_jax.text.tokenizer import DOCUMENT_END, Tokenizer

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The published Qwen3.5 rule for cutting text into words; no merge crosses a cut."""

SPECIAL_TOKENS = (
    DOCUMENT_END,
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
"""The published Qwen3.5 special tokens in order of their ids, which are the last ones of the vocabulary."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The chat template that a tokenizer trained here is saved with."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def with_published_splitting(model: models.BPE) -> tokenizers.Tokenizer:
    """A tokenizer around a BPE model: NFC, the published cuts, byte level."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from texts; the same texts give the same tokenizer.

    Ids: the 256 bytes, then the merges, most frequent first, then the special tokens.

    Args:
      vocab_size: ids in all. Fewer if the texts are too small for so many merges.

    Raises:
      UserError: if vocab_size leaves no room for the bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens), got {vocab_size}"
        )
    backend = with_published_splitting(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    add_special_tokens(backend)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": DOCUMENT_END,
        "pad_token": DOCUMENT_END,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend, config, {"default": ChatTemplate(CHATML, "the built-in chat template")})


def add_special_tokens(backend: tokenizers.Tokenizer) -> None:
    """Appends the published special tokens.

    Those that are markup of a reply (`<think>`) are not `special`, as published: they stay when special
    tokens are dropped from a text.
    """
    for token in SPECIAL_TOKENS:
        markup = not token.startswith("<|")
        backend.add_tokens([AddedToken(token, normalized=False, special=not markup)])
