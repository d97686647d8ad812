"""generate.py with one prompt, called as a user calls it; files of prompts are in test_generate_rows.py."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from documented import KEYS
from random_checkpoint import NEXT, Variant, write_variant

from mtp_jax.text import Tokenizer

ROOT = Path(__file__).parent.parent.parent


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
    assert text.replace("‹", "").replace("›", "") == printable(record["text"])


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


def test_a_head_that_was_lost_is_missed(call, tmp_path):
    # Qwen3-Next's config does not say that there should be one.
    folder = write_variant(tmp_path, Variant("next", 1, False, family=NEXT, head=False))
    flags = ("--checkpoint", folder, "--prompt-ids", "1,2", "--max-new-tokens", 2, "--json")
    status, out, err = call("generate", *flags)
    assert (status, json.loads(out)["drafted"]) == (0, 0)
    assert re.fullmatch(r"note: this checkpoint has no MTP head, .*graft_head\.py.*\n", err)
    for flag in (["--num-draft-tokens", 0], ["--trunk-only"]):
        assert call("generate", *flags, *flag)[::2] == (0, "")
    status, _, err = call("generate", *flags, "--num-draft-tokens", 2)
    assert status == 2
    assert "drafting 2 tokens needs the MTP head" in err
    assert "graft_head.py" in err


def test_a_question_is_put_into_the_chat_template(call, checkpoint, tmp_path):
    (tmp_path / "q.txt").write_text("x", encoding="utf-8")
    flags = ("--checkpoint", checkpoint, "--max-new-tokens", 9, "--json")
    status, out, _ = call("generate", *flags, "--chat", "--prompt-file", tmp_path / "q.txt")
    assert status == 0
    spelled = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert json.loads(out)["tokens"] == json.loads(call("generate", *flags, "--prompt", spelled)[1])["tokens"]


def test_a_misspelt_flag_is_named_first(call):
    for flags in (["--promt", "a"], ["stray"], ["--temprature", "1", "stray"]):
        status, _, err = call("generate", *flags)
        assert status == 2
        assert f"unrecognized arguments: {flags[0]}" in err


def test_samples_differ_and_the_seed_decides(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 16, "--json")
    drawn = ("--temperature", 1.5, "--num-samples", 3)
    first, again, other = (
        json.loads(call("generate", *flags, *drawn, *more)[1])["completions"]
        for more in (("--seed", 4), ("--seed", 4, "--num-draft-tokens", 0, "--batch-size", 1), ("--seed", 5))
    )
    assert [completion["sample"] for completion in first] == [0, 1, 2]
    tokens = [completion["tokens"] for completion in first]
    assert len({tuple(row) for row in tokens}) == 3
    assert [completion["tokens"] for completion in again] == tokens
    assert [completion["tokens"] for completion in other] != tokens


def test_samples_as_text_come_in_order(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 16, "--marks", "none")
    flags += ("--temperature", 1.5, "--num-samples", 3)
    records = json.loads(call("generate", *flags, "--json")[1])["completions"]
    status, out, _ = call("generate", *flags)
    assert status == 0
    texts = re.split(r"^─+ sample \d of 3 ─+\n", out, flags=re.MULTILINE)
    assert texts[0] == ""
    shown = [text.rpartition("\n16 tokens")[0] for text in texts[1:]]
    assert shown == [printable(record["text"]) for record in records]


def printable(text):
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def test_a_stop_string_cuts_the_text(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 20, "--json")
    whole = json.loads(call("generate", *flags)[1])["text"]
    stop = whole[5:8]
    record = json.loads(call("generate", *flags, "--stop", "never there", f"--stop={stop}")[1])
    assert record["finish_reason"] == "stop"
    assert record["text"] == whole[: whole.index(stop)]


def test_log_probabilities_only_where_asked_for(call, checkpoint, tmp_path):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 5, "--json")
    record = json.loads(call("generate", *flags, "--logprobs", 2)[1])
    assert len(record["logprobs"]) == len(record["tokens"])
    assert record["logprobs"][0]["top"][0] == [record["tokens"][0], record["logprobs"][0]["logprob"]]
    record = json.loads(call("generate", *flags, "--report", tmp_path / "page.html")[1])
    assert set(record) == KEYS, "those of the report are its own"


def test_a_report_shows_samples_and_settings(call, checkpoint, tmp_path):
    page = tmp_path / "page.html"
    flags = ("--checkpoint", checkpoint, "--prompt", "<b>def", "--max-new-tokens", 9, "--report", page)
    status, _, _ = call("generate", *flags, "--temperature", 0.7, "--num-samples", 2, "--stop", "</script>")
    assert status == 0
    html = page.read_text(encoding="utf-8")
    assert html.count("&lt;b&gt;def") == 4, "in the overview, and before each text"
    assert "0.7" in html
    assert "&lt;/script&gt;" in html
    settings = dict(re.findall(r'<th scope="row">([a-z ]+)</th><td>(.*?)</td>', html))
    assert (settings["temperature"], settings["seed"], settings["verifier"]) == ("0.7", "0", "shared_noise")
    assert " %" in html, "tokens have probabilities"


def test_a_report_shows_the_text_of_ids(call, checkpoint, tmp_path):
    page, ids = tmp_path / "page.html", ",".join(map(str, Tokenizer.from_folder(checkpoint).encode("def f")))
    flags = ("--checkpoint", checkpoint, "--prompt-ids", ids, "--max-new-tokens", 5, "--report", page)
    assert call("generate", *flags)[0] == 0
    html = page.read_text(encoding="utf-8")
    assert '<span class="prompt">def f</span>' in html
    assert "verifier" not in html.partition('id="settings"')[2], "greedy"


def test_auto_reports_its_choice(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 9, "--num-draft-tokens")
    record = json.loads(call("generate", *flags, "auto", "--json")[1])
    assert set(record) == KEYS | {"auto_drafts"}
    assert [size["num_draft_tokens"] for size in record["auto_drafts"]["sizes"]] == [0, 1, 2, 3, 5]
    assert record["tokens"] == json.loads(call("generate", *flags, 3, "--json")[1])["tokens"]
    assert "drafts a round: not chosen yet (J=0" in call("generate", *flags, "auto")[1]


def test_drafts_over_fewer_tokens_give_the_same_text(call, checkpoint, tmp_path):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--max-new-tokens", 20, "--json")
    whole = json.loads(call("generate", *flags)[1])
    (tmp_path / "ids.txt").write_text("".join(f"{i}\n" for i in range(0, 290, 7)))
    few = json.loads(call("generate", *flags, "--draft-vocab", tmp_path / "ids.txt")[1])
    assert few["tokens"] == whole["tokens"]
    assert few["accepted"] < whole["accepted"]
    status, _, err = call("generate", *flags, "--draft-vocab", 5)
    assert status == 2
    assert "draft_vocabulary.txt: expected a file of ids, there is none" in err


def test_no_new_tokens_compile_nothing(call, checkpoint):
    flags = ("--checkpoint", checkpoint, "--prompt", "def", "--json")
    record = json.loads(call("generate", *flags, "--max-new-tokens", 0)[1])
    assert (record["tokens"], record["text"], record["finish_reason"]) == ([], "", "length")
    assert record["compile_seconds"] == record["seconds"] == 0
    assert json.loads(call("generate", *flags, "--max-new-tokens", 1)[1])["compile_seconds"] > 0


def test_a_second_start_compiles_nothing(start, tmp_path):
    flags = ("--prompt", "class Queue:", "--max-new-tokens", 8)
    entries = []
    for _ in range(2):
        process = start("generate", *flags, environment={"XDG_CACHE_HOME": str(tmp_path)}, stdout=subprocess.PIPE)
        assert process.wait(timeout=300) == 0
        entries.append(sorted(path.name for path in (tmp_path / "mtp_jax" / "programs").iterdir()))
    assert any(name.startswith("jit_decode-") for name in entries[0])
    assert entries[1] == entries[0], "programs that the second start did not find"


@pytest.fixture
def endless(checkpoint, tmp_path):
    """The flags of a text that takes longer than a test."""
    folder = tmp_path / "endless"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 100_000
    (folder / "config.json").write_text(json.dumps(config))
    return (
        "--checkpoint",
        folder,
        "--prompt",
        "def",
        "--max-new-tokens",
        90_000,
        "--ignore-eos",
        "--cache-length",
        95_000,
    )


def test_a_terminal_gets_text_as_it_comes_and_ctrl_c_ends_it(start, endless, tmp_path):
    terminal, theirs = pty.openpty()
    report = tmp_path / "page.html"
    flags = (*endless, "--json", tmp_path / "out.json", "--report", report, "--marks", "none")
    process = start("generate", *flags, stdout=theirs, stderr=subprocess.PIPE, environment={"TERM": "xterm"})
    os.close(theirs)
    screen = b""
    while len(screen) < 300:
        screen += os.read(terminal, 1000)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # how a terminal without another end says so
        while more := os.read(terminal, 1000):
            screen += more
    os.close(terminal)
    assert process.wait(timeout=300) == 130
    assert process.stderr.read() == "interrupted\n"
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert record["finish_reason"] == "interrupted"
    assert 0 < len(record["tokens"]) < 90_000
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.decode()).replace("\r\n", "\n")
    expected = f"def{printable(record['text'])}\n{len(record['tokens'])} tokens"
    assert text.startswith(expected)
    assert "</html>" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --prompt --prompt-file --prompt-ids is required"),
        (["--prompt", "a", "--prompt-ids", "1"], "not allowed with argument"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-ids", ""], "--prompt-ids: the prompt is empty"),
        (["--prompt-ids", "1,x"], "--prompt-ids: expected integers separated by commas, got 'x'"),
        (["--prompt-ids", "1,307"], "--prompt-ids: the prompt holds id 307; expected ids from 0 to 306"),
        (["--prompt-ids", "1,2,3", "--cache-length", "2"], "a prompt of 3 tokens does not fit into the cache of 2"),
        (["--prompt-ids", "1", "--chat"], "not --prompt-ids"),
        (["--prompt", "a", "--num-draft-tokens", "-1"], "expected an integer that is at least 0, got '-1'"),
        (["--prompt", "a", "--max-new-tokens", "x"], "expected an integer that is at least 0, got 'x'"),
        (["--prompt-file", "/nowhere"], "/nowhere: cannot be read"),
        (["--prompt", "a", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--prompt", "a", "--checkpoint", "/nowhere"], "/nowhere, which is not a folder"),
        (["--prompt", "a", "--report", "/nowhere/page.html"], "--report: cannot write /nowhere/page.html"),
        (["--prompt", "a", "--output", "o.jsonl"], "--output is for the rows of a .jsonl file"),
        (["--prompt", "a", "--batch-size", "2"], "--batch-size is for several rows"),
        (["--prompt", "a", "--logprobs", "2"], "add --json or --report"),
        (["--prompt", "a", "--raw-logprobs", "--json"], "add --logprobs N or --report"),
        (["--prompt", "a", "--json", "x", "--report", "x"], "--report and --json are the same file"),
        (["--prompt", "a", "--stop", ""], "--stop: expected at least one character"),
        (["--prompt", "a", "--num-draft-tokens", "many"], "at least 0, got 'many'"),
        (["--prompt", "a", "--num-draft-tokens", "auto", "--trunk-only"], "--num-draft-tokens auto drafts with"),
        (["--prompt", "a", "--draft-vocab", "0"], "--draft-vocab: expected an integer that is at least 1"),
        (["--prompt", "a", "--draft-vocab", "/nowhere"], "/nowhere: cannot be read"),
        (["--prompt", "a", "--top-k", "3"], "--top-k 3 needs a temperature above 0"),
        (["--prompt", "a", "--ban-ids", "295"], "--ban-ids holds id 295; expected ids from 0 to 294"),
        (["--prompt", "a", "--logprobs", "999", "--json"], "between 0 and the vocabulary's 307, got 999"),
        (["--prompt", "a", "--ignore-eos", "--min-new-tokens", "2"], "drop one of the two"),
        (["--prompt", "a", "--max-new-tokens", "4", "--min-new-tokens", "5"], "5 is above --max-new-tokens 4"),
        (["--prompt", "a", "--num-samples", "0"], "at least 1, got '0'"),
        (["--prompt", "a", "--num-draft-tokens", "1000000"], "at most 128, got 1000000"),
        (["--prompt", "a", "--stop", "\udcff"], "--stop: expected stop strings that have a UTF-8 form"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(call, checkpoint, flags, message):
    status, out, err = call("generate", "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["generate", "compare_decoding"])
def test_help_from_another_folder(name, tmp_path):
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--num-draft-tokens" in done.stdout
    assert done.stderr == ""
