"""One side of the training benchmark, in a process of its own: its peak memory is then its own too.

Reads what to do as JSON from its only argument, and writes what it found as JSON to stdout.
"""

import json
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from rich.console import Console

from mtp_jax.compiler_options import TRAINING, compiler_options
from mtp_jax.hf import load_checkpoint
from mtp_jax.sizes import Stage
from scripts.benchmarks.limits import Products, timed
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.turns import take_turns
from train.allocator import keep_freed_memory
from train.batch import Batch
from train.experiment import Experiment
from train.objective import count_targets, targets
from train.step import build_model, loss_and_gradients
from train.vocabulary_losses import vocabulary_losses

MTP_WEIGHT = 0.3


def main_loss(folder: Path, dtype: str, length: int) -> Callable[[], tuple[PyTree, PyTree]]:
    """The next token's loss and its gradient, without a head."""
    checkpoint = load_checkpoint(folder, trunk_only=True)
    experiment = _experiment(length, dtype)
    model = build_model(checkpoint.config, experiment)

    def loss(params: dict, batch: Batch) -> Array:
        labels, mask = targets(batch, 0)
        weights = mask[:, 0].astype(jnp.float32) / count_targets(batch, 0)[:, None]
        bound = model.bind({"params": params})
        hidden = bound.trunk_output(bound(jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)))
        how = experiment.head_loss, experiment.gradient_mode, experiment.cross_entropy_chunk
        return vocabulary_losses(hidden, params["lm_head"]["kernel"], labels[0], weights, *how)[0]

    return _in_place(jax.value_and_grad(loss), checkpoint.params, _batch(checkpoint.config.vocab_size, length))


def mtp_loss(folder: Path, dtype: str, length: int) -> Callable[[], tuple[PyTree, PyTree]]:
    """The loss that training has by default, with the head's at depth 1, and its gradient."""
    checkpoint = load_checkpoint(folder)
    experiment = _experiment(length, dtype)
    model = build_model(checkpoint.config, experiment)

    def loss(params: dict, batch: Batch) -> tuple[PyTree, PyTree]:
        return loss_and_gradients(model, experiment, params, batch, jnp.float32(MTP_WEIGHT))

    return _in_place(loss, checkpoint.params, _batch(checkpoint.config.vocab_size, length))


def _in_place(
    loss_and_gradient: Callable[[PyTree, Batch], tuple[PyTree, PyTree]], params: PyTree, batch: Batch
) -> Callable[[], tuple[PyTree, PyTree]]:
    """Each call gives the loss and its gradient, and writes the gradient where the last call's was."""

    def step(spent: PyTree, params: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        del spent
        return loss_and_gradient(params, batch)

    compiled = jax.jit(
        step,
        donate_argnames="spent",
        keep_unused=True,
        compiler_options=compiler_options(TRAINING),
    )
    gradient = jax.tree.map(jnp.zeros_like, params)

    def run() -> tuple[PyTree, PyTree]:
        nonlocal gradient
        loss, gradient = compiled(gradient, params, batch)
        return loss, gradient

    return run


def products(folder: Path, dtype: str, length: int) -> dict[str, Callable[[], float]]:
    """Products with weights alone: those of the main loss, and those that the MTP loss adds."""
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    stages = {"products": [(Stage.TRUNK, length), (Stage.OUTPUT, length)]}
    if config.num_mtp_layers:
        stages["mtp_products"] = [(Stage.HEAD, length), (Stage.OUTPUT, length)]
    return {
        name: Products.of(config, checkpoint.params, chosen).timer(dtype, backward=True)
        for name, chosen in stages.items()
    }


def transformers(folder: Path, dtype: str, length: int) -> dict[str, Callable[[], float]]:
    """The peer's next token's loss and its gradient."""
    peer = Peer(folder, dtype)
    ids = _tokens(peer.model.config.get_text_config().vocab_size, length)
    return {"transformers": lambda: peer.train_seconds(ids.tolist())}


SIDES = {
    "main_loss": lambda *args: {"main": partial(timed, main_loss(*args))},
    "mtp_loss": lambda *args: {"mtp": partial(timed, mtp_loss(*args))},
    "products": products,
    "transformers": transformers,
}
"""What each side measures, by name: seconds."""


def _experiment(length: int, dtype: str) -> Experiment:
    return Experiment(batch_size=1, sequence_length=length, dtype=dtype)


def _batch(vocab: int, length: int) -> Batch:
    tokens = _tokens(vocab, length)[None]
    ones = np.ones_like(tokens)
    return Batch(tokens=tokens, segment_ids=ones, loss_mask=ones.astype(bool))


def _tokens(vocab: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab, size=length).astype(np.int32)


def peak_bytes(side: str) -> int:
    """The most memory that this process, or the accelerator for it, has held."""
    if side == "transformers":
        import torch  # pyright: ignore[reportMissingImports]  (the peer extra)

        if torch.cuda.is_available() and (peak := torch.cuda.max_memory_allocated()):
            return peak
    elif stats := jax.devices()[0].memory_stats():
        return stats["peak_bytes_in_use"]
    if sys.platform == "linux":  # where ru_maxrss has the parent's in it
        (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(kilobytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(side: str, folder: str, dtype: str, length: int, repeats: int) -> dict[str, Any]:
    if side != "transformers":  # which runs as its users run it, and training here as its script does
        keep_freed_memory()
    with Console(stderr=True).status(f"loading for {side}"):
        measurements = SIDES[side](Path(folder), dtype, length)
    return {"taken": take_turns(measurements, repeats), "peak_bytes": peak_bytes(side)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
