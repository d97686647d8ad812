"""Text as ids come: against decoding all at once, and stop strings against a search of each prefix's text."""

import random

import published_text
import pytest
import tokenizers
from tokenizers import decoders, models

from infer.text_stream import TextStream, stop_strings
from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer, train_bpe

DEMO = published_text.ROOT / "models" / "demo"
TEXTS = (
    "def f(x):\n    return x  # ok\n\n\n",
    "用一句话介绍一下 Transformer。长江，全长6300公里。",
    "👩‍👩‍👧‍👦 und 🏳️‍🌈, 👍🏽!",
    "x\u0301q\u0323\u0308 \u0928\u093f\u0902 \u200f\u0645\u0631\u062d\u0628\u0627 \ufeff",
    "<|im_start|>user\n1<|im_end|><think></think><|endoftext|> after",
    "literal \ufffd\ufffd and on \ufffd",
)


@pytest.fixture(scope="module", params=["demo", "bytes", "published"])
def tokenizer(request):
    """Byte-level: the shipped one, one that knows little more than bytes, and the published one."""
    if request.param == "bytes":
        return train_bpe(["some text\n"], 300)
    folder = DEMO if request.param == "demo" else published_text.TOKENIZER
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the whole published vocabulary is absent: python tests/published_text.py fetches it")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_bpe(["some text\n"], 300)


def spaced_tokenizer(byte_fallback=False):
    """Not byte-level: a space is part of the word after it, and the decoder drops the first one."""
    words = ["▁", "▁a", "b", "▁c", "▁▁"]
    if not byte_fallback:
        backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁"))
        backend.decoder = decoders.Metaspace()
    else:
        vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend)


def stream(tokenizer, ids, stop=(), min_new_tokens=0, rng=None):
    """All pieces of ids that come one by one or, with `rng`, in random groups; the stream itself too."""
    found = TextStream(tokenizer, stop, min_new_tokens)
    pieces, start = [], 0
    while start < len(ids):
        size = 1 if rng is None else rng.randrange(0, 5)
        pieces.append(found.push(ids[start : start + size]))
        start += size
    pieces.append(found.finish())
    assert found.text == "".join(pieces)
    return pieces, found


def by_definition(tokenizer, ids, stops, min_new_tokens=0):
    """Text and number of tokens at the stop: every prefix of the ids decoded anew, every end in its text looked at."""
    before = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        whole = len(text.rstrip("\ufffd"))
        for end in range(before + 1, whole + 1) if count > min_new_tokens else ():
            for begin in range(end):
                if text[begin:end] in stops:
                    return text[:begin], count
        before = max(before, whole)
    return tokenizer.decode(ids), None


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text_however_ids_come(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # and so nothing below compares two wrong texts
    rng = random.Random(0)
    for splitting in (None, *[rng] * 20):
        pieces, found = stream(tokenizer, ids, rng=splitting)
        assert "".join(pieces) == text
        assert found.stopped is None


def test_random_ids_join_to_the_whole_text(tokenizer):
    """Most are no text: invalid bytes, halves of characters, ids that no token has."""
    rng = random.Random(1)
    for _ in range(60):
        ids = [rng.randrange(len(tokenizer) + 50) for _ in range(rng.randrange(60))]
        pieces, _ = stream(tokenizer, ids, rng=rng)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_random_bytes_join_to_the_whole_text(byte_tokenizer):
    """Bytes that begin, go on with and break off characters, in any order."""
    ids = {byte: byte_tokenizer.token_id(letter) for byte, letter in enumerate(published_text.byte_letters())}
    rng = random.Random(2)
    likely = [0x41, 0x80, 0x8F, 0x90, 0xA0, 0xBD, 0xBF, 0xC0, 0xC3, 0xE0, 0xE6, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    for _ in range(300):
        raw = bytes(rng.choice(likely[:: rng.choice((1, 1, 3))]) for _ in range(rng.randrange(80)))
        pieces, _ = stream(byte_tokenizer, [ids[byte] for byte in raw], rng=rng)
        assert "".join(pieces) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_decoder_that_treats_the_beginning_in_another_way(byte_fallback):
    tokenizer = spaced_tokenizer(byte_fallback)
    rng = random.Random(3)
    for _ in range(100):
        parts = [[0], [1], [2], [3], [4], [999]]
        if byte_fallback:  # one invalid byte spoils all neighbouring ones there: what was given out cannot follow
            parts += [[5 + byte for byte in sign.encode()] for sign in "江👍"]
        ids = [i for _ in range(rng.randrange(12)) for i in rng.choice(parts)]
        pieces, _ = stream(tokenizer, ids, rng=rng)
        assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_comes_whole_and_at_once(byte_tokenizer):
    ids = byte_tokenizer.encode("a江👍b")
    assert len(ids) == 9
    assert stream(byte_tokenizer, ids)[0] == ["a", "", "", "江", "", "", "", "👍", "b", ""]
    assert stream(byte_tokenizer, ids[:-2])[0] == ["a", "", "", "江", "", "", "", "\ufffd"]


def test_many_ids_cost_a_short_decoding_each(byte_tokenizer):
    """However long the text, and also where no character is ever whole."""
    longest = 0

    class Watched(Tokenizer):
        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    watched = Watched(byte_tokenizer._backend)
    invalid = byte_tokenizer.token_id(published_text.byte_letters()[0x80])
    for ids in ([invalid] * 500, byte_tokenizer.encode("江" * 200), byte_tokenizer.encode("\ufffd" * 200), [999] * 500):
        found = TextStream(watched)
        text = found.push(ids) + found.finish()
        assert text == byte_tokenizer.decode(ids)
    assert longest <= 65


# The tokens of "some text" in the tokenizer that knows these words: "some", " text".
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("ab some text, more", "me te", "ab so"),  # begins within a token, ends within the next
        ("ab some text, more", ["ext, m"], "ab some t"),
        ("ab some text", ["some text"], "ab "),
        ("xaby", ["ab", "b"], "x"),  # end together: the one that begins first
        ("xaby", ["b", "aby"], "xa"),  # ends first, though it begins later
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["ab", "abc"], "x"),  # one a prefix of the other
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("abx", ["abc"], "abx"),  # a near miss is released
        ("ab", ["abc"], "ab"),  # also at the end
        ("用江边", "江", "用"),
        ("用江边", ["江边", "x"], "用"),
        ("👩‍👩‍👧", "\u200d", "👩"),  # within what is shown as one sign
        ("x\u0301", "\u0301", "x"),
        ("a<|im_end|>b", "<|im", "a"),
        ("stop", "stop", ""),
    ],
)
def test_text_is_cut_exactly_before_a_stop_string(tokenizer, text, stop, expected):
    ids = tokenizer.encode(text)
    stops = stop_strings(stop)
    wanted, count = by_definition(tokenizer, ids, stops)
    assert wanted == expected
    assert (count is None) == (expected == text)
    rng = random.Random(4)
    for splitting in (None, *[rng] * 10):
        pieces, found = stream(tokenizer, ids, stop, rng=splitting)
        assert ("".join(pieces), found.stopped) == (expected, count)
    whole = TextStream(tokenizer, stop)
    assert whole.push(ids) + whole.finish() == expected
    assert whole.stopped == count


