"""Published tensors and our parameters: a table, read in both directions.

Each rule says which published tensor holds which parameters, or parts of them, and how its axes lie. A family's rules
for a model are total and one-to-one: every parameter is written whole, by tensors that are written from it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mtp_jax.hf.layouts import Layout, Rows, Same, Shape


@dataclass(frozen=True)
class Piece:
    """A parameter, or one matrix of a stack of them.

    Attributes:
      path: of the parameter.
      index: into its first axis; None: all of it.
    """

    path: str
    index: int | None = None

    def of(self, parameters: Mapping[str, Any]) -> Any:
        """The array itself."""
        parameter = parameters[self.path]
        return parameter if self.index is None else parameter[self.index]

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Its shape, from those of the parameters."""
        return shapes[self.path] if self.index is None else shapes[self.path][1:]


@dataclass(frozen=True)
class Rule:
    """One line of the table: what a published tensor holds, and how."""

    published: str
    pieces: tuple[Piece, ...]
    layout: Layout


@dataclass(frozen=True)
class Slot:
    """What one published tensor is to a model: the parameters it holds, its layout and its published shape."""

    pieces: tuple[Piece, ...]
    layout: Layout
    shape: Shape


def whole(published: str, path: str) -> Rule:
    """A tensor that is a parameter."""
    return Rule(published, (Piece(path),), Same())


def kernel(published: str, path: str) -> Rule:
    """The matrix of a linear map."""
    return Rule(f"{published}.weight", (Piece(f"{path}/kernel"),), Rows())


def scale(published: str, path: str) -> Rule:
    """The scale of a norm."""
    return whole(f"{published}.weight", f"{path}/scale")


def inside(rules: Iterable[Rule], published: str, path: str) -> Iterator[Rule]:
    """The rules of a module, for one that is part of another."""
    for rule in rules:
        pieces = tuple(replace(piece, path=path + piece.path) for piece in rule.pieces)
        yield Rule(published + rule.published, pieces, rule.layout)


def expanded(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> dict[str, Slot]:
    """What each published tensor of a model is to it, by published name, from the shapes of its parameters."""
    rules = list(rules)
    pieces = [piece for rule in rules for piece in rule.pieces]
    assert len(set(pieces)) == len(pieces), "the table must write each parameter once"
    unknown = [piece.path for piece in pieces if piece.path not in shapes]
    assert not unknown, f"the table must write parameters, there is no {unknown}"
    written = dict.fromkeys(shapes, 0)
    for piece in pieces:
        written[piece.path] += prod(piece.shape(shapes))
    partly = [path for path, shape in shapes.items() if written[path] != prod(shape)]
    assert not partly, f"the table must write each parameter whole, it does not: {partly}"
    result = {
        rule.published: Slot(
            rule.pieces, rule.layout, rule.layout.published_shape([piece.shape(shapes) for piece in rule.pieces])
        )
        for rule in rules
    }
    assert len(result) == len(rules), "the table must name each tensor once"
    return result
