"""Measure decoding speed, by itself or beside transformers, on the same weights in the same process.

Without a checkpoint, one of a released shape is made of random weights, written in the published format and loaded
back. Each side takes turns; a step's time is that of 1 + N tokens less that of 1 token, divided by N. Examples:

  python scripts/benchmark.py decode
  python scripts/benchmark.py decode --shape 0.8b --vs transformers --json decode.json

The second needs torch and transformers: pip install -e '.[peer]'.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _cli

from configs.released import RELEASED
from mtp_jax.errors import UserError

PROMPT = list(range(100, 132))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="benchmark.py", description=__doc__)
    parser.add_argument("what", choices=["decode"], help="what to measure")
    source = parser.add_mutually_exclusive_group()
    _cli.add_checkpoint_flag(source)
    source.add_argument(
        "--shape",
        type=_cli.released_model,
        metavar="NAME",
        help="random weights of a released shape instead: 0.8b, .. (describe.py lists them)",
    )
    parser.add_argument("--vs", choices=["transformers"], help="measure this beside it")
    parser.add_argument("--steps", type=_cli.positive, default=32, metavar="N", help="tokens a measurement")
    parser.add_argument("--repeats", type=_cli.positive, default=5, metavar="N", help="measurements of each")
    _cli.add_dtype_flag(parser)
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.vs and importlib.util.find_spec("transformers") is None:
        raise UserError("--vs transformers: it is not installed; pip install -e '.[peer]'")
    if args.shape is None:
        measure(args, _cli.existing_checkpoint(args.checkpoint))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_random_checkpoint(args.shape, Path(folder) / args.shape)
        measure(args, Path(folder) / args.shape)


def make_random_checkpoint(shape: str, folder: Path) -> None:
    import jax
    from rich.console import Console

    from mtp_jax.hf import save_checkpoint
    from mtp_jax.mtp import MTPModel, init_params

    config = RELEASED[shape]
    with Console(stderr=True).status(f"writing random weights of shape {shape}"):
        save_checkpoint(folder, config, init_params(MTPModel(config), jax.random.key(0)))


def measure(args: argparse.Namespace, folder: Path) -> None:
    import jax
    from rich.console import Console
    from rich.table import Table

    from infer.generator import Generator
    from infer.job import Job
    from infer.step_time import alternate, seconds_per_step, summary

    dtype = _cli.compute_dtype(args.dtype)
    status = Console(stderr=True).status
    with status("loading"):
        started = time.perf_counter()
        generator = Generator.from_pretrained(folder, dtype=dtype)
        load_seconds = time.perf_counter() - started
    generator.end_ids = frozenset()  # every measurement has its full length
    cache_length = Job(PROMPT, 1 + args.steps).cache_length(generator.model.config, None)

    def ours(num_new: int) -> float:
        (completion,) = generator.generate(
            [PROMPT], max_new_tokens=num_new, num_draft_tokens=0, cache_length=cache_length
        )
        return completion.seconds

    measurements = {"mtp_jax": lambda: seconds_per_step(ours, args.steps)}
    if args.vs:
        with status("loading with transformers"):
            theirs = transformers_decoder(folder, dtype)
        measurements["transformers"] = lambda: seconds_per_step(theirs, args.steps)
    with status("measuring"):
        taken = {name: summary(values) for name, values in alternate(measurements, args.repeats).items()}

    record = {
        "dtype": str(dtype),
        "device": jax.devices()[0].device_kind,
        "steps": args.steps,
        "repeats": args.repeats,
        "load_seconds": load_seconds,
        "seconds_per_step": taken["mtp_jax"]["median"],
        "spread": taken,
    }
    if args.vs:
        record["peer_seconds_per_step"] = taken["transformers"]["median"]
        record["ratio"] = record["seconds_per_step"] / record["peer_seconds_per_step"]
    if args.json is not None:
        _cli.write_json(record, args.json)
    if args.json != "-":
        table = Table("plain decoding", "ms a step", "from", "to", "tokens/s")
        for name, values in taken.items():
            milliseconds = [f"{1e3 * values[key]:.1f}" for key in ("median", "min", "max")]
            table.add_row(name, *milliseconds, f"{1 / values['median']:.1f}")
        console = Console()
        console.print(table)
        if args.vs:
            console.print(f"a step takes {record['ratio']:.2f} of the time that transformers takes ({dtype})")


def transformers_decoder(folder: Path, dtype):
    """Plain greedy `generate` of transformers on the same folder; gives the seconds for a number of new tokens."""
    import torch  # pyright: ignore[reportMissingImports]  (the peer extra)
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, str(dtype))).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])

    def decode(num_new: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)
        return time.perf_counter() - started

    return decode


if __name__ == "__main__":
    _cli.run(main)
