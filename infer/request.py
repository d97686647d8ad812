"""What may be asked of a model, told from its config alone: mistakes show before weights are read."""

from collections.abc import Sequence

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError

MIN_CACHE_LENGTH = 64


def check_request(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_drafts: int) -> None:
    """Refuses what `Generator.generate` cannot do.

    Raises:
      UserError: a prompt is empty or holds ids outside the vocabulary, a number is negative, or drafts are
        asked of a model without a head.
    """
    if max_new_tokens < 0:
        raise UserError(f"the number of new tokens must be at least 0, got {max_new_tokens}")
    if num_drafts < 0:
        raise UserError(f"the number of draft tokens must be at least 0, got {num_drafts}")
    if num_drafts and not config.num_mtp_layers:
        raise UserError(
            f"drafting {num_drafts} tokens needs the MTP head, and this model was loaded without one: load a "
            "checkpoint that has mtp.* tensors, not --trunk-only, or decode plainly with --num-draft-tokens 0"
        )
    vocab = config.vocab_size
    for index, prompt in enumerate(prompts):
        where = "the prompt" if len(prompts) == 1 else f"prompt {index}"
        if not len(prompt):
            raise UserError(f"{where} is empty: expected at least one token")
        outside = next((i for i in prompt if not 0 <= i < vocab), None)
        if outside is not None:
            raise UserError(f"{where} holds id {outside}; expected ids from 0 to {vocab - 1}, the vocabulary")


def cache_length_for(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, cache_length: int | None = None
) -> int:
    """The cache length that `Generator.generate` uses: the given one, checked, or else the default for these prompts.

    Raises:
      UserError: the given one is out of range, or a prompt does not fit.
    """
    longest = max(map(len, prompts))
    most = config.max_position_embeddings
    if cache_length is None:
        cache_length = min(bucket(longest + max_new_tokens, MIN_CACHE_LENGTH), most)
    elif not 1 <= cache_length <= most:
        raise UserError(
            f"the cache length must be between 1 and the model's max_position_embeddings {most}, got {cache_length}"
        )
    if longest > cache_length:
        raise UserError(f"a prompt of {longest} tokens does not fit into the cache of {cache_length} tokens")
    return cache_length


def bucket(size: int, smallest: int) -> int:
    """The smallest of `smallest`, 2 `smallest`, 4 `smallest`, ... that is at least `size`."""
    found = smallest
    while found < size:
        found *= 2
    return found
