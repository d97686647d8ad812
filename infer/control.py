"""The control of an acceptance: the same drafts at the wrong places, which should hardly ever stand."""

from jaxtyping import Array, Float

from infer.carry import DecodeCarry, Drafts
from infer.draft_vocabulary import DraftVocabulary
from infer.sampling import Rule
from infer.speculative import draft_with_head
from mtp_jax.mtp import MTPModel


def draft_one_place_on(
    model: MTPModel,
    rule: Rule,
    vocabulary: DraftVocabulary | None,
    carry: DecodeCarry,
    noise: Float[Array, "B T V"],
    num_drafts: int,
) -> Drafts:
    """The head's drafts without the first, each therefore meant for the place after the one it is at.

    Where they stand more often than chance the text repeats itself, or the counting is wrong.
    """
    drafts = draft_with_head(model, rule, vocabulary, carry, noise, num_drafts + 1)
    assert drafts.laws is not None
    return Drafts(drafts.tokens[:, 1:], drafts.head, drafts.laws[:, 1:])
