"""Reading prompts, beside the peer and beside the same products with weights run bare."""

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import _cli
import numpy as np
from rich.console import Console

from infer.generator import Generator
from infer.step_time import summary
from mtp_jax.config import ModelConfig
from mtp_jax.sizes import Stage
from scripts._tables import new_table
from scripts.benchmarks.flags import LENGTHS
from scripts.benchmarks.limits import Products, Stages, causal_attention_flops, flops_of
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.subject import check_positions, circumstances
from scripts.benchmarks.turns import print_result, take_turns

MOST_ROWS = 2048
"""Bare products of longer prompts are taken for so many rows: more are not faster, and need much memory."""


def check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuses prompts for which the model has too few positions."""
    longest = max(args.lengths or LENGTHS)
    check_positions(config, "--lengths", longest, longest + 1)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = _cli.compute_dtype(args.dtype)
    status = Console(stderr=True).status
    lengths = args.lengths or LENGTHS
    with status("loading"):
        generator = Generator.from_pretrained(folder, dtype=dtype)
    generator.end_ids = frozenset()
    config, programs = generator.model.config, generator.programs
    rng = np.random.default_rng(0)
    prompts = {length: rng.integers(config.vocab_size, size=length).tolist() for length in lengths}

    def ours(length: int) -> float:
        (completion,) = generator.generate(
            [prompts[length]], max_new_tokens=1, num_draft_tokens=0, cache_length=length + 1
        )
        return completion.seconds

    def bare(length: int) -> float:
        with programs.precision():
            return timers[length]()

    timers = {
        length: Products.of(config, programs.params, _stages(min(length, MOST_ROWS))).timer(dtype) for length in lengths
    }
    measurements, peer = {}, None
    if args.vs:
        with status("loading with transformers"):
            peer = Peer(folder, args.peer_dtype or str(dtype))
    for length in lengths:
        measurements[_name(length, "mtp_jax")] = partial(ours, length)
        measurements[_name(length, "products alone")] = partial(bare, length)
        if peer is not None:
            measurements[_name(length, "transformers")] = partial(peer.prefill_seconds, prompts[length])
    taken = take_turns(measurements, args.repeats)

    results = []
    for length in lengths:
        seconds = median(taken[_name(length, "mtp_jax")])
        flops, bare_flops = (flops_of(config, _stages(tokens)) for tokens in (length, min(length, MOST_ROWS)))
        rate = bare_flops / median(taken[_name(length, "products alone")])
        result = {
            "length": length,
            "seconds": seconds,
            "seconds_per_token": seconds / length,
            "tokens_per_second": length / seconds,
            "flops": flops,
            "attention_flops": causal_attention_flops(config, length),
            "limit_flops_per_second": rate,
            "share_of_limit": flops / seconds / rate,
        }
        if args.vs:
            result["peer_seconds"] = median(taken[_name(length, "transformers")])
            result["peer_tokens_per_second"] = length / result["peer_seconds"]
            result["ratio"] = seconds / result["peer_seconds"]
        results.append(result)
    return (
        circumstances(args, folder)
        | {"dtype": str(dtype), "peer_dtype": args.peer_dtype or str(dtype) if args.vs else None}
        | results[0]
        | {"lengths": results, "spread": {name: summary(values) for name, values in taken.items()}}
    )


def _stages(tokens: int) -> Stages:
    """The last token alone has logits."""
    return [(Stage.TRUNK, tokens), (Stage.OUTPUT, 1)]


def _name(length: int, side: str) -> str:
    return f"{length} tokens, {side}"


def show(record: dict[str, Any]) -> None:
    columns = ["tokens/s", "GFLOP/s", "+ attention", "limit", "share"]
    columns += ["peer", "time"] * bool(record["peer_dtype"])
    table = new_table(f"reading a prompt, {record['dtype']}", "tokens", *columns)
    for result in record["lengths"]:
        cells = [
            f"{result['tokens_per_second']:,.1f}",
            f"{result['flops'] / result['seconds'] / 1e9:,.0f}",
            f"{(result['flops'] + result['attention_flops']) / result['seconds'] / 1e9:,.0f}",
            f"{result['limit_flops_per_second'] / 1e9:,.0f}",
            f"{result['share_of_limit']:.0%}",
        ]
        if record["peer_dtype"]:
            cells += [f"{result['peer_tokens_per_second']:,.1f}", f"x {result['ratio']:.2f}"]
        table.add_row(f"{result['length']:,}", *cells)
    lines = [
        f"{record['length']:,} tokens are read at {record['share_of_limit']:.0%} of the limit, the rate of the same "
        "products with weights run alone"
    ]
    if len(record["lengths"]) > 1:
        lines.append('"+ attention" counts scores and values too: the same at every length if all else is linear in it')
    if record["peer_dtype"]:
        lines.append(f"that takes {record['ratio']:.2f} of the time that transformers takes ({record['peer_dtype']})")
    print_result([table], lines)
