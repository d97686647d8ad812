"""From an experiment's settings to its rows: which files, which tokenizer, with a word in the log about each."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer, train_bpe
from train.checkpoint import Workdir
from train.experiment import Experiment
from train.packing import PackedRows, Pieces, cut
from train.progress import Progress
from train.records import BadRows, Document, read_documents
from train.sources import Source, find_source, fingerprint, matches, standard_library
from train.token_cache import TokenStore, tokenized
from train.unigram import unigram_loss

_NAMES_SHOWN = 10
_COUNTS: dict[str, Any] = dict.fromkeys(
    (
        "training_documents",
        "training_tokens",
        "held_out_documents",
        "held_out_tokens",
        "bad_rows",
        "conversations_split",
        "conversations_dropped",
    ),
    0,
)


class Corpus(NamedTuple):
    """What a run reads, and which part of it is held out."""

    sources: list[Source]  # one a data path, or all in one where paths have no weights
    held_out_patterns: tuple[str, ...]
    held_out_every: int
    skip_bad: bool

    def is_held_out(self, file: str, row: int) -> bool:
        """Whether a document is kept for evaluation: all of some files, and every so many rows of files with rows."""
        every = self.held_out_every
        return matches(file, self.held_out_patterns) or bool(every and row and row % every == 0)

    def documents(self, *, held_out: bool) -> Iterator[Document]:
        """Those to train on, or those held out, in order. Rows that are malformed are an error or left out."""
        for source in self.sources:
            for file in source.files:
                for document in read_documents(file, BadRows(skip=self.skip_bad)):
                    if self.is_held_out(document.file, document.row) == held_out:
                        yield document

    @property
    def held_out_files(self) -> list[str]:
        """Names of the files that are held out as a whole."""
        names = [file.name for source in self.sources for file in source.files]
        return [name for name in names if matches(name, self.held_out_patterns)]


class Rows(NamedTuple):
    """What a run trains on and is evaluated on."""

    training: list[PackedRows]  # one a source
    held_out: list[PackedRows]
    record: dict[str, Any]  # for data.json


def read_corpus(experiment: Experiment, progress: Progress, leave_out: Path | None = None) -> Corpus:
    """The experiment's files, with a line in the log about them; without those in the folder to leave out.

    Raises:
      UserError: if there is nothing to read, or everything is held out.
    """
    if experiment.data:
        with progress.task("looking at the files"):
            sources = [find_source(Path(path), leave_out) for path in experiment.data]
        if not experiment.data_weights:
            files = [file for source in sources for file in source.files]
            label = ", ".join(source.label for source in sources)
            sources = [Source(label, files, sum(source.others for source in sources))]
    else:
        sources = [standard_library(experiment.stdlib_files)]
    corpus = Corpus(sources, experiment.held_out, experiment.held_out_every, experiment.skip_bad)
    held_out = corpus.held_out_files
    for source in sources:
        if not source.files:
            raise UserError(f"--data {source.label}: expected UTF-8 text, found none ({source.others} other files)")
        size = sum(file.size for file in source.files)
        progress.say(f"data: {source.label}: {len(source.files)} files, {size:,} bytes")
        if source.others:
            progress.say(f"left out: {source.others} files that are empty or not UTF-8 text")
        if all(matches(file.name, experiment.held_out) for file in source.files):
            raise UserError(
                f"held_out {','.join(experiment.held_out)}: matches every file of {source.label}, "
                "none is left to train on"
            )
    if held_out:
        more = f" and {len(held_out) - _NAMES_SHOWN} more" if len(held_out) > _NAMES_SHOWN else ""
        progress.say(f"held out: {' '.join(held_out[:_NAMES_SHOWN])}{more}")
    elif experiment.held_out:
        progress.say(f"held out: nothing matches {','.join(experiment.held_out)}, so nothing will be evaluated")
    return corpus


def run_tokenizer(experiment: Experiment, workdir: Workdir, corpus: Corpus, progress: Progress) -> Tokenizer:
    """The run's tokenizer, trained now if the run is new."""
    tokenizer = Tokenizer.from_folder(workdir.tokenizer) if workdir.tokenizer.is_dir() else None
    if tokenizer is None:
        tokenizer = new_tokenizer(experiment, corpus, progress)
    if len(tokenizer) > experiment.vocab_size:
        raise UserError(
            f"setting vocab_size: expected at least the tokenizer's {len(tokenizer)}, got {experiment.vocab_size}"
        )
    return tokenizer


