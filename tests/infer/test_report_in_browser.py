"""The report in a real browser: it fits, it can be read, it runs nothing and asks for nothing."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from browser import Page, chromium, find_chromium
from traces import traced

from infer.completion import TokenLogprob
from infer.report import NUM_COLOURS, report_html
from mtp_jax.text import Tokenizer, train_bpe

CODE = "def f(x):\n    if x:\n\t\treturn  x  \n\n    return 'a好b👩‍👩‍👧'\n"
EVIL = (
    "<script>document.title = 'ran'</script><img src='http://localhost:9/x.png' onerror=\"document.title = 'ran'\">\n"
)
SIZES = [(400, False), (400, True), (1200, False), (1200, True)]

CONTRAST = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return light(colour);
    }
  };
  const entries = [...document.querySelectorAll('SELECTOR')].map(e => {
    const [a, b] = [light(getComputedStyle(e).color), behind(e)];
    return [e.className + ' ' + e.textContent.slice(0, 20), (Math.max(a, b) + .05) / (Math.min(a, b) + .05), b];
  });
  return entries;
})()
"""


@pytest.fixture(scope="module")
def page():
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium or Chrome on this machine: `apt-get install chromium` (`.ci/run` does)")
    with chromium(path) as page:
        yield page


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([CODE * 3], 310)


@pytest.fixture(scope="module")
def report(tokenizer, tmp_path_factory) -> Path:
    """Two completions with everything that can be in one, J above the number of colours, and very long words."""
    ids = tokenizer.encode(EVIL + CODE * 4 + "w" * 300)
    num_drafts = NUM_COLOURS + 1
    drawn = traced([*ids, *[0] * 20], [3, 0, 8, 1, 2, 5], num_drafts, len(ids), [])
    logprobs = [TokenLogprob(-0.1, [(token, -0.1), (40, -2.5)], None) for token in drawn.tokens]
    logprobs = [
        dataclasses.replace(entry, rejected=-3.0 if refused >= 0 else None)
        for entry, refused in zip(logprobs, drawn.rejected, strict=True)
    ]
    completions = [dataclasses.replace(drawn, logprobs=logprobs), dataclasses.replace(drawn, logprobs=None)]
    settings = {"prompt": EVIL, "long": "v" * 400, "n" * 60: "name"}
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report_html(completions, tokenizer, [EVIL + CODE, CODE * 40], settings), encoding="utf-8")
    return file


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}-{'dark' if size[1] else 'light'}")
def opened(request, page: Page, report: Path) -> Page:
    width, dark = request.param
    page.requests.clear()
    page.complaints.clear()
    page.open(report, width, dark=dark)
    return page


def test_it_fits_runs_nothing_and_asks_for_nothing(opened, report):
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.evaluate("document.title") == "How each token came about"
    assert opened.evaluate("document.scripts.length + document.images.length") == 0
    assert opened.requests == [report.as_uri()]
    assert opened.complaints == []


def test_text_is_kept_to_the_space_and_the_prompt_is_shown(opened):
    text = opened.evaluate(
        "(() => { const e = document.querySelector('.text').cloneNode(true);"
        " e.querySelectorAll('.note').forEach(n => n.remove()); return e.textContent; })()"
    )
    assert text == EVIL + CODE + EVIL + CODE * 4 + "w" * 300
    assert opened.evaluate("getComputedStyle(document.querySelector('.t')).whiteSpace") == "pre-wrap"


def test_pointing_at_a_token_or_focusing_it_shows_its_note(opened):
    visible = "getComputedStyle(document.querySelectorAll('.t.refused > .note')[0]).display"
    assert opened.evaluate(visible) == "none"
    opened.point_at(".t.refused")
    assert opened.evaluate(visible) == "block"
    note = opened.evaluate("document.querySelector('.t.refused > .note').innerText")
    assert "refused at position 4" in note
    assert "4.98 %" in note
    box = opened.evaluate(
        "(() => { const b = document.querySelector('.t.refused > .note').getBoundingClientRect();"
        " return [b.left >= 0, b.top >= 0, b.right <= innerWidth, b.bottom <= innerHeight]; })()"
    )
    assert box == [True] * 4
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert opened.evaluate(visible) == "none"
    # From the link before the text, one Tab leads to the first token.
    opened.evaluate("document.querySelector('.hint a').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert opened.evaluate("document.activeElement === document.querySelector('.t')")
    assert opened.evaluate("getComputedStyle(document.activeElement.querySelector('.note')).display") == "block"
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_all_text_stands_out_and_positions_do_without_colour(opened):
    words = ".key, header p, .hint, .hint a, .figures dt, .prompt, .t, small, .note span, .settings th, .ends"
    words += ", nav a, nav th, nav td"
    contrasts = opened.evaluate(CONTRAST.replace("SELECTOR", words))
    assert len(contrasts) > 100
    assert [entry for entry in contrasts if entry[1] < 4.5] == []
    # WCAG's relative luminance behind position 1, 2, ...: each step is in the same direction and can be seen.
    keys = opened.evaluate(CONTRAST.replace("SELECTOR", ".legend .key:not(.p0)"))
    behind = [entry[2] + 0.05 for entry in keys]
    assert len(behind) == NUM_COLOURS
    steps = [a / b for a, b in itertools.pairwise(behind)]
    assert all(step > 1.2 for step in steps) or all(step < 1 / 1.2 for step in steps)


def test_the_policy_is_in_force(page, report):
    page.open(report, 400)
    page.complaints.clear()
    page.evaluate(
        "(() => { const e = document.createElement('script'); e.textContent = \"document.title = 'ran'\";"
        " document.body.append(e); })()"
    )
    assert page.evaluate("document.title") == "How each token came about"
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_ten_thousand_tokens_open(page, tokenizer, tmp_path):
    ids = tokenizer.encode(CODE)
    # Not by `traced`, which asks `settle` round by round.
    completion = traced([*ids[:12], *[0] * 8], [2], 3, 10, [])
    times = 1000
    repeated = {
        name: getattr(completion, name) * times
        for name in ("tokens", "draft_positions", "round_drafts", "rejected", "logprobs")
    }
    file = tmp_path / "long.html"
    file.write_text(report_html([dataclasses.replace(completion, **repeated)], tokenizer, [CODE], {}), encoding="utf-8")
    page.open(file, 400)
    assert page.evaluate("document.querySelectorAll('.text .note .of').length") == 10_000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
