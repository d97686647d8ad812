"""What arms are compared by, and with which of them."""

from collections.abc import Sequence
from typing import NamedTuple

from train.ablation.arms import Ablation, Arm, as_text, at_depth
from train.ablation.statistics import Estimate, paired_difference

DRAFTING_WEIGHT = 0.1
"""Of the arm that others' drafting is compared with, where there is one: what published runs end at."""


class Quantity(NamedTuple):
    """A figure of runs. `of_head`: of the head and its drafts; else of the trunk."""

    figure: str
    title: str
    unit: str
    of_head: bool


MAIN_LOSS = Quantity("eval_main_loss", "held-out main loss", "nats a token", False)
HEAD_LOSS = Quantity("eval_mtp_loss", "held-out head loss", "nats a token", True)
AGREEMENT = Quantity("eval_mtp_agreement", "held-out agreement", "share of targets", True)
ACCEPTANCE = Quantity("acceptance", "decoded acceptance", "share of rounds", True)
TOKENS_PER_ROUND = Quantity("tokens_per_round", "tokens per round", "tokens", True)
CONTROL = Quantity("acceptance_control", "control", "share of rounds", True)
IDENTICAL = Quantity("acceptance_identical", "identical to plain decoding", "share of prompts", True)

_BY_DEPTH = (HEAD_LOSS, AGREEMENT, ACCEPTANCE)
_OF_DEPTHS = ("depths", "depth_weights")
"""Settings that are about depths after the first."""


class References(NamedTuple):
    """The arms that differences are taken to, of the trunk's figures and of the head's."""

    trunk: Arm
    head: Arm

    def of(self, quantity: Quantity) -> Arm:
        return self.head if quantity.of_head else self.trunk


class Difference(NamedTuple):
    """Of an arm to the reference, over the seeds of both; `estimate` is None where they have none in common."""

    quantity: Quantity
    arm: Arm
    reference: Arm
    estimate: Estimate | None


def at(quantity: Quantity, depth: int) -> Quantity:
    """The same at a depth or a position."""
    title = f"{quantity.title}, {'position' if quantity.figure == ACCEPTANCE.figure else 'depth'} {depth}"
    return quantity._replace(figure=at_depth(quantity.figure, depth), title=title)


def compared(ablation: Ablation) -> list[Quantity]:
    """What arms are compared by. Few, since every comparison more is one more that may err: what there is at several
    depths is compared at the first, unless arms differ in how the others are trained.
    """
    varied = {key for arm in ablation.arms for key, _ in arm.varied}
    every_depth = not varied.isdisjoint(_OF_DEPTHS)
    quantities = [MAIN_LOSS]
    for quantity in _BY_DEPTH:
        depths = ablation.depths(quantity.figure)
        quantities += [at(quantity, depth) for depth in (depths if every_depth else depths[:1])]
    return [*quantities, TOKENS_PER_ROUND]


def choose_references(ablation: Ablation, label: str | None = None) -> References:
    """The arm of that label, or else one for each of two questions.

    What does the auxiliary loss do to the trunk? Asked against the constant arm of the smallest weight: 0 in a grid
    that has it. What does its weight do to drafting? 0 would be no reference for that, since a head that was never
    trained is worse than any. It is asked against the constant arm of weight `DRAFTING_WEIGHT`, else of the smallest
    above 0. Where there is no such arm, the first takes its place.

    Raises:
      UserError: if there is no arm of that label.
    """
    if label is not None:
        return References(ablation.arm(label), ablation.arm(label))
    constants = [arm for arm in ablation.arms if arm.is_constant]  # their weights rise
    trained = [arm for arm in constants if arm.weights[0] > 0] or [arm for arm in ablation.arms if any(arm.weights)]
    usual = [arm for arm in constants if arm.weights[0] == DRAFTING_WEIGHT]
    return References(trunk=(constants or ablation.arms)[0], head=(usual or trained or ablation.arms)[0])


def head_loss_unit(arms: Sequence[Arm]) -> str | None:
    """Of the head's losses of these arms; None if they are of more than one kind, which cannot be compared."""
    kinds = {as_text(record["settings"].get("head_loss")) for arm in arms for record in arm.runs.values()}
    if len(kinds) != 1:
        return None
    return {"kl": "nats a token, KL to the trunk", "tv": "probability, TV to the trunk"}.get(
        kinds.pop(), HEAD_LOSS.unit
    )


def differences(ablation: Ablation, references: References, quantity: Quantity) -> list[Difference]:
    """Of every other arm to the quantity's reference; none if arms lack the figure, or it is not the same for all."""
    if quantity.figure.startswith(HEAD_LOSS.figure) and head_loss_unit(ablation.arms) is None:
        return []
    reference = references.of(quantity)
    base = reference.values(quantity.figure)
    return [
        Difference(quantity, arm, reference, paired_difference(arm.values(quantity.figure), base))
        for arm in ablation.arms
        if arm is not reference and (base or arm.values(quantity.figure))
    ]
