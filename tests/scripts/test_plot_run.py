"""Curves of a stored metrics.jsonl, and the command line that draws them."""

import json
import xml.etree.ElementTree

import pytest

from mtp_jax.errors import UserError
from train.curves import read_metrics, series, weight_switches

ROWS = [
    {"step": 2, "main_loss": 5.0, "mtp_loss": 5.5, "mtp_weight": 0.3, "mtp_agreement": 0.1},
    {"step": 4, "main_loss": None, "mtp_loss": 5.0, "mtp_weight": 0.3, "mtp_agreement": 0.2},
    {"step": 6, "main_loss": 4.0, "mtp_loss": 4.5, "mtp_weight": 0.1, "mtp_agreement": 0.4, "acceptance": 0.3},
    {"step": 8, "main_loss": 3.5, "mtp_loss": 4.0, "mtp_weight": 0.1, "mtp_agreement": 0.5, "acceptance_control": 0.0},
]


@pytest.fixture
def workdir(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 10, "main_lo')
    return tmp_path


def test_rows_without_a_figure_and_a_line_cut_short_are_left_out(workdir):
    rows = read_metrics(workdir / "metrics.jsonl")
    assert rows == ROWS
    assert series(rows, "main_loss") == ([2, 6, 8], [5.0, 4.0, 3.5])
    assert series(rows, "acceptance") == ([6], [0.3])
    assert weight_switches(rows) == [6]


def test_svg_has_every_curve_there_is_and_png_is_a_picture(call, workdir):
    out = workdir / "curves.svg"
    status, stdout, err = call("plot_run", "--workdir", workdir, "--out", out)
    assert (status, stdout) == (0, ""), err
    text = out.read_text()
    xml.etree.ElementTree.fromstring(text)
    drawn = [name for name in ("main_loss", "mtp_agreement", "acceptance_control", "eval_main_loss") if name in text]
    assert drawn == ["main_loss", "mtp_agreement", "acceptance_control"]
    call("plot_run", "--workdir", workdir, "--out", workdir / "again.svg")
    assert (workdir / "again.svg").read_text() == text
    status, _, err = call("plot_run", "--workdir", workdir, workdir / "metrics.jsonl", "--out", workdir / "two.png")
    assert status == 0, err
    assert (workdir / "two.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "there are none yet"),
        ('{"step": 1}\nx\n', "line 2: expected a row of metrics"),
        ("[" * 100_000 + "\n", "line 1: expected a row of metrics"),
        ("x\x0b\n", "line 1: expected a row of metrics"),  # no end of a line within it
        ('{"step": 1%s}\n' % ("0" * 400), "line 1: expected a row of metrics: no step"),
        ('{"loss": 1}\n', "line 1: expected a row of metrics: no step"),
    ],
)
def test_files_that_are_no_metrics_are_named(tmp_path, content, message):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_metrics(path)


def test_mistakes_in_flags(call, workdir):
    status, _, err = call("plot_run", "--workdir", workdir, "--out", workdir / "curves.txt")
    assert status == 2
    assert "expected a name that ends in .png or .svg" in err
    status, _, err = call("plot_run", "--workdir", workdir, "--out", workdir / "absent" / "curves.png")
    assert status == 2
    assert "cannot be written: No such file or directory" in err
