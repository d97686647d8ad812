"""Ids to text as they come: characters are kept whole, and the text is cut before a stop string."""

from collections.abc import Iterable, Sequence

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not a whole character
# How many of them may be one unfinished character: some decoders show each of its first three bytes so, and those of
# the whole character just before too.
MOST_UNFINISHED = 7
WINDOW = 32  # tokens, of a byte or more each, from which a decoder is right about that many characters at the end


def stop_strings(given: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; one alone may be given as it is.

    Raises:
      UserError: one is empty, or is not text, or is none that a tokenizer could give.
    """
    if not isinstance(given, Iterable):
        raise UserError(f"expected a stop string or a list of them, got {given!r}")
    stops = (given,) if isinstance(given, str) else tuple(given)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UserError(f"expected stop strings of at least one character, got {stop!r}")
        if any(0xD800 <= ord(character) < 0xE000 for character in stop):
            raise UserError(f"expected stop strings that have a UTF-8 form, got {stop!r}: no text could hold it")
    return stops


class TextStream:
    """Text of ids that come a few at a time; the pieces joined are the text of all ids at once, however they came.

    Text is held back while it may still change: the bytes of an unfinished character, and what may turn out to be a
    stop string. Of several stop strings the one that ends first counts, and of those that end together the one that
    begins first; the text ends before it. They may span tokens, begin within one and end within one. Like an end id,
    one does not count where fewer than `min_new_tokens` tokens come before the token that completes it.

    Each id costs a decoding of a few ids, however long the text is.

    Attributes:
      stopped: how many ids there were up to the one that completed a stop string, that one included; None so far.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: str | Sequence[str] = (), min_new_tokens: int = 0) -> None:
        """Without a tokenizer there is no text: every piece is empty.

        Raises:
          UserError: a stop string is empty, or there is no tokenizer to look for it with.
        """
        self._tokenizer = tokenizer
        self._stops = stop_strings(stop)
        self._min_new_tokens = min_new_tokens
        if self._stops and tokenizer is None:
            raise UserError("stop strings need a tokenizer, and the checkpoint has no tokenizer.json")
        self.stopped: int | None = None
        self._count = 0  # ids so far
        # The last ids. The first `_context` of them are read only since a decoder may treat the beginning of a text
        # in another way (it drops a space there, say); `_known` characters of their text have been passed on.
        self._window: list[int] = []
        self._context = 0
        self._known = 0
        self._held = ""  # passed on, but may begin a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, ids: Sequence[int]) -> str:
        """Reads ids (not the end id) and gives the text that is now certain; nothing once a stop string is complete."""
        return self._give("".join(map(self._read, ids)))

    def finish(self) -> str:
        """The rest, when no more ids come; an unfinished character is U+FFFD."""
        rest = ""
        if self._tokenizer is not None and self.stopped is None:
            rest = self._search(self._tokenizer.decode(self._window)[self._known :])
        held, self._held, self._window, self._context, self._known = self._held, "", [], 0, 0
        return self._give(rest + held)

    def _give(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _read(self, token_id: int) -> str:
        """The text that one more id makes certain."""
        if self.stopped is not None:
            return ""
        self._count += 1
        if self._tokenizer is None or not self._tokenizer.has_token(token_id):
            return ""
        return self._search(self._whole_characters(self._tokenizer, token_id))

    def _whole_characters(self, tokenizer: Tokenizer, token_id: int) -> str:
        self._window.append(token_id)
        text = tokenizer.decode(self._window)
        unfinished = min(len(text) - len(text.rstrip(UNFINISHED)), MOST_UNFINISHED)
        new = text[self._known : len(text) - unfinished]
        self._known += len(new)
        if new and not unfinished:
            # All characters are whole: what brought the last of them is what the next ids are read after.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._known = len(tokenizer.decode(self._window))
        elif len(self._window) > 2 * WINDOW:
            # Nothing but invalid bytes. A decoder finds its way after a few of them, wherever it begins.
            self._window = self._window[-WINDOW:]
            self._context = 0
            self._known = len(tokenizer.decode(self._window)) - unfinished
        return new

    def _search(self, new: str) -> str:
        """Of the held text and new text after it, what cannot be part of a stop string; sets `stopped`."""
        text = self._held + new
        if self._count > self._min_new_tokens:
            found = []
            for stop in self._stops:
                begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))  # ends in the new text
                if begin >= 0:
                    found.append((begin + len(stop), begin))
            if found:
                _, begin = min(found)
                self.stopped = self._count
                self._held = ""
                return text[:begin]
        longest = max(map(len, self._stops), default=1) - 1
        begin = max(0, len(text) - longest)
        while begin < len(text) and not self._may_become_a_stop(text[begin:]):
            begin += 1
        self._held = text[begin:]
        return text[:begin]

    def _may_become_a_stop(self, text: str) -> bool:
        return any(len(stop) > len(text) and stop.startswith(text) for stop in self._stops)
