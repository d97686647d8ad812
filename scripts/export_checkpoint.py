"""Write a trained model, or a loaded checkpoint again, in the published layout."""

import argparse
import sys
from collections.abc import Sequence

from _cli import Parser, path, run

DESCRIPTION = """\
Write a model in the published layout (config.json, safetensors, tokenizer, chat template).

From a work directory of train.py: as `qwen3_5_text`, in bfloat16 with A_log and linear_attn.norm in float32.
From a checkpoint: load it and save it again; names, dtypes, bytes, files and side files come back as they were.

Examples:
  python scripts/export_checkpoint.py --workdir runs/demo --out exported
  python scripts/export_checkpoint.py --checkpoint models/demo --out copy
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    # After parsing: `--help` and mistakes in flags should not wait for jax.
    from mtp_jax.hf import load_checkpoint, save_checkpoint

    if arguments.checkpoint is not None:
        checkpoint = load_checkpoint(arguments.checkpoint, arguments.trunk_only)
        save_checkpoint(arguments.out, checkpoint.config, checkpoint.params, checkpoint.manifest)
    else:
        from train.checkpoint import load_for_export

        config, params, tokenizer = load_for_export(arguments.workdir, arguments.step)
        save_checkpoint(arguments.out, config, params, tokenizer_folder=tokenizer)
    print(f"wrote {arguments.out}", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=path, metavar="DIR", help="work directory of train.py")
    source.add_argument("--checkpoint", type=path, metavar="DIR", help="checkpoint in the published layout")
    parser.add_argument("--step", type=int, metavar="N", help="training step to export (default: the last one saved)")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="folder to write: new or empty")
    parser.add_argument(
        "--trunk-only",
        action="store_true",
        help="with --checkpoint: do without an MTP head that config.json declares; its tensors, if any, are copied",
    )
    arguments = parser.parse_args(argv)
    if arguments.step is not None and arguments.workdir is None:
        parser.error("--step goes with --workdir")
    if arguments.trunk_only and arguments.checkpoint is None:
        parser.error("--trunk-only goes with --checkpoint")
    if arguments.out.exists() and not (arguments.out.is_dir() and not any(arguments.out.iterdir())):
        parser.error(f"--out: expected a new or an empty folder, got {arguments.out}")
    return arguments


if __name__ == "__main__":
    run(main)
