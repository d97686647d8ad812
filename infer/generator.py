"""Prompts in, completions out."""

import operator
from collections import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from infer.auto_drafts import AutoDrafts
from infer.buckets import bucket
from infer.carry import Plan
from infer.completion import Completion
from infer.draft_vocabulary import DraftVocabulary, take_columns
from infer.job import Job, check_jobs
from infer.noise import row_key
from infer.programs import Programs
from infer.prompt_reading import padded, read_pieces, slots_for
from infer.prompts import prompt_from_text
from infer.row import Piece
from infer.sampling import Sampling, checked_count
from infer.settings import Settings
from infer.slots import Decoding, Reading, Slots
from infer.speculative import decode, logits_of, next_token_logits, start, unread
from infer.text_stream import stop_strings
from mtp_jax.config import HeadReads
from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer, end_ids

Updates: TypeAlias = abc.Generator[Reading | Piece, None, None]
Pieces: TypeAlias = abc.Generator[Piece, None, None]

GREEDY = Sampling()
AUTO_SIZES = (0, 1, 2, 3, 5)
WATCHED, STOPPABLE, UNWATCHED = 4, 16, 64
"""Rounds run before the host looks: while a person reads along or `auto` tries sizes, while a stop string may end a
row, and otherwise."""


class Generator:
    """A model ready to decode. Compiled programs are kept, so calls with the same buckets compile once.

    Attributes:
      model: static description; its dtype is that of the matrix products.
      tokenizer: None if there is none; then nothing is masked and completions have no text.
      end_ids: an emitted one ends its row.
      auto_drafts: what `auto` has measured and chooses, once it was asked for; later calls go on from there.
    """

    def __init__(
        self,
        model: MTPModel,
        params: PyTree,
        tokenizer: Tokenizer | None = None,
        end_ids: Iterable[int] = (),
        mesh: Mesh | None = None,
    ) -> None:
        """Args: mesh: to spread parameters and work over (`mtp_jax.sharding.make_mesh`)."""
        self.model = model
        self.programs = Programs(model, params, mesh)
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.auto_drafts: AutoDrafts | None = None
        self._vocabularies: dict[tuple[int, ...], DraftVocabulary] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        dtype: jnp.dtype = jnp.float32,
        trunk_only: bool = False,
        head_reads: HeadReads | None = None,
        mesh: Mesh | None = None,
    ) -> "Generator":
        """Loads a published checkpoint, its tokenizer (if it has one) and its end ids.

        Args:
          trunk_only: leave the MTP head out on purpose; then only J = 0 is possible.
          head_reads: which hidden state the head reads, otherwise than the checkpoint says. The wrong one changes no
            token: fewer drafts stand.
          mesh: to spread parameters and work over.

        Raises:
          UserError: something in the folder is missing or wrong.
        """
        folder = Path(folder)
        checkpoint = load_checkpoint(folder, trunk_only=trunk_only, dtype=dtype, mesh=mesh)
        tokenizer = Tokenizer.from_folder(folder)
        config = checkpoint.config if head_reads is None else replace(checkpoint.config, head_reads=head_reads)
        model = MTPModel(config, dtype)
        return cls(model, checkpoint.params, tokenizer, end_ids(folder, tokenizer), mesh)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        num_draft_tokens: int | Literal["auto"] | None = None,
        sampling: Sampling = GREEDY,
        num_samples: int = 1,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> list[Completion]:
        """Continues each prompt, `num_samples` times; completions come prompt by prompt.

        Speculation changes speed, never the law of the text: greedy, or with one seed under shared noise, the tokens do
        not depend on `num_draft_tokens` (in float32), nor on what else is in the batch.

        Args:
          prompts: texts or lists of ids.
          max_new_tokens: a completion's limit, never exceeded.
          num_draft_tokens: J, drafts a round; see `Settings`.
          sampling: the law of the next token, and the seed.
          num_samples: completions of each prompt. That of prompt p and sample i depends on (seed, p, i).
          stop: texts that end a completion; it is cut before them.
          settings: the other fields of `Settings`: ignore_eos, logprobs, raw_logprobs, cache_length, batch_size,
            draft_vocabulary, drafter.

        Raises:
          UserError: a prompt is empty, too long or holds ids outside the vocabulary, a number is out of range, or
            settings contradict each other or the model.
        """
        chosen, stops = Settings(num_draft_tokens, sampling, **settings), stop_strings(stop)
        max_new_tokens = checked_count("max_new_tokens", max_new_tokens)
        if checked_count("num_samples", num_samples) < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        jobs = [
            Job(ids, max_new_tokens, row_key(chosen.sampling.seed, p, i), stops)
            for p, ids in enumerate(self._ids(prompts))
            for i in range(num_samples)
        ]
        completions: dict[int, Completion] = {}
        for piece in self.run(jobs, chosen):
            if isinstance(piece, Piece) and piece.completion is not None:
                completions[piece.job] = piece.completion
        return [completions[index] for index in range(len(jobs))]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        num_draft_tokens: int | Literal["auto"] | None = None,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        **settings: Any,
    ) -> Pieces:
        """Continues one prompt, as `generate` does, and gives what comes a few rounds at a time.

        The texts of the pieces joined are the completion's text; the last piece has the completion. On Ctrl-C a piece
        with what there is comes before KeyboardInterrupt is raised. A caller that was interrupted itself gets it from
        `throw(KeyboardInterrupt())`.
        """
        chosen = Settings(num_draft_tokens, sampling, **settings)
        (ids,) = self._ids([prompt])
        max_new_tokens = checked_count("max_new_tokens", max_new_tokens)
        job = Job(ids, max_new_tokens, row_key(chosen.sampling.seed, 0, 0), stop_strings(stop))
        return _pieces(self.run([job], chosen, watched=True))

    def run(self, jobs: Sequence[Job], settings: Settings, *, watched: bool = False) -> Updates:
        """Decodes jobs, at most `batch_size` at a time, shortest first; what comes is told as it comes.

        Jobs are grouped by the bucket of their cache length; groups smaller than a batch join the next larger one.
        On Ctrl-C what there is of each row comes as its last piece, before KeyboardInterrupt is raised.

        Args:
          watched: by a person: few rounds at a time.

        Raises:
          UserError: as `generate`, and before anything is decoded.
        """
        config = self.model.config
        settings.check(config)
        check_jobs(config, jobs, settings.cache_length)
        if self.tokenizer is None and any(job.stop for job in jobs):
            raise UserError("stop strings need a tokenizer, and the checkpoint has no tokenizer.json")
        lengths = [job.cache_length(config, settings.cache_length) for job in jobs]
        # A text of 128 tokens must be long enough for `auto` to try each size twice, and then to use the best.
        few = watched or settings.num_draft_tokens == "auto"
        rounds = WATCHED if few else STOPPABLE if any(job.stop for job in jobs) else UNWATCHED
        decoding = self.decoding(settings, rounds)
        return self._run(jobs, lengths, settings.batch_size, decoding)

    def _run(self, jobs: Sequence[Job], cache_lengths: Sequence[int], batch_size: int, decoding: Decoding) -> Updates:
        lengths = {}
        for index, (job, cache_length) in enumerate(zip(jobs, cache_lengths, strict=True)):
            if job.max_new_tokens and len(job.prompt) < cache_length:
                lengths[index] = cache_length
            else:
                yield Piece(index, [], [], [], self._no_tokens(decoding))
        for cache_length, group in _groups(jobs, lengths, batch_size):
            num_rows = min(bucket(len(group), 1), batch_size)
            num_slots = slots_for(cache_length, decoding.max_drafts)
            slots = Slots(self.programs, self.tokenizer, decoding, num_rows, num_slots, cache_length)
            yield from slots.run([(index, jobs[index]) for index in group])

    def _no_tokens(self, decoding: Decoding) -> Completion:
        """Of a row without room for any: nothing need be read or compiled for it."""
        text, logprobs = None if self.tokenizer is None else "", None if decoding.plan.num_logprobs is None else []
        return Completion([], text, "length", [], [], [], decoding.max_drafts, logprobs, 0.0, 0.0)

    def decoding(self, settings: Settings, rounds: int) -> Decoding:
        """What all rows with these settings share; `rounds` are run before the host looks."""
        drafts = settings.draft_tokens(self.model.config)
        if drafts == "auto" and self.auto_drafts is None:
            self.auto_drafts = AutoDrafts(AUTO_SIZES)
        plan = Plan(
            num_drafts=0 if drafts == "auto" else drafts,
            drafter=settings.drafter,
            verifier=settings.sampling.verifier,
            with_head=drafts != 0,
            num_logprobs=settings.logprobs,
            raw_logprobs=settings.raw_logprobs,
        )
        return Decoding(
            rule=settings.rule(self.model.config, self.tokenizer, self.end_ids),
            plan=plan,
            vocabulary=self._vocabulary(settings.draft_vocabulary),
            auto=self.auto_drafts if drafts == "auto" else None,
            rounds=rounds,
        )

    def _vocabulary(self, ids: Sequence[int] | None) -> DraftVocabulary | None:
        if ids is None:
            return None
        key = tuple(map(int, ids))
        if key not in self._vocabularies:
            self._vocabularies = {key: take_columns(self.programs.params, np.asarray(key, np.int32), self.model.dtype)}
        return self._vocabularies[key]

    def _ids(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        if isinstance(prompts, str):
            raise UserError("expected a list of prompts, got one text: put it in a list")
        if not isinstance(prompts, Iterable):
            raise UserError(f"expected a list of prompts, got {prompts!r}")
        return [self._encoded(prompt, number) for number, prompt in enumerate(prompts)]

    def _encoded(self, prompt: str | Sequence[int], number: int) -> list[int]:
        if isinstance(prompt, str):
            return prompt_from_text(prompt, self.tokenizer).ids
        try:
            if isinstance(prompt, bytes):  # whose elements are integers, but were hardly meant as ids
                raise TypeError
            return [operator.index(i) for i in prompt]
        except TypeError as error:
            raise UserError(f"prompt {number}: expected a text or a list of ids, got {prompt!r}") from error

    def next_logits(
        self, prompt: Sequence[int], num_new: int, max_new_tokens: int, sampling: Sampling = GREEDY
    ) -> Float[np.ndarray, " vocab"]:
        """The trunk's logits after the prompt and its first `num_new` new tokens, on plain decoding's path.

        As the model gives them: neither warped nor masked by the tokenizer's length.

        Args:
          max_new_tokens: of the decoding that is looked into, which decides on its shapes.
          sampling: of that decoding; greedy by default.
        """
        job = Job(prompt, max_new_tokens, row_key(sampling.seed, 0, 0))
        check_jobs(self.model.config, [job])
        decoding, programs = self.decoding(Settings(num_draft_tokens=0, sampling=sampling), UNWATCHED), self.programs
        num_slots = slots_for(job.cache_length(self.model.config, None), 0)
        empty = programs.call(unread, batch=1, num_slots=num_slots)
        *_, (context, _) = read_pieces(programs, empty, 0, prompt, num_slots, with_head=False)
        if num_new == 0:
            return np.asarray(programs.call(logits_of, context))[0]
        row = *padded(prompt, num_slots), np.array([num_new], np.int32), job.key[None]
        carry = programs.call(start, decoding.rule, context, *row, plan=decoding.plan.without_drafts())
        limits = np.int32(num_new), np.bool_(False)
        carry = programs.call(decode, decoding.rule, None, carry, *limits, plan=decoding.plan)
        return np.asarray(programs.call(next_token_logits, carry))[0]


def _pieces(updates: Updates) -> Pieces:
    """The pieces among them."""
    try:
        for update in updates:
            if isinstance(update, Piece):
                yield update
    except KeyboardInterrupt as interrupt:
        # Where it was thrown in here, the loop below has not heard of it, and has a last piece to give.
        piece = updates.throw(interrupt)
        assert isinstance(piece, Piece)
        yield piece
        raise


def _groups(jobs: Sequence[Job], lengths: Mapping[int, int], batch_size: int) -> Iterator[tuple[int, list[int]]]:
    """Cache lengths, ascending, with the indices of their jobs, those with short prompts first.

    Args: lengths: of caches, by index of the job.
    """
    group: list[int] = []
    for cache_length in sorted(set(lengths.values())):
        # A stable order: samples of one prompt stay together, and the prompt is read once.
        group += [index for index, length in lengths.items() if length == cache_length]
        if len(group) >= batch_size or cache_length == max(lengths.values()):
            yield cache_length, sorted(group, key=lambda index: len(jobs[index].prompt))
            group = []
