"""Write a model's logits and hidden states for given token ids, to compare with another implementation."""

import argparse
from collections.abc import Sequence

from _cli import (
    Parser,
    add_checkpoint_flag,
    add_dtype_flag,
    add_head_reads_flag,
    compute_dtype,
    existing_checkpoint,
    path,
    run,
)

from mtp_jax.errors import UserError

DESCRIPTION = """\
Write a model's logits and hidden states for given token ids [B, T]; all arrays are float32:

  main_logits        [B,T,vocab]    of the trunk
  hidden             [B,T,D]        of the trunk, after the final norm
  hidden_before_norm [B,T,D]
  mtp_logits         [B,T-1,vocab]  of the head: entry t reads hidden[t] and the embedding of ids[t+1]
  chained_logits     [B,4,vocab]    of the head after the last position, run on its own output and drafts;
                                    entry 0 reads hidden[T-1] and the trunk's own greedy token

Of a head with several layers, mtp_logits are the first one's; entry k of chained_logits is layer k's or the last one's.
No id is masked. With --trunk-only, or without a head, the last two are left out.

Example:
  python -c "import numpy as np; np.save('ids.npy', np.arange(65)[None])"
  python scripts/dump_logits.py --ids ids.npy --out logits.npz
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    # After parsing: `--help` and mistakes in flags should not wait for jax.
    from dataclasses import replace

    import numpy as np

    from infer.logits import all_logits, check_ids
    from mtp_jax.config import HeadReads
    from mtp_jax.files import replacing
    from mtp_jax.hf import load_checkpoint, read_config
    from mtp_jax.mtp import MTPModel

    folder = existing_checkpoint(arguments.checkpoint)
    try:
        # Not np.load: that would open archives too.
        with open(arguments.ids, "rb") as file:
            ids = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # numpy's reader may raise anything, MemoryError and TokenError among others
        raise UserError(f"--ids {arguments.ids}: expected a .npy file of integers: {error}") from error
    check_ids(ids, read_config(folder).vocab_size)
    dtype = compute_dtype(arguments.dtype)
    checkpoint = load_checkpoint(folder, arguments.trunk_only, dtype)
    config = checkpoint.config
    if arguments.head_reads is not None:
        config = replace(config, head_reads=HeadReads(arguments.head_reads))
    result = all_logits(MTPModel(config, dtype), checkpoint.params, ids)
    try:
        with replacing(arguments.out) as partial, open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, **result)
    except OSError as error:
        raise UserError(f"--out {arguments.out}: cannot be written: {error.strerror}") from error


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION)
    add_checkpoint_flag(parser)
    parser.add_argument("--ids", type=path, required=True, metavar="FILE.npy", help="integers of shape [B, T]")
    parser.add_argument("--out", type=path, required=True, metavar="FILE.npz", help="file to write")
    parser.add_argument("--trunk-only", action="store_true", help="load the checkpoint without its MTP head")
    add_head_reads_flag(parser)
    add_dtype_flag(parser)
    arguments = parser.parse_args(argv)
    if arguments.out.is_dir() or not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, got {arguments.out}")
    return arguments


if __name__ == "__main__":
    run(main)
