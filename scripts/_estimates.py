"""describe.py's estimates: the chips and uses that flags ask for, as a record and as tables."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil, floor
from typing import TYPE_CHECKING, Any, NamedTuple

import _cli

from configs.chips import CHIPS
from mtp_jax.chip import Chip, Machine
from mtp_jax.errors import UserError
from scripts._tables import memory_amount, new_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mtp_jax.config import ModelConfig
    from mtp_jax.roofline import Bound

FIGURES = ("memory", "bandwidth", "flops", "link")
DRAFTS = 3


class Plan(NamedTuple):
    """What the estimates are made for."""

    chips: dict[str, Chip]
    batch_size: int
    num_draft_tokens: int
    draft_vocab: int | None
    acceptance: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Hand the arguments to `plan_from`."""
    group = parser.add_argument_group("what time is estimated for")
    group.add_argument(
        "--chip",
        type=_chip,
        nargs="+",
        action="extend",
        metavar="NAME|NAME:KEY=X,..",
        help=f"{', '.join(CHIPS)} (default: each), or one described by memory= (bytes), bandwidth= (of it, bytes/s), "
        "flops= (operations/s of products), and where wanted dtype= (bfloat16) and link= (bytes/s sent to others)",
    )
    group.add_argument("--batch-size", type=_cli.positive, default=1, metavar="N", help="rows decoded, prompts read")
    group.add_argument(
        "--num-draft-tokens",
        type=_cli.count,
        metavar="J",
        help=f"drafts a round (default: {DRAFTS}, or 0 without a head)",
    )
    group.add_argument(
        "--draft-vocab", type=_cli.positive, metavar="N", help="draft over so many tokens (default: all)"
    )
    group.add_argument(
        "--acceptance",
        type=_probability,
        default=0.7,
        metavar="A",
        help="how often a draft stands once those before it do",
    )


