"""Figures and tables of a small stored ablation, and the command line that makes them."""

import json
import re

import pytest
from ablation_records import record, small_ablation, three_seeds, write_records

from train.ablation.arms import arms_of
from train.ablation.comparison import choose_references
from train.ablation.statistics import Estimate
from train.ablation.table import escaped, markdown, shown

FIGURES = ("main_loss", "head", "drafting", "trade_off", "curves")


@pytest.fixture
def grid(tmp_path):
    path = write_records(tmp_path / "records.jsonl", small_ablation())
    with path.open("a") as file:
        file.write('{"name": "1-se')  # of a run that was just being recorded
    for name in ("0-seed0", "1-seed0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    return tmp_path


def rows(text, heading):
    """Cells of the first table after a heading, without its head."""
    table = text.split(f"# {heading}\n", 1)[1].split("\n| ", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.split("\n")[2:]]


def tables(records, reference=None):
    ablation = arms_of(records)
    return markdown(ablation, choose_references(ablation, reference), [])


def test_a_document_and_its_figures(call, grid, tmp_path):
    out = tmp_path / "results" / "weights"
    status, stdout, err = call("plot_ablation", grid, "--out", out)
    assert (status, stdout) == (0, ""), err
    assert err == f"{out}/ablation.md: 4 arms, 12 runs; 1 left out\n"
    text = (out / "ablation.md").read_text()
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", text) == [f"{name}.png" for name in FIGURES]
    names = {"ablation.md", *(f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg"))}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "main_loss.png").read_bytes().startswith(b"\x89PNG")
    assert rows(text, "Runs that are not in these figures") == [
        ["1-seed0", "it has no record: it failed, or is not finished"]
    ]


def test_tables_say_what_was_worked_out_by_hand():
    text = tables(small_ablation())
    assert [row[:6] for row in rows(text, "Held-out text")] == [
        ["0", "3", "0, 1, 2", "2,000", "0123456789ab", "3.20 ± 0.50"],
        ["0.1", "3", "0, 1, 2", "2,000", "0123456789ab", "3.10 ± 0.50"],
        ["0.3", "3", "0, 1, 2", "2,000", "0123456789ab", "3.40 ± 0.75"],
        ["0.3-then-0.1", "3", "0, 1, 2", "2,000", "0123456789ab", "3.20 ± 0.43"],
    ]
    differences = rows(text, "Differences")
    assert len(differences) == 5 * 3
    assert "and there are 15**" in text
    assert "about 0.8 of them would still exclude 0" in text
    assert differences[1:3] == [
        ["held-out main loss", "0.3", "0", "3", "0, 1, 2", "+0.20 ± 0.25", "no"],
        ["held-out main loss", "0.3-then-0.1", "0", "3", "0, 1, 2", "+0.00 ± 0.25", "no"],
    ]
    assert differences[0][-1] == "yes"
    assert [row[2] for row in differences[3:]] == ["0.1"] * 12
    assert "All runs that were begun are recorded, and count." in text
    assert "not of one kind" not in text


def test_another_reference():
    differences = rows(tables(small_ablation(), "0.3"), "Differences")
    assert {row[2] for row in differences} == {"0.3"}
    assert differences[0][:6] == ["held-out main loss", "0", "0.3", "3", "0, 1, 2", "-0.20 ± 0.25"]


def test_one_seed_and_seeds_that_differ():
    text = tables([record("0", 0, 3.0), record("0.1", 0, 2.9)])
    assert rows(text, "Held-out text")[0][-1] == "3.0000"
    assert rows(text, "Differences") == [["held-out main loss", "0.1", "0", "1", "0", "-0.1000", "no interval"]]
    assert "each interval" not in text.lower()
    text = tables([record("0", 0, 3.0), record("0.1", 1, 2.9), record("0.1", 2, 2.9, acceptance=0.5)])
    assert "**Arms have different seeds**" in text
    assert rows(text, "Differences")[0] == ["held-out main loss", "0.1", "0", "0", "–", "–", "no seed in common"]
    assert rows(text, "Decoding of held-out prompts, greedy")[1][-1] == "0.5000 (n = 1)"
    assert "There is one arm: nothing to compare." in tables(three_seeds("0.3", (3.0, 3.1, 3.2), 1.5))


def test_runs_of_different_commits_and_settings_are_told():
    runs = [record(weight, 0, 3.0) for weight in ("0", "0.1", "0.3")]
    runs[1]["commit"] = "abc-dirty"
    runs[2]["settings"]["learning_rate"] = 0.1
    runs[2]["versions"]["jax"] = "0.11"
    runs[2]["settings"]["log_every"] = 7  # changes nothing
    text = tables(runs)
    kinds = text.split("**The runs are not of one kind.**")[1].split("\n\n")[1].split("\n")
    assert kinds == [
        "- commit: 0123456789abcdef (0-seed0, 0.3-seed0); abc-dirty (0.1-seed0)",
        "- jax: 0.10.2 (0-seed0, 0.1-seed0); 0.11 (0.3-seed0)",
        "- learning_rate: null (0-seed0, 0.1-seed0); 0.1 (0.3-seed0)",
    ]


def test_runs_that_were_measured_on_different_text_are_told():
    runs = [record("0.1", 0, 3.0), record("0.1", 0, 3.1, {"vocab_size": 512})]
    assert "different text" not in tables(runs)
    runs[1]["unigram_loss"] = 6.1
    assert "**Runs were measured on different text or in different tokens**" in tables(runs)


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (3.14159, 0.0123, "3.142 ± 0.012"),
        (3.14159, 0.996, "3.1 ± 1.0"),
        (3.14159, 1.24, "3.1 ± 1.2"),
        (314.159, 123.0, "314 ± 123"),
        (1.0, 0.0, "1.0000 ± 0.0000"),
        (0.5, None, "0.5000"),
        (0.5, 1e-12, "0.500000 ± 0.000000"),
    ],
)
def test_numbers_end_where_they_are_sure(mean, half_width, text):
    assert shown(Estimate(mean, half_width, (0, 1))) == text


def test_names_from_files_are_text_in_markdown():
    assert escaped("0.3 head_loss=kl") == "0.3 head_loss=kl"
    assert escaped("a|b\n`c` <script>&_d_") == r"a\|b�\`c\` &lt;script&gt;&amp;\_d\_"
    assert escaped("[x](http://y) ![z] **b** $m$") == r"\[x\](http:\/\/y) \!\[z\] \*\*b\*\* \$m\$"
    name = "x|y\n# heading\x1b[31m<img src=x>"
    runs = [{**record(weight, 0, 3.0), "label": f"{weight} {name}", "commit": name} for weight in ("0", "0.1")]
    text = tables(runs)
    assert "<" not in text
    assert "\n# heading" not in text
    assert "\x1b" not in text
    assert {len(row) for row in rows(text, "Held-out text")} == {6}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "there are none"),
        ('{"name": "cut', "there are none"),
        ("x\n", "line 1: expected a record"),
        ("[1]\n", "line 1: expected a record"),
        ("[" * 100_000 + "\n", "line 1: expected a record"),
        ('{"name": "0-seed0", "settings": {}}\n', "run 0-seed0: label: expected a name, got none"),
        (
            json.dumps(record("0", 0, None)) + "\n",
            "none of 1 runs counts; 0-seed0: it has no finite held-out main loss",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_nothing_is_written(call, tmp_path, content, message):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    status, stdout, err = call("plot_ablation", tmp_path)
    assert (status, stdout) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "figures").exists()


def test_mistakes_in_flags(call, grid):
    status, _, err = call("plot_ablation", grid, "--reference", "0.2")
    assert status == 2
    assert "--reference 0.2: expected one of the arms 0, 0.1, 0.3, 0.3-then-0.1" in err
    for out in (grid / "records.jsonl", grid / "records.jsonl" / "below"):
        status, _, err = call("plot_ablation", grid, "--out", out)
        assert status == 2
        assert f"--out {out}: expected a folder, {grid}/records.jsonl is a file" in err


def test_without_out_the_files_lie_beside_the_records(call, tmp_path):
    write_records(tmp_path / "records.jsonl", [record("0.3", 0, 3.0)])
    status, _, err = call("plot_ablation", tmp_path / "records.jsonl")
    assert status == 0, err
    names = {"ablation.md", *(f"{name}.{suffix}" for name in ("main_loss", "curves") for suffix in ("png", "svg"))}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names
