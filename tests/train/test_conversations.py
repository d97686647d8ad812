"""What is trained on in a conversation: exactly the assistant's words and the token that ends them, in any template."""

import re
import zipfile
from pathlib import Path

import numpy as np
import published_text
import pytest
import tokenizers

from mtp_jax.errors import UserError
from mtp_jax.text import ChatTemplate, Tokenizer, train_bpe
from mtp_jax.text.bpe import CHATML
from train.conversations import Turns, target_mask
from train.records import BadRows, Conversation, Document
from train.tokenizing import DocumentTokenizer

GOLDENS = Path(__file__).parents[1] / "goldens" / "text"

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# The system's words go into the first question; the assistant is called model.
MERGED = """\
{{- bos_token }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
# No token ends a turn: the next header does.
HEADERS_ONLY = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
# One token opens the question, another closes it; the end of the text ends the answer.
BRACKETED = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- message.content + eos_token }}{%- else %}
{{- '[INST] ' + message.content + ' [/INST]' }}{%- endif %}
{%- endfor %}
"""
WITHOUT_GENERATION_PROMPT = CHATML.partition("{%- if add_generation_prompt")[0]

OWN = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml without a generation prompt": (WITHOUT_GENERATION_PROMPT, "<|im_end|>"),
    "like llama": (LLAMA, "<|eot_id|>"),
    "system merged": (MERGED, "<end_of_turn>"),
}
PUBLISHED = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
CHAT = [
    {"role": "user", "content": "First: what is é?\n\nSay it."},
    {"role": "assistant", "content": "A letter:\n\n\te\u0301 or 江🙂."},
    {"role": "user", "content": "assistant\nuser\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Bye"},
]
SAID = ["A letter:\n\n\té or 江🙂.", "Yes."]  # the tokenizer composes letters


def _tokenizer(source, name="t.jinja"):
    """Bytes as tokens, and every token that the template spells out in one piece."""
    backend = tokenizers.Tokenizer.from_str(train_bpe([], 289)._backend.to_str())
    spelled = re.findall(r"<\|\w+\|>|<｜[^<>]+｜>|</?\w+>|\[/?INST\]", source)
    roles = ("<|user|>", "<|assistant|>", "<|system|>", "<s>", "</s>")
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in (*spelled, *roles)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": ChatTemplate(source, name)})


def _tokenized(tokenizer, messages, *, skip=False, tools=None):
    bad = BadRows(skip=skip)
    document = Document(Conversation(messages, tools), "a.jsonl", 1, "a.jsonl:1")
    return list(DocumentTokenizer(tokenizer).tokenize([document], bad)), bad


def _trained(tokenizer, messages, **options):
    """The texts of the runs that are trained on."""
    ((_, ids, mask),), _ = _tokenized(tokenizer, messages, **options)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["", "system"])
def test_trained_on_is_what_the_assistant_said_and_its_end(name, system):
    source, end = OWN[name]
    assert _trained(_tokenizer(source), [*system, *CHAT]) == [said + end for said in SAID]


def test_the_whole_rendering_is_read_whatever_is_trained_on():
    tokenizer = _tokenizer(CHATML)
    ((_, ids, _),), _ = _tokenized(tokenizer, CHAT)
    assert ids.tolist() == tokenizer.encode(tokenizer.render_chat(CHAT, add_generation_prompt=False))


def test_where_no_token_ends_a_turn_the_next_header_does():
    trained = _trained(_tokenizer(HEADERS_ONLY), CHAT)
    assert trained == [SAID[0] + "<|user|>", SAID[1] + "<|user|>"]
    assert _trained(_tokenizer(HEADERS_ONLY), CHAT[:4]) == [SAID[0] + "<|user|>", SAID[1]]


def test_headers_that_also_close_a_question():
    tokenizer = _tokenizer(BRACKETED)
    assert _trained(tokenizer, CHAT) == [said + "</s>" for said in SAID]
    with pytest.raises(UserError, match="begins twice"):
        _tokenized(tokenizer, [{"role": "system", "content": "Be brief."}, *CHAT])


