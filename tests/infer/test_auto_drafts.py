"""The choice of J against simulated decoding, whose best J is known from its costs and acceptance."""

import itertools
import random

import pytest

from infer.auto_drafts import REVISIT, AutoDrafts

SIZES = [0, 1, 2, 3, 4]
ROUNDS = 8


class Simulation:
    """Chunks of rounds with given costs and conditional acceptance; `noise` is the costs' relative spread."""

    def __init__(self, sizes=SIZES, seed=0, noise=0.0, rows=1):
        self.auto, self.random, self.noise, self.rows = AutoDrafts(sizes), random.Random(seed), noise, rows
        self.used = []

    def run(self, chunks, costs, acceptance):
        for _ in range(chunks):
            size = self.auto.num_draft_tokens
            cold = 30 if size not in self.used else 1
            self.used.append(size)
            accepted = [0] * size
            for _ in range(ROUNDS * self.rows):
                for position in range(size):
                    if self.random.random() >= acceptance[position]:
                        break
                    accepted[position] += 1
            seconds = ROUNDS * costs[size] * cold * max(0.2, self.random.gauss(1, self.noise))
            self.auto.observe(size, ROUNDS, ROUNDS * self.rows + sum(accepted), accepted, seconds)
        return self.used[-chunks:]


def best(costs, acceptance, sizes=SIZES):
    def rate(size):
        expected, reach = 1.0, 1.0
        for share in acceptance[:size]:
            reach *= share
            expected += reach
        return expected / costs[size]

    return max(sizes, key=rate)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize(
    ("costs", "acceptance", "expected"),
    [
        ([1, 1.1, 1.2, 1.3, 1.4], [0.9, 0.9, 0.9, 0.9], 4),
        ([1, 1.1, 1.2, 1.9, 2.6], [0.9, 0.9, 0.4, 0.2], 2),
        ([1, 1.3, 1.7, 2.1, 2.5], [0.7, 0.1, 0.1, 0.1], 1),
        ([1, 2.2, 2.6, 3.0, 3.4], [0.6, 0.5, 0.4, 0.3], 0),
    ],
)
def test_it_finds_the_best_size_and_keeps_it(costs, acceptance, expected, rows):
    assert best(costs, acceptance) == expected
    simulation = Simulation(noise=0.03, rows=rows)
    simulation.run(20, costs, acceptance)
    used = simulation.run(200, costs, acceptance)
    assert used.count(expected) >= 185
    assert simulation.auto.report()["num_draft_tokens"] == expected


def test_every_size_is_measured_once_warm_and_cold_chunks_do_not_count():
    simulation = Simulation()
    used = simulation.run(2 * len(SIZES), [1, 1, 1, 1, 1], [0.5] * 4)
    assert used == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [entry["seconds_per_round"] for entry in simulation.auto.report()["sizes"]] == pytest.approx([1] * 5)


@pytest.mark.parametrize("largest_first", [False, True])
def test_it_follows_the_text(largest_first):
    costs = [1, 1.2, 1.4, 1.6, 1.8]
    easy, hard = [0.95] * 4, [0.1] * 4
    assert (best(costs, easy), best(costs, hard)) == (4, 0)
    first, then = (easy, hard) if largest_first else (hard, easy)
    simulation = Simulation(noise=0.02)
    simulation.run(100, costs, first)
    # Plain decoding learns nothing about drafts: it takes a revisit to see that they would stand.
    simulation.run(2 * REVISIT, costs, then)
    assert simulation.run(30, costs, then).count(best(costs, then)) >= 28


def test_it_follows_costs():
    acceptance = [0.8, 0.8, 0.8, 0.8]
    simulation = Simulation()
    simulation.run(50, [1, 1.1, 1.2, 1.3, 1.4], acceptance)
    assert simulation.auto.num_draft_tokens == 4
    later = [1, 1.1, 1.2, 3, 4]
    simulation.run(60, later, acceptance)
    assert simulation.auto.num_draft_tokens == best(later, acceptance) == 2


@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_flap_between_equals(seed):
    # Every size gives the same rate: cost = expected tokens.
    share = 0.5
    costs = [sum(share**k for k in range(size + 1)) for size in SIZES]
    simulation = Simulation(seed=seed, noise=0.02, rows=8)
    simulation.run(10, costs, [share] * 4)
    used = simulation.run(4 * REVISIT - 10, costs, [share] * 4)
    changes = sum(a != b for a, b in itertools.pairwise(used))
    assert changes <= 8 + 4, "a revisit is two changes"


def test_an_unseen_position_does_like_the_deepest_seen():
    auto = AutoDrafts([1, 4])
    for _ in range(40):
        auto.observe(1, 8, 8 + 6, [6], 8.0)
    assert auto.num_draft_tokens == 4, "a size never measured is tried"
    assert auto.report()["acceptance"] == pytest.approx([0.75] * 4, abs=0.01)
    assert auto.report()["sizes"][1]["tokens_per_second"] is None


def test_an_accepted_end_does_not_break_the_shares():
    auto = AutoDrafts([2])
    auto.observe(2, 1, 2, [1, 1], 1.0)  # both tokens are drafts; the second is an end id
    auto.observe(2, 0, 0, [0, 0], 0.0)
    assert all(0 <= share <= 1 for share in auto.report()["acceptance"])
    assert auto.num_draft_tokens == 2


def test_one_line_says_what_was_chosen():
    simulation = Simulation([0, 2])
    simulation.run(12, {0: 0.002, 2: 0.003}, [1.0, 1.0])
    line = simulation.auto.summary()
    assert line.startswith("drafts a round: J=2 (J=0 2.00 ms a round, 500 tokens/s; J=2 3.00 ms a round, 9")
    assert "\n" not in line
    assert "not measured" in AutoDrafts([0, 2]).summary()


@pytest.mark.parametrize("sizes", [[], [1, -1]])
def test_sizes_must_make_sense(sizes):
    with pytest.raises(ValueError, match="expected at least one number of drafts"):
        AutoDrafts(sizes)
