"""Chat: whatever a template does to the history, the state is that of the whole rendering, and so are the replies."""

import copy
import dataclasses
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import FAMILIES, bent_params

from infer.conversation import Conversation
from infer.generator import Generator
from infer.job import Job
from infer.noise import row_key
from infer.row import Piece
from infer.sampling import Sampling
from infer.settings import Settings
from infer.slots import Reading
from infer.speculative import read, unread
from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel
from mtp_jax.state import DeltaState
from mtp_jax.text import ChatTemplate, train_bpe

GOLDENS = Path(__file__).parent.parent / "goldens" / "text"
EXTENDING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
REWRITING = """\
{%- for m in messages %}
{%- if m.content == 'refuse' %}{{ raise_exception('refused') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
# Its rendering without a header of the assistant's turn is no prefix of the one with it.
AWKWARD = """\
{%- for m in messages %}{{ m.content if m.role == 'user' else '<tool_call>' + m.content[:3] }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{% else %}{{ '<|fim_pad|>' }}{% endif %}"""
TEMPLATES = {
    "extending": EXTENDING,
    "rewriting": REWRITING,
    "awkward": AWKWARD,
    "qwen3_5_think": (GOLDENS / "qwen3_5_think.jinja").read_text(),
    "qwen3_5_nothink": (GOLDENS / "qwen3_5_nothink.jinja").read_text(),
}
ROOM = 512  # one shape for most tests
NEW = 24
SAYS = ["hello there", "", "and now?\n", "<|im_end|> x"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([], 289)  # bytes and special tokens: text encodes as it was decoded


@pytest.fixture(scope="module", params=["dense hybrid", pytest.param("two head layers", marks=pytest.mark.slow)])
def base(request, tokenizer):
    config = FAMILIES[request.param]
    model = MTPModel(dataclasses.replace(config, vocab_size=307, max_position_embeddings=1024), jnp.dtype("float32"))
    params = bent_params(model, seed=3, trunk_noise=0.8, head_noise=0.1)
    return Generator(model, params, tokenizer, {tokenizer.token_id("<|im_end|>")})


@pytest.fixture(scope="module")
def sampling(tokenizer):
    """Draws letters, line ends, `</think>` and the end of a turn."""
    wanted = {*map(tokenizer.token_id, [*"abcdefghijklmnopqrstuvwxyz", "Ċ", "</think>", "<|im_end|>"])}
    bias = {tokenizer.token_id("</think>"): 2.0, tokenizer.token_id("<|im_end|>"): 1.0}
    banned = tuple(i for i in range(len(tokenizer)) if i not in wanted)
    return Sampling(temperature=1.0, logit_bias=bias, banned_ids=banned, seed=5)


def with_template(base, source):
    """The same generator, compiled programs and all, with another template."""
    other, other.tokenizer = copy.copy(base), copy.copy(base.tokenizer)
    other.tokenizer.chat_templates = {"default": ChatTemplate(source, "t.jinja")}
    return other


@pytest.fixture
def chat(base, sampling):
    def make(template, num_draft_tokens=3, cache_length=ROOM, **kwargs):
        settings = Settings(num_draft_tokens=num_draft_tokens, sampling=sampling, cache_length=cache_length)
        generator = with_template(base, TEMPLATES[template])
        return Conversation(generator, settings, **{"max_new_tokens": NEW, **kwargs})

    return make


def finish(pieces):
    """The completion of a turn, whose pieces must make it up."""
    pieces = [piece for piece in pieces if isinstance(piece, Piece)]
    completion = pieces[-1].completion
    assert "".join(piece.text for piece in pieces) == completion.text
    # Tokens after a stop string may come in one piece with it.
    assert [i for piece in pieces for i in piece.tokens] == completion.tokens
    return completion


def rendered(conversation, messages, header=True):
    tokenizer, thinking = conversation._tokenizer, conversation.enable_thinking
    variables = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=header, **variables))


def expected_reply(base, conversation, ids, turn, attempt=0):
    """By the generator, from the whole rendering."""
    settings = dataclasses.replace(conversation._settings, cache_length=ROOM)
    job = Job(ids, conversation._max_new_tokens, row_key(settings.sampling.seed, turn, attempt), conversation._stop)
    (*_, last) = base.run([job], settings)
    return last.completion


def check_state(base, conversation):
    """The state, against one that reads the same tokens at once; keys and values below its length."""
    history = conversation._history
    tokens, (trunk, head, hidden) = history._now
    model, params = base.model, base.programs.params
    fresh = unread(model, params, batch=1, num_slots=ROOM)
    row = np.pad(np.array([tokens], np.int32), ((0, 0), (0, ROOM - len(tokens))))
    whole = read(model, params, fresh, row, np.array([len(tokens)], np.int32), with_head=True)
    np.testing.assert_allclose(hidden, whole.hidden, atol=1e-4, rtol=0)
    states = [(trunk, whole.trunk)]
    if history._with_head:
        states.append((head, whole.head))
    for ours, other in states:
        assert int(ours.length[0]) == int(other.length[0])
        for number, (layer, expected) in enumerate(zip(ours.layers, other.layers, strict=True)):
            # Of a head with several layers each further one holds one token fewer.
            held = int(ours.length[0]) - (number if ours.waiting else 0)
            last = None if isinstance(layer, DeltaState) else held
            for a, b in zip(layer, expected, strict=True):
                a, b = (x if last is None else x[:, :, :last] for x in (a, b))
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4, rtol=0)
        for a, b in zip(ours.waiting, other.waiting, strict=True):
            np.testing.assert_allclose(np.asarray(a[:, 1]), np.asarray(b[:, 1]), atol=1e-4, rtol=0)


CASES = [
    ("extending", None, 3),
    ("extending", None, 0),
    ("rewriting", True, 3),
    ("rewriting", False, 3),
    ("rewriting", None, 0),
    ("awkward", None, 3),
    ("qwen3_5_think", True, 3),
    ("qwen3_5_think", False, 3),
    ("qwen3_5_nothink", None, 3),
]


@pytest.mark.parametrize(("template", "thinking", "num_drafts"), CASES)
def test_state_and_reply_are_those_of_the_whole_rendering(base, chat, template, thinking, num_drafts):
    system = None if template == "awkward" else "be brief"
    conversation = chat(template, num_drafts, enable_thinking=thinking, system=system)
    held = questions = 0
    for turn, text in enumerate(SAYS):
        messages = [*conversation.messages, {"role": "user", "content": text}]
        ids = rendered(conversation, messages)
        expected = expected_reply(base, conversation, ids, turn)
        got = finish(conversation.say(text))
        assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
        assert conversation._history.tokens == [*ids, *got.tokens[:-1]]
        check_state(base, conversation)
        assert conversation.messages[:-1] == messages
        assert conversation.turn.kept + conversation.turn.read == len(ids)
        if template == "extending":
            assert (conversation.turn.kept, conversation.turn.forgotten) == (held, 0)
        else:
            assert conversation.turn.kept == questions
        held, questions = len(ids) + len(got.tokens) - 1, len(rendered(conversation, messages, header=False))
        if template == "awkward":
            questions -= 1


def test_reading_is_told_piece_by_piece(chat):
    pieces = list(chat("extending").say("x" * 300))
    told = [(piece.done, piece.total) for piece in pieces if isinstance(piece, Reading)]
    total = 300 + len("user\n\nassistant\n") + 3
    assert told == [(total - len("assistant\n") - 1, total), (total, total)]
    assert all(isinstance(piece, Piece) for piece in pieces[len(told) :])


def test_thinking_can_be_turned_off_and_on_between_turns(base, chat):
    conversation = chat("qwen3_5_think", enable_thinking=True)
    for turn, thinking in enumerate([True, False, True]):
        conversation.enable_thinking = thinking
        ids = rendered(conversation, [*conversation.messages, {"role": "user", "content": "q"}])
        expected = expected_reply(base, conversation, ids, turn)
        assert finish(conversation.say("q")).tokens == expected.tokens
        assert conversation.opened == ("<think>\n" if thinking else "")
        check_state(base, conversation)


@pytest.mark.parametrize(
    ("template", "opened", "text", "expected"),
    [
        ("qwen3_5_think", "<think>\n", "a\nb\n</think>\n\nc\n", {"reasoning_content": "a\nb", "content": "c\n"}),
        ("qwen3_5_think", "<think>\n", "unfinished", {"reasoning_content": "unfinished", "content": ""}),
        ("qwen3_5_think", "", "<think>a</think>b", {"reasoning_content": "a", "content": "b"}),
        ("qwen3_5_think", "", "a</think>b", {"content": "a</think>b"}),
        ("rewriting", "<think>\n", "a\n</think>\n\nb", {"content": "<think>\na\n</think>\n\nb"}),
        ("extending", "", " a\n", {"content": " a\n"}),
    ],
)
def test_a_reply_becomes_the_message_that_its_template_reads(chat, template, opened, text, expected):
    assert chat(template)._message(opened, text) == {"role": "assistant", **expected}


@pytest.mark.parametrize("template", ["extending", "qwen3_5_think"])
def test_another_reply_reads_nothing(base, chat, template):
    conversation = chat(template)
    replies = [finish(conversation.say(text)).tokens for text in ("a", "c")]
    before = conversation.messages[:-1]
    ids = rendered(conversation, before)
    for attempt in (1, 2):
        again = finish(conversation.retry())
        assert again.tokens == expected_reply(base, conversation, ids, turn=1, attempt=attempt).tokens
        replies.append(again.tokens)
        assert (conversation.turn.kept, conversation.turn.read) == (len(ids), 0)
        assert conversation.messages[:-1] == before
        check_state(base, conversation)
    assert len(set(map(tuple, replies[1:]))) == 3


def test_without_a_reply_there_is_none_to_make_again(chat):
    with pytest.raises(UserError, match="no reply yet"):
        next(chat("extending").retry())


def test_closing_a_turn_keeps_what_there_is(base, chat):
    conversation = chat("extending", max_new_tokens=200)
    pieces = conversation.say("hi")
    given = ""
    for piece in pieces:
        given += piece.text if isinstance(piece, Piece) else ""
        if len(given) > 3:
            break
    pieces.close()
    assert conversation.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": given}]
    completion = conversation.turn.completion
    assert (completion.finish_reason, completion.text) == ("interrupted", given)
    check_state(base, conversation)
    ids = rendered(conversation, [*conversation.messages, {"role": "user", "content": "go on"}])
    held = len(conversation._history.tokens)
    assert finish(conversation.say("go on")).tokens == expected_reply(base, conversation, ids, turn=1).tokens
    assert (conversation.turn.kept, conversation.turn.forgotten) == (held, 0)
    check_state(base, conversation)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_may_take_the_state_and_nothing_else(base, chat, monkeypatch, after):
    """It comes right after a call to which the state was donated, at any of the calls of a turn."""
    conversation = chat("rewriting", max_new_tokens=60)
    finish(conversation.say("one"))
    messages = list(conversation.messages)
    calls, call = [], base.programs.call

    def interrupted(function, *arguments, **static):
        result = call(function, *arguments, **static)
        calls.append(function)
        if len(calls) == 2 * after + 1:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(base.programs, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.say("two"))
    monkeypatch.undo()
    kept = conversation.messages[len(messages) :]
    assert [message["role"] for message in kept] == (["user", "assistant"] if after == 2 else [])
    ids = rendered(conversation, [*conversation.messages, {"role": "user", "content": "three"}])
    turn = 2 if kept else 1
    assert finish(conversation.say("three")).tokens == expected_reply(base, conversation, ids, turn).tokens
    assert conversation.turn.kept == 0
    check_state(base, conversation)


def test_a_turn_that_comes_to_nothing_changes_nothing(base, chat):
    conversation = chat("rewriting")
    finish(conversation.say("one"))
    messages, turn = list(conversation.messages), conversation.turn
    reply = expected_reply(base, conversation, rendered(conversation, [*messages, {"role": "user", "content": "b"}]), 1)
    with pytest.raises(UserError, match=r"t\.jinja: the chat template failed on these messages: refused"):
        list(conversation.say("refuse"))
    with pytest.raises(UserError, match=r"is full: with this message it takes \d+ tokens.* for 512 .*/reset"):
        list(conversation.say("x" * 600))
    reading = conversation.say("x" * 100)
    assert isinstance(next(reading), Reading)
    reading.close()  # before the reply began
    assert (conversation.messages, conversation.turn) == (messages, turn)
    assert finish(conversation.say("b")).tokens == reply.tokens
    assert conversation.turn.kept > 0
    check_state(base, conversation)


def test_a_full_conversation_ends_a_reply_and_then_says_so(chat):
    conversation = chat("extending", cache_length=64, max_new_tokens=100)

    def talk():
        for _ in range(10):
            finish(conversation.say("hello"))
            assert len(conversation._history.tokens) < 64

    with pytest.raises(UserError, match="for 64 with the reply; /reset"):
        talk()
    conversation.reset()
    assert conversation.messages == []
    assert finish(conversation.say("hello")).tokens
    assert conversation.turn.kept == 0


def test_the_cache_grows_with_the_conversation(base, chat):
    conversation = chat("rewriting", cache_length=None)
    sizes = []
    for turn, text in enumerate(["a", "b" * 90]):
        ids = rendered(conversation, [*conversation.messages, {"role": "user", "content": text}])
        expected = expected_reply(base, conversation, ids, turn)
        assert finish(conversation.say(text)).tokens == expected.tokens
        assert conversation.turn.kept > 0 or turn == 0
        check_state(base, conversation)
        sizes.append(conversation._history.num_slots)
    assert sizes == [64 + 16, 256 + 16]


def test_a_stop_string_ends_a_reply_and_is_not_part_of_it(base, chat):
    plain = chat("extending", max_new_tokens=60)
    text = finish(plain.say("hi")).text
    stop = text[5:7]
    cut = text[: text.index(stop)]
    conversation = chat("extending", max_new_tokens=60, stop=stop)
    completion = finish(conversation.say("hi"))
    assert (completion.text, completion.finish_reason) == (cut, "stop")
    assert conversation.messages[-1]["content"] == cut
    ids = rendered(conversation, [*conversation.messages, {"role": "user", "content": "so?"}])
    assert finish(conversation.say("so?")).tokens == expected_reply(base, conversation, ids, turn=1).tokens
    check_state(base, conversation)


def test_a_second_conversation_of_the_same_size_compiles_nothing(chat):
    for _ in range(2):
        conversation = chat("extending")
        completions = [finish(conversation.say("hi")) for _ in range(2)]
    assert [completion.compile_seconds for completion in completions] == [0, 0]


def test_only_copies_of_a_few_turns_are_kept(chat):
    conversation = chat("extending", max_new_tokens=2)
    for _ in range(4):
        finish(conversation.say("x"))
    marks = conversation._history._marks
    assert len(marks) == 6
    assert [mark.num_tokens for mark in marks] == sorted({mark.num_tokens for mark in marks})
    buffers = jax.tree.leaves([(mark.trunk, mark.head) for mark in marks])
    assert all(ROOM not in leaf.shape and conversation._history.num_slots not in leaf.shape for leaf in buffers)


def test_what_a_conversation_needs_is_said(base, chat, sampling):
    without = copy.copy(base)
    without.tokenizer = None
    with pytest.raises(UserError, match=r"needs a tokenizer, and the checkpoint has no tokenizer\.json"):
        Conversation(without)
    without.tokenizer = copy.copy(base.tokenizer)
    without.tokenizer.chat_templates = {}
    with pytest.raises(UserError, match=r"expected chat_template\.jinja, or chat_template in tokenizer_config\.json"):
        Conversation(without)
    with pytest.raises(UserError, match=r"the chat template has no enable_thinking to turn on or off"):
        chat("extending", enable_thinking=False)
    with pytest.raises(UserError, match="at least 1, got 0"):
        chat("extending", max_new_tokens=0)
    with pytest.raises(UserError, match="max_position_embeddings 1024, got 2000"):
        chat("extending", cache_length=2000)
