"""The report's page as text: what is told of each token, and that nothing in it is taken for markup."""

import base64
import dataclasses
import hashlib
import math
import re
from html.parser import HTMLParser

import pytest
from traces import REFUSED, traced

from infer.completion import TokenLogprob
from infer.report import report_html, visible
from mtp_jax.text import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["def f(x):\n    return x\n" * 3], 295)


class Parsed(HTMLParser):
    """Each token's classes, own text and note."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.spans: list[tuple[str, int]] = []
        self.classes: list[str] = []
        self.texts: list[str] = []
        self.notes: list[str] = []
        self.all_text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "span":
            return
        classes = dict(attrs).get("class") or ""
        self.spans.append(classes)
        if classes.startswith("t "):
            self.classes.append(classes)
            self.texts.append("")
            self.notes.append("")

    def handle_endtag(self, tag):
        if tag == "span":
            self.spans.pop()

    def handle_data(self, data):
        self.all_text += data
        if "note" in self.spans:
            self.notes[-1] += data
        elif any(classes.startswith("t ") for classes in self.spans):
            self.texts[-1] += data


def test_each_token_says_how_it_came(tokenizer):
    ids = tokenizer.encode("a b c d e f")
    completion = traced([*ids, *[0] * 8], [2, 0, 3], 3, len(ids), [])
    parsed = Parsed(report_html([completion], tokenizer, ["x"], {}))
    assert "".join(parsed.texts) == "a b c d e f"
    shown = [re.search(r"p(\d)", classes) for classes in parsed.classes]
    assert [int(match[1]) for match in shown] == completion.draft_positions
    assert ["refused" in classes for classes in parsed.classes] == [token >= 0 for token in completion.rejected]
    assert "prefill" in parsed.classes[0]
    assert "first token, from reading the prompt" in parsed.notes[0]
    first_draft = completion.draft_positions.index(1)
    assert "drafted at position 1, round 1" in parsed.notes[first_draft]
    refused = completion.rejected.index(REFUSED)
    assert completion.draft_positions[refused] == 0
    name = tokenizer.decode([REFUSED])
    assert re.search(
        rf"chosen by the trunk, round 1\s*refused at position 3: {re.escape(name)} id 7", parsed.notes[refused]
    )


def test_probabilities_are_percents(tokenizer):
    ids = tokenizer.encode("abc")
    other = tokenizer.encode("z")[0]
    logprobs = [
        TokenLogprob(math.log(0.75), [(ids[0], math.log(0.75)), (other, math.log(0.2)), (5, -math.inf)]),
        TokenLogprob(0.0, [], math.log(0.031)),
        TokenLogprob(-50.0, [], -math.inf),
    ]
    completion = traced([*ids, *[0] * 8], [0], 2, 3, [])
    with_them = dataclasses.replace(completion, logprobs=logprobs)
    notes = Parsed(report_html([with_them], tokenizer, [""], {})).notes
    assert f"a id {ids[0]} 75 %" in notes[0]
    assert f"also possible: z id {other} 20 %" in notes[0]
    assert "id 5" not in notes[0]
    assert (f"b id {ids[1]} 100 %" in notes[1], "id 7 3.1 %" in notes[1]) == (True, True)
    assert ("under 0.001 %" in notes[2], "id 7 0 %" in notes[2]) == (True, True)
    without = Parsed(report_html([dataclasses.replace(completion, logprobs=None)], tokenizer, [""], {})).notes
    assert "%" not in "".join(without)
    assert "probability not recorded" in without[1]


def test_tokens_that_share_a_character_are_one_piece(tokenizer):
    ids = tokenizer.encode("a好b")
    assert len(ids) == 5
    completion = traced([*ids, *[0] * 8], [1, 2], 2, 5, [])
    parsed = Parsed(report_html([completion], tokenizer, [""], {}))
    assert parsed.texts == ["a", "好", "b"]
    assert "3 tokens share a character" in parsed.notes[1]
    assert all(f"id {token}" in parsed.notes[1] for token in ids[1:4])


def test_an_unfinished_character_and_ids_without_a_token_are_shown(tokenizer):
    ids = [*tokenizer.encode("a好")[:-1], 9999]
    completion = traced([*ids, *[0] * 8], [0], 1, 4, [])
    parsed = Parsed(report_html([completion], tokenizer, [""], {}))
    assert "".join(parsed.texts).startswith("a\ufffd")
    assert "9999" in "".join(parsed.notes)


def test_without_a_tokenizer_ids_are_shown():
    completion = traced([11, 22, 33, 0, 0, 0], [1], 1, 3, [])
    assert Parsed(report_html([completion], None, ["5 6"], {})).texts == ["11 ", "22 ", "33 "]


def test_nothing_given_is_markup(tokenizer):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;</style></div>{{ 7 * 7 }}"
    end = tokenizer.end_id
    ids = [*tokenizer.encode(evil), end]
    completion = traced([*ids, *[0] * 8], [1], 1, len(ids), [end])
    page = report_html([completion], tokenizer, [evil * 20], {evil: evil, "a": "b"})
    plain = report_html([completion], None, [""], {"a": "b", "c": "d"})
    parsed = Parsed(page)
    assert {*parsed.tags} - {"details", "summary"} == {*Parsed(plain).tags}
    assert parsed.tags.count("style") == 1
    assert "".join(parsed.texts) == evil + tokenizer.decode([end])
    assert "special" in parsed.classes[-1]
    # Twenty in the prompt, one of which is folded in two, and two in the settings.
    assert parsed.all_text.count(evil) == 21


def test_the_policy_lets_in_the_style_and_nothing_else(tokenizer):
    page = report_html([traced(range(9), [1], 1, 5, [])], tokenizer, ["x"], {"a": "b"})
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not re.search(r"\b(src|style|on\w+)=|url\(|@import|http:|https:", page)


def test_the_charts_say_what_was_counted(tokenizer):
    completion = traced(range(60), [3, 1, 0], 3, 40, [])
    page = report_html([completion], tokenizer, ["x"], {})
    made = [sum(drafts >= k for drafts in completion.round_drafts) for k in (1, 2, 3)]
    for kept, tried in zip(completion.accepted_per_position, made, strict=True):
        assert f"{100 * kept / tried:.0f} % <small>{kept} of {tried}</small>" in page
    # Columns of whole tokens: the areas of the paths are the tokens of each position.
    for position, wanted in enumerate([completion.draft_positions.count(k) for k in range(4)]):
        outline = re.search(rf'<path class="p{position}" d="([^"]*)"', page)[1]
        area = sum(float(tall) for tall in re.findall(r"v-([\d.]+)h", outline))
        assert area == pytest.approx(wanted - (position == 0)), "prefill's token is in no round"
    assert f"The dashed line is the mean, {completion.tokens_per_round:.2f}" in page


def test_many_rounds_share_columns(tokenizer):
    completion = traced([1] * 300, [0], 1, 250, [])
    page = report_html([completion], tokenizer, ["x"], {})
    assert "A column is the mean of 3 rounds" in page
    assert 'viewBox="0 0 83 2"' in page


@pytest.mark.parametrize(("num_drafts", "limit"), [(0, 6), (3, 1)])
def test_no_drafts_no_charts(tokenizer, num_drafts, limit):
    page = report_html([traced(range(20), [0], num_drafts, limit, [])], tokenizer, ["x"], {})
    assert "<svg" not in page
    assert page.count('tabindex="0"') == limit


def test_several_completions_have_an_overview(tokenizer):
    completions = [traced(range(20), [1], 1, n, []) for n in (1, 8)]
    page, second = report_html(completions, tokenizer, ["x", "y\n\t z"], {}), completions[1]
    assert "Completion 2 of 2" in page
    assert '<a href="#completion-2">' in page
    row = re.search(r'<td class="excerpt">y z</td>(.*?)</tr>', page, re.DOTALL)[1]
    assert re.sub(r"<.*?>|\s+", " ", row).split() == ["8", str(second.rounds), f"{7 / second.rounds:.2f}", "100", "%"]
    assert "<nav" not in report_html([traced(range(20), [1], 1, 8, [])], tokenizer, ["x"], {})


def test_hidden_characters_are_made_visible():
    text = "a\0\x1b\x85\u202e\r\n\tb\u200dc\ud800"
    joined = "".join(shown for _, shown in visible(text))
    assert joined == "a\\x00\\x1bU+0085U+202E\\x0d\n\tb\u200dcU+D800"
    assert "".join(shown for _, shown in visible(" \t\n", keep_lines=False)) == "␣⇥↵"
