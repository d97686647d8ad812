"""Say what a model is made of and what it takes, without its weights: layers, parameters, memory, operations a token,
and the least time that decoding, reading a prompt and a training step take on given chips.

A released model by its name, or a checkpoint by its folder; without either, the known names. Examples:

  python scripts/describe.py
  python scripts/describe.py --config qwen3.5-397b-a17b --devices 8,64,256
  python scripts/describe.py --config 27b --chip h200 --batch-size 16 --draft-vocab 32768 --acceptance 0.8
  python scripts/describe.py --config 0.8b --devices 1 --chip cpu:dtype=float32,memory=16e9,bandwidth=60e9,flops=4e11
  python scripts/describe.py --checkpoint models/demo --context 512 --json

docs/sizes.md says what each figure means.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import _cli

from configs.released import RELEASED
from mtp_jax.errors import UserError
from scripts import _estimates
from scripts._tables import memory_amount, new_table

if TYPE_CHECKING:
    from rich.table import Table

    from mtp_jax.config import ModelConfig

CONTEXT = 32768
MOST_DEVICES = 100_000  # several times as many as these models run on: a larger number is a slip
DTYPES = ("bfloat16", "float32")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="describe.py", description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--config", type=_cli.released_model, metavar="NAME", help="a released model")
    model.add_argument(
        "--checkpoint", type=_cli.path, metavar="DIR", help="folder with config.json and safetensors files"
    )
    parser.add_argument("--trunk-only", action="store_true", help="leave out the MTP head")
    parser.add_argument(
        "--context",
        type=_cli.positive,
        metavar="N",
        help=f"tokens that a row holds (default: {CONTEXT}, or the most that the model can)",
    )
    parser.add_argument(
        "--devices",
        type=_counts,
        default="1,8,64",
        metavar="N,N,..",
        help="numbers of devices to divide the model among",
    )
    _estimates.add_flags(parser)
    _cli.add_json_flag(parser)
    args = parser.parse_args(argv)
    if args.config is None and args.checkpoint is None:
        wants_model = {"--context": args.context, "--trunk-only": args.trunk_only, "--chip": args.chip}
        for flag, given in wants_model.items():
            if given:
                parser.error(f"{flag} goes with --config or --checkpoint")
    return args


def _counts(text: str) -> list[int]:
    """An argparse type: different numbers of devices, separated by commas."""
    counts = [_cli.positive(item) for item in text.split(",")]
    if len(set(counts)) < len(counts) or max(counts) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(
            f"expected different numbers from 1 to {MOST_DEVICES:,}, such as 1,8,64, got {text!r}"
        )
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.config is None and args.checkpoint is None:
        if args.json is None:
            print(*RELEASED, sep="\n")
        else:
            _cli.write_json({"names": list(RELEASED)}, args.json)
        return
    config = chosen_config(args)
    context = args.context or min(CONTEXT, config.max_position_embeddings)
    if context > config.max_position_embeddings:
        raise UserError(f"--context {context}: the model holds at most {config.max_position_embeddings} tokens")
    plan = _estimates.plan_from(args, config)
    record = {
        "name": args.config or str(args.checkpoint),
        **describe(config, context, args.devices),
        **_estimates.record(config, context, args.devices, plan),
    }
    if args.json is not None:
        _cli.write_json(record, args.json)
    if args.json != "-":
        show(record)


def chosen_config(args: argparse.Namespace) -> "ModelConfig":
    from dataclasses import replace

    from mtp_jax.hf.load import read_manifest

    if args.checkpoint is not None:
        return read_manifest(_cli.existing_checkpoint(args.checkpoint), args.trunk_only).config
    return replace(RELEASED[args.config], num_mtp_layers=0) if args.trunk_only else RELEASED[args.config]


def describe(config: "ModelConfig", context: int, devices: Sequence[int]) -> dict[str, Any]:
    """What `--json` gives, but for the name and the estimates."""
    from mtp_jax.flops import token_flops
    from mtp_jax.mtp import MTPModel
    from mtp_jax.sizes import count_parts, row_bytes, weight_bytes
    from train.experiment import Experiment
    from train.memory import state_bytes

    stacks = {"trunk": False, "head": True}
    parts = {stack: count_parts(config, head=head) for stack, head in stacks.items()}
    every = [count for counts in parts.values() for count in counts.values()]
    rows = {dtype: {stack: row_bytes(config, dtype, head=head) for stack, head in stacks.items()} for dtype in DTYPES}
    memory = {f"weights_{dtype}": weight_bytes(config, dtype) for dtype in DTYPES}
    memory["training_state"] = state_bytes(MTPModel(config), Experiment())
    return {
        "context": context,
        "width": config.width,
        "vocab_size": config.vocab_size,
        "layers": layers(config),
        "parameters": {
            "total": sum(count.total for count in every),
            "active": sum(count.active for count in every),
            **{
                stack: {part.value: count._asdict() for part, count in counts.items()}
                for stack, counts in parts.items()
            },
        },
        "row_bytes": {
            dtype: {
                **{stack: size._asdict() for stack, size in sizes.items()},
                "at_context": sum(size.at(context) for size in sizes.values()),
            }
            for dtype, sizes in rows.items()
        },
        "memory_bytes": [
            {"devices": count, **{name: -(-size // count) for name, size in memory.items()}} for count in devices
        ],
        "flops_per_token": token_flops(config, context)._asdict(),
    }


def layers(config: "ModelConfig") -> dict[str, dict[str, int]]:
    """How many layers of each kind there are, as mixer and MLP."""
    from collections import Counter

    from mtp_jax.config import LayerType

    def kind(layer_type: LayerType, has_experts: bool) -> str:
        return f"{layer_type.value} + {'experts' if has_experts else 'mlp'}"

    trunk = Counter(kind(t, config.layer_moe(n) is not None) for n, t in enumerate(config.layer_types))
    head = Counter(kind(LayerType.FULL, config.moe is not None) for _ in range(config.num_mtp_layers))
    return {"trunk": dict(trunk), "head": dict(head)}


def show(record: dict[str, Any]) -> None:
    """The record as tables."""
    from rich.console import Console

    console = Console()
    totals = record["parameters"]
    console.print(
        f"{record['name']}: {amount(totals['total'])} parameters, {amount(totals['active'])} of them used for a token; "
        f"width {record['width']:,}, vocabulary {record['vocab_size']:,}",
        highlight=False,
    )
    for table in (layer_table(record), parameter_table(record), row_table(record), memory_table(record)):
        console.print(table)
    console.print(flops_table(record))
    _estimates.show(record, console)


def layer_table(record: dict[str, Any]) -> "Table":
    table = new_table("layers", "", "number")
    for stack, kinds in record["layers"].items():
        for kind, number in kinds.items():
            table.add_row(f"{stack}: {kind.replace('_', ' ')}", f"{number}")
    return table


def parameter_table(record: dict[str, Any]) -> "Table":
    table = new_table("parameters", "", "total", "a token uses")
    for stack in ("trunk", "head"):
        parts = record["parameters"][stack]
        for part, count in parts.items():
            table.add_row(f"{stack}: {part.replace('_', ' ')}", f"{count['total']:,}", f"{count['active']:,}")
        sums = [f"{sum(count[key] for count in parts.values()):,}" for key in ("total", "active")]
        table.add_row(f"{stack}: all", *sums, end_section=True)
    return table


def row_table(record: dict[str, Any]) -> "Table":
    table = new_table("state of a row", "", *DTYPES)
    sizes = [record["row_bytes"][dtype] for dtype in DTYPES]
    for stack in ("trunk", "head"):
        table.add_row(f"{stack}: whatever it holds", *(memory_amount(size[stack]["fixed"]) for size in sizes))
        table.add_row(f"{stack}: each token", *(memory_amount(size[stack]["per_slot"]) for size in sizes))
    table.add_row(f"{record['context']:,} tokens", *(memory_amount(size["at_context"]) for size in sizes))
    return table


def memory_table(record: dict[str, Any]) -> "Table":
    table = new_table("memory of each device", "devices", *(f"weights {dtype}" for dtype in DTYPES), "training state")
    for row in record["memory_bytes"]:
        sizes = [row[f"weights_{dtype}"] for dtype in DTYPES] + [row["training_state"]]
        table.add_row(f"{row['devices']:,}", *map(memory_amount, sizes))
    return table


def flops_table(record: dict[str, Any]) -> "Table":
    meanings = {
        "decode": "decode: a plain step",
        "draft": "decode: a draft of the head",
        "prefill": "prefill",
        "prefill_head": "prefill: the head too",
        "train": "training step",
        "train_mtp": "training step: the MTP loss too",
    }
    table = new_table(f"operations for each token, at {record['context']:,} tokens", "", "GFLOPs")
    for key, meaning in meanings.items():
        table.add_row(meaning, f"{record['flops_per_token'][key] / 1e9:,.3f}")
    return table


def amount(number: int) -> str:
    """12.3 B, say."""
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:,.2f}{unit}"
    return str(number)


if __name__ == "__main__":
    _cli.run(main)
