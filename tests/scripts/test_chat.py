"""chat.py, called as a user calls it: with lines from a pipe, and in a terminal with Ctrl-C."""

import dataclasses
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from bent_model import CONFIG, bent_params

from infer import Generator, Sampling
from infer.chat_screen import split_thinking
from mtp_jax.hf import save_checkpoint
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer, train_bpe

ROOT = Path(__file__).parent.parent.parent
THINKING = (ROOT / "tests" / "goldens" / "text" / "qwen3_5_think.jinja").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model of 307 ids that talks in letters; room for long replies."""
    folder = tmp_path_factory.mktemp("checkpoints") / "bent"
    config = dataclasses.replace(CONFIG, vocab_size=307, max_position_embeddings=32768)
    model = MTPModel(config, jnp.dtype("float32"))
    save_checkpoint(folder, config, bent_params(model, seed=3, trunk_noise=0.8, head_noise=0.1))
    tokenizer = train_bpe([], 289)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def thinker(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


@pytest.fixture(scope="module")
def letters(checkpoint):
    """Flags that ban all but letters and the end of a turn."""
    tokenizer = Tokenizer.from_folder(checkpoint)
    wanted = {*map(tokenizer.token_id, [*"abcdefghijklmnopqrstuvwxyz", "<|im_end|>"])}
    banned = ",".join(str(i) for i in range(len(tokenizer)) if i not in wanted)
    return ["--ban-ids", banned, "--max-new-tokens", 20, "--cache-length", 512]


@pytest.fixture
def talk(call, monkeypatch):
    """`talk(lines, *flags)` is (status, stdout, stderr) of chat.py with the lines on its stdin."""

    def run(lines, *flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", *flags)

    return run


def test_each_line_of_a_pipe_is_a_message_and_stdout_has_replies_only(talk, checkpoint, letters):
    lines = ["hello", "", "and?", "/stats", " /stats", "/reset", "hello"]
    status, out, err = talk(lines, "--checkpoint", checkpoint, "--system", "s", *letters)
    assert status == 0
    replies = out.splitlines()
    assert len(replies) == 4, "the message that begins with a space, and no empty one"
    assert all(re.fullmatch("[a-z]*", reply) for reply in replies)
    assert replies[3] == replies[0]
    told = err.splitlines()
    limited = [line for line in told if "ended at" in line]
    assert limited == [f"reply {i} ended at 20 tokens, the limit" for i, r in enumerate(replies, 1) if len(r) == 20]
    context, reply, forgotten = (line for line in told if line not in limited)
    kept, read = map(int, re.fullmatch(r"context: \d+ of 512 tokens; .* kept (\d+) and read (\d+)", context).groups())
    # Of the first turn all but its newest token; then what ends that turn, the question, and the reply's header.
    frame = len("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    frame -= 5 * 11
    assert kept >= frame
    assert read <= 4 + len("user\nand?\nassistant\n") + 6
    assert reply.startswith("reply: ")
    assert "drafts accepted (by position: " in reply
    assert forgotten == "forgotten"
    # Told as the generator tells it.
    generator = Generator.from_pretrained(checkpoint)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    sampling = Sampling(banned_ids=[int(i) for i in letters[1].split(",")])
    ids = generator.tokenizer.encode(generator.tokenizer.render_chat(messages))
    (expected,) = generator.generate([ids], max_new_tokens=20, sampling=sampling)
    assert replies[0] == expected.text


def test_thinking_is_turned_off_by_flag_and_command(talk, thinker, letters):
    flags = ("--checkpoint", thinker, *letters)
    _, out, _ = talk(["hi", "/thinking off", "hi"], *flags)
    assert re.fullmatch(r"<think>\n[a-z]*\n[a-z]*\n", out)
    _, off, err = talk(["hi", "/stats", "/retry", "/stats"], *flags, "--thinking", "off")
    first, second = off.splitlines()
    assert first == second, "greedy"
    assert re.search(r"kept 0 and read (\d+)\n(.*\n)+.* kept \1 and read 0; \d+ read before were given up\n", err)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ([], ["--thinking", "off"], "error: the chat template has no enable_thinking to turn on or off"),
        (["/thinking on"], [], "error: the chat template has no enable_thinking to turn on or off"),
        (["/thinking maybe"], [], "expected a command that /help lists, got '/thinking maybe'"),
        (["/stop"], [], "expected a command that /help lists, got '/stop'"),
        (["/retry"], [], "there is no reply yet that could be made again"),
        (["x" * 300], ["--cache-length", "256"], "the conversation is full: with this message it takes"),
        ([], ["--cache-length", "100000"], "max_position_embeddings 32768, got 100000"),
        ([], ["--max-new-tokens", "0"], "expected an integer that is at least 1, got '0'"),
        ([], ["--max-new-tokens", "4", "--min-new-tokens", "5"], "--min-new-tokens 5 is above --max-new-tokens 4"),
        ([], ["--top-k", "5"], "--top-k 5 needs a temperature above 0"),
        (["caf\udce9"], [], "expected text that has a UTF-8 form"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(talk, checkpoint, lines, flags, message):
    status, out, err = talk(lines, "--checkpoint", checkpoint, *flags)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_checkpoint_without_a_template_says_what_was_expected(talk, checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    status, _, err = talk(["hi"], "--checkpoint", tmp_path)
    assert status == 2
    assert "expected chat_template.jinja, or chat_template in tokenizer_config.json, beside tokenizer.json" in err
    (tmp_path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in talk(["hi"], "--checkpoint", tmp_path)[2]


def test_commands_that_need_no_model(talk, checkpoint):
    status, out, err = talk(["/help", "/stats", "/exit", "never read"], "--checkpoint", checkpoint)
    assert (status, out) == (0, "")
    assert "/thinking on|off" in err
    assert "nothing was said yet" in err


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a</think>b"], [("a</think>b", False)]),
        (["<think>", "a", "</think>b", "c"], [("<think>", True), ("a", True), ("</think>", True), ("b", False)]),
        (["<think>a</thi", "nk>b"], [("<think>a</thi", True), ("nk>", True), ("b", False)]),
        (["<think>a</think>"], [("<think>a</think>", True)]),
    ],
)
def test_thinking_is_told_from_the_answer(pieces, expected):
    got = [(text, thinking) for (text, _), thinking in split_thinking([(piece, 1) for piece in pieces], "")]
    assert got[: len(expected)] == expected
    assert all(not thinking for _, thinking in got[len(expected) :])


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True, **streams)
        os.close(slave)
        self.seen = ""

    def wait_for(self, pattern):
        """Reads until the pattern is there, and gives the text up to its end."""
        ends = time.monotonic() + 120
        os.set_blocking(self.master, False)
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < ends, f"{pattern} never came, only: {self.seen}"
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def type(self, line):
        os.write(self.master, f"{line}\n".encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(thinker, letters):
    end = Tokenizer.from_folder(thinker).token_id("<|im_end|>")
    flags = [*letters[:2], "--ban-ids", end, "--max-new-tokens", 30000, "--cache-length", 32000]
    program = Terminal(sys.executable, ROOT / "scripts" / "chat.py", "--checkpoint", thinker, *flags)
    yield program
    program.close()


def test_ctrl_c_ends_a_reply_and_then_the_program(terminal):
    terminal.wait_for("> ")
    terminal.type("hi")
    shown = terminal.wait_for(r"\x1b\[2m<think>(.|\n)*[a-z]{2}")
    assert "\x1b[" in shown
    terminal.interrupt()
    terminal.wait_for("ended here")
    terminal.wait_for("> ")
    terminal.type("/stats")
    terminal.wait_for("ended by interrupted")
    terminal.wait_for("> ")
    terminal.type("and now?")
    terminal.wait_for(r"<think>(.|\n)*[a-z]{2}")
    terminal.interrupt()
    terminal.wait_for("ended here")
    terminal.type("/stats")
    kept = re.search(r"kept (\d+) and", terminal.wait_for("reply: "))
    assert int(kept[1]) > 0
    terminal.wait_for("> ")
    terminal.interrupt()
    assert terminal.process.wait(60) == 130
