"""Files to documents: whole texts, or the rows of JSONL and parquet files."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer
from train.conversations import check_messages
from train.sources import Kind, SourceFile, read_text_file

_COLUMNS = ("text", "prompt", "completion", "messages", "tools")


class Text(NamedTuple):
    """Every token is trained on."""

    text: str


class Completion(NamedTuple):
    """The completion, and the end of the document, are trained on."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """What the assistant says, and the end of its turns, are trained on."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


class Document(NamedTuple):
    """One text, completion or conversation, and where it came from."""

    content: Text | Completion | Conversation
    file: str  # SourceFile.name
    row: int = 0  # line or row in the file, from 1; 0: the file is the document
    where: str = ""  # for messages

    @property
    def name(self) -> str:
        """The file's name, with the row if the file has rows."""
        return f"{self.file}:{self.row}" if self.row else self.file

    def as_text(self, tokenizer: Tokenizer) -> str:
        """All of it as the model reads it.

        Raises:
          UserError: if it is a conversation and the tokenizer has no chat template, or the template refuses it.
        """
        match self.content:
            case Text(text):
                return text
            case Completion(prompt, completion):
                return prompt + completion
            case Conversation(messages, tools):
                return tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)

    def pieces(self) -> list[str]:
        """The texts in it, for a tokenizer to learn from."""
        match self.content:
            case Text() | Completion():
                return list(self.content)
            case Conversation(messages):
                return [text for message in messages for text in _content_texts(message)]


class BadRows:
    """What becomes of rows that cannot be used: the first is an error, or all are counted."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: str | None = None

    def add(self, where: str, error: UserError) -> None:
        """Raises:
        UserError: if bad rows are not skipped; names the row.
        """
        message = f"{where}: {error}"
        self.count += 1
        self.first = self.first or message
        if not self.skip:
            raise UserError(with_hint(message)) from error


def with_hint(message: str) -> str:
    """The message of a bad row, and what can be done about it."""
    return f"{message} (--skip-bad leaves such rows out and counts them)"


def read_documents(
    file: SourceFile, bad: BadRows, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Document]:
    """The documents of a file, in order.

    Args:
      progress: called with the number of the file's bytes read so far.

    Raises:
      UserError: if the file cannot be read, or as `BadRows` says.
    """
    if file.kind is Kind.TEXT:
        yield Document(Text(read_text_file(file)), file.name, 0, str(file.path))
    else:
        rows = _jsonl_rows if file.kind is Kind.JSONL else _parquet_rows
        for number, where, row in rows(file, bad, progress):
            try:
                content = parse_row(row)
            except UserError as error:
                bad.add(where, error)
            else:
                yield Document(content, file.name, number, where)
        file.check_unchanged()
    progress(file.size)


def parse_row(row: Any) -> Text | Completion | Conversation:
    """The document in a row. Keys that say nothing about it are passed over, nulls too.

    Raises:
      UserError: if the row is of none of the forms, or of several.
    """
    if not isinstance(row, dict):
        raise UserError(f"expected an object, got {_shown(row)}")
    row = {key: value for key, value in row.items() if value is not None}
    forms = [key for key in ("text", "messages", "prompt") if key in row]
    if len(forms) > 1:
        raise UserError(f"expected one of text, messages and prompt, got {' and '.join(forms)}")
    match row:
        case {"text": str(text)}:
            return Text(text)
        case {"prompt": str(prompt), "completion": str(completion)}:
            if not completion:
                raise UserError("completion: expected text, got none, so there is nothing to train on")
            return Completion(prompt, completion)
        case {"messages": list(messages)}:
            tools = row.get("tools")
            if not (tools is None or isinstance(tools, list)):
                raise UserError(f"tools: expected a list, got {_shown(tools)}")
            messages = _without_nulls(messages)
            check_messages(messages)
            return Conversation(messages, tools or None)
    raise UserError(
        'expected {"text": text}, {"messages": [{"role": text, "content": text}, ...]} or {"prompt": text, '
        f'"completion": text}}, got {_shown(row)}'
    )


def _jsonl_rows(
    file: SourceFile, bad: BadRows, progress: Callable[[int], None]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Line number, place, row. Blank lines are nothing."""
    try:
        with open(file.path, "rb") as raw, gzip.open(raw) if file.compressed else raw as lines:
            for number, line in enumerate(lines, 1):
                if number % 1024 == 0:
                    progress(raw.tell())
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                try:
                    row = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, too; integers too long
                    bad.add(where, UserError(f"expected a JSON object, got a line that is not JSON ({error})"))
                else:
                    yield number, where, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"--data {file.path}: the compressed file is damaged: {error}") from error
    except OSError as error:
        raise UserError(f"--data {file.path}: cannot be read: {error.strerror}") from error


def _parquet_rows(
    file: SourceFile, bad: BadRows, progress: Callable[[int], None]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Row number, place, row. Only the columns that are wanted are read."""
    try:
        import pyarrow  # here: the other kinds do without it
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"--data {file.path}: parquet needs pyarrow: pip install 'mtp-jax[train]'") from error
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
            if not columns:
                have = ", ".join(table.schema_arrow.names)
                raise UserError(f"--data {file.path}: expected a column text, messages or prompt, got {have}")
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, f"{file.path}: row {number}", row
                progress(file.size * number // table.metadata.num_rows)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--data {file.path}: expected a parquet file: {reason}") from error
    except OSError as error:
        raise UserError(f"--data {file.path}: cannot be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Parquet's rows name every key that some row has; a template would take null for something given."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _content_texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content", "")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content]


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else text[:200] + "..."
