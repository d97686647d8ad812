"""How a command line ends, and where its results go."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from infer.sampling import Sampling
from mtp_jax.errors import UserError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def cli(script):
    return script("_cli")


def test_a_users_mistake_is_one_line_and_status_2(cli, capsys):
    def main(argv):
        raise UserError("expected this, got that")

    with pytest.raises(SystemExit) as end:
        cli.run(main, [])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: expected this, got that\n"


def test_help_states_every_default_that_means_something(cli):
    parser = cli.Parser()
    parser.add_argument("--zero", type=int, default=0, help="a number")
    parser.add_argument("--float", type=float, default=0.0, help="a number")
    parser.add_argument("--flag", action="store_true", help="a flag")
    parser.add_argument("--list", action="append", default=[], help="a list")
    parser.add_argument("--none", help="nothing")
    text = parser.format_help()
    assert ("a number (default: 0)\n" in text, "a number (default: 0.0)\n" in text) == (True, True)
    assert text.count("(default: ") == 2


def run_python(code, **environment):
    """The code in a Python of its own, where `_cli` is imported as scripts do it."""
    code = "import sys; sys.path.insert(0, 'scripts'); import _cli\n" + code
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


def test_an_interruption_is_status_130():
    done = run_python("def main(argv): raise KeyboardInterrupt\n_cli.run(main)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("place", ["import", "__del__", "collector"])
def test_an_interruption_is_not_lost(tmp_path, place):
    """Where Python would drop the exception, or a module would be left half imported, it comes right afterwards."""
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('whole')\n")
    code = f"""
import gc, signal, time
sys.path.append({str(tmp_path)!r})

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        print("whole")

def _xla_gc_callback(phase, info):
    if phase == "stop":
        gc.callbacks.remove(_xla_gc_callback)
        signal.raise_signal(signal.SIGINT)
        print("whole")

def main(argv):
    if {place!r} == "import":
        import interrupted
    elif {place!r} == "__del__":
        Dying()
    else:
        gc.callbacks.append(_xla_gc_callback)
        gc.collect()
    time.sleep(20)
    print("not interrupted")

