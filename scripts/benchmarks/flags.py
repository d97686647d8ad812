"""The flags of each mode. Nothing slow is imported: help and mistakes come at once."""

import argparse
import importlib.util
from collections.abc import Callable

import _cli

from mtp_jax.errors import UserError

DRAFT_VOCABULARY = 32768
LENGTHS = [512, 2048]
NUM_DRAFTS = [1, 2, 3, 4]


def add_modes(parser: argparse.ArgumentParser) -> None:
    """A sub-parser for each mode; the one chosen is `mode` of the result. Hand it to `check`."""
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE", parser_class=_cli.Parser)
    for name, (text, description, add) in _MODES.items():
        mode = modes.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.\n\n{description}")
        add(mode)
        _cli.add_json_flag(mode)


def check(args: argparse.Namespace) -> None:
    """Refuses what can be seen to be wrong before anything slow starts."""
    missing = [name for name in ("transformers", "torch") if args.vs and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--vs transformers: {' and '.join(missing)} not installed; pip install -e '.[peer]'")
    if getattr(args, "peer_dtype", None) and not args.vs:
        raise UserError("--peer-dtype goes with --vs transformers")
    if args.mode == "decode":
        for flag in ("num_draft_tokens", "new_tokens"):
            if getattr(args, flag) is not None and not args.acceptance:
                raise UserError(f"--{flag.replace('_', '-')} goes with --acceptance")


def _source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    _cli.add_checkpoint_flag(source)
    source.add_argument(
        "--shape",
        type=_cli.released_model,
        metavar="NAME",
        help="random weights of a released shape instead: 0.8b, .. (describe.py lists them)",
    )


def _peer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vs", choices=["transformers"], help="measure this beside it, in turns")
    parser.add_argument(
        "--peer-dtype", choices=["float32", "bfloat16"], help="of what --vs names (default: the same as --dtype)"
    )


def _repeats(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--repeats", type=_cli.positive, default=default, metavar="N", help="measurements of each")


def _lengths(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--lengths",
        type=_list_of(_cli.positive, "lengths, such as 512,2048"),
        metavar="N,..",
        help=f"of the {what}, in tokens (default: {','.join(map(str, LENGTHS))})",
    )


def _decode(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _peer(parser)
    parser.add_argument("--steps", type=_cli.positive, default=32, metavar="N", help="tokens in a measurement")
    _repeats(parser, 5)
    parser.add_argument(
        "--acceptance",
        type=_list_of(_rate, "rates from 0 to 1, such as 0.52,0.89"),
        default=[],
        metavar="A,..",
        help="also decode speculatively where a draft stands at this rate once those before it do",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_list_of(_cli.positive, "numbers of drafts, such as 1,3"),
        metavar="J,..",
        help=f"drafts a round, with --acceptance (default: {','.join(map(str, NUM_DRAFTS))})",
    )
    parser.add_argument(
        "--new-tokens", type=_cli.positive, metavar="N", help="tokens decoded with --acceptance (default: 64)"
    )
    parser.add_argument(
        "--draft-vocab",
        type=_cli.positive,
        default=DRAFT_VOCABULARY,
        metavar="N",
        help="tokens that the head drafts over, or all if there are fewer",
    )
    parser.add_argument("--seed", type=_cli.count, default=0, metavar="N", help="of which drafts stand")
    _cli.add_dtype_flag(parser)


def _prefill(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _peer(parser)
    _lengths(parser, "prompts")
    _repeats(parser, 5)
    _cli.add_dtype_flag(parser)


def _delta_rule(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    parser.add_argument("--vs", choices=["transformers"], help="measure its chunked form beside it, in turns")
    _lengths(parser, "sequences")
    _repeats(parser, 3)


def _load(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    parser.add_argument("--vs", choices=["transformers"], help="measure its loading beside it, in turns")
    _repeats(parser, 3)
    _cli.add_dtype_flag(parser)


def _startup(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    parser.add_argument("--vs", choices=["transformers"], help="measure its start beside it, in turns")
    _repeats(parser, 5)
    _cli.add_dtype_flag(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    _source(parser)
    _peer(parser)
    parser.add_argument("--length", type=_length_of_a_row, default=512, metavar="N", help="of the row, in tokens")
    _repeats(parser, 3)
    _cli.add_dtype_flag(parser)


def _length_of_a_row(text: str) -> int:
    length = _cli.positive(text)
    if length < 3:
        raise argparse.ArgumentTypeError(f"expected at least 3 tokens, which have a target for the head, got {text!r}")
    return length


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _list_of(item: Callable, expected: str) -> Callable[[str], list]:
    """An argparse type: different values, separated by commas."""

    def parse(text: str) -> list:
        try:
            values = [item(part) for part in text.split(",")]
        except (ValueError, argparse.ArgumentTypeError):
            values = []
        if not values or len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected different {expected}, got {text!r}")
        return values

    return parse


_MODES = {
    "decode": (
        "how long a step of decoding takes, and its share of the rate at which memory is read",
        """A step's time is that of 1 + N tokens less that of 1 token, divided by N. The limit is the best of several
programs that do nothing but read 2 GiB, run in turns with the rest. Beside it: verifying 4 tokens, a drafted token
and keeping what was verified, as shares of a step, and with --acceptance speculative decoding whose drafts are
replaced, once the head has made them, by some that stand at a given rate.

  python scripts/benchmark.py decode
  python scripts/benchmark.py decode --shape 0.8b --vs transformers --acceptance 0.52,0.89 --json decode.json""",
        _decode,
    ),
    "prefill": (
        "how fast prompts are read, and the share of the rate of the same products run bare",
        """From nothing to the first new token, a piece at a time. The limit is a program that multiplies as many rows
with the same matrices and does nothing else; counted on both sides are 2 operations for each value of a matrix and
token, and not what attention and the delta rule multiply. Attention alone takes more for each token of a longer prompt;
the rate with its scores and values counted too shows whether all else is linear in the length.

  python scripts/benchmark.py prefill
  python scripts/benchmark.py prefill --shape 0.8b --vs transformers --json prefill.json
  python scripts/benchmark.py prefill --shape 0.8b --lengths 1024,2048,4096,8192,16384 --repeats 1""",
        _prefill,
    ),
    "train": (
        "how long forward and backward of one row take, and the memory that they need",
        """The loss of the next token alone, and with the MTP head's; neither with the optimiser's step. The limit is a
program that makes the same products with weights, forward and backward, and does nothing else. Each side runs in a
process of its own, one after the other: two models with their gradients may not fit beside each other, and a
process's peak memory is then that of its side. Ours keeps freed memory, as train.py does; transformers runs as it
comes.

  python scripts/benchmark.py train
  python scripts/benchmark.py train --shape 0.8b --vs transformers --json train.json""",
        _train,
    ),
    "delta-rule": (
        "how long one layer's gated delta rule takes, chunk by chunk and token by token",
        """Forward, and forward with backward, at the heads of the model's shape and in float32, as in the model. Its
weights are not needed. The limit is a program that makes the products of the chunked form and does nothing else.

  python scripts/benchmark.py delta-rule --shape 0.8b
  python scripts/benchmark.py delta-rule --shape 0.8b --vs transformers --lengths 512,2048 --json delta.json""",
        _delta_rule,
    ),
    "load": (
        "how long a checkpoint takes to load, beside reading and converting the same bytes with numpy",
        """From files that the system has in memory, since each was read before, to parameters on the device. numpy
reads the same tensors one by one and converts them to the same type, and does nothing else. Right before each turn as
much memory as the parameters take is in use: a virtual machine's first touch of memory may take longer than loading.

  python scripts/benchmark.py load
  python scripts/benchmark.py load --shape 0.8b --vs transformers --json load.json""",
        _load,
    ),
    "startup": (
        "how long a new process takes until its first token has come",
        """`generate.py --max-new-tokens 1` from its start to its end, with programs that an earlier run has compiled.
The limit is a process that imports jax, asks for its devices and ends.

  python scripts/benchmark.py startup
  python scripts/benchmark.py startup --vs transformers --json startup.json""",
        _startup,
    ),
}
