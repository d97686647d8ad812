"""The files that an ablation's figures and tables are written to."""

from pathlib import Path

from mtp_jax.errors import UserError
from mtp_jax.files import write_bytes
from train.ablation.arms import Ablation, arms_of
from train.ablation.comparison import choose_references
from train.ablation.drawing import render
from train.ablation.figures import pictures
from train.ablation.records import read_records
from train.ablation.table import markdown

DOCUMENT = "ablation.md"


def write_document(grid: Path, out: Path | None = None, reference: str | None = None) -> tuple[Path, Ablation]:
    """Reads an ablation's records and writes `ablation.md` and its figures, each as PNG and SVG.

    All is made before anything is written, the document last; each file is written whole or not at all.

    Args:
      grid: folder with records.jsonl, or that file.
      out: folder; None: `figures` beside the records.
      reference: label of the arm that the others are compared with; None: see `choose_references`.

    Returns:
      the document, and what it is about.

    Raises:
      UserError: if there are no records, they say nothing or contradict each other, or the files cannot be written.
    """
    path = grid / "records.jsonl" if grid.is_dir() else grid
    out = path.parent / "figures" if out is None else out
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"--out {out}: expected a folder, {there} is a file")
    records = read_records(path)
    if not records:
        raise UserError(f"{path}: expected records of finished runs, there are none yet")
    ablation = arms_of(records, _begun(path.parent / "runs"))
    references = choose_references(ablation, reference)
    drawn = pictures(ablation, references)
    files = {f"{one.name}.{suffix}": render(one.figure, suffix) for one in drawn for suffix in ("png", "svg")}
    text = markdown(ablation, references, [(one.name, one.title, one.caption) for one in drawn])
    files[DOCUMENT] = text.encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_bytes(out / name, content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    return out / DOCUMENT, ablation


def _begun(runs: Path) -> list[str]:
    """Names of the runs that have a work directory."""
    return [entry.name for entry in runs.iterdir() if entry.is_dir()] if runs.is_dir() else []
