"""A run small enough to be trained several times in a test."""

import json

import jax
import pytest

from train.experiment import Experiment

SETTINGS = (
    "steps=6",
    "batch_size=2",
    "sequence_length=32",
    "log_every=1",
    "checkpoint_every=2",
    "keep_checkpoints=0",
    "warmup_steps=2",
    "mtp_weights=0.3,0.1",
    "mtp_switch_tokens=128",
    "held_out=b.txt",
    "vocab_size=320",
    "width=16",
    "mlp_width=24",
    "num_layers=2",
    "full_attention_interval=2",
    "num_heads=2",
    "num_kv_heads=1",
    "head_dim=8",
    "rotary_dim=4",
    "delta_v_heads=2",
    "delta_k_heads=1",
    "delta_head_k_dim=8",
    "delta_head_v_dim=8",
)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Three documents, one of which the settings hold out."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("def double(x):\n    return x + x\n\n" * 20)
    (folder / "b.txt").write_text("def triple(x):\n    return x + x + x\n" * 3)
    (folder / "c.txt").write_text("".join(f"value_{i} = {i * i}\n" for i in range(40)))
    return folder


@pytest.fixture(scope="session")
def small_experiment(text_folder):
    return Experiment(data=(str(text_folder),)).override(SETTINGS)


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory):
    """Compiled programs on disk: the same step is needed in every run, also in other processes."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in names.items()}
    for name, value in before.items():
        jax.config.update(name, value)


def read_rows(workdir):
    """The rows of metrics.jsonl without the one figure that differs from run to run."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("tokens_per_second") > 0
    return rows
