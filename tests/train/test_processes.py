"""What a run in several processes is refused for, before any process waits for another."""

import pytest

from configs import PRESETS
from mtp_jax.errors import UserError
from train.processes import join

TINY = PRESETS["tiny"]()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"--num-processes 2: expected a mesh whose data times fsdp is .* mesh=fsdp:2 .*; got no mesh"),
        (["mesh=tensor:2"], r"--num-processes 2: .*; got tensor:2"),
        (["mesh=fsdp:2", "acceptance_every=5"], r"acceptance_every: expected 0 in a run of 2 processes, .* got 5"),
    ],
)
def test_a_run_that_cannot_be_divided_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        join("localhost:1", 2, 0, TINY.override(settings))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-processes", "2"], "go together, missing: --coordinator, --process-id"),
        (["--coordinator", "here"], "expected HOST:PORT, got 'here'"),
        (
            ["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id: expected less than --num-processes 2, got 2",
        ),
    ],
)
def test_flags_that_name_no_process_are_refused(script, capsys, flags, message):
    train = script("train")
    with pytest.raises((UserError, SystemExit)) as refused:
        train.main(["--config", "tiny", "--workdir", "w", *flags])
    assert message in capsys.readouterr().err + str(refused.value)
