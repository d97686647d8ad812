"""Programs that are compiled once, and dropped before they are too many for the process."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from infer import programs
from infer.programs import Programs


@partial(jax.jit, static_argnames=("model", "times"))
def scaled(model, params, x, *, times):
    return params * x * times


def test_a_program_serves_all_values_of_its_shapes(model, compiled):
    ours = Programs(model, jnp.float32(2))
    assert ours.call(scaled, np.float32([1, 2]), times=3).tolist() == [6, 12]
    seconds, heard = ours.compile_seconds, len(compiled)
    assert seconds > 0
    assert ours.call(scaled, np.float32([5, 7]), times=3).tolist() == [30, 42]
    assert (ours.compile_seconds, len(compiled)) == (seconds, heard)
    assert ours.call(scaled, np.float32([1]), times=3).tolist() == [6]
    assert ours.call(scaled, np.float32([1]), times=4).tolist() == [8]
    assert len(compiled) == heard + 2


def test_programs_are_dropped_when_mappings_run_short(model, monkeypatch, compiled):
    ours = Programs(model, jnp.float32(2))
    first = ours.call(scaled, np.float32([1, 2]), times=3)
    monkeypatch.setattr(programs, "_mappings_run_short", lambda: True)
    ours.call(scaled, np.float32([1]), times=3)
    before = len(compiled)
    assert ours.call(scaled, np.float32([1, 2]), times=3).tolist() == first.tolist()
    assert len(compiled) > before
    ours.call(scaled, np.float32([3, 4]), times=3)
    assert len(compiled) == before + 1


def test_mappings_run_short_at_half_of_what_linux_allows(monkeypatch, tmp_path):
    limit = tmp_path / "max_map_count"
    monkeypatch.setattr(programs, "MAPPINGS_ALLOWED", limit)
    assert not programs._mappings_run_short()  # no such file: another system
    for allowed, short in ((1 << 40, False), (4, True)):
        limit.write_text(f"{allowed}\n")
        assert programs._mappings_run_short() == short
