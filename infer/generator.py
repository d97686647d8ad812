"""Prompts in, generations out: shape buckets, compiled programs kept per shape, statistics."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from infer.request import bucket, cache_length_for, check_request
from infer.speculative import (
    LENGTH,
    STOP,
    DecodeCarry,
    Drafter,
    Limits,
    Statistics,
    check_can_draft,
    decode,
    draft_with_head,
    next_token_logits,
    prefill,
)
from mtp_jax.hf import load_checkpoint
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer, end_ids

FINISH_REASONS = {STOP: "stop", LENGTH: "length"}
MIN_PROMPT_WIDTH = 16
MIN_MAX_DRAFTS = 7  # calls with any J up to it share their buffers' shapes


@dataclass(frozen=True)
class Generation:
    """What one prompt gave.

    Attributes:
      tokens: new ids, with the end id that stopped the row.
      from_draft: for each token whether it was an accepted draft.
      text: the tokens' text without the end id; None without a tokenizer.
      finish_reason: `stop` (an end id) or `length` (the token limit or the cache).
      rounds: verifications while the row was live; prefill, which yields the first token, is not one.
      drafted: drafts verified that could have been emitted.
      accepted: drafts emitted.
      accepted_per_position: of length J, how often the draft at that position was emitted.
      seconds: prefill to last token of the whole batch, without loading and compiling.
      compile_seconds: spent on compiling for this call.
    """

    tokens: list[int]
    from_draft: list[bool]
    text: str | None
    finish_reason: str
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    seconds: float
    compile_seconds: float

    @property
    def tokens_per_round(self) -> float | None:
        """(tokens - 1) / rounds, since prefill yields the first; None at 0 rounds."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this row over the seconds of the batch."""
        return len(self.tokens) / self.seconds

    def record(self) -> dict[str, Any]:
        """The generation as the command lines give it in JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_per_position": self.accepted_per_position,
            "tokens_per_round": self.tokens_per_round,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "compile_seconds": self.compile_seconds,
        }


class Generator:
    """A model ready to decode. Compiled programs are kept, so calls with the same buckets compile once.

    Attributes:
      model: static description; its dtype is that of the matrix products.
      params: on the device.
      tokenizer: None if there is none; then nothing is masked and generations have no text.
      end_ids: an emitted one ends its row.
    """

    def __init__(
        self,
        model: MTPModel,
        params: PyTree,
        tokenizer: Tokenizer | None = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        self.model = model
        self.params = jax.device_put(params)
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self._programs: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def from_checkpoint(cls, folder: Path, *, dtype: jnp.dtype = jnp.float32, trunk_only: bool = False) -> "Generator":
        """Loads a published checkpoint, its tokenizer (if it has one) and its end ids.

        Args:
          trunk_only: leave the MTP head out on purpose; then only J = 0 is possible.

        Raises:
          UserError: something in the folder is missing or wrong.
        """
        checkpoint = load_checkpoint(folder, trunk_only=trunk_only, dtype=dtype)
        tokenizer = Tokenizer.from_folder(folder)
        model = MTPModel(checkpoint.config, dtype)
        return cls(model, checkpoint.params, tokenizer, end_ids(folder, tokenizer))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_draft_tokens: int,
        *,
        cache_length: int | None = None,
        drafter: Drafter = draft_with_head,
    ) -> list[Generation]:
        """Continues each prompt greedily; the tokens do not depend on `num_draft_tokens` (in float32).

        Args:
          prompts: ids; rows may differ in length.
          max_new_tokens: a row's limit, never exceeded.
          num_draft_tokens: J, drafts a round; 0 is plain decoding.
          cache_length: most tokens of a row, prompt included; a full cache ends the row with `length`. By
            default the smallest bucket that holds the longest prompt and its new tokens, at most the model's
            `max_position_embeddings`.
          drafter: static; see `infer.speculative.Drafter`.

        Raises:
          UserError: a prompt is empty, too long or holds ids outside the vocabulary, a number is out of
            range, or J > 0 without a head.
        """
        config = self.model.config
        check_request(config, prompts, max_new_tokens, num_draft_tokens)
        if not prompts:
            return []
        cache_length = cache_length_for(config, prompts, max_new_tokens, cache_length)
        carry, seconds, compile_seconds = self._run(prompts, max_new_tokens, num_draft_tokens, cache_length, drafter)
        # Everything but the caches, in one transfer.
        host = jax.device_get((carry.num_new, carry.finish, carry.tokens, carry.from_draft, carry.statistics))
        return [
            self._generation(jax.tree.map(lambda x, row=row: x[row], host), num_draft_tokens, seconds, compile_seconds)
            for row in range(len(prompts))
        ]

    def next_logits(
        self, prompt: Sequence[int], num_new: int, *, cache_length: int | None = None
    ) -> Float[np.ndarray, " vocab"]:
        """The trunk's logits after the prompt and its first `num_new` plain greedy tokens, on plain decoding's path.

        Not masked by the tokenizer's length.
        """
        check_request(self.model.config, [prompt], num_new, 0)
        cache_length = cache_length_for(self.model.config, [prompt], num_new, cache_length)
        if num_new:
            carry, *_ = self._run([prompt], num_new, 0, cache_length, draft_with_head)
        else:
            # The prompt's last token takes the place of the newest token, unread by the trunk.
            carry, *_ = self._run([prompt[:-1]], 0, 0, cache_length, draft_with_head)
            carry = carry._replace(last=jnp.asarray(prompt[-1:], jnp.int32))
        with self._precision():
            return np.asarray(next_token_logits(self.model, self.params, carry))[0]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_drafts: int,
        cache_length: int,
        drafter: Drafter,
    ) -> tuple[DecodeCarry, float, float]:
        """Prefill and decode; the final carry, seconds without and seconds spent compiling."""
        max_drafts = max(MIN_MAX_DRAFTS, num_drafts)
        # A round writes J + 1 slots past what a row holds, and a write past the end would land on good slots.
        num_slots = cache_length + max_drafts + 1
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        width = min(bucket(int(lengths.max()), MIN_PROMPT_WIDTH), num_slots)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        limits = Limits(
            max_new=jnp.asarray(np.minimum(min(max_new_tokens, cache_length), cache_length - lengths), jnp.int32),
            end_ids=jnp.asarray(_padded(sorted(self.end_ids))),
            num_ids=jnp.asarray(self._num_ids, jnp.int32),
        )

        shapes = (len(prompts), width, num_slots, max_drafts, len(limits.end_ids), num_drafts > 0)
        started = time.perf_counter()
        with self._precision():
            read_prompts, run_rounds = self._compiled(shapes, tokens, lengths, limits, num_drafts, drafter)
        compile_seconds = time.perf_counter() - started

        started = time.perf_counter()
        carry = read_prompts(self.params, tokens, lengths, limits)
        if num_drafts:
            check_can_draft(carry)
        carry = jax.block_until_ready(run_rounds(self.params, carry))
        return carry, time.perf_counter() - started, compile_seconds

    def _compiled(
        self,
        shapes: tuple[int | bool, ...],
        tokens: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, " B"],
        limits: Limits,
        num_drafts: int,
        drafter: Drafter,
    ) -> tuple[Callable[..., DecodeCarry], Callable[..., DecodeCarry]]:
        """The two programs for these shapes: one reads prompts, the other runs rounds. Kept once compiled."""
        _, _, num_slots, max_drafts, _, with_head = shapes
        if (key := ("prefill", *shapes)) not in self._programs:
            lowered = prefill.lower(
                self.model,
                self.params,
                tokens,
                lengths,
                limits,
                num_slots=num_slots,
                max_drafts=max_drafts,
                with_head=with_head,
            )
            self._programs[key] = lowered.compile(), lowered.out_info
        read_prompts, carry_shapes = self._programs[key]
        # The prompts' width is not among the shapes of the loop.
        if (key := ("decode", shapes[0], *shapes[2:], num_drafts, drafter)) not in self._programs:
            lowered = decode.lower(self.model, self.params, carry_shapes, num_drafts=num_drafts, drafter=drafter)
            self._programs[key] = lowered.compile()
        return read_prompts, self._programs[key]

    def _precision(self) -> AbstractContextManager:
        """float32 means float32: an accelerator's default rounds such products, and then passes over one token and over
        several may choose differently."""
        return jax.default_matmul_precision("highest") if self.model.dtype == jnp.float32 else nullcontext()

    @property
    def _num_ids(self) -> int:
        vocab = self.model.config.vocab_size
        return vocab if self.tokenizer is None else min(len(self.tokenizer), vocab)

    def _generation(
        self,
        row: tuple[Any, Any, Any, Any, Statistics],
        num_drafts: int,
        seconds: float,
        compile_seconds: float,
    ) -> Generation:
        """From one row of the count, finish, tokens, from_draft and statistics that came back."""
        count, finish, tokens, from_draft, counts = row
        new = tokens[:count].tolist()
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(new[:-1] if finish == STOP else new)
        return Generation(
            tokens=new,
            from_draft=from_draft[:count].tolist(),
            text=text,
            finish_reason=FINISH_REASONS[int(finish)],
            rounds=int(counts.rounds),
            drafted=int(counts.drafted),
            accepted=int(counts.accepted),
            accepted_per_position=np.asarray(counts.accepted_per_position)[:num_drafts].tolist(),
            seconds=seconds,
            compile_seconds=compile_seconds,
        )


def _padded(ids: Sequence[int]) -> np.ndarray:
    """End ids in an array whose size is a bucket, so that other end ids do not compile again; -1 is no id."""
    padded = np.full((bucket(len(ids), 8),), -1, np.int32)
    padded[: len(ids)] = ids
    return padded
