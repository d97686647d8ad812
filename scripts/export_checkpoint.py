"""Write a trained model, or a loaded checkpoint again, in the published layout."""

import argparse
import sys
from collections.abc import Sequence

from _cli import Parser, path, run

DESCRIPTION = """\
Write a model in the published layout (config.json, safetensors, tokenizer, chat template).

From a work directory of train.py that started from a checkpoint: into that checkpoint's files, types and names, with
the bytes it had wherever nothing was trained. From one that started from nothing: as `qwen3_5_text`, with experts
`qwen3_5_moe_text`, in bfloat16 with A_log and linear_attn.norm in float32. From a checkpoint: loaded and saved again.

Examples:
  python scripts/export_checkpoint.py --workdir runs/demo --out exported
  python scripts/export_checkpoint.py --workdir runs/demo --head-only head.safetensors
  python scripts/export_checkpoint.py --checkpoint models/demo --out copy
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    # After parsing: `--help` and mistakes in flags should not wait for jax.
    from mtp_jax.hf import load_checkpoint, save_checkpoint, save_head

    tokenizer = None
    if arguments.checkpoint is not None:
        checkpoint = load_checkpoint(arguments.checkpoint, arguments.trunk_only)
        config, params, manifest = checkpoint.config, checkpoint.params, checkpoint.manifest
    else:
        from train.checkpoint import load_for_export

        config, params, tokenizer, manifest, step = load_for_export(
            arguments.workdir, arguments.step, arguments.base, best=arguments.best
        )
        print(f"{arguments.workdir}: the checkpoint after step {step}", file=sys.stderr)
    if arguments.head_only is not None:
        save_head(arguments.head_only, config, params, manifest)
    else:
        save_checkpoint(arguments.out, config, params, manifest, tokenizer)
    print(f"wrote {arguments.head_only or arguments.out}", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=path, metavar="DIR", help="work directory of train.py")
    source.add_argument("--checkpoint", type=path, metavar="DIR", help="checkpoint in the published layout")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="training step to export (default: the last one saved)")
    which.add_argument(
        "--best", action="store_true", help="export the best checkpoint, of a run with the setting keep_best"
    )
    parser.add_argument(
        "--base", type=path, metavar="DIR", help="with --workdir: where the checkpoint it started from has moved to"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=path, metavar="DIR", help="folder to write: new or empty")
    target.add_argument(
        "--head-only", type=path, metavar="FILE", help="write the MTP head alone, as one new .safetensors file"
    )
    parser.add_argument(
        "--trunk-only",
        action="store_true",
        help="with --checkpoint: do without an MTP head that config.json declares; its tensors, if any, are copied",
    )
    arguments = parser.parse_args(argv)
    for flag in ("step", "base"):
        if getattr(arguments, flag) is not None and arguments.workdir is None:
            parser.error(f"--{flag} goes with --workdir")
    if arguments.best and arguments.workdir is None:
        parser.error("--best goes with --workdir")
    if arguments.trunk_only and arguments.checkpoint is None:
        parser.error("--trunk-only goes with --checkpoint")
    if arguments.head_only is not None:
        if arguments.trunk_only:
            parser.error("--trunk-only leaves no head for --head-only")
        if arguments.head_only.suffix != ".safetensors" or arguments.head_only.exists():
            parser.error(f"--head-only: expected a new file named .safetensors, got {arguments.head_only}")
    elif arguments.out.exists() and not (arguments.out.is_dir() and not any(arguments.out.iterdir())):
        parser.error(f"--out: expected a new or an empty folder, got {arguments.out}")
    return arguments


if __name__ == "__main__":
    run(main)
