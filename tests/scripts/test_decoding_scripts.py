"""generate.py and compare_decoding.py, called as a user calls them."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from bent_model import write_checkpoint

ROOT = Path(__file__).parent.parent.parent
KEYS = {
    "text",
    "tokens",
    "finish_reason",
    "rounds",
    "drafted",
    "accepted",
    "accepted_per_position",
    "tokens_per_round",
    "seconds",
    "tokens_per_second",
    "compile_seconds",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "bent"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def without_tokenizer(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_json_alone_on_stdout(call, checkpoint):
    status, out, _ = call("generate", "--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 20, "--json")
    record = json.loads(out)
    assert status == 0
    assert set(record) == KEYS
    assert len(record["tokens"]) <= 20
    assert len(record["accepted_per_position"]) == 3
    assert max(record["tokens"]) < 295, "ids that no token has must not be chosen"


def test_json_file_beside_text(call, checkpoint, tmp_path):
    target = tmp_path / "out.json"
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 20, "--json", target)
    status, out, _ = call("generate", *flags)
    assert status == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert set(record) == KEYS
    text, _, summary = out.rstrip("\n").rpartition("\n")
    assert summary.startswith(f"{len(record['tokens'])} tokens")
    # A random model writes control characters, which a terminal is spared.
    shown = "".join(c for c in record["text"] if c in "\n\t" or unicodedata.category(c) != "Cc")
    assert text.replace("‹", "").replace("›", "").split() == shown.split()


def test_drafts_do_not_change_the_text(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 20, "--json", "--num-draft-tokens")
    records = [json.loads(call("generate", *flags, j)[1]) for j in (0, 3)]
    assert records[0]["tokens"] == records[1]["tokens"]
    assert records[0]["drafted"] == 0


def test_ids_need_no_tokenizer(call, without_tokenizer):
    flags = ("--checkpoint", without_tokenizer, "--max-new-tokens", 9)
    status, out, _ = call("generate", *flags, "--prompt-ids", " 1, 2 ,3", "--json")
    assert status == 0
    assert json.loads(out)["text"] is None
    status, out, err = call("generate", *flags, "--prompt", "def")
    assert (status, out) == (2, "")
    assert "no tokenizer.json" in err


def test_the_trunk_alone_decodes_plainly(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--trunk-only", "--prompt", "def", "--max-new-tokens", 9)
    status, out, _ = call("generate", *flags, "--json")
    assert status == 0
    assert json.loads(out)["drafted"] == 0
    status, _, err = call("generate", *flags, "--num-draft-tokens", 2)
    assert status == 2
    assert "--trunk-only leaves out the head that --num-draft-tokens 2 drafts with" in err


def test_a_question_is_put_into_the_chat_template(call, checkpoint, tmp_path):
    (tmp_path / "q.txt").write_text("x", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--max-new-tokens", 9, "--json")
    status, out, _ = call("generate", *flags, "--chat", "--prompt-file", tmp_path / "q.txt")
    assert status == 0
    spelled = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(out)["tokens"] == json.loads(call("generate", *flags, "--prompt", spelled)[1])["tokens"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --prompt --prompt-file --prompt-ids is required"),
        (["--prompt", "a", "--prompt-ids", "1"], "not allowed with argument"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-ids", ""], "the prompt is empty"),
        (["--prompt-ids", "1,x"], "expected integers separated by commas, got 'x'"),
        (["--prompt-ids", "1,307"], "holds id 307; expected ids from 0 to 306"),
        (["--prompt-ids", "1,2,3", "--cache-length", "2"], "a prompt of 3 tokens does not fit into the cache of 2"),
        (["--prompt-ids", "1", "--chat"], "not --prompt-ids"),
        (["--prompt", "a", "--num-draft-tokens", "-1"], "expected an integer that is at least 0, got '-1'"),
        (["--prompt", "a", "--max-new-tokens", "x"], "expected an integer that is at least 0, got 'x'"),
        (["--prompt-file", "/nowhere"], "/nowhere: cannot be read"),
        (["--prompt", "a", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--prompt", "a", "--checkpoint", "/nowhere"], "/nowhere, which is not a folder"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(call, checkpoint, flags, message):
    status, out, err = call("generate", "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


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


def test_compare_for_people(call, checkpoint, tmp_path):
    (tmp_path / "p.txt").write_text("def :smile: [red]\n", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20, "--repeats", 1)
    status, out, _ = call("compare_decoding", *flags, "--num-draft-tokens", "3", "--show-text")
    assert status == 0
    assert "J = 3" in out
    assert "def :smile: [red]" in out
    assert "by position" in out
    assert "yes" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-draft-tokens", "1,-2"], "at least 0, got '-2'"),
        (["--num-draft-tokens", "1,1"], "expected different numbers"),
        (["--repeats", "0"], "at least 1, got '0'"),
        (["--prompts", "/nowhere"], "expected a file, got /nowhere"),
    ],
)
def test_a_mistake_in_comparing_is_one_line_and_status_2(call, checkpoint, flags, message):
    status, out, err = call("compare_decoding", "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["generate", "compare_decoding"])
def test_help_from_another_folder(name, tmp_path):
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--num-draft-tokens" in done.stdout
    assert done.stderr == ""
