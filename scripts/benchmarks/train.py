"""Forward and backward of one row, beside the peer and beside the same products with weights run bare."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import _cli

from infer.step_time import summary
from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.hf import read_manifest
from mtp_jax.sizes import Stage
from scripts._tables import memory_amount, new_table
from scripts.benchmarks.limits import flops_of
from scripts.benchmarks.subject import check_positions, circumstances
from scripts.benchmarks.turns import print_result

BACKWARD = 3  # products of a step for each of a forward pass


def check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuses a row for which the model has too few positions."""
    check_positions(config, "--length", args.length, args.length)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = str(_cli.compute_dtype(args.dtype))
    config, length = read_manifest(folder).config, args.length
    sides = {"main_loss": dtype, "products": dtype}
    if config.num_mtp_layers:
        sides["mtp_loss"] = dtype
    if args.vs:
        sides["transformers"] = args.peer_dtype or dtype
    taken: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for side, side_dtype in sides.items():
        result = _run_side(side, folder, side_dtype, length, args.repeats)  # which tells on stderr what it does
        taken |= result["taken"]
        peaks[side] = result["peak_bytes"]

    seconds = {name: median(values) for name, values in taken.items()}
    flops = BACKWARD * flops_of(config, [(Stage.TRUNK, length), (Stage.OUTPUT, length)])
    record = circumstances(args, folder) | {
        "dtype": dtype,
        "length": length,
        "seconds": seconds["main"],
        "tokens_per_second": length / seconds["main"],
        "flops": flops,
        "limit_flops_per_second": flops / seconds["products"],
        "share_of_limit": seconds["products"] / seconds["main"],
        "peak_bytes": peaks["main_loss"],
        "spread": {name: summary(values) for name, values in taken.items()},
    }
    if config.num_mtp_layers:
        added = BACKWARD * flops_of(config, [(Stage.HEAD, length), (Stage.OUTPUT, length)])
        limit = seconds["products"] + seconds["mtp_products"]
        record |= {
            "mtp_seconds": seconds["mtp"],
            "mtp_tokens_per_second": length / seconds["mtp"],
            "mtp_flops": flops + added,
            "mtp_share_of_limit": limit / seconds["mtp"],
            "mtp_peak_bytes": peaks["mtp_loss"],
        }
    if args.vs:
        peer = seconds["transformers"]
        record |= {
            "peer_dtype": sides["transformers"],
            "peer_seconds": peer,
            "peer_tokens_per_second": length / peer,
            "peer_peak_bytes": peaks["transformers"],
            "ratio": seconds["main"] / peer,
        }
        if config.num_mtp_layers:
            record["mtp_ratio"] = seconds["mtp"] / peer
    return record


def _run_side(side: str, folder: Path, dtype: str, length: int, repeats: int) -> dict[str, Any]:
    order = {"side": side, "folder": str(folder), "dtype": dtype, "length": length, "repeats": repeats}
    # -P: the working directory may hold a train.py.
    command = [sys.executable, "-P", "-m", "scripts.benchmarks.train_side", json.dumps(order)]
    path = os.pathsep.join(filter(None, (str(_cli.ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | _cli.compilation_cache_variables() | {"PYTHONPATH": path}
    ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        how = "was ended, as for want of memory," if ended.returncode < 0 else "failed"
        raise UserError(f"the process that measures {side} {how} with status {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


def show(record: dict[str, Any]) -> None:
    table = new_table(
        f"forward and backward of 1 x {record['length']:,}, {record['dtype']}",
        "loss",
        *("seconds", "tokens/s", "share of limit", "peak memory", "x peer's time"),
    )
    rows = [("main", "", "ratio")]
    rows += [("main and MTP", "mtp_", "mtp_ratio")] * ("mtp_seconds" in record)
    if "peer_seconds" in record:
        rows.append(("transformers: main", "peer_", ""))
    for name, prefix, ratio in rows:
        share = record.get(f"{prefix}share_of_limit")
        table.add_row(
            name,
            f"{record[f'{prefix}seconds']:,.2f}",
            f"{record[f'{prefix}tokens_per_second']:,.1f}",
            "" if share is None else f"{share:.0%}",
            memory_amount(record[f"{prefix}peak_bytes"]),
            f"{record[ratio]:.2f}" if ratio in record else "",
        )
    rate = f"{record['limit_flops_per_second'] / 1e9:,.0f} GFLOP/s of the same products with weights run alone"
    lines = [f"with the main loss {record['share_of_limit']:.0%} of the limit is reached, {rate}"]
    if "ratio" in record:
        lines.append(f"that takes {record['ratio']:.2f} of the time that transformers takes ({record['peer_dtype']})")
    print_result([table], lines)
