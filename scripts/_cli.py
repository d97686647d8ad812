"""What every command line here shares: how mistakes and interruptions end, and the flags that recur.

Importing this first also repairs the import path. Python puts this folder on it, where `train.py` would hide
the package `train`; the root of the repository takes its place, so scripts run from a checkout, installed or
not.
"""

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from infer.sampling import Sampling
    from infer.settings import Settings
    from mtp_jax.config import ModelConfig
    from mtp_jax.text import Tokenizer
    from train.experiment import Experiment

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "scripts"]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

if importlib.util.find_spec("jax") is None:
    print(
        "error: jax is not installed for this Python; run `make demo` once, then use .venv/bin/python (or "
        "`source .venv/bin/activate`)",
        file=sys.stderr,
    )
    sys.exit(2)

from mtp_jax.errors import UserError  # noqa: E402  (needs the path above)
from mtp_jax.files import write_text  # noqa: E402
from mtp_jax.mesh_shape import MeshShape, parse_mesh  # noqa: E402

DEMO_CHECKPOINT = ROOT / "models" / "demo"
INTERRUPTED = 130
USER_ERROR = 2


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Calls `main(argv)` and exits: 0, 130 if interrupted, 2 with one line on stderr for a `UserError`, an `OSError` or
    too little memory."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character still gets the rest
    try:
        with _interrupts_that_arrive():
            main(argv)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stdout.flush()
        print("interrupted", file=sys.stderr, flush=True)
        # At once: an ordinary exit takes modules down under compiler threads that still run, and crashes.
        os._exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader (`head`, say) has left. Python would complain once more when it flushes stdout at exit.
        _drop_stdout()
        sys.exit(1)
    except OSError as error:
        # A name that is too long, a full disk, a folder that may not be read: wherever it is met, the machine's doing.
        if error.errno is None:
            raise
        if error.filename is None:
            _drop_stdout()  # it may be the one that is full
        _fail(": ".join(map(str, filter(None, (error.filename, error.strerror)))))
    except (MemoryError, RuntimeError) as error:  # jax's own is the latter
        if not is_out_of_memory(error):
            raise
        _fail(f"out of memory: {error}")
    sys.exit(0)


def is_out_of_memory(error: Exception) -> bool:
    """Whether host or device had not as much memory as was asked of them."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def _interrupts_that_arrive() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt a little later where it would come to nothing or to something else.

    Python drops what is raised within `__del__` and within calls of the garbage collector, of which jax has one; and a
    module half imported may not be whole again, or take the process down.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # not to be heard at all, say
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not run.__code__:
            code = frame.f_code
            if code.co_name in ("__del__", "_xla_gc_callback") or code.co_filename.startswith("<frozen importlib"):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    alarm = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)


def _fail(message: str) -> NoReturn:
    """Ends with the message as one line, whatever names from files or flags it repeats."""
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(USER_ERROR)


def _drop_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """Argument parser with defaults in its help, and one line instead of a usage dump for a mistake."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's line breaks and states every default that means something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        nothing = default is None or default is False or default == [] or default is argparse.SUPPRESS  # 0 is something
        if text is None or "%(default)" in text or nothing:
            return text
        return f"{text} (default: %(default)s)"


def count(text: str) -> int:
    """An argparse type: an integer that is at least 0."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """An argparse type: an integer that is at least 1."""
    return _integer(text, 1)


def path(text: str) -> Path:
    """An argparse type: a path. Not `Path` itself, for which nothing (a variable that is not set) is this folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty name")
    return Path(text)


def released_model(text: str) -> str:
    """An argparse type: a key of `configs.released.RELEASED`, which may be given in short."""
    from configs.released import released_name  # here and not above: few scripts want it

    try:
        return released_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"expected an integer that is at least {least}, got {text!r}")
    return value


