"""Strict numerics for every test: nothing is promoted, in rank or dtype, without being asked to."""

import atexit
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Hundreds of tiny programs: unoptimised they compile three times faster. Scripts started by tests inherit it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Nor do they fill the user's cache folder with such programs.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

# Tokens made by tests stay out of the user's cache. Scripts started by tests inherit this too.
os.environ["MTP_JAX_CACHE"] = tempfile.mkdtemp(prefix="mtp_jax_tests_")

import jax
import pytest

atexit.register(shutil.rmtree, os.environ["MTP_JAX_CACHE"], ignore_errors=True)
# A job in the background is started deaf to Ctrl-C, and so would be all that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests on several devices need a process of their own: they run where they are named."""
    named = any("many_devices" in argument for argument in config.args)
    return True if collection_path.name == "many_devices" and not named else None


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Drops compiled programs between files: each takes hundreds of memory mappings, of which a process has 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture
def compiled() -> Iterator[list]:
    """Compilations from here on, heard from JAX itself."""
    heard = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            heard.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield heard
    before = len(heard)
    jax.jit(lambda x: x + 1)(float(before))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert len(heard) > before, "the listener no longer hears of compilations"


@pytest.fixture
def no_programs_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Programs` keeps what it compiled, however many programs other tests in this process hold."""
    monkeypatch.setattr("infer.programs._mappings_run_short", lambda: False)


@pytest.fixture
def script() -> Callable[[str], ModuleType]:
    """Loads a command line by its name: `script("generate")` is `scripts/generate.py`, not run yet."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent.parent / "scripts" / f"{name}.py"
        # As a module, `train` is the package: it is loaded first, and the script is kept out of sys.modules.
        importlib.import_module("train")
        spec = importlib.util.spec_from_file_location(f"script_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))  # as Python does for a script; its `_cli` takes it away again
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path[:] = [entry for entry in sys.path if entry != str(path.parent)]
        return module

    return load
