"""What is measured: a checkpoint in the published format, found or made; and on what."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import _cli
import jax
from rich.console import Console

from configs.released import RELEASED
from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.hf import read_config, save_checkpoint
from mtp_jax.mtp import MTPModel, init_params


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The model that the flags name, which is not made for this."""
    return read_config(_cli.existing_checkpoint(args.checkpoint)) if args.shape is None else RELEASED[args.shape]


@contextmanager
def checkpoint_folder(args: argparse.Namespace) -> Iterator[Path | None]:
    """The folder that the flags name, or one with random weights that goes when it is no longer needed; None for a mode
    that needs a shape and no weights."""
    if args.shape is None:
        yield _cli.existing_checkpoint(args.checkpoint)
        return
    if args.mode == "delta-rule":
        yield None
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / args.shape
        write_random(args.shape, folder)
        yield folder


def write_random(shape: str, folder: Path) -> None:
    """Random weights of a released shape, in bfloat16 as releases are, without a tokenizer."""
    config = RELEASED[shape]
    with Console(stderr=True).status(f"writing random weights of shape {shape}"):
        save_checkpoint(folder, config, init_params(MTPModel(config), jax.random.key(0)))


def check_positions(config: ModelConfig, flag: str, given: int, needed: int) -> None:
    """Refuses a length for which the model has too few positions.

    Args:
      needed: positions that it takes with what else is measured.

    Raises:
      UserError: names the flag.
    """
    if needed > config.max_position_embeddings:
        raise UserError(
            f"{flag} {given}: that takes {needed:,} positions with all that is measured, and the model has "
            f"{config.max_position_embeddings:,}"
        )


def circumstances(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """What figures depend on besides the code."""
    return {
        "mode": args.mode,
        "model": args.shape or str(folder),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {name: found for name in ("jax", "torch", "transformers") if (found := _version(name))},
        "repeats": args.repeats,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