def new_tokenizer(experiment: Experiment, corpus: Corpus, progress: Progress) -> Tokenizer:
    """A BPE that learns from the documents to train on."""
    with progress.task("training the tokenizer"):
        texts = (text for document in corpus.documents(held_out=False) for text in document.pieces())
        return train_bpe(texts, experiment.vocab_size)


def packed_rows(experiment: Experiment, corpus: Corpus, tokenizer: Tokenizer, progress: Progress) -> Rows:
    """Training rows and evaluation rows of each source, and what data.json says about them.

    Raises:
      UserError: if a document cannot be used, or a source has none to train on.
    """
    rows = Rows([], [], _COUNTS.copy())
    digest = hashlib.sha256(fingerprint(corpus.sources).encode())
    for number, source in enumerate(corpus.sources):
        store = tokenized(source.label, source.files, tokenizer, corpus.skip_bad, progress)
        digest.update(store.checksum.encode())
        if store.num_bad:
            progress.say(f"left out: {store.num_bad:,} rows that cannot be used")
        held_out = _held_out(corpus, source, store)
        rows.record["bad_rows"] += store.num_bad
        rows.record["training_documents"] += int(np.count_nonzero(~held_out))
        rows.record["held_out_documents"] += int(np.count_nonzero(held_out))

        pieces = _cut(experiment, store, ~held_out, rows.record)
        if not len(pieces.starts):
            raise UserError(f"data {source.label}: no document is left to train on")
        with progress.task("packing"):
            packed = PackedRows(store, pieces, experiment.sequence_length, [experiment.seed, number])
        progress.say(f"{packed.num_tokens:,} tokens, {packed.num_targets:,} of them targets")
        progress.say(f"{len(packed):,} rows an epoch, {packed.padding:.1%} of them padding")
        rows.training.append(packed)
        rows.record["training_tokens"] += packed.num_tokens

        pieces = _cut(experiment, store, held_out, rows.record)
        if len(pieces.starts):
            rows.held_out.append(PackedRows(store, pieces, experiment.sequence_length))
            rows.record["held_out_tokens"] += rows.held_out[-1].num_tokens
    if rows.held_out:
        rows.record["unigram_loss"] = unigram_loss(rows.training, rows.held_out, len(tokenizer))
        progress.say(f"held-out loss of a model that knows only frequencies: {rows.record['unigram_loss']:.3f}")
    # What the files became counts too: a template may read the clock.
    rows.record["fingerprint"] = digest.hexdigest()
    rows.record["held_out"] = corpus.held_out_files
    rows.record["files_left_out"] = sum(source.others for source in corpus.sources)
    split, dropped = rows.record["conversations_split"], rows.record["conversations_dropped"]
    if split or dropped:
        what = f"{split:,} split" if split else f"{dropped:,} left out"
        progress.say(f"longer than {experiment.sequence_length} tokens: {what} (long_conversations)")
    return rows


def _cut(
    experiment: Experiment, store: TokenStore, chosen: Bool[np.ndarray, " num_documents"], record: dict[str, Any]
) -> Pieces:
    split = experiment.long_conversations == "split"
    pieces = cut(store, np.flatnonzero(chosen), experiment.sequence_length, split_conversations=split)
    record["conversations_split"] += pieces.num_split
    record["conversations_dropped"] += pieces.num_dropped
    return pieces


def _held_out(corpus: Corpus, source: Source, store: TokenStore) -> Bool[np.ndarray, " num_documents"]:
    """Which of the store's documents are kept for evaluation."""
    by_file = np.array([corpus.is_held_out(file.name, 0) for file in source.files])
    every = corpus.held_out_every
    by_row = (store.rows > 0) & (store.rows % every == 0) if every else np.zeros(len(store.rows), bool)
    return by_file[store.files] | by_row
