"""Talk with a model in the terminal, in its own chat template.

The history stays in the model's state: a turn reads what is new, and what the template rewrites. Accepted drafts are
marked, thinking is dimmed. Ctrl-C ends a reply and keeps what there is; at the prompt it ends the program, as Ctrl-D
does. Where stdin or stdout is no terminal, each line read is a message, and nothing but replies is written to stdout.

  python scripts/chat.py
  python scripts/chat.py --checkpoint DIR --system "Be brief." --thinking off --temperature 0.7 --top-p 0.8
  printf 'Hello!\\nAnd in French?\\n' | python scripts/chat.py --checkpoint DIR
"""

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import _cli

from mtp_jax.errors import UserError

if TYPE_CHECKING:  # imports that take a second, which `--help` and mistakes in flags should not wait for
    from rich.console import Console

    from infer.chat_screen import ReplyWriter
    from infer.conversation import Conversation

HELP = """\
/reset             forget the conversation, but for the system message
/retry             another reply in place of the last one; the same again without --temperature
/stats             tokens in the context, how many the last turn read, and how its reply was drafted
/thinking on|off   from the next message on
/exit              end, as Ctrl-D does
/help              this
A message that is to begin with a slash needs a space before it."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="chat.py", description=__doc__)
    _cli.add_checkpoint_flag(parser)
    _cli.add_dtype_flag(parser)
    _cli.add_mesh_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message, which comes first")
    parser.add_argument(
        "--thinking", choices=["on", "off"], help="tell the template so (default: whatever the template does)"
    )
    parser.add_argument(
        "--max-new-tokens", type=_cli.positive, default=512, metavar="N", help="a reply's tokens, at most"
    )
    parser.add_argument(
        "--cache-length",
        type=_cli.positive,
        metavar="N",
        help="room for the whole conversation (default: begins small and grows, up to max_position_embeddings)",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_cli.count,
        metavar="J",
        help="drafts a round; 0 decodes plainly (default: 3, or 0 without a head)",
    )
    _cli.add_sampling_flags(parser)
    _cli.add_marks_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    _cli.check_new_tokens(args.min_new_tokens, args.max_new_tokens)
    folder = _cli.existing_checkpoint(args.checkpoint)
    _cli.enable_compilation_cache()

    from rich.console import Console  # after the flags are checked: these imports take seconds

    from infer.chat_screen import ReplyWriter
    from infer.conversation import Conversation, with_template
    from infer.generator import Generator
    from infer.settings import Settings
    from mtp_jax.hf import read_config
    from mtp_jax.text import Tokenizer, end_ids

    # All that can be wrong, before weights are read.
    config, tokenizer = read_config(folder), Tokenizer.from_folder(folder)
    thinking = None if args.thinking is None else args.thinking == "on"
    with_template(tokenizer, thinking)
    settings = Settings(
        num_draft_tokens=args.num_draft_tokens, sampling=_cli.sampling_from(args), cache_length=args.cache_length
    )
    _cli.check_settings(settings, config, tokenizer, end_ids(folder, tokenizer))

    mesh = _cli.mesh_of(args.mesh)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen, aside = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    with aside.status("loading the model"):
        generator = Generator.from_pretrained(folder, dtype=_cli.compute_dtype(args.dtype), mesh=mesh)
    conversation = Conversation(
        generator, settings, system=args.system, enable_thinking=thinking, max_new_tokens=args.max_new_tokens
    )
    # Among nothing but replies, brackets would be part of them.
    writer = ReplyWriter("none" if args.marks == "auto" and not interactive else args.marks)
    most = args.cache_length or config.max_position_embeddings
    if interactive:
        screen.print(
            f"{folder.name}: /help lists commands, Ctrl-C ends a reply, Ctrl-D ends", style="dim", markup=False
        )
    _Chat(conversation, writer, screen, aside, most, interactive).talk()


class Interrupts:
    """Ctrl-C asks for the end of a reply; a second one ends the program.

    A handler, as KeyboardInterrupt could come while the state is on its way through a call, and lose it.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _Chat:
    """The loop of messages and replies."""

    def __init__(
        self,
        conversation: "Conversation",
        writer: "ReplyWriter",
        screen: "Console",
        aside: "Console",
        most: int,
        interactive: bool,
    ) -> None:
        self._conversation = conversation
        self._writer = writer
        self._screen = screen
        self._aside = aside
        self._most = most
        self._interactive = interactive
        self._replies = 0

    def talk(self) -> None:
        """Until there is nothing more to read, or /exit."""
        if self._interactive:
            with suppress(ImportError):  # not everywhere
                import readline  # noqa: F401  (gives `input` its history and editing)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not text is told by the tokenizer
        while True:
            try:
                line = input("> ") if self._interactive else input()
            except EOFError:
                if self._interactive:
                    self._screen.print()
                return
            if line.strip() == "/exit":
                return
            try:
                self._answer(line)
            except UserError as error:
                if not self._interactive:
                    raise
                self._aside.print(f"error: {error}", markup=False, style="red")

    def _answer(self, line: str) -> None:
        command, *rest = line.split() or [""]
        if not command:
            return
        if not line.startswith("/"):
            self._reply(line)
        elif (command, rest) == ("/reset", []):
            self._conversation.reset()
            self._tell("forgotten")
        elif (command, rest) == ("/retry", []):
            self._reply(None)
        elif (command, rest) == ("/stats", []):
            self._tell(self._stats())
        elif command == "/thinking" and rest in (["on"], ["off"]):
            self._conversation.enable_thinking = rest == ["on"]
            self._tell(f"thinking {rest[0]}")
        elif (command, rest) == ("/help", []):
            self._tell(HELP)
        else:
            raise UserError(f"expected a command that /help lists, got {line.strip()!r}")

    def _stats(self) -> str:
        from infer.chat_screen import turn_summary

        turn = self._conversation.turn
        return "nothing was said yet" if turn is None else turn_summary(turn, self._most)

    def _tell(self, text: str) -> None:
        """What is no reply."""
        console = self._screen if self._interactive else self._aside
        console.print(text, style="dim", markup=False)

    def _reply(self, text: str | None) -> None:
        """To a message; None asks for another reply to the last one."""
        from infer.row import Piece

        pieces = self._conversation.retry() if text is None else self._conversation.say(text)
        began, completion = False, None
        with self._aside.status("compiling, reading") as status, Interrupts() as interrupts:
            for piece in pieces:
                if isinstance(piece, Piece):
                    if not began:
                        began = True
                        status.stop()
                        self._writer.begin(self._conversation.opened)
                    self._writer.write(piece.spans)
                    completion = piece.completion
                elif piece.done < piece.total:
                    status.update(f"reading: {piece.done} of {piece.total} tokens")
                else:
                    status.update("compiling, decoding")
                if interrupts.asked:
                    pieces.close()
                    break
        if began:
            self._replies += 1
            self._screen.print()
        if interrupts.asked:
            if not self._interactive:
                raise KeyboardInterrupt
            self._tell("ended here" if began else "ended before the reply began: the message is dropped")
        elif completion is not None and completion.finish_reason == "length":
            which = "ended" if self._interactive else f"reply {self._replies} ended"
            self._tell(f"{which} at {len(completion.tokens)} tokens, the limit")


if __name__ == "__main__":
    _cli.run(main)
