"""From an experiment's settings to its rows: which documents, which tokenizer, with a word in the log about each."""

from pathlib import Path
from typing import Any, NamedTuple

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer, train_bpe
from train import data
from train.checkpoint import Workdir
from train.experiment import Experiment
from train.progress import Progress


class Corpus(NamedTuple):
    """Documents as read."""

    training: list[data.Document]
    held_out: list[data.Document]
    others: int  # files that are not text

    @property
    def fingerprint(self) -> str:
        """Of all documents, names and order included."""
        return data.fingerprint(self.training + self.held_out)


def read_corpus(experiment: Experiment, progress: Progress, leave_out: Path | None = None) -> Corpus:
    """The experiment's documents, with a line in the log about them; without those in the folder to leave out."""
    if experiment.data:
        documents, others = data.read_documents(experiment.data, leave_out)
        source = ", ".join(experiment.data)
    else:
        documents, others = data.read_standard_library(experiment.stdlib_files)
        source = "standard library sources"
    training, held_out = data.split_held_out(documents, experiment.held_out)
    size = sum(len(document.text) for document in training)
    progress.say(f"data: {source}: {len(training)} documents, {size:,} characters")
    progress.say(f"left out: {others} files that are empty or not UTF-8 text")
    if held_out:
        progress.say(f"held out: {' '.join(document.name for document in held_out)}")
    elif experiment.held_out:
        progress.say(f"held out: nothing matches {','.join(experiment.held_out)}, so nothing will be evaluated")
    return Corpus(training, held_out, others)


def run_tokenizer(experiment: Experiment, workdir: Workdir, corpus: Corpus, progress: Progress) -> Tokenizer:
    """The run's tokenizer, trained now if the run is new."""
    tokenizer = Tokenizer.from_folder(workdir.tokenizer) if workdir.tokenizer.is_dir() else None
    if tokenizer is None:
        with progress.task("training the tokenizer"):
            tokenizer = train_bpe((document.text for document in corpus.training), experiment.vocab_size)
    if len(tokenizer) > experiment.vocab_size:
        raise UserError(
            f"setting vocab_size: expected at least the tokenizer's {len(tokenizer)}, got {experiment.vocab_size}"
        )
    return tokenizer


def packed_rows(
    experiment: Experiment, corpus: Corpus, tokenizer: Tokenizer, progress: Progress
) -> tuple[data.PackedRows, data.PackedRows | None, dict[str, Any]]:
    """Training rows, evaluation rows if anything is held out, and what data.json says about both."""
    with progress.task("tokenizing", len(corpus.training) + len(corpus.held_out)) as advance:
        stream = data.tokenize(tokenizer, corpus.training, advance)
        held_out_stream = data.tokenize(tokenizer, corpus.held_out) if corpus.held_out else None
    rows = data.PackedRows(stream, experiment.sequence_length, experiment.seed)
    progress.say(f"{len(stream.tokens):,} tokens, {rows.rows_per_epoch:,} rows an epoch")
    held_out = None
    if held_out_stream:
        held_out = data.PackedRows(held_out_stream, experiment.sequence_length, 0, shuffle=False)
    record = {
        "fingerprint": corpus.fingerprint,
        "training_documents": len(corpus.training),
        "training_tokens": len(stream.tokens),
        "held_out": [document.name for document in corpus.held_out],
        "held_out_tokens": len(held_out_stream.tokens) if held_out_stream else 0,
        "files_left_out": corpus.others,
    }
    return rows, held_out, record
