"""What templates may do, what they may not, and where they are found."""

import json

import pytest

from mtp_jax.errors import UserError
from mtp_jax.text import ChatTemplate, Tokenizer, train_bpe

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **variables):
    return ChatTemplate(source, "t.jinja").render(messages, **variables)


def test_blocks_are_trimmed_as_published():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loop_controls_work():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_tojson_keeps_non_ascii_and_html():
    assert render("{{ x | tojson }}", x={"b": "汉<&'", "a": 1}) == '{"b": "汉<&\'", "a": 1}'


def test_raise_exception_is_the_users_mistake():
    with pytest.raises(UserError, match=r"t\.jinja.*No user query"):
        render("{{ raise_exception('No user query') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ ''['format'].__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ 'a' * 10**12 }}",
        "{{ 9**9**9 }}",
        "{{ [0] * 10**9 }}",
        "{% for i in range(10**7) %}x{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.here }}",
        "{% include 'config.json' %}",
    ],
)
def test_a_hostile_or_broken_template_gets_nowhere(source):
    with pytest.raises(UserError, match=r"t\.jinja"):
        render(source)


def test_too_much_output_is_stopped():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{{ x }}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="characters"):
        render(source, x="x" * 99)


def test_a_template_that_does_not_compile_is_named():
    with pytest.raises(UserError, match=r"t\.jinja: the chat template does not compile"):
        ChatTemplate("{% for %}", "t.jinja")


@pytest.fixture
def folder(tmp_path):
    train_bpe([], 289).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    return tmp_path


def set_template(folder, value):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))


def test_the_template_inside_tokenizer_config_is_found(folder):
    set_template(folder, "inside {{ eos_token }}")
    assert Tokenizer.from_folder(folder).render_chat(USER) == "inside <|endoftext|>"


def test_a_file_comes_before_tokenizer_config(folder):
    set_template(folder, "inside")
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).render_chat(USER) == "file"


def test_the_list_form_holds_named_templates(folder):
    set_template(folder, [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat(USER) == "d"
    assert tokenizer.render_chat(USER, tools=[{}]) == "t"
    with pytest.raises(UserError, match=r"named rag.*default, tool_use"):
        tokenizer.render_chat(USER, template="rag")
    tokenizer.save(folder / "again")
    assert Tokenizer.from_folder(folder / "again").render_chat(USER, tools=[{}]) == "t"


def test_the_old_json_file_is_found(folder):
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    assert Tokenizer.from_folder(folder).render_chat(USER) == "old"


@pytest.mark.parametrize("value", [3, [1], [{"name": "default"}], {"default": "x"}])
def test_a_template_of_another_form_is_refused(folder, value):
    set_template(folder, value)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.from_folder(folder)


def test_no_template_is_said_when_one_is_asked_for(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.end_of_turn_id is None
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.render_chat(USER)


def test_a_template_without_end_of_turn_is_ended_by_the_next_header(folder):
    set_template(folder, "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.end_of_turn_id == tokenizer.token_id("<|im_start|>")
