"""Where the assistant speaks in a conversation that a chat template has rendered.

Templates rewrite history (Qwen3.5's drops earlier thinking), so what a turn becomes depends on all turns, and the
difference of two renderings says nothing. Spans are therefore read from the whole rendering: from the end of the header
that opens an assistant's turn to the token that ends it. Headers and end tokens are learnt once, from a conversation
whose texts are known; a template on which that fails is refused.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer

# Roles that may follow a role; None is the beginning.
_AFTER: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}

_SAID = ("first question", "first answer", "second question", "second answer")
_PROBE = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, _SAID, strict=True)]
_TOOL_RESULT = "a tool's result"


def check_messages(messages: Sequence[Any]) -> None:
    """Raises:
    UserError: if a message is not `{"role", "content"}`, roles are out of order, a tool's call names none, or no
      assistant speaks.
    """
    previous: str | None = None
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise UserError(f'message {number}: expected {{"role": text, "content": text}}, got {str(message)[:200]}')
        if role not in _AFTER[previous]:
            before = f"after {previous}" if previous else "first"
            raise UserError(f"message {number}: expected {' or '.join(_AFTER[previous])} {before}, got {role[:40]!r}")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
                raise UserError(f"message {number}: expected parts of text only")
        elif not (isinstance(content, str) or (role == "assistant" and message.get("tool_calls"))):
            raise UserError(f"message {number}: content: expected text, got {str(content)[:200]}")
        if role == "assistant" and not all(_called(message)):
            calls = str(message["tool_calls"])[:200]
            raise UserError(
                f'message {number}: tool_calls: expected {{"function": {{"name": text}}}} each, got {calls}'
            )
        previous = role
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("messages: expected an assistant's turn, there is none, so there is nothing to train on")


def _called(message: Mapping[str, Any]) -> list[str]:
    """Names of the tools that a message calls, "" for a call that names none; templates read both forms."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return [""]
    inner = [call.get("function", call) if isinstance(call, Mapping) else None for call in calls]
    names = [call.get("name") if isinstance(call, Mapping) else None for call in inner]
    return [name if isinstance(name, str) else "" for name in names]


