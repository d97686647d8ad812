"""True acceptance while a model is trained: held-out prompts decoded by the decoding loop itself, with its counters.

The one place where `train` asks `infer`. Acceptance says something only beside two checks, which every measurement has:
the tokens must be those of plain decoding (a verifier that lets wrong drafts pass raises acceptance), and drafts from
the place after the right one must hardly ever stand (else the text repeats itself, or the counting is wrong).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import PyTree

from infer.completion import Completion
from infer.control import draft_one_place_on
from infer.generator import Generator
from infer.prompts import prompt_from_messages, prompt_from_text
from infer.settings import BATCH_SIZE
from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer
from train.corpus import Corpus
from train.experiment import Experiment
from train.held_out import cut_prompts

_LINES = (8, 1)
"""Of a prompt cut from a text: so many, or a line where no held-out text is that long."""


class Acceptance:
    """Prompts and compiled programs for measuring a model again and again. The first measurement compiles."""

    def __init__(
        self,
        experiment: Experiment,
        model: MTPModel,
        tokenizer: Tokenizer,
        end_ids: Iterable[int],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Args: prompts: at least one, none empty."""
        self._experiment = experiment
        self._prompts = prompts
        self.generator = Generator(MTPModel(model.config, model.dtype), {}, tokenizer, end_ids)

    def measure(self, params: PyTree) -> dict[str, float | None]:
        """Figures for a row of metrics, greedy, a draft for each measured depth; None where no draft could be emitted.

            acceptance, acceptance_d2, ..   of the rounds that could emit a draft at that position, how many did
            tokens_per_round                tokens past prefill's, over rounds
            acceptance_identical            share of prompts whose tokens are those of plain decoding: 1 in float32
            acceptance_control              as acceptance, of drafts that were meant for the place after: near 0

        Args:
          params: of an ordinary model: adapters are merged.
        """
        self.generator.programs.params = params
        try:
            drafts = self._experiment.measured().depths
            plain = self._decode(num_draft_tokens=0)
            ours = self._decode(num_draft_tokens=drafts)
            shifted = self._decode(num_draft_tokens=drafts, drafter=draft_one_place_on)
        finally:
            self.generator.programs.params = {}  # the next step gives the buffers away
        shares = accepted_shares(ours)
        rounds = sum(completion.rounds for completion in ours)
        identical = [one.tokens == other.tokens for one, other in zip(plain, ours, strict=True)]
        return {
            "acceptance": shares[0],
            **{f"acceptance_d{position}": share for position, share in enumerate(shares[1:], 2)},
            "tokens_per_round": sum(len(c.tokens) - 1 for c in ours) / rounds if rounds else None,
            "acceptance_identical": sum(identical) / len(identical),
            "acceptance_control": accepted_shares(shifted)[0],
        }

    def _decode(self, **settings: Any) -> list[Completion]:
        return self.generator.generate(
            self._prompts, max_new_tokens=self._experiment.acceptance_new_tokens, batch_size=BATCH_SIZE, **settings
        )


def accepted_shares(completions: Sequence[Completion]) -> list[float | None]:
    """For each draft position: emitted drafts over rounds that could have emitted one there; None without any."""
    accepted = map(sum, zip(*(completion.accepted_per_position for completion in completions), strict=True))
    drafted = map(sum, zip(*(completion.drafted_per_position for completion in completions), strict=True))
    return [stood / made if made else None for stood, made in zip(accepted, drafted, strict=True)]


def held_out_prompts(experiment: Experiment, corpus: Corpus, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of `acceptance_prompts` different prompts, evenly spaced over the held-out documents; fewer if there are
    fewer.

    A text gives whole lines, a conversation what comes before a turn of the assistant. A long prompt loses its
    beginning: it has at most `sequence_length` tokens.

    Raises:
      UserError: if nothing is held out that a prompt can be cut from.
    """
    held_out = list(corpus.documents(held_out=True))
    cuts = (cut_prompts(held_out, experiment.acceptance_prompts, num_lines) for num_lines in _LINES)
    prompts = []
    for row in next(filter(None, cuts), []):
        cut = (
            prompt_from_messages(row["messages"], tokenizer)
            if "messages" in row
            else prompt_from_text(row["prompt"], tokenizer)
        )
        ids = cut.ids[-experiment.sequence_length :]
        if ids and ids not in prompts:
            prompts.append(ids)
    if not prompts:
        raise UserError(
            f"setting acceptance_every: {experiment.acceptance_every} needs held-out documents to cut prompts from, "
            "there are none: see held_out and held_out_every"
        )
    return prompts