def add_head_reads_flag(parser: argparse._ActionsContainer) -> None:
    """`--head-reads`: absent is None, as the checkpoint says."""
    parser.add_argument(
        "--head-reads",
        choices=("after_norm", "before_norm"),
        help="let the head read hidden states after the final norm or before it, whatever the checkpoint says: engines "
        "disagree for some models, and the wrong one shows in nothing but acceptance",
    )


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """`--json [FILE]`: absent is None, without a file is "-" (stdout). Hand the value to `write_json`."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        type=_json_target,
        help="give the result as one JSON object: to FILE, or else alone on stdout",
    )


def _json_target(target: str) -> str:
    return target if target == "-" else writable(target)


def writable(target: str) -> str:
    """An argparse type: a file that can be written, as far as can be seen before there is something to write."""
    path = Path(target)
    if not target or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, got {target or 'an empty name'!r}")
    if path.exists() and not path.is_file():  # a device or a pipe, which is written to as it is
        if not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"cannot write {target}: it may not be written to")
        return target
    folder = path.resolve().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {target}: there is no folder {path.parent}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"cannot write {target}: the folder {path.parent} may not be written to")
    return target


def write_json(record: dict[str, Any], target: str) -> None:
    """Writes one JSON object to a file (under another name first, then renamed) or, for "-", to stdout."""
    ascii_only = target == "-" and not _writes_utf()
    text = json.dumps(record, ensure_ascii=ascii_only, allow_nan=False, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        write_text(Path(target), text)
    except OSError as error:
        raise UserError(f"--json {target}: cannot be written: {error.strerror}") from error


def write_json_line(record: dict[str, Any]) -> None:
    """Writes one JSON object as a line to stdout, at once."""
    sys.stdout.write(json.dumps(record, ensure_ascii=not _writes_utf(), allow_nan=False) + "\n")
    sys.stdout.flush()


def _writes_utf() -> bool:
    return "utf" in (sys.stdout.encoding or "").lower()


def add_checkpoint_flag(parser: argparse._ActionsContainer) -> None:
    """`--checkpoint DIR`, by default the shipped model. Hand the value to `existing_checkpoint`."""
    parser.add_argument(
        "--checkpoint",
        type=path,
        default=DEMO_CHECKPOINT,
        metavar="DIR",
        help="folder with config.json and safetensors files",
    )


def existing_checkpoint(folder: Path) -> Path:
    """The folder itself, checked before anything slow starts."""
    if folder.is_dir():
        return folder
    if folder == DEMO_CHECKPOINT:
        raise UserError(f"the shipped model is not at {folder}; name a checkpoint folder with --checkpoint DIR")
    raise UserError(f"--checkpoint: expected a folder with a config.json, got {folder}, which is not a folder")


def add_experiment_flags(parser: argparse.ArgumentParser, presets: Iterable[str], settings: str) -> None:
    """`--config NAME`, `--init DIR`, `--new-head` and those of `add_data_flags`.

    Hand the arguments to `experiment_from`.

    Args:
      settings: the help of `--set`.
    """
    parser.add_argument("--config", required=True, choices=list(presets), help="the experiment to start from")
    parser.add_argument(
        "--init",
        type=path,
        metavar="DIR",
        help="published checkpoint to start from: its config, weights, tokenizer",
    )
    parser.add_argument(
        "--new-head",
        action="store_true",
        help="with --init: start a fresh MTP head for a checkpoint that has none, from its last full-attention layer",
    )
    add_data_flags(parser, settings)


def experiment_from(preset: "Experiment", args: argparse.Namespace) -> "Experiment":
    """The preset with what `add_experiment_flags` has read.

    Raises:
      UserError: if flags contradict each other, or the preset means nothing without a checkpoint and none is named.
    """
    from configs import FROM_A_CHECKPOINT

    if args.init:
        preset = dataclasses.replace(preset, init=str(args.init.absolute()), new_head=args.new_head)
    elif args.new_head:
        raise UserError("--new-head goes with --init DIR")
    experiment = chosen_experiment(preset, args)
    if args.config in FROM_A_CHECKPOINT and not experiment.init:
        raise UserError(f"--config {args.config} starts from a checkpoint: name it with --init DIR")
    return experiment


def add_data_flags(parser: argparse.ArgumentParser, settings: str) -> None:
    """`--data PATH...`, `--set KEY=VALUE...` and `--skip-bad`. Hand the arguments to `chosen_experiment`.

    Args:
      settings: the help of `--set`.
    """
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        type=path,
        metavar="PATH",
        help="files, folders and patterns to train on: text (every UTF-8 file), JSONL, parquet; text and JSONL also as "
        ".gz; by default the standard library's sources",
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=settings)
    parser.add_argument(
        "--skip-bad", action="store_true", help="count rows that cannot be used and leave them out: --set skip_bad=true"
    )


def chosen_experiment(preset: "Experiment", args: argparse.Namespace) -> "Experiment":
    """The preset with what `add_data_flags` has read."""
    settings = [*args.set, *(["skip_bad=true"] if args.skip_bad else [])]
    if not args.data:
        return preset.override(settings)
    # Absolute, so that a run continues from any folder. First, since settings may go with the paths.
    return dataclasses.replace(preset, data=tuple(str(path.absolute()) for path in args.data)).override(settings)


def add_dtype_flag(parser: argparse._ActionsContainer) -> None:
    """`--dtype float32|bfloat16`. Hand the value to `compute_dtype`."""
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of parameters and matrix products (default: float32 on a CPU, bfloat16 elsewhere)",
    )


def compute_dtype(name: str | None) -> "jnp.dtype":
    """The dtype that the flag asks for: float32 on a CPU and bfloat16 elsewhere, unless it says otherwise."""
    import jax  # here and not above: `--help` and mistakes in flags should not wait for it
    import jax.numpy as jnp

    if name is None:
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def add_mesh_flag(parser: argparse._ActionsContainer) -> None:
    """`--mesh AXIS:DEVICES,..`: absent is None. Hand the value to `mesh_of`."""
    parser.add_argument(
        "--mesh",
        type=_mesh_shape,
        metavar="AXIS:DEVICES,..",
        help="spread the model over all devices there are, as in tensor:4: tensor:N spreads heads, hidden channels, "
        "experts and vocabulary, fsdp:N what is left of its matrices and the rows of a batch, data:N rows alone "
        "(default: one device)",
    )


def _mesh_shape(text: str) -> MeshShape:
    shape = parse_mesh(text.split(","), "--mesh")
    assert shape is not None  # a split text has at least one word
    return shape


def mesh_of(shape: MeshShape | None) -> "Mesh | None":
    """The mesh that the flag asks for; None: one device.

    Raises:
      UserError: if there is another number of devices.
    """
    if shape is None:
        return None
    from mtp_jax.sharding import make_mesh  # here and not above: `--help` and mistakes in flags should not wait for JAX

    return make_mesh(shape, "--mesh")


def add_marks_flag(parser: argparse._ActionsContainer) -> None:
    """`--marks`: how accepted drafts are shown in a text; see `infer.marked_text`."""
    parser.add_argument(
        "--marks",
        choices=["auto", "colour", "brackets", "none"],
        default="auto",
        help="how accepted drafts are shown: colour, ‹brackets›, or not; auto is colour where the terminal has it, "
        "else brackets",
    )


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder: a second start need not compile. Before anything is compiled.

    jax's own variables count: `JAX_COMPILATION_CACHE_DIR` names another folder, `JAX_ENABLE_COMPILATION_CACHE=false`
    turns it off. A folder that cannot be written is no mistake; then every start compiles.
    """
    import jax

    for name, value in _compilation_cache().items():
        jax.config.update(name, value)
    # The disk may fill up. An entry that cannot be read is told: it stays in the way until it is removed.
    warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")


