"""compare_decoding.py with a temperature."""

import json

import pytest


@pytest.mark.parametrize(("verifier", "identical"), [("shared_noise", True), ("rejection", None)])
def test_sampled_decoding_is_compared(call, checkpoint, tmp_path, verifier, identical):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def"}\n{"prompt_ids": [4, 5]}\n', encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 20, "--repeats", 1)
    flags += ("--num-draft-tokens", 3, "--temperature", 0.8, "--verifier", verifier, "--expected-acceptance")
    status, out, _ = call("compare_decoding", *flags, "--json", tmp_path / "out.json")
    assert status == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["sampling"]["verifier"] == verifier
    assert [(row["identical"], row["first_difference"]) for row in record["results"]] == [(identical, None)] * 2
    (total,) = record["totals"]
    assert total["identical"] is identical
    assert 0 < total["expected_shared_noise"] <= total["expected_rejection"] <= 1
    assert 0 <= total["first_accepted_share"] <= 1
    assert total["accepted_share_error"] is not None
    assert ("yes" in out) == (identical is True)
    assert f"J = 3: of the drafts that a round began with {total['first_accepted_share']:.3f}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--expected-acceptance"], "needs a --temperature above 0"),
        (["--expected-acceptance", "--temperature", "1", "--num-draft-tokens", "0,1"], "drop the 0"),
        (["--verifier", "rejection"], "--verifier"),
        (["--ban-ids", "9999"], "--ban-ids holds id 9999"),
        (["--min-new-tokens", "9", "--max-new-tokens", "3"], "--min-new-tokens 9 is above --max-new-tokens 3"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(call, checkpoint, flags, message):
    status, out, err = call("compare_decoding", "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
