"""A conversation whose history stays in the model's state: a turn reads what is new, and what its template rewrites."""

import re
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from infer.completion import Completion
from infer.generator import WATCHED, Generator
from infer.history import History, common_prefix
from infer.job import Job, check_jobs
from infer.noise import row_key
from infer.prompt_reading import padded, slots_for
from infer.row import Piece, Row, view
from infer.settings import Settings
from infer.slots import Clock, Reading
from infer.speculative import start
from infer.text_stream import stop_strings
from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer

MAX_NEW_TOKENS = 512
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Turn:
    """What a turn took.

    Attributes:
      kept: tokens of its prompt that the state had read already.
      read: the prompt's other tokens.
      forgotten: tokens that the state had read and that the prompt does not go on from, as the template rewrote them
        or the reply was encoded otherwise than it came.
      completion: the reply.
    """

    kept: int
    read: int
    forgotten: int
    completion: Completion


class _Prompt(NamedTuple):
    """Messages in the chat template.

    Attributes:
      ids: of all, up to where the assistant begins.
      ending: how many of them are the messages, without the header of the assistant's turn.
      opened: `<think>` and spaces if the header ends with them.
    """

    ids: list[int]
    ending: int
    opened: str


class Conversation:
    """Messages, and the state of a model that has read them.

    For each turn all messages are rendered by the checkpoint's own template and encoded, so the model sees what it was
    trained on. Of that, what the state has read already is not read again: the turn begins at the longest kept state
    whose tokens are a prefix. States are kept where messages end, where the reply begins, and where it ends. So where a
    template rewrites history (Qwen3.5's leaves the thinking of earlier turns out), a turn reads from the last reply on.

    Attributes:
      messages: so far. A thinking reply is split into `reasoning_content` and `content` if the template reads both;
        else `content` is the reply as it was generated.
      opened: what the template put before the newest reply as its first part, `<think>` say; else empty.
      turn: the last one; None before the first.
    """

    def __init__(
        self,
        generator: Generator,
        settings: Settings | None = None,
        *,
        system: str | None = None,
        enable_thinking: bool | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
    ) -> None:
        """
        Args:
          settings: its cache length is the most tokens that the conversation may have. None begins small and grows, up
            to the model's `max_position_embeddings`; each size compiles once.
          system: the first message.
          enable_thinking: handed to the template; None leaves the template's default.
          max_new_tokens: of a reply, at least 1.
          stop: texts that end a reply; it is cut before them.

        Raises:
          UserError: there is no tokenizer or chat template, the template has no thinking to turn on or off, or
            settings are out of range or contradict each other.
        """
        settings = settings or Settings()
        settings.check(generator.model.config)
        if max_new_tokens < 1:
            raise UserError(f"a reply's number of new tokens must be at least 1, got {max_new_tokens}")
        self._tokenizer = with_template(generator.tokenizer, enable_thinking)
        self._config = generator.model.config
        self._programs = generator.programs
        self._settings = settings
        self._decoding = generator.decoding(settings, WATCHED)
        self._max_new_tokens = max_new_tokens
        self._stop = stop_strings(stop)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._history = History(self._programs, self._decoding.plan.with_head)
        self.enable_thinking = enable_thinking
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages: list[dict[str, str]] = list(self._system)
        self.opened = ""
        self.turn: Turn | None = None
        self._attempt = 0
        self._history.forget()

    @property
    def enable_thinking(self) -> bool | None:
        """What the template is told from the next turn on; None is its default."""
        return self._enable_thinking

    @enable_thinking.setter
    def enable_thinking(self, value: bool | None) -> None:
        with_template(self._tokenizer, value)
        self._enable_thinking = value

    def say(self, text: str) -> abc.Generator[Reading | Piece, None, None]:
        """The user's next message, and the reply to it as it comes; the last piece has the completion.

        A caller that closes the iterator, or a KeyboardInterrupt, ends the reply: what there is becomes the assistant's
        message. If that is nothing, it is as if the message had not been said.

        The noise of turn n is that of prompt n: a conversation is a matter of its seed and its messages.

        Raises:
          UserError: the template refuses the message, or the conversation is full; nothing has changed then.
        """
        yield from self._take_turn([*self.messages, {"role": "user", "content": text}], 0)

    def retry(self) -> abc.Generator[Reading | Piece, None, None]:
        """Another reply in place of the last one, with noise of its own; as `say`.

        Raises:
          UserError: there is no reply.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no reply yet that could be made again")
        yield from self._take_turn(self.messages[:-1], self._attempt + 1)

    def _take_turn(self, messages: list[dict[str, str]], attempt: int) -> abc.Generator[Reading | Piece, None, None]:
        prompt = self._render(messages)
        number = sum(message["role"] == "user" for message in messages) - 1
        key = row_key(self._settings.sampling.seed, number, attempt)
        job = Job(prompt.ids, self._max_new_tokens, key, self._stop)
        self._check(job)
        cache_length = job.cache_length(self._config, self._settings.cache_length)
        clock, before = Clock(self._programs), len(self._history.tokens)
        kept = self._history.return_to_prefix_of(prompt.ids, slots_for(cache_length, self._decoding.max_drafts))
        self._history.mark()
        for end in (prompt.ending, len(prompt.ids)):
            for _ in self._history.read(prompt.ids[len(self._history.tokens) : end]):
                yield Reading(0, len(self._history.tokens) - kept, len(prompt.ids) - kept)
            self._history.mark()
        self.opened = prompt.opened
        row = Row(0, job, self._tokenizer, int(self._decoding.rule.min_new_tokens))
        last = None
        try:
            for piece in self._decode(row, cache_length):
                if row.finished:
                    last = piece
                else:
                    yield piece
        finally:
            completion = row.completion(self._decoding.max_drafts, self._settings.logprobs, *clock.read())
            if completion.tokens:
                self.messages = [*messages, self._message(prompt.opened, completion.text or "")]
                self.turn = Turn(kept, len(prompt.ids) - kept, max(0, before - kept), completion)
                self._attempt = attempt
        assert last is not None
        yield replace(last, completion=completion)

    def _decode(self, row: Row, cache_length: int) -> Iterator[Piece]:
        """What comes for a row whose prompt has been read; the history is never behind what was given."""
        history, programs, decoding = self._history, self._programs, self._decoding
        prompt = row.job.prompt
        max_new = np.array([min(row.job.max_new_tokens, cache_length - len(prompt))], np.int32)
        arguments = *padded(prompt, history.num_slots), max_new, row.job.key[None]
        carry = programs.call(start, decoding.rule, history.context, *arguments, plan=decoding.plan.without_drafts())
        while True:
            seen = view(carry)
            num_read = len(prompt) + int(seen.num_new[0]) - 1  # not the newest
            history.follow(seen.tokens[0, :num_read].tolist(), carry.context)
            if (piece := row.look(seen, 0)) is not None:
                yield piece
            if row.finished:
                return
            carry = decoding.run_rounds(programs, carry, until_one_finishes=False)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> _Prompt:
        variables: dict[str, Any] = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        texts = [self._tokenizer.render_chat(messages, add_generation_prompt=add, **variables) for add in (True, False)]
        ids, ended = self._tokenizer.encode_batch(texts)
        header = texts[0].removeprefix(texts[1])
        opened = re.search(rf"{THINK}\s*\Z", header)
        return _Prompt(ids, common_prefix(ids, ended), opened[0] if opened else "")

    def _check(self, job: Job) -> None:
        """Also that there is room for a reply."""
        most = self._settings.cache_length or self._config.max_position_embeddings
        if len(job.prompt) >= most:
            raise UserError(
                f"the conversation is full: with this message it takes {len(job.prompt)} tokens, and there is room for "
                f"{most} with the reply; /reset begins a new one"
            )
        check_jobs(self._config, [job], self._settings.cache_length)

    def _message(self, opened: str, text: str) -> dict[str, str]:
        """A reply as the template wants it in later turns."""
        text = opened + text
        if text.lstrip().startswith(THINK) and "reasoning_content" in self._tokenizer.chat_templates["default"].source:
            reasoning, _, answer = text.partition(END_THINK)
            reasoning = reasoning.lstrip().removeprefix(THINK).strip("\n")
            return {"role": "assistant", "content": answer.lstrip("\n"), "reasoning_content": reasoning}
        return {"role": "assistant", "content": text}


def with_template(tokenizer: Tokenizer | None, enable_thinking: bool | None = None) -> Tokenizer:
    """The tokenizer, seen to have what a conversation needs.

    Raises:
      UserError: there is no tokenizer, no chat template, or no thinking in it to turn on or off.
    """
    if tokenizer is None:
        raise UserError("a conversation needs a tokenizer, and the checkpoint has no tokenizer.json")
    template = tokenizer.chat_templates.get("default")
    if template is None:
        raise UserError(
            "a conversation needs a chat template, and the checkpoint has none: expected chat_template.jinja, or "
            "chat_template in tokenizer_config.json, beside tokenizer.json"
        )
    if enable_thinking is not None and "enable_thinking" not in template.source:
        raise UserError("the chat template has no enable_thinking to turn on or off")
    return tokenizer