def compilation_cache_variables() -> dict[str, str]:
    """The same as `enable_compilation_cache`, for the environment of other processes."""
    return {name.upper(): str(value) for name, value in _compilation_cache().items()}


def _compilation_cache() -> dict[str, Any]:
    import jax

    if not jax.config.values["jax_enable_compilation_cache"]:
        return {}
    folder = jax.config.values["jax_compilation_cache_dir"] or _own_cache_folder()
    if folder is None:
        return {}
    return {
        "jax_compilation_cache_dir": str(folder),
        # jax keeps only what took a second to compile; many programs of half a second add up.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def _own_cache_folder() -> Path | None:
    """A folder that nobody else can write to, since what lies in it is run; None if there can be none."""
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (given if given.is_absolute() else Path.home() / ".cache") / "mtp_jax" / "programs"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # the latter if there is no home
        return None
    own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK | os.X_OK) else None


# Fields as messages name them, with their flags where these are not the name with dashes.
_FIELDS = {"banned_ids": "--ban-ids"} | {
    name: "--" + name.replace("_", "-")
    for name in (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "min_new_tokens", "seed", "verifier", "ignore_eos"),
    )
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen: a flag for each field of `infer.sampling.Sampling`. Hand the result to `sampling_from`."""
    group = parser.add_argument_group("choosing tokens", "Drafts change the speed; never what these ask for.")

    def number(flag: str, default: float, text: str) -> None:
        group.add_argument(flag, type=_number, default=default, metavar="X", help=text)

    number(
        "--temperature",
        0.0,
        "0 takes the most probable token; above 0 tokens are drawn",
    )
    group.add_argument(
        "--top-k",
        type=count,
        default=0,
        metavar="K",
        help="draw from the K most probable tokens only; 0 is off",
    )
    number("--top-p", 1.0, "draw from the fewest most probable tokens that reach this probability together")
    number("--min-p", 0.0, "draw from tokens at least X times as probable as the most probable one; 0 is off")
    number("--repetition-penalty", 1.0, "above 1: tokens of prompt and output become less probable")
    number("--presence-penalty", 0.0, "taken off the logits of tokens in the output")
    number("--frequency-penalty", 0.0, "the same, once for each time the token is there")
    group.add_argument(
        "--logit-bias",
        nargs="+",
        action="extend",
        type=_bias,
        default=[],
        metavar="ID=X",
        help="added to the logits of these ids",
    )
    group.add_argument(
        "--ban-ids", action="extend", type=_ids, default=[], metavar="IDS", help="never choose these ids: 1,2,3"
    )
    group.add_argument(
        "--min-new-tokens", type=count, default=0, metavar="N", help="neither end id nor stop string before so many"
    )
    group.add_argument("--seed", type=count, default=0, metavar="N", help="the same seed draws the same tokens")
    group.add_argument(
        "--verifier",
        choices=["shared_noise", "rejection"],
        default="shared_noise",
        help="how drawn drafts are verified: shared_noise draws the same tokens for every number of drafts; with "
        "rejection more drafts stand, and other tokens of the same distribution are drawn",
    )


def sampling_from(args: argparse.Namespace) -> "Sampling":
    """The flags' values, checked.

    Raises:
      UserError: a value is out of range, or two contradict each other; names flags.
    """
    from infer.sampling import Sampling  # here and not above: it imports jax

    bias = dict(args.logit_bias)
    if len(bias) < len(args.logit_bias):
        ids = [token_id for token_id, _ in args.logit_bias]
        raise UserError(
            f"--logit-bias: id {next(i for i in ids if ids.count(i) > 1)} is given twice; expected each once"
        )
    try:
        return Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            logit_bias=bias,
            banned_ids=args.ban_ids,
            min_new_tokens=args.min_new_tokens,
            seed=args.seed,
            verifier=args.verifier,
        )
    except UserError as error:
        raise UserError(flags_for_fields(str(error))) from error


def check_settings(
    settings: "Settings", config: "ModelConfig", tokenizer: "Tokenizer | None", end_ids: Iterable[int]
) -> None:
    """Refuses what contradicts itself, the model or its vocabulary, by the names of flags.

    Where drafts are left to the default and there is no head to make any, says so on stderr: a checkpoint that another
    tool took the head from would only be slow.
    """
    if settings.num_draft_tokens is None and not config.num_mtp_layers:
        print(
            "note: this checkpoint has no MTP head, so text is decoded plainly; scripts/graft_head.py puts back one "
            "that was lost, --num-draft-tokens 0 says that there is none on purpose",
            file=sys.stderr,
        )
    try:
        settings.check(config)
        settings.rule(config, tokenizer, end_ids)
    except UserError as error:
        raise UserError(flags_for_fields(str(error))) from error


def check_new_tokens(least: int, most: int, most_is: str = "--max-new-tokens") -> None:
    """Refuses a minimum that is never reached."""
    if least > most:
        raise UserError(f"--min-new-tokens {least} is above {most_is} {most}: lower the one or raise the other")


def flags_for_fields(message: str) -> str:
    """A message about fields of `Sampling` or `Settings`, about flags instead.

    A field has an underscore or is the message's first word; the same words elsewhere are English.
    """
    word = r"^[a-z]+\b|\b[a-z]+(?:_[a-z]+)+\b"
    return re.sub(word, lambda match: _FIELDS.get(match[0], match[0]), message)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected ID=X, an id and a number, got {text!r}")
    return count(token_id), _number(value)


def _ids(text: str) -> list[int]:
    return [count(item) for item in text.split(",")]