def _chip(text: str) -> tuple[str, Chip]:
    """An argparse type: a key of CHIPS, or a name and figures."""
    name, _, description = text.partition(":")
    if not description:
        if name.lower() not in CHIPS:
            raise argparse.ArgumentTypeError(f"expected {', '.join(CHIPS)} or NAME:KEY=X,.., got {text!r}")
        return name.lower(), CHIPS[name.lower()]
    if not name:
        raise argparse.ArgumentTypeError(f"expected a name before the colon, got {text!r}")
    items = [(key, value) for key, _, value in (item.partition("=") for item in description.split(","))]
    given = dict(items)
    if len(given) < len(items):
        raise argparse.ArgumentTypeError(f"{name}: expected each figure once, got {description!r}")
    dtype = given.pop("dtype", "bfloat16")
    if dtype not in ("bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"{name}: dtype must be bfloat16 or float32, got {dtype!r}")
    if unknown := given.keys() - set(FIGURES):
        raise argparse.ArgumentTypeError(f"{name}: expected {', '.join(FIGURES)}, dtype, got {min(unknown)!r}")
    figures = {key: _figure(key, value) for key, value in given.items()}
    if absent := [key for key in FIGURES[:3] if key not in figures]:
        raise argparse.ArgumentTypeError(f"{name}: {', '.join(absent)} must be given")
    memory, bandwidth, flops = (figures[key] for key in FIGURES[:3])
    return name, Chip(memory, bandwidth, flops, dtype, figures.get("link", 0.0))


def _figure(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{key} must be a positive number, such as 60e9, got {text!r}")
    return value


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def plan_from(args: argparse.Namespace, config: "ModelConfig") -> Plan:
    """What the flags ask for, for this model."""
    chips = dict(args.chip or CHIPS)
    most = max(args.devices)
    for name, chip in chips.items():
        try:
            Machine(chip, most)
        except ValueError as error:
            raise UserError(f"--devices {most} --chip {name}: {error}") from None
    if args.draft_vocab and args.draft_vocab > config.vocab_size:
        raise UserError(f"--draft-vocab {args.draft_vocab}: the model has {config.vocab_size} tokens")
    if args.num_draft_tokens and not config.num_mtp_layers:
        raise UserError(f"--num-draft-tokens {args.num_draft_tokens}: without a head there is nothing to draft with")
    drafts = DRAFTS if args.num_draft_tokens is None else args.num_draft_tokens
    return Plan(chips, args.batch_size, drafts if config.num_mtp_layers else 0, args.draft_vocab, args.acceptance)


def record(config: "ModelConfig", context: int, devices: Sequence[int], plan: Plan) -> dict[str, Any]:
    """`plan` and `estimates` of the JSON record."""
    chips = {name: asdict(chip) for name, chip in plan.chips.items()}
    machines = [(name, Machine(chip, count)) for name, chip in plan.chips.items() for count in devices]
    estimates = [
        {
            "chip": name,
            "devices": machine.devices,
            "inference": _inference(config, machine, context, plan),
            "training": _training(config, machine, context),
        }
        for name, machine in machines
    ]
    return {"plan": {**plan._asdict(), "chips": chips}, "estimates": estimates}


def _inference(config: "ModelConfig", machine: Machine, context: int, plan: Plan) -> dict[str, Any]:
    from mtp_jax import roofline

    shape = {"rows": plan.batch_size, "slots": context}
    memory = roofline.decode_bytes(config, machine, **shape)
    estimate: dict[str, Any] = {"memory_bytes": round(memory), "fits": memory <= machine.chip.memory}
    if not estimate["fits"]:
        return estimate
    plain = roofline.decode(config, machine, **shape)
    prefill = roofline.prefill(config, machine, **shape)
    speculative = None
    if plan.num_draft_tokens:
        seconds = roofline.round_seconds(
            config, machine, **shape, drafts=plan.num_draft_tokens, vocabulary=plan.draft_vocab
        )
        tokens = roofline.tokens_per_round(plan.acceptance, plan.num_draft_tokens)
        speculative = {"seconds": seconds, "tokens": tokens, "speedup": tokens * plain.seconds / seconds}
    return {**estimate, "decode": _bound(plain), "round": speculative, "prefill": _bound(prefill)}


def _training(config: "ModelConfig", machine: Machine, context: int) -> dict[str, Any]:
    from mtp_jax import roofline

    memory = roofline.train_bytes(config, machine)
    estimate: dict[str, Any] = {"memory_bytes": round(memory), "fits": memory <= machine.chip.memory}
    return (
        {**estimate, "step": _bound(roofline.train(config, machine, slots=context))} if estimate["fits"] else estimate
    )


def _bound(bound: "Bound") -> dict[str, Any]:
    return {**bound._asdict(), "limit": bound.limit}


def show(record: dict[str, Any], console: "Console") -> None:
    """The estimates as tables, which say that they are bounds."""
    sums = 2 * sum(record["layers"]["trunk"].values())
    text = (
        "\nBounds, not predictions: real machines are slower. Counted are bytes to and from memory, products, and "
        f"bytes on links; not latencies, of {sums} sums over devices in a step of decoding for one."
    )
    if any("experts" in part for part in record["parameters"]["trunk"]):
        text += " Experts are taken as chosen at random, which reads the most of them."
    console.print(text, highlight=False)
    for table in (decoding_table(record), prompt_table(record), training_table(record)):
        console.print(table)


def decoding_table(record: dict[str, Any]) -> "Table":
    plan = record["plan"]
    drafts = plan["num_draft_tokens"]
    columns = (
        "memory of each",
        "plain step",
        "limit",
        *([f"{drafts} drafts", f"gain at {plan['acceptance']:g}"] * (drafts > 0)),
    )
    table = new_table(f"decoding {_rows(record)}", "devices", *columns)
    for estimate in record["estimates"]:
        part = estimate["inference"]
        cells = _memory(record, estimate, part)
        if part["fits"]:
            cells += _cells(part["decode"])
            if part["round"]:
                cells += [time(part["round"]["seconds"]), f"x {part['round']['speedup']:.2f}"]
        table.add_row(_machine(estimate), *cells)
    return table


def prompt_table(record: dict[str, Any]) -> "Table":
    table = new_table(f"reading {_rows(record)}", "devices", "time", "limit", "tokens/s")
    tokens = record["context"] * record["plan"]["batch_size"]
    for estimate in record["estimates"]:
        part = estimate["inference"]
        if part["fits"]:
            bound = part["prefill"]
            table.add_row(_machine(estimate), *_cells(bound), f"{tokens / bound['seconds']:,.0f}")
    return table


def training_table(record: dict[str, Any]) -> "Table":
    title = f"training step, each device {record['context']:,} tokens; activations come on top"
    table = new_table(title, "devices", "memory of each", "time", "limit", "tokens/s")
    for estimate in record["estimates"]:
        part = estimate["training"]
        cells = _memory(record, estimate, part)
        if part["fits"]:
            tokens = record["context"] * estimate["devices"]
            cells += [*_cells(part["step"]), f"{tokens / part['step']['seconds']:,.0f}"]
        table.add_row(_machine(estimate), *cells)
    return table


def _rows(record: dict[str, Any]) -> str:
    count = record["plan"]["batch_size"]
    return f"{count:,} row{'s' * (count > 1)} of {record['context']:,} tokens"


def _machine(estimate: dict[str, Any]) -> str:
    return f"{estimate['devices']:,} {estimate['chip']}"


def _memory(record: dict[str, Any], estimate: dict[str, Any], part: dict[str, Any]) -> list[str]:
    """What a device needs; of what it has, and that this is too little."""
    needed, there = part["memory_bytes"], record["plan"]["chips"][estimate["chip"]]["memory"]
    if part["fits"]:
        return [memory_amount(needed)]
    return [f"{ceil(needed / 2**30):,} of {floor(there / 2**30):,} GiB", "does not fit"]


def _cells(bound: dict[str, Any]) -> list[str]:
    return [time(bound["seconds"]), bound["limit"]]


def time(seconds: float) -> str:
    """12.3 ms, say."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{seconds * 1e6:,.2f} us"
