"""Drafting over frequent tokens only: a guess that costs a product with N columns instead of with the vocabulary.

Most text consists of few of the tokens, and a draft is only a guess: the trunk verifies over the whole vocabulary, so
what is chosen does not change, and a rare token is at worst never drafted.

Reference: Zhao et al. 2025, FR-Spec, arXiv:2502.14856.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from mtp_jax.errors import UserError
from mtp_jax.files import read_text, write_text
from mtp_jax.text import Tokenizer

FILE_NAME = "draft_vocabulary.txt"
"""In a checkpoint's folder: the file whose first N ids `--draft-vocab N` takes."""


class DraftVocabulary(NamedTuple):
    """The tokens that may be drafted, and their columns of the output matrix."""

    ids: Int[Array, " num_ids"]  # ascending
    kernel: Float[Array, "D num_ids"]


def take_columns(params: PyTree, ids: Int[np.ndarray, " num_ids"], dtype: DTypeLike) -> DraftVocabulary:
    """Copies the columns once, in the type of the model's matrix products.

    Args:
      params: of an `MTPModel`.
      ids: distinct, ascending, as `load_draft_vocabulary` gives them.
    """
    kernel = jnp.take(params["lm_head"]["kernel"], ids, axis=1)
    return DraftVocabulary(jnp.asarray(ids, jnp.int32), kernel.astype(dtype))


def subset_logits(
    hidden: Float[Array, "*batch D"], vocabulary: DraftVocabulary, vocab_size: int
) -> Float[Array, "*batch vocab"]:
    """float32 logits that equal the model's at the vocabulary's ids, and are -inf elsewhere."""
    kernel = vocabulary.kernel
    few = jnp.matmul(hidden.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)
    nothing = jnp.full((*hidden.shape[:-1], vocab_size), -jnp.inf, jnp.float32)
    return nothing.at[..., vocabulary.ids].set(few, indices_are_sorted=True, unique_indices=True)


def load_draft_vocabulary(
    source: int | str | Path, folder: Path, vocab_size: int, end_ids: Iterable[int]
) -> Int[np.ndarray, " num_ids"]:
    """The ids that may be drafted, ascending. End ids are always among them: else no end could be drafted.

    Args:
      source: a file of ids, or N: the first N ids of `draft_vocabulary.txt` in the checkpoint's folder.
      folder: of the checkpoint.
      vocab_size: ids must be below it.
      end_ids: those outside the vocabulary are passed over.

    Raises:
      UserError: the file is missing or is not as `read_ids` wants it, or holds fewer than N ids.
    """
    if isinstance(source, int):
        path = folder / FILE_NAME
        if source < 1:
            raise UserError(f"the draft vocabulary must have at least 1 token, got {source}")
        if not path.is_file():
            raise UserError(
                f"{path}: expected a file of ids, there is none; make it with `python scripts/draft_vocabulary.py "
                f"--checkpoint {folder} --data TEXTS`, or name a file of ids"
            )
        ids = read_ids(path, vocab_size)
        if source > len(ids):
            raise UserError(f"{path}: expected at least the {source} ids asked for, got {len(ids)}")
        ids = ids[:source]
    else:
        ids = read_ids(Path(source), vocab_size)
    ends = {i for i in end_ids if 0 <= i < vocab_size}
    return np.array(sorted(ends.union(ids)), np.int32)


def read_ids(path: Path, vocab_size: int) -> list[int]:
    """Ids from a text file: one a line, in order. Empty lines and what follows a `#` do not count.

    Raises:
      UserError: the file cannot be read, holds no id, or something else than distinct ids of the vocabulary.
    """
    ids: dict[int, int] = {}  # id -> its line
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        # No vocabulary has ids of ten digits, and Python refuses to read numbers of thousands.
        id_ = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else -1
        if not 0 <= id_ < vocab_size:
            shown = word if len(word) <= 40 else word[:40] + "..."
            raise UserError(f"{path}:{number}: expected an id from 0 to {vocab_size - 1}, got {shown!r}")
        if id_ in ids:
            raise UserError(f"{path}:{number}: id {id_} was in line {ids[id_]} already; expected distinct ids")
        ids[id_] = number
    if not ids:
        raise UserError(f"{path}: expected at least one id, found none")
    return list(ids)


def most_frequent(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Ids that occur in the texts, most frequent first and of equal ones the lower first; and the number of tokens.

    The end of a document counts once for each text, as in training.
    """
    counts = np.zeros(len(tokenizer), np.int64)
    for text in texts:
        counts += np.bincount(tokenizer.encode(text), minlength=len(counts))
        if tokenizer.end_id is not None:
            counts[tokenizer.end_id] += 1
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0].tolist(), int(counts.sum())


def write_ids(path: Path, ids: Iterable[int], comment: str) -> None:
    """Writes what `read_ids` reads, with one line of comment before it."""
    write_text(path, f"# {' '.join(comment.split())}\n" + "".join(f"{i}\n" for i in ids))