_cli.run(main)
"""
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "whole\n", "interrupted\n")


def test_a_reader_that_left_is_no_traceback():
    code = "import os\ndef main(argv):\n  r, w = os.pipe(); os.close(r); os.dup2(w, 1); print('x')"
    done = run_python(code + "\n_cli.run(main)")
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_stdout_is_no_traceback():
    code = "sys.stdout = None\ndef main(argv): _cli.write_json({}, '-'); print('x')"
    done = run_python(code + "\n_cli.run(main)")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_stdin_and_stderr_are_no_traceback():
    code = "def main(argv):\n    print(sys.stdin.read() == '')\n    raise UserError('x')\n_cli.run(main)"
    whole = f"import sys; sys.path.insert(0, 'scripts'); import _cli; from mtp_jax.errors import UserError\n{code}"
    command = 'exec "$0" -c "$1" <&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, whole], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "True\n")


def test_a_pipe_may_be_written_to_wherever_it_lies(cli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert cli.writable(str(tmp_path / "pipe")) == str(tmp_path / "pipe")
    assert cli.writable(os.devnull) == os.devnull


def test_an_output_that_lacks_a_character_gets_the_rest():
    code = "def main(argv): print('a\u6c5f'); _cli.write_json({'text': '\u6c5f'}, '-')\n_cli.run(main)"
    done = run_python(code, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout == 'a\\u6c5f\n{\n  "text": "\\u6c5f"\n}\n'


def test_a_wrong_flag_is_one_line_and_status_2(cli, capsys):
    def main(argv):
        cli.Parser(prog="x.py").parse_args(argv)

    with pytest.raises(SystemExit) as end:
        cli.run(main, ["--no-such-flag"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "--no-such-flag" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("argv", "expected"), [([], None), (["--json"], "-"), (["--json", "out.json"], "out.json")])
def test_json_flag(cli, tmp_path, monkeypatch, argv, expected):
    monkeypatch.chdir(tmp_path)
    parser = cli.Parser()
    cli.add_json_flag(parser)
    assert parser.parse_args(argv).json == expected


def test_json_refuses_a_folder_that_is_not_there(cli):
    parser = cli.Parser()
    cli.add_json_flag(parser)
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        parser.parse_args(["--json", "/nowhere/out.json"])


def test_write_json_leaves_only_the_file(cli, tmp_path):
    cli.write_json({"text": "长江"}, str(tmp_path / "out.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"text": "长江"}


def test_scripts_do_not_hide_the_package_train(tmp_path):
    done = run_python("import train; print(train.__file__)")
    assert done.stdout.strip() == str(ROOT / "train" / "__init__.py")


def test_a_message_that_repeats_line_ends_is_one_line(cli, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(lambda argv: cli.Parser(prog="x.py").parse_args(argv), ["a\nb"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_the_machine_refuses_is_one_line_and_status_2(cli, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(lambda argv: Path(argv[0]).stat(), ["x" * 300])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {'x' * 300}: File name too long\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("bytearray(2**62)", "error: out of memory: "),
        ("jnp.zeros((2**20, 2**20, 2**10)).block_until_ready()", "error: out of memory: RESOURCE_EXHAUSTED: "),
    ],
)
def test_too_little_memory_is_one_line_and_status_2(code, message):
    done = run_python(f"import jax.numpy as jnp\ndef main(argv): {code}\n_cli.run(main)")
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_other_errors_at_run_time_are_not_taken_for_it(cli):
    def main(argv):
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.run(main, [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line():
    done = run_python(
        "import os\ndef main(argv): os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('x')\n_cli.run(main)"
    )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_write_json_beside_a_folder_in_its_way(cli, tmp_path):
    (tmp_path / "out.json.partial").mkdir()
    with pytest.raises(UserError, match=r"out\.json: cannot be written"):
        cli.write_json({}, str(tmp_path / "out.json"))


def sampling(cli, *flags):
    parser = cli.Parser(prog="x.py")
    cli.add_sampling_flags(parser)
    return cli.sampling_from(parser.parse_args(list(flags)))


def test_without_flags_sampling_is_the_default(cli):
    assert sampling(cli) == Sampling()


def test_every_sampling_flag_arrives(cli):
    flags = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5 --presence-penalty -1 "
    flags += "--frequency-penalty 2 --logit-bias 3=-1.5 4=1 --logit-bias 5=2 --ban-ids 8,9 --ban-ids 6 "
    flags += "--min-new-tokens 4 --seed 11 --verifier rejection"
    expected = Sampling(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={3: -1.5, 4: 1, 5: 2},
        banned_ids=(6, 8, 9),
        min_new_tokens=4,
        seed=11,
        verifier="rejection",
    )
    assert sampling(cli, *flags.split()) == expected
    assert all(getattr(expected, field.name) != getattr(Sampling(), field.name) for field in fields(Sampling))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature x", "argument --temperature: expected a number, got 'x'"),
        ("--temperature nan", "--temperature must be a finite number"),
        ("--top-p 0", "--top-p must be above 0 and at most 1, got 0.0"),
        ("--top-k 5", "--top-k 5 needs a temperature above 0"),
        ("--verifier rejection", "--verifier rejection needs a temperature above 0"),
        ("--seed -1", "argument --seed: expected an integer that is at least 0, got '-1'"),
        ("--logit-bias 5", "argument --logit-bias: expected ID=X, an id and a number, got '5'"),
        ("--logit-bias 5=1 5=2", "--logit-bias: id 5 is given twice"),
        ("--logit-bias 5=1 --ban-ids 5", "id 5 is in both --logit-bias and --ban-ids"),
        ("--ban-ids 1,,2", "argument --ban-ids: expected an integer that is at least 0, got ''"),
    ],
)
def test_a_mistake_in_sampling_names_the_flag(cli, flags, message):
    with pytest.raises(UserError) as error:
        sampling(cli, *flags.split())
    assert str(error.value).startswith(message)


CACHE = "_cli.enable_compilation_cache(); import jax; print(jax.config.jax_compilation_cache_dir)"


def cache_folder(**environment):
    done = run_python(CACHE, JAX_ENABLE_COMPILATION_CACHE="true", **environment)
    assert done.stderr == ""
    return done.stdout.strip()


def test_compiled_programs_are_kept_where_only_the_user_writes(tmp_path):
    folder = tmp_path / "cache" / "mtp_jax" / "programs"
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path / "cache")) == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path / "cache")) == "None"
    given = str(tmp_path / "given")
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=given) == given
    assert cache_folder(XDG_CACHE_HOME="", HOME=str(tmp_path)) == str(tmp_path / ".cache" / "mtp_jax" / "programs")


def test_no_place_for_compiled_programs_is_no_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
