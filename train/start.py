"""Where a run's model comes from: a published checkpoint, or nothing."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mtp_jax.config import LayerType, ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.hf import Manifest, read_manifest, read_params
from mtp_jax.hf.manifest import CONFIG, safe_path
from mtp_jax.hf.tensor_file import Reader
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.sharding import made_spread
from mtp_jax.text import Tokenizer, end_ids
from train.experiment import Experiment
from train.lora import adapted_paths

_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Start:
    """What a run begins with; its weights are read only when asked for.

    Attributes:
      config: of the model that is trained, always with a head.
      base: the checkpoint it starts from; None: from nothing.
      tokenizer: the base's; None: to be trained on the run's data.
    """

    config: ModelConfig
    base: Manifest | None = None
    tokenizer: Tokenizer | None = None

    def params(self, experiment: Experiment) -> dict:
        """Parameters before the first step: float32, or the compute dtype if all that is trained are adapters.

        Raises:
          UserError: if the base has changed or is gone.
        """
        if self.base is None:
            return made_spread(lambda: init_params(MTPModel(self.config), jax.random.key(experiment.seed)), self.config)
        dtype: DTypeLike = jnp.dtype(experiment.dtype) if experiment.lora_rank else jnp.float32
        return self.stored_params(dtype)

    def completed(self, trained: PyTree, experiment: Experiment) -> dict:
        """All parameters of a run whose checkpoint keeps only those that it trains.

        Raises:
          UserError: if the base has changed or is gone.
        """
        return trained if "trunk" in trained else {**self.params(experiment), **trained}

    def stored_params(self, dtype: DTypeLike = jnp.float32) -> dict:
        """The base's parameters, with a fresh head if it has none."""
        assert self.base is not None
        mesh = jax.sharding.get_mesh()
        params = read_params(self.base, dtype, None if mesh.empty else mesh, donated=True)
        return params if "mtp" in params else {**params, "mtp": fresh_head(params, self.config)}

    def record(self) -> dict[str, Any] | None:
        """What a work directory keeps about the base: where it was, and by what it is known again."""
        if self.base is None:
            return None
        return {"folder": str(self.base.folder), "fingerprint": fingerprint(self.base)}

    def lines(self) -> list[str]:
        """What the log says about it."""
        if self.base is None:
            return []
        lines = [f"model: from {self.base.folder}"]
        if not self.base.config.num_mtp_layers:
            source = last_full_attention(self.config)
            lines.append(f"head: there is none; a fresh one starts with the weights of the trunk's layer {source}")
        return lines


def read_start(experiment: Experiment) -> Start:
    """Reads and checks all of the base but its weights.

    Raises:
      UserError: if the base cannot be loaded, has no tokenizer or one that is larger than its vocabulary, has lost
        its head and `new_head` is not set, or has one and it is; if there is nothing to adapt, or adapters
        are wider than the model.
    """
    if not experiment.init:
        return Start(experiment.model_config())
    folder = Path(experiment.init)
    trunk = read_manifest(folder, trunk_only=True)
    head = trunk.head_names
    if not head and not experiment.new_head:
        raise UserError(
            f"{folder}: has no MTP head; scripts/graft_head.py puts back the base model's, "
            "--new-head starts a fresh one"
        )
    if head and experiment.new_head:
        raise UserError(f"--new-head: {folder} has a head ({head[0]} and others); without the flag that one is trained")
    base = trunk if experiment.new_head else read_manifest(folder)
    config = base.config
    if not head:
        config = replace(config, num_mtp_layers=1)
        last_full_attention(config)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise UserError(f"{folder}: expected a tokenizer.json to read the data with, found none")
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer)} ids, more than {CONFIG}'s vocab_size {config.vocab_size}"
        )
    end_ids(folder, tokenizer)  # decoding stops at them, in the loop and after export
    if experiment.lora_rank:
        _check_adapters(config, experiment)
    return Start(config, base, tokenizer)


def _check_adapters(config: ModelConfig, experiment: Experiment) -> None:
    if experiment.lora_rank > config.width:  # no projection has both sides larger
        raise UserError(
            f"setting lora_rank: expected at most the model's width {config.width}, got {experiment.lora_rank}"
        )
    adapted_paths(jax.eval_shape(lambda: init_params(MTPModel(config), jax.random.key(0))), experiment)


def fingerprint(base: Manifest) -> str:
    """SHA-256 over config.json, the headers of the tensor files, and a piece from the middle of every tensor.

    Training moves nearly every value, so pieces tell checkpoints of the same shape apart without reading them whole.
    """
    digest = hashlib.sha256(safe_path(base.folder, CONFIG).read_bytes())
    for file in base.files:
        digest.update(file.name.encode() + file.header)
        with Reader(safe_path(base.folder, file.name), file) as reader:
            for name in file.entries:
                digest.update(reader.middle(name, _SAMPLE_BYTES))
    return digest.hexdigest()


def last_full_attention(config: ModelConfig) -> int:
    """The trunk's last layer of the kind that the head's block is, with experts if there are any.

    Raises:
      UserError: if it has none.
    """
    layers = [
        n for n, kind in enumerate(config.layer_types) if kind is LayerType.FULL and config.layer_moe(n) == config.moe
    ]
    if not layers:
        raise UserError("--new-head: starts from the last full-attention layer's weights, the trunk has no such layer")
    return layers[-1]


def fresh_head(params: PyTree, config: ModelConfig) -> dict:
    """A head for a trunk that has none, as one layer more on the trunk's hidden state.

        h' = norm(block(norm(hidden)))

    The block starts with the weights of the trunk's last full-attention layer and the last norm with the trunk's final
    one: what the output matrix reads came from them. W_fc is zero for the embedding and the identity for the hidden
    state, and the norms before it have scale 1, so the block reads a mean square of about 1. The embedding's half
    is learnt from zero: where the vocabulary matrix is tied, passing the embedding on says the token just read once
    more, with certainty (on the shipped model without its head a first loss of 19.8, against 9.5).
    """
    identity = jnp.eye(config.width, dtype=jnp.float32)
    layer = params["trunk"][f"layers_{last_full_attention(config)}"]
    final = params["trunk"]["norm"]
    unit = jnp.full_like(final["scale"], 0 if config.zero_centred_norms else 1)
    head = {
        "pre_fc_norm_embedding": {"scale": unit},
        "pre_fc_norm_hidden": {"scale": unit},
        "fc": {"kernel": jnp.concatenate([jnp.zeros_like(identity), identity])},
        "layers_0": layer,
        "norm": final,
    }
    return jax.tree.map(jnp.array, head)  # copies: a buffer that is given away may not come twice
