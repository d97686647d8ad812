"""What a person at a terminal reads while nothing else is written."""

import io

import pytest
from made_up import completion
from rich.console import Console

from infer.row import Piece
from infer.screen import PromptStatus, RowsBar, Transcript
from infer.slots import Reading

DONE = completion([2, 0], 2)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_a_prompt_that_was_read_is_not_said_to_be_read_still(console):
    """Programs are made before its first tokens come, which takes seconds."""
    with PromptStatus(console, until_text=True) as status:
        status.reading(Reading(0, 4, 6))
        assert status._status.status == "reading the prompt: 4 of 6 tokens"
        status.reading(Reading(0, 6, 6))
        assert status._status.status == "compiling, decoding"


def test_the_bar_says_so_too_until_there_are_tokens(console):
    with RowsBar(console, 2, 0, hidden=False) as bar:
        told = []
        for event in (Reading(0, 6, 6), Piece(0, [1, 2], [0, 1], [], None), Reading(1, 4, 6), Reading(1, 6, 6)):
            bar.reading(event) if isinstance(event, Reading) else bar.came(event)
            told.append(bar._bar.tasks[0].description)
    assert told == ["compiling, decoding", "decoding", "reading 4 of 6", "decoding"]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_preparing_is_told_once(num_samples):
    file = io.StringIO()
    transcript = Transcript(Console(file=file), "none", "", num_samples, has_text=False)
    for job in range(num_samples):
        transcript.show(Piece(job, [], [], [], DONE))
    transcript.finish(1.5)
    assert file.getvalue().count("prepared in 1.5 s") == file.getvalue().count("prepared") == 1
    assert file.getvalue().count("ended by length") == num_samples