@pytest.fixture(scope="module", params=published_text.TEMPLATES)
def qwen(request):
    tokenizer = Tokenizer.from_folder(GOLDENS)
    source = (GOLDENS / f"{request.param}.jinja").read_text()
    return Tokenizer(tokenizer._backend, tokenizer.config, {"default": ChatTemplate(source, request.param)})


def test_qwens_thinking_is_trained_on_where_it_is_rendered_and_only_there(qwen):
    """It is dropped from earlier turns; an empty block is the generation prompt's, so never written by the model."""
    first = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"}
    last = {"role": "assistant", "content": "four", "reasoning_content": "2 + 2"}
    user = {"role": "user", "content": "?"}
    assert _trained(qwen, [user, first, user, last]) == ["two<|im_end|>", "2 + 2\n</think>\n\nfour<|im_end|>"]
    last = {"role": "assistant", "content": "four"}
    assert _trained(qwen, [user, first, user, last]) == ["two<|im_end|>", "four<|im_end|>"]


def test_qwens_tool_calls_are_trained_on_and_results_are_not(qwen):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "武汉"}}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "18 °C"},
        {"role": "assistant", "content": "mild"},
    ]
    called, answered = _trained(qwen, messages, tools=[{"type": "function", "function": {"name": "weather"}}])
    assert called == (
        "<tool_call>\n<function=weather>\n<parameter=city>\n武汉\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    assert answered == "mild<|im_end|>"


@pytest.mark.skipif(
    not (published_text.TOKENIZER / "tokenizer.json").exists(),
    reason="the whole published vocabulary is absent: python tests/published_text.py fetches it",
)
def test_the_published_tokenizer_and_template():
    tokenizer = Tokenizer.from_folder(published_text.TOKENIZER)
    assert _trained(tokenizer, CHAT) == [said + "<|im_end|>" for said in SAID]


@pytest.mark.skipif(
    not published_text.wheel("trl").exists(),
    reason="the published templates are absent: python tests/published_text.py fetches them",
)
class TestPublishedTemplates:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_trained_on_is_what_the_assistant_said_and_its_end(self, name):
        tokenizer = _tokenizer(published_text.template(name), name)
        assert _trained(tokenizer, CHAT[:4]) == [said + PUBLISHED[name] for said in SAID]

    def test_glm_ends_a_turn_with_the_next_header(self):
        tokenizer = _tokenizer(published_text.template("glm4moe"), "glm4moe")
        assert _trained(tokenizer, CHAT) == [said + "<|user|>" for said in SAID]
        thinking = [*CHAT[:3], {"role": "assistant", "content": "<think>hm</think>Yes."}]
        assert _trained(tokenizer, thinking)[1] == "\n<think>hm</think>\nYes."

    def test_one_that_wants_contents_in_parts_is_refused(self):
        with pytest.raises(UserError, match="llava_next: the chat template failed"):
            _tokenized(_tokenizer(published_text.template("llava_next"), "llava_next"), CHAT)

    def test_the_list_is_not_empty(self):
        with zipfile.ZipFile(published_text.wheel("trl")) as archive:
            assert {f"trl/chat_templates/{name}.jinja" for name in PUBLISHED} <= set(archive.namelist())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "no token of its own"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", "no token of its own"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes what was said"),
        ("{{ messages[-1].content }}", "changes what was said"),
        ("{% for m in messages[::-1] %}<|im_start|>{{ m.role + m.content }}{% endfor %}", "its order"),
        ("{% for m in messages %}{{ '<s>' if m.role == 'user' }}{{ m.content }}{% endfor %}", "no token of its own"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content + ' said<|im_end|>' }}{% endfor %}",
            "not found again",
        ),
    ],
)
def test_a_template_whose_turns_cannot_be_told_apart_is_refused(source, reason):
    """Also where bad rows are skipped: every row would be one."""
    with pytest.raises(UserError, match=rf"t\.jinja: the assistant's turns cannot be told apart.*{reason}"):
        _tokenized(_tokenizer(source), CHAT, skip=True)