def test_random_stop_strings_against_their_definition(tokenizer):
    rng = random.Random(5)
    stopped = 0
    for _ in range(300):
        ids = tokenizer.encode("".join(rng.choice("ab江") for _ in range(12)))
        stops = ["".join(rng.choice("ab江") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        least = rng.choice((0, 0, 3, 6))
        pieces, found = stream(tokenizer, ids, stops, least, rng)
        assert ("".join(pieces), found.stopped) == by_definition(tokenizer, ids, stops, least)
        stopped += found.stopped is not None
    assert 50 < stopped < 300


def test_held_back_no_longer_than_it_may_be_a_stop_string(byte_tokenizer):
    pieces, found = stream(byte_tokenizer, byte_tokenizer.encode("xabxabc"), ["abc"])
    assert pieces == ["x", "", "", "abx", "", "", "", ""]
    assert found.stopped == 7
    pieces, found = stream(byte_tokenizer, byte_tokenizer.encode("xab"), ["abc"])
    assert pieces == ["x", "", "", "ab"]


def test_a_stop_string_that_ends_where_another_character_begins(byte_tokenizer):
    """The bytes after it are of no interest."""
    ids = byte_tokenizer.encode("a!江")[:-1]
    pieces, found = stream(byte_tokenizer, ids, "!")
    assert (pieces, found.stopped) == (["a", "", "", "", ""], 2)


def test_nothing_follows_a_stop(byte_tokenizer):
    found = TextStream(byte_tokenizer, "b")
    ids = byte_tokenizer.encode("abab")
    assert [found.push(ids), found.push(ids), found.finish()] == ["a", "", ""]
    assert (found.text, found.stopped) == ("a", 2)


def test_a_stop_string_counts_only_after_the_least_number_of_tokens(byte_tokenizer):
    ids = byte_tokenizer.encode("ababab")
    got = {least: stream(byte_tokenizer, ids, "b", least)[1] for least in range(8)}
    assert {least: (found.text, found.stopped) for least, found in got.items()} == {
        0: ("a", 2),
        1: ("a", 2),
        **{least: ("aba", 4) for least in (2, 3)},
        **{least: ("ababa", 6) for least in (4, 5)},
        **{least: ("ababab", None) for least in (6, 7)},
    }


def test_ids_without_a_token_are_counted(byte_tokenizer):
    a, b = byte_tokenizer.encode("ab")
    _, found = stream(byte_tokenizer, [a, 5000, 5000, b], "b")
    assert (found.text, found.stopped) == ("a", 4)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_refused(byte_tokenizer, stop):
    with pytest.raises(UserError, match="at least one character, got ''"):
        TextStream(byte_tokenizer, stop)


def test_without_a_tokenizer_there_is_no_text():
    assert stream(None, [1, 2])[0] == ["", "", ""]
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        TextStream(None, "a")