class Turns:
    """How one chat template marks what the assistant says, and where that is in a rendering.

    An assistant's turn begins with a header. What the template also writes into a generation prompt (an empty or an
    opened thinking block, say) belongs to the header where it stands there: the model never writes it itself.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "default") -> None:
        """Learns the marks from a conversation whose texts are known.

        Raises:
          UserError: if the template does not render such a conversation, or the assistant's turns in it cannot be
            told from the rest by tokens of their own.
        """
        self._tokenizer = tokenizer
        self._template = template
        added = (tokenizer.decode([i]) for i in tokenizer.added_ids)
        self._added = _any_of(token for token in added if token.strip())

        rendered = self._render(_PROBE)
        before, between, after = self._around_answers(rendered)
        start = self._header_start(before[0], between)
        user_end = before[0][:start]
        first = self._added.match(before[0], start)
        assert first is not None  # found there just now
        # First and last turns, and generation prompts, may go on with their header in different ways.
        prompts = [
            self._render(_PROBE[:1], add_generation_prompt=True, **variables).partition(_SAID[0])[2]
            for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        ]
        headers = {text.removeprefix(user_end) for text in (*before, *prompts) if text.startswith(user_end + first[0])}
        self._headers = _any_of({_common_start(headers), *headers})

        ends = [self._first_added(text) for text in (between, after, self._before_tool_result())]
        self._last_is_closed = bool(ends[1])  # else the last turn ends with the text
        self._ends = _any_of(ends)
        # A text that holds one of these could open or close a turn.
        self._reserved = _any_of([first[0], *ends])

        try:
            got = [rendered[begin:end] for begin, end in self._find(rendered)]
        except UserError as error:
            raise self._refusal(str(error)) from error
        expected = [f"{re.escape(said)}\\s*{re.escape(end)}" for said, end in zip(_SAID[1::2], ends, strict=False)]
        if len(got) != 2 or not all(map(re.fullmatch, expected, got)):
            raise self._refusal("they are not found again by their headers and ends")

    def spans(self, messages: Sequence[Mapping[str, Any]], rendered: str) -> list[tuple[int, int]]:
        """Where the assistant's turns are in the rendering of the messages: after the header, the end token included.

        Raises:
          UserError: if a message's text would open or close a turn, a tool's call is left out, or not every turn is
            found.
        """
        for number, message in enumerate(messages, 1):
            mark = next(filter(None, map(self._reserved.search, _texts(message))), None)
            if mark:
                raise UserError(f"message {number} holds {mark[0]}, with which the chat template marks turns")
            left_out = [name for name in _called(message) if name not in rendered]
            if left_out:
                raise UserError(f"message {number}: the chat template leaves out its call of the tool {left_out[0]!r}")
        found = list(self._find(rendered))
        wanted = sum(message["role"] == "assistant" for message in messages)
        if len(found) != wanted:
            raise UserError(f"expected {wanted} turns of the assistant in the rendered text, found {len(found)}")
        return found

    def _find(self, rendered: str) -> Iterator[tuple[int, int]]:
        position = 0
        while header := self._headers.search(rendered, position):
            end = self._ends.search(rendered, header.end())
            if end is None and self._last_is_closed:
                return
            position = end.end() if end else len(rendered)
            if self._headers.search(rendered, header.end(), end.start() if end else position):
                raise UserError("a turn of the assistant begins twice in the rendered text before it ends")
            yield header.end(), position

    def _render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        options = {"add_generation_prompt": False, **variables}
        return self._tokenizer.render_chat(messages, template=self._template, **options)

    def _around_answers(self, rendered: str) -> tuple[tuple[str, str], str, str]:
        """What stands before the two answers, between the first of them and the next question, and at the end."""
        parts = re.fullmatch("(.*)".join(["", *map(re.escape, _SAID), ""]), rendered, re.DOTALL)
        if parts is None or any(rendered.count(said) != 1 for said in _SAID):
            raise self._refusal("it changes what was said, or its order")
        return (parts[2], parts[4]), parts[3], parts[5]

    def _header_start(self, before_assistant: str, before_user: str) -> int:
        """Where the assistant's header begins in what stands between a question and its answer.

        Before it comes what ends the user's turn. It begins with the last token of its own kind that is not later
        than the first difference from what stands between an answer and the next question.
        """
        own, other = self._units(before_assistant), self._units(before_user)
        position, same = 0, 0
        for (position, unit), (_, other_unit) in zip(own, other, strict=False):  # noqa: B007
            if unit != other_unit:
                break
            same += 1
        starts = [mark.start() for mark in self._added.finditer(before_assistant)]
        if not starts or same == len(own):
            raise self._refusal("no token of its own opens what the assistant says")
        return max([start for start in starts if start <= position], default=starts[0])

    def _units(self, text: str) -> list[tuple[int, str]]:
        """The text cut into added tokens and single characters, each with its position."""
        pattern = re.compile(f"{self._added.pattern}|.", re.DOTALL)
        return [(unit.start(), unit[0]) for unit in pattern.finditer(text)]

    def _first_added(self, text: str) -> str:
        found = self._added.search(text)
        return found[0] if found else ""

    def _before_tool_result(self) -> str:
        """What ends a turn of the assistant before a tool's result; nothing if the template has no such role."""
        messages = [*_PROBE[:2], {"role": "tool", "content": _TOOL_RESULT}, _PROBE[3]]
        try:
            before, result, _ = self._render(messages).partition(_TOOL_RESULT)
        except UserError:
            return ""
        return before.partition(_SAID[1])[2] if result else ""

    def _refusal(self, reason: str) -> UserError:
        name = self._tokenizer.chat_templates[self._template].name
        return UserError(
            f"{name}: the assistant's turns cannot be told apart in this chat template: {reason}; expected a header "
            "that begins with a token of its own, as <|im_start|> in ChatML"
        )


def target_mask(
    spans: Sequence[tuple[int, int]], offsets: Int[np.ndarray, "num_tokens two"]
) -> Bool[np.ndarray, " num_tokens"]:
    """Which tokens lie wholly in one of the spans.

    Args:
      spans: first character and the one past the last, rising.
      offsets: the same of each token.
    """
    mask = np.zeros(len(offsets), bool)
    for begin, end in spans:
        mask[np.searchsorted(offsets[:, 0], begin) : np.searchsorted(offsets[:, 1], end, side="right")] = True
    return mask


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of some texts, the longest that there is; empty ones are none."""
    ordered = sorted(filter(None, set(texts)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _common_start(texts: Iterable[str]) -> str:
    ordered = sorted(texts)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ordered[0], ordered[-1], strict=False))
    return "".join(letter for letter, _ in same)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
