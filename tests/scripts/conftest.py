"""Calling a command line as a user does, within this process."""

import sys

import pytest


@pytest.fixture
def call(script, capsys, monkeypatch):
    """`call("generate", *flags)` is (status, stdout, stderr)."""
    # The program compiled for one set of flags serves the other tests: jax keeps it.
    cli = script("_cli")
    monkeypatch.setitem(sys.modules, "_cli", cli)

    def run(name, *argv):
        with pytest.raises(SystemExit) as end:
            cli.run(script(name).main, list(map(str, argv)))
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run
