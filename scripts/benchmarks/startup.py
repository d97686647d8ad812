"""From the start of a process to its first token, with programs that an earlier one has compiled."""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import _cli

from infer.step_time import summary
from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer
from scripts.benchmarks.limits import timed
from scripts.benchmarks.subject import circumstances
from scripts.benchmarks.turns import print_result, take_turns, time_table

OURS, IMPORTS, PEER = "mtp_jax", "jax alone", "transformers"
PROMPT = "def "
IDS = [1, 2, 3]  # where there is no tokenizer

PEER_PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, dtype, ids = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
print(model.generate(torch.tensor([[int(i) for i in ids.split(",")]]), max_new_tokens=1, do_sample=False).tolist())
"""


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype, tokenizer = str(_cli.compute_dtype(args.dtype)), Tokenizer.from_folder(folder)
    ids = ",".join(map(str, IDS if tokenizer is None else tokenizer.encode(PROMPT)))
    script = [str(_cli.ROOT / "scripts" / "generate.py"), "--checkpoint", str(folder), "--dtype", dtype]
    prompt = ["--prompt-ids", ids] if tokenizer is None else ["--prompt", PROMPT]
    commands = {
        OURS: [*script, *prompt, "--max-new-tokens", "1"],
        IMPORTS: ["-c", "import jax; jax.devices()"],
    }
    if args.vs:
        commands[PEER] = ["-c", PEER_PROGRAM, str(folder), dtype, ids]
    taken = take_turns({name: lambda c=command: timed(_run, c) for name, command in commands.items()}, args.repeats)
    seconds = {name: median(values) for name, values in taken.items()}
    record = circumstances(args, folder) | {
        "dtype": dtype,
        "compilation_cache": bool(_cli.compilation_cache_variables()),
        "seconds": seconds[OURS],
        "limit_seconds": seconds[IMPORTS],
        "share_of_limit": seconds[IMPORTS] / seconds[OURS],
        "spread": {name: summary(values) for name, values in taken.items()},
    }
    if args.vs:
        record |= {"peer_seconds": seconds[PEER], "ratio": seconds[OURS] / seconds[PEER]}
    return record


def _run(arguments: list[str]) -> None:
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        raise UserError(f"a process that was to make one token failed: {last}")


def show(record: dict[str, Any]) -> None:
    table = time_table("from start to end, with one token", record["spread"], "", {})
    share = f"{record['share_of_limit']:.0%} of the limit: the rest is not jax's own start"
    lines = [f"the first token is there after {record['seconds']:.2f} s, {share}"]
    if not record["compilation_cache"]:
        lines.append("each start compiles: jax keeps no compiled programs here (JAX_ENABLE_COMPILATION_CACHE)")
    if "ratio" in record:
        lines.append(f"it takes {record['ratio']:.2f} of the time that transformers takes")
    print_result([table], lines)
