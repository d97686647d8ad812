"""An ablation as a Markdown document: tables and figures, what was compared with what, and what is not in it.

Names come from files. Whatever they hold, they are text in the document: no markup, no cell, no line of their own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train.ablation.arms import PER_RUN, Ablation, Arm, as_text, number
from train.ablation.comparison import (
    ACCEPTANCE,
    AGREEMENT,
    CONTROL,
    HEAD_LOSS,
    IDENTICAL,
    MAIN_LOSS,
    TOKENS_PER_ROUND,
    Difference,
    Quantity,
    References,
    at,
    compared,
    differences,
    head_loss_unit,
)
from train.ablation.statistics import CONFIDENCE, Estimate, estimate

_MOST_DECIMALS = 6
_LONGEST = 200
_NOT_SETTINGS = {*PER_RUN, "log_every", "checkpoint_every", "keep_checkpoints"}


def markdown(ablation: Ablation, references: References, figures: Sequence[tuple[str, str, str]]) -> str:
    """The whole document.

    Args:
      figures: name, title and caption of each; NAME.png and NAME.svg lie beside the document.
    """
    found = [each for quantity in compared(ablation) for each in differences(ablation, references, quantity)]
    parts = [
        "# Loss-weight ablation",
        *_set_up(ablation),
        "## Means",
        _means_note(),
        *_means(ablation),
        "## Differences",
        *_differences(ablation, references, found),
        *_left_out(ablation),
        "## Figures",
        *(
            f"![{title}]({name}.png)\n\n**{title}.** {escaped(caption, longest=None)} ([SVG]({name}.svg))"
            for name, title, caption in figures
        ),
        "Made by `python scripts/plot_ablation.py`; drawn again, the files are the same.",
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str, longest: int | None = _LONGEST) -> str:
    """Text that Markdown shows as it is, on one line and in a table's cell too; cut after `longest` characters."""
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    line = line if longest is None or len(line) <= longest else f"{line[: longest - 1]}…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"(?<!\w)_|_(?!\w)|[\\`*\[\]|~$#!@]", lambda match: "\\" + match[0], line)
    return line.replace("://", ":\\/\\/").replace("www.", "www\\.")  # nor a link


def shown(value: Estimate | None, signed: bool = False) -> str:
    """A mean ± half the width of its interval, both to where the latter has two digits."""
    if value is None:
        return "–"
    sign = "+z" if signed else "z"  # z: no -0.00
    if value.half_width is None:
        return f"{value.mean:{sign}.4f}"
    decimals = _decimals(value.half_width)
    return f"{value.mean:{sign}.{decimals}f} ± {value.half_width:.{decimals}f}"


def _decimals(half_width: float) -> int:
    if half_width <= 0:
        return 4
    exponent = int(f"{half_width:.1e}".partition("e")[2])
    return min(max(1 - exponent, 0), _MOST_DECIMALS)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _set_up(ablation: Ablation) -> list[str]:
    runs = ablation.runs
    lines = [
        f"{number_of(len(ablation.arms), 'arm')}, {number_of(len(runs), 'run')} that "
        f"{'counts' if len(runs) == 1 else 'count'}: held-out main loss below a unigram model's. λ is the weight of "
        "the MTP loss; an arm is named by its schedule and what else is varied.",
        _table(
            ("", ""),
            [
                ("tokens a run", _range(record["tokens"] for record in runs)),
                ("parameters", _range(record.get("parameters") for record in runs)),
                ("commit", _in_words(record["commit"] or "not known" for record in runs)),
                *(
                    (escaped(name), _in_words(as_text(record["versions"].get(name) or "not known") for record in runs))
                    for name in dict.fromkeys(name for record in runs for name in record["versions"])
                ),
                ("held-out loss of a unigram model", _range(record["unigram_loss"] for record in runs)),
            ],
        ),
    ]
    differing = _differing(ablation)
    if differing:
        lines.append(
            "**The runs are not of one kind.** They differ, beside the seed and what is varied, in:\n\n"
            + "\n".join(f"- {line}" for line in differing)
        )
    if len({f"{record['unigram_loss']:.6f}" for record in runs}) > 1:
        lines.append(
            "**Runs were measured on different text or in different tokens**: a unigram model's held-out loss is not "
            "the same for all. Figures of such runs do not compare."
        )
    counts = {arm.label: sorted(arm.runs) for arm in ablation.arms}
    if len({tuple(seeds) for seeds in counts.values()}) > 1:
        lines.append("**Arms have different seeds**, so their means are over different orders of the data.")
    return lines


def _differing(ablation: Ablation) -> list[str]:
    """Of commits, versions and settings: what is not the same in all runs."""
    found = []
    runs = ablation.runs
    varied = {key for record in runs for key in record["varied"]}
    parts: list[tuple[str, Mapping[str, str]]] = [
        ("commit", {record["name"]: record["commit"] or "not known" for record in runs})
    ]
    for group, skipped in (("versions", set()), ("settings", _NOT_SETTINGS | varied)):
        for key in dict.fromkeys(key for record in runs for key in record[group]):
            if key not in skipped:
                parts.append((key, {record["name"]: as_text(record[group].get(key)) for record in runs}))
    for key, values in parts:
        kinds = dict.fromkeys(values.values())
        if len(kinds) > 1:
            words = (f"{escaped(kind)} ({_names(n for n, v in values.items() if v == kind)})" for kind in kinds)
            found.append(f"{escaped(key)}: {'; '.join(words)}")
    return found


def _names(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(escaped, names[:4])) + more


def _means_note() -> str:
    return (
        f"Mean over seeds ± half the width of its {CONFIDENCE:.0%} interval (Student's t, n - 1 degrees of freedom); "
        "one seed has no interval. Intervals of means hold what seeds do to all arms alike: to compare arms, see the "
        "differences."
    )


def _means(ablation: Ablation) -> list[str]:
    kinds = "" if head_loss_unit(ablation.arms) else " (of different kinds: not to be compared)"
    text = [
        (MAIN_LOSS, MAIN_LOSS.title),
        *_depths(ablation, HEAD_LOSS, "head loss, depth", kinds),
        *_depths(ablation, AGREEMENT, "agreement, depth"),
    ]
    decoding = [
        *_depths(ablation, ACCEPTANCE, "acceptance, position"),
        *((quantity, quantity.title) for quantity in (TOKENS_PER_ROUND, CONTROL, IDENTICAL)),
    ]
    tables = []
    for title, quantities in (("Held-out text", text), ("Decoding of held-out prompts, greedy", decoding)):
        measured = [(q, name) for q, name in quantities if any(arm.values(q.figure) for arm in ablation.arms)]
        if measured:
            head = ("λ", "n", "seeds", "tokens a run", "commit", *(name for _, name in measured))
            rows = [(*_about(arm), *(_cell(arm, quantity) for quantity, _ in measured)) for arm in ablation.arms]
            tables += [f"### {title}", _table(head, rows)]
        else:
            tables.append(f"No run has figures for: {title.lower()}.")
    return tables


def _depths(ablation: Ablation, quantity: Quantity, words: str, after: str = "") -> list[tuple[Quantity, str]]:
    return [(at(quantity, depth), f"{words} {depth}{after}") for depth in ablation.depths(quantity.figure)]


def _about(arm: Arm) -> tuple[str, ...]:
    runs = arm.runs.values()
    commits = _in_words((record["commit"] or "not known")[:12] for record in runs)
    tokens = _range(record["tokens"] for record in runs)
    return escaped(arm.label), str(len(runs)), _seeds(arm.runs), tokens, commits


def _cell(arm: Arm, quantity: Quantity) -> str:
    value = estimate(arm.values(quantity.figure))
    fewer = f" (n = {value.n})" if value is not None and value.n < len(arm.runs) else ""
    return shown(value) + fewer


def _differences(ablation: Ablation, references: References, found: Sequence[Difference]) -> list[str]:
    if not found:
        return ["There is one arm: nothing to compare."]
    intervals = sum(d.estimate is not None and d.estimate.half_width is not None for d in found)
    trunk, head = escaped(references.trunk.label), escaped(references.head.label)
    against = (
        f"λ = {trunk}" if trunk == head else f"λ = {trunk} for the trunk's loss and λ = {head} for the head's figures"
    )
    note = (
        f"Each arm less the reference, {against}, seed by seed: a seed settles the first weights and the order of the "
        f"data in both. Mean over the seeds that both have ± half the width of its {CONFIDENCE:.0%} interval."
    )
    if intervals:
        note += (
            f" **Each interval is for one comparison alone, and there are {intervals}**: if no arm differed from its "
            f"reference in anything, about {(1 - CONFIDENCE) * intervals:.1f} of them would still exclude 0."
        )
    if head_loss_unit(ablation.arms) is None:
        note += " Arms have different head losses, which are not compared."
    rows = [
        (
            escaped(d.quantity.title),
            escaped(d.arm.label),
            escaped(d.reference.label),
            str(d.estimate.n if d.estimate else 0),
            _seeds(d.estimate.seeds if d.estimate else ()),
            shown(d.estimate, signed=True),
            _verdict(d.estimate),
        )
        for d in found
    ]
    return [note, _table(("figure", "λ", "less λ", "n", "seeds", "difference", "interval excludes 0"), rows)]


def _verdict(value: Estimate | None) -> str:
    if value is None:
        return "no seed in common"
    return {True: "yes", False: "no", None: "no interval"}[value.excludes_zero]


def _left_out(ablation: Ablation) -> list[str]:
    if not ablation.left_out:
        return ["All runs that were begun are recorded, and count."]
    rows = [(escaped(name), escaped(reason)) for name, reason in ablation.left_out]
    return ["## Runs that are not in these figures", _table(("run", "why"), rows)]


def number_of(count: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _seeds(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds))) or "–"


def _range(values: Iterable[Any]) -> str:
    """One value, or the smallest and the largest."""
    numbers = [value for value in values if number(value) is not None]
    if not numbers:
        return "not known"
    ends = [f"{end:,}" if isinstance(end, int) else f"{end:.4f}" for end in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


def _in_words(values: Iterable[str]) -> str:
    return ", ".join(map(escaped, dict.fromkeys(values)))
