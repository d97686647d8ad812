"""What a step keeps and takes, read from shapes and compiled programs."""

import dataclasses

import jax

from configs import PRESETS
from train.experiment import REMAT_NAMES, Experiment
from train.memory import kept_bytes, step_memory
from train.step import build_model, initial_state

TINY = dataclasses.replace(PRESETS["tiny"](), dtype="float32", width=48, mlp_width=192, full_attention_interval=1)


def _experiment(**settings) -> Experiment:
    return dataclasses.replace(TINY, **settings)


def _kept(**settings):
    experiment = _experiment(**settings)
    return kept_bytes(build_model(experiment.model_config(), experiment), experiment)


def _block_bytes():
    """Of the parameters of one block."""
    state = jax.eval_shape(lambda: initial_state(build_model(TINY.model_config(), TINY), TINY))
    return sum(4 * leaf.size for leaf in jax.tree.leaves(state.params["trunk"]["layers_0"]))


def test_the_backward_pass_keeps_a_blocks_input_under_block():
    """What three more layers add: weights and one hidden state a token, with two norms' worth to spare."""
    hidden = TINY.batch_size * TINY.sequence_length * TINY.width * 4
    more = {remat: _kept(num_layers=4, remat=remat) - _kept(num_layers=1, remat=remat) for remat in REMAT_NAMES}
    assert more["block"] <= 3 * (_block_bytes() + 2 * hidden)
    assert more["block"] < more["products"] / 3
    assert more["products"] < more["none"] / 3


def test_accumulation_keeps_a_part_at_a_time():
    assert _kept(accumulate_steps=4) < 0.4 * _kept()


def test_a_frozen_trunk_keeps_nothing_for_a_backward_pass():
    assert _kept(gradient_mode="head_only", num_layers=4) == _kept(gradient_mode="head_only", num_layers=1)
    assert _kept(gradient_mode="head_only") < 0.6 * _kept(gradient_mode="detached")


def test_a_compiled_step_with_a_frozen_trunk_takes_no_memory_for_its_gradient():
    """Three more layers cost a joint step gradients and activations, a head_only step only their parameters."""

    def memory(mode, num_layers):
        experiment = _experiment(gradient_mode=mode, num_layers=num_layers)
        return step_memory(build_model(experiment.model_config(), experiment), experiment)

    block = _block_bytes()
    small, large = memory("head_only", 1), memory("head_only", 4)
    assert large.temporary - small.temporary < block / 2
    assert large.state - small.state == 3 * block  # no moments
    joint = memory("joint", 1), memory("joint", 4)
    assert joint[1].temporary - joint[0].temporary > 6 * block
    assert joint[1].state - joint[0].state == 9 * block
