"""What a person at the terminal sees of a run."""

import io

from rich.console import Console

from train.progress import Progress


def test_a_terminal_shows_the_latest_rows_with_the_last_evaluation_and_a_bar():
    progress = Progress()
    progress._console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with progress.training(12, 0) as update:
        for step in range(1, 13):
            row = {"step": step, "main_loss": 10.0 - step, "mtp_loss": None, "tokens_per_second": 1234.4}
            update(step, row | ({"eval_main_loss": 7.25} if step == 5 else {}))
    last = progress._console.export_text().rpartition("held-out main")[2]
    lines = [line.split() for line in last.splitlines() if line.endswith("1,234 ") or "1,234" in line]
    assert [line[0] for line in lines] == [str(step) for step in range(5, 13)]
    assert all(line[1:] == [f"{10 - int(line[0]):.3f}", "7.250", "1,234"] for line in lines)
    assert "12/12" in last


def test_elsewhere_rows_are_lines_now_and_then(capsys):
    with Progress().training(3, 0) as update:
        for step in (1, 2, 3):
            checks = {"acceptance": 0.25, "acceptance_identical": 1.0, "acceptance_control": 0.0}
            update(step, {"step": step, "main_loss": 1.5, **checks, "tokens_per_second": 10.0})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"step {step}/3  main 1.500  acceptance 0.250  control 0.000  identical 1.000  10 tokens/s" for step in (1, 3)
    ]
