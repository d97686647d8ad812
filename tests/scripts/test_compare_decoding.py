"""compare_decoding.py, called as a user calls it."""

import json

import pytest
from documented import KEYS


def test_compare_as_json(call, checkpoint, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def"}\n{"prompt_ids": [4, 5]}\n', encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 20, "--repeats", 1)
    status, out, _ = call("compare_decoding", *flags, "--num-draft-tokens", "3", "--json")
    assert status == 0
    rows = json.loads(out)["results"]
    extra = {"plain_tokens_per_second", "speedup", "identical", "first_difference", "distinct_4grams"}
    assert [set(row) for row in rows] == [KEYS | extra | {"prompt", "num_prompt_tokens", "num_draft_tokens"}] * 2
    assert [(row["prompt"], row["num_draft_tokens"], row["identical"]) for row in rows] == [
        ("def", 3, True),
        ("4,5", 3, True),
    ]


def test_a_head_that_reads_otherwise_changes_no_token(call, checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("def\n", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20, "--repeats", 1)
    tokens = []
    for reads in ("after_norm", "before_norm"):
        status, out, _ = call("compare_decoding", *flags, "--num-draft-tokens", "2", "--head-reads", reads, "--json")
        assert status == 0
        record = json.loads(out)
        assert record["head_reads"] == reads
        (row,) = record["results"]
        assert row["identical"]
        tokens.append(row["tokens"])
    assert tokens[0] == tokens[1]


def test_compare_for_people(call, checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("def :smile: [red]\n", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20, "--repeats", 1)
    status, out, _ = call("compare_decoding", *flags, "--num-draft-tokens", "3", "--show-text")
    assert status == 0
    assert "J = 3" in out
    assert "def :smile: [red]" in out
    assert "by position" in out
    assert "yes" in out


def test_the_shipped_models_drafts_stand_and_those_of_the_place_after_do_not(call, tmp_path, script):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "import os\\n\\nclass Reader:\\n"}\n{"prompt": "def add(self, key):\\n"}\n'
    )
    flags = ("--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 40, "--repeats", 1, "--num-draft-tokens", 2)
    status, out, err = call("compare_decoding", *flags, "--control", "--json", tmp_path / "out.json")
    assert status == 0, err
    (total,) = json.loads((tmp_path / "out.json").read_text())["totals"]
    assert total["identical"]
    assert total["position_shares"][0] == total["first_accepted_share"] > 0.4
    assert total["control_share"] < 0.15
    assert f"stood by position {total['position_shares'][0]:.3f} ± " in out


def test_plain_decoding_alone_is_shown(call, checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("def\n", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20, "--repeats", 1)
    status, out, err = call("compare_decoding", *flags, "--num-draft-tokens", "0")
    assert (status, err) == (0, "")
    assert "by position" in out


def test_a_rows_own_settings_are_not_passed_over(call, checkpoint, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def"}\n{"prompt": "x", "seed": 1}\n', encoding="utf-8")
    status, out, err = call("compare_decoding", "--checkpoint", checkpoint, "--prompts", tmp_path / "p.jsonl")
    assert (status, out) == (2, "")
    assert "p.jsonl:2: seed: rows are compared under the same settings" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-draft-tokens", "1,-2"], "at least 0, got '-2'"),
        (["--num-draft-tokens", "1,1"], "expected different numbers"),
        (["--repeats", "0"], "at least 1, got '0'"),
        (["--control", "--num-draft-tokens", "0,1"], "--control is of drafts: drop the 0"),
        (["--prompts", "/nowhere"], "expected a file, got /nowhere"),
    ],
)
def test_a_mistake_in_comparing_is_one_line_and_status_2(call, checkpoint, flags, message):
    status, out, err = call("compare_decoding", "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