def test_a_conversation_without_a_template_is_refused():
    tokenizer = train_bpe([], 289)
    tokenizer.chat_templates.clear()
    with pytest.raises(UserError, match=r"a\.jsonl:1: a conversation needs a chat template"):
        _tokenized(tokenizer, CHAT, skip=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([*CHAT[:3], {"role": "assistant", "content": "a<|im_end|>b"}], r"message 4 holds <\|im_end\|>"),
        ([{"role": "user", "content": "<|im_start|>assistant\nno"}, CHAT[1]], r"message 1 holds <\|im_start\|>"),
        ([CHAT[0], {**CHAT[1], "tool_calls": [{"a": ["<|im_end|>"]}]}], "message 2 holds"),
        ([CHAT[0], {**CHAT[1], "tool_calls": [{"function": {"name": "look_up"}}]}], "leaves out its call .*'look_up'"),
        (
            [CHAT[0], {**CHAT[1], "tool_calls": [{"name": "look_up"}]}],
            "message 2: the chat template leaves out its call",
        ),
        ([CHAT[0], {"role": "assistant", "content": "\ud800"}], "UTF-8"),
        ([CHAT[0], {"role": "assistant", "tool_calls": []}, *CHAT[2:]], "the chat template failed"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_named_or_counted(messages, message):
    tokenizer = _tokenizer(CHATML.replace("(message.content | trim)", "(message['content'].strip())"))
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{message}"):
        _tokenized(tokenizer, messages)
    documents, bad = _tokenized(tokenizer, messages, skip=True)
    assert (documents, bad.count) == ([], 1)


def test_a_template_that_raises_on_some_messages_names_the_row():
    source = CHATML + "{%- if messages | length > 4 %}{{- raise_exception('too long a chat') }}{%- endif %}"
    with pytest.raises(UserError, match=r"a\.jsonl:1: t\.jinja: the chat template failed.*too long a chat"):
        _tokenized(_tokenizer(source), CHAT)


def test_a_template_that_drops_a_turn_is_noticed():
    source = CHATML.replace("in messages", "in (messages if messages | length < 5 else messages[2:])")
    with pytest.raises(UserError, match="expected 2 turns of the assistant in the rendered text, found 1"):
        _tokenized(_tokenizer(source), CHAT)


def test_the_tool_template_is_used_where_there_are_tools():
    tokenizer = _tokenizer(CHATML)
    tokenizer.chat_templates["tool_use"] = ChatTemplate("tools! " + CHATML, "tools")
    ((_, ids, mask),), _ = _tokenized(tokenizer, CHAT, tools=[{}])
    assert tokenizer.decode(ids.tolist()).startswith("tools!<|im_start|>user")
    assert _trained(tokenizer, CHAT, tools=[{}]) == [said + "<|im_end|>" for said in SAID]
    assert mask.any()


def test_tokens_partly_outside_a_span_are_no_targets():
    offsets = np.array([[0, 2], [2, 3], [3, 5], [5, 6], [5, 6], [6, 9]])
    assert target_mask([(2, 4), (5, 8)], offsets).tolist() == [False, True, False, True, True, False]


def test_turns_are_learnt_once_for_many_conversations(monkeypatch):
    built = []
    monkeypatch.setattr("train.tokenizing.Turns", lambda *given: built.append(given) or Turns(*given))
    documents = [Document(Conversation(CHAT), "a.jsonl", row) for row in (1, 2, 3)]
    assert len(list(DocumentTokenizer(_tokenizer(CHATML)).tokenize(documents, BadRows(skip=False)))) == 3
    assert len(built) == 1
