"""Data, settings and compiled programs that the tests of whole runs share."""

import jax
import pytest
from published_base import BASE, write_base
from small_run import SETTINGS

from train.experiment import Experiment


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Three documents, one of which the settings hold out."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("def double(x):\n    return x + x\n\n" * 20)
    (folder / "b.txt").write_text("def triple(x):\n    return x + x + x\n" * 3)
    (folder / "c.txt").write_text("".join(f"value_{i} = {i * i}\n" for i in range(40)))
    return folder


@pytest.fixture(scope="module")
def variant(request):
    """Which checkpoint `base` is; marks of `published_base` make it each one in turn."""
    return getattr(request, "param", BASE)


@pytest.fixture(scope="module")
def base(variant, tmp_path_factory):
    """A published checkpoint to start from."""
    with pytest.MonkeyPatch.context() as patch:
        return write_base(tmp_path_factory.mktemp("bases") / "base", patch, variant)


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
