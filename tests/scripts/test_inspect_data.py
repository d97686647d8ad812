"""The command line that shows what is trained on."""

import json

import pytest

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
SETTINGS = ["--set", "sequence_length=64", "vocab_size=300", "held_out=", "held_out_every=3"]


@pytest.fixture
def chats(tmp_path):
    rows = [{"messages": MESSAGES}, {"text": "prose"}, {"text": "held out"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


def test_a_row_is_shown_with_its_counts(call, chats):
    status, out, err = call("inspect_data", "--config", "tiny", "--data", chats, *SETTINGS)
    assert status == 0, err
    assert "<|im_start|>assistant\n‹Hello.<|im_end|>›\n" in out
    assert "── padding: " in out
    assert out.splitlines()[-1].startswith("all 1 rows of 64: documents 2, segments 2, tokens ")
    status, out, _ = call("inspect_data", "--config", "tiny", "--data", chats, *SETTINGS, "--held-out")
    assert status == 0
    assert "h‹eld out<|endoftext|>›" in out


def test_the_tokenizer_is_that_of_the_checkpoint_the_run_starts_from(call, chats, script):
    demo = script("_cli").DEMO_CHECKPOINT
    data = ("--config", "finetune", "--data", chats, "--json", "--set", "held_out_every=3")
    status, from_start, err = call("inspect_data", *data, f"init={demo}")
    assert status == 0, err
    assert from_start == call("inspect_data", *data, "--checkpoint", demo)[1]


def test_json_and_a_checkpoints_template(call, chats, script):
    demo = script("_cli").DEMO_CHECKPOINT
    flags = ["--config", "tiny", "--data", chats, *SETTINGS, "--checkpoint", demo, "--marks", "colour", "--json"]
    status, out, err = call("inspect_data", *flags)
    assert status == 0, err
    record = json.loads(out)
    (row,) = record["shown"]
    assert record["targets"] == row["targets"] == sum(segment["targets"] for segment in row["segments"])
    assert record["tokens"] + record["padding"] == record["rows"] * 64
    trained = [text for segment in row["segments"] for text, is_trained in segment["runs"] if is_trained]
    assert "Hello.<|im_end|>" in trained


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--row", "5"], "--row 5: there are 1 rows"),
        (["--row", "0"], "--row"),
        (["--checkpoint", "."], "expected a tokenizer.json"),
        (["--set", "data_weights=1,2"], "data_weights"),
        (["--data", "absent"], "absent: expected a file or a folder"),
    ],
)
def test_mistakes(call, chats, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("inspect_data", "--config", "tiny", "--data", chats, *SETTINGS, *flags)
    assert status == 2
    assert message in err.splitlines()[-1]
    assert "all" not in out


def test_bad_rows_may_be_skipped(call, chats):
    with open(chats, "a") as file:
        file.write("{\n")
    flags = ["--config", "tiny", "--data", chats, *SETTINGS]
    status, _, err = call("inspect_data", *flags)
    assert status == 2
    assert "chats.jsonl:4: " in err.splitlines()[-1]
    assert "--skip-bad" in err
    status, _, err = call("inspect_data", *flags, "--skip-bad")
    assert status == 0
    assert "1 rows that cannot be used" in err


def test_prompts_and_frequent_tokens_come_from_the_same_readers(call, chats, tmp_path, script):
    demo = script("_cli").DEMO_CHECKPOINT
    status, _, err = call("draft_vocabulary", "--checkpoint", demo, "--data", chats, "--out", tmp_path / "ids.txt")
    assert status == 0, err
    assert "counted in" in err
    status, _, err = call("held_out_prompts", "--config", "tiny", "--count", 2, "--out", tmp_path / "prompts.jsonl")
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"prompt", "source"}] * 2


def test_prompts_are_cut_from_the_rows_that_a_run_on_this_data_holds_out(call, chats, tmp_path):
    with chats.open("a") as file:
        file.write(json.dumps({"messages": [*MESSAGES, *MESSAGES]}) + "\n")
    flags = ("--config", "finetune", "--data", chats, "--count", 2, "--out", tmp_path / "prompts.jsonl")
    status, _, err = call("held_out_prompts", *flags)
    assert status == 2
    assert "is held out (see held_out and held_out_every" in err
    status, _, err = call("held_out_prompts", *flags, "--set", "held_out_every=4")
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["messages"] for row in rows] == [MESSAGES[:1], [*MESSAGES, *MESSAGES[:1]]]
