"""Everything that settles a training run, as one flat frozen record that the command line can change by name."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from mtp_jax.config import AttentionConfig, DeltaNetConfig, ModelConfig, interleaved
from mtp_jax.errors import UserError
from mtp_jax.mesh_shape import MeshShape, parse_mesh

HEAD_LOSSES = ("ce", "kl", "tv")
GRADIENT_MODES = ("joint", "detached", "head_only")
REMAT_NAMES = ("none", "products", "block")
LEARNING_RATE_SHAPES = ("cosine", "linear", "constant")
DECAY = 0.6  # from one depth's weight to the next, in depth_weights=decay

# A work directory may be continued with other values of these; of `steps` only upwards.
CHANGEABLE = ("steps", "log_every", "checkpoint_every", "mesh")

# A run that starts from a checkpoint takes these from its config.json.
MODEL_SETTINGS = (
    *("vocab_size", "width", "mlp_width", "num_layers", "full_attention_interval", "num_heads", "num_kv_heads"),
    *("head_dim", "rotary_dim", "rope_theta", "delta_v_heads", "delta_k_heads", "delta_head_k_dim"),
    *("delta_head_v_dim", "conv_width", "tie_embeddings"),
)

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "fc"),
)


_EVALUATED = ("eval_main_loss", "eval_mtp_loss", "eval_mtp_accuracy", "eval_mtp_agreement")
_DECODED = ("acceptance", "tokens_per_round")
_NOT_WITH_INIT = "no value beside init, whose config.json says it"

_LARGEST = 3.4e38  # float32's


def _setting(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Experiment:
    """A model, its data and how it is optimised. `meaning` in each field's metadata is what `--help` prints.

    Raises:
      UserError: if a setting is out of range or two settings contradict each other.
    """

    # The run.
    steps: int = _setting(1000, "optimiser steps in all")
    batch_size: int = _setting(8, "rows a step")
    accumulate_steps: int = _setting(1, "parts that a step's rows are worked off in, to save memory; changes no result")
    sequence_length: int = _setting(256, "tokens a row")
    seed: int = _setting(0, "of the weights and of the order of the data")
    dtype: str = _setting("auto", "of matrix products: float32, bfloat16, or auto (float32 on a CPU, else bfloat16)")
    mesh: tuple[str, ...] = _setting(
        (),
        "devices that the run is spread over, all there are: data:N spreads rows, fsdp:N rows and parameters, tensor:N "
        "heads, hidden channels, experts and vocabulary; none: one device",
    )
    log_every: int = _setting(10, "steps from one row of metrics.jsonl to the next")
    checkpoint_every: int = _setting(500, "steps from one checkpoint to the next")
    keep_checkpoints: int = _setting(3, "latest checkpoints that are kept; 0 keeps all")
    keep_best: str = _setting(
        "",
        "figure by which the best checkpoint is kept too: eval_main_loss, acceptance and others; none: only the latest",
    )
    eval_every: int = _setting(0, "steps from one evaluation on the held-out documents to the next; 0: only at the end")
    measured_depths: int = _setting(
        0, "depths at which held-out documents and decoding are measured, if more than are trained; 0: those trained"
    )
    acceptance_every: int = _setting(
        0, "steps from one decoding of held-out prompts, with the head's drafts, to the next, and at the end; 0: never"
    )
    acceptance_prompts: int = _setting(8, "held-out prompts that are decoded")
    acceptance_new_tokens: int = _setting(64, "tokens that each of them is continued by")

    # Where the model comes from.
    init: str = _setting("", "folder of a published checkpoint to start from (--init); empty: a new model")
    new_head: bool = _setting(False, "start a fresh head for a checkpoint that has none (--new-head)")
    lora_rank: int = _setting(0, "train low-rank adapters of this rank and nothing else; 0: train the weights")
    lora_alpha: float = _setting(16.0, "what an adapter gives counts alpha / rank times")
    lora_targets: tuple[str, ...] = _setting(
        PROJECTIONS, "projections with an adapter: by name, in trunk and head, or trunk.NAME and head.NAME"
    )

    # The objective.
    mtp_weights: tuple[float, ...] = _setting((0.3, 0.1), "weights of the MTP loss, in turn")
    mtp_switch_tokens: tuple[int, ...] = _setting(
        (1_000_000,), "tokens seen at which each weight after the first takes over"
    )
    mtp_schedule: str = _setting(
        "step", "between two switch points the weight stays (step) or moves on a line to the next one (linear)"
    )
    depths: int = _setting(1, "how often the head is run on its own output: tokens after the next that it predicts")
    depth_weights: str = _setting(
        "equal",
        f"of the depths' losses: equal, decay ({DECAY} from each to the next) or a number each; scaled to sum 1",
    )
    head_loss: str = _setting(
        "ce", "ce: cross entropy to the label; kl, tv: divergence, total variation to the trunk's own distribution"
    )
    gradient_mode: str = _setting(
        "joint",
        "joint: both losses train all; detached: the MTP loss trains the head only; head_only: the trunk is frozen",
    )
    balance_loss_weight: float = _setting(
        0.0, "of the loss that spreads tokens evenly over experts, in a model that has them"
    )
    router_bias_rate: float = _setting(
        0.0, "how far a sigmoid router's biases move each step, towards experts that got too little; 0: not at all"
    )
    cross_entropy_chunk: int = _setting(512, "rows of logits that exist at one time")
    remat: str = _setting(
        "products",
        "what is made again in the backward pass to save memory: none; products: all but products with weights; "
        "block: all within a block",
    )

    # The optimiser.
    learning_rate: float = _setting(3e-3, "peak of the learning rate")
    head_learning_rate_scale: float = _setting(1.0, "factor on the learning rate of the head's own parameters")
    warmup_steps: int = _setting(100, "steps of linear warm-up")
    learning_rate_shape: str = _setting("cosine", "after the warm-up: cosine, linear or constant")
    final_learning_rate: float = _setting(0.0, "where cosine and linear end, as a fraction of the peak")
    weight_decay: float = _setting(0.1, "decoupled, on matrices except the vocabulary's")
    beta1: float = _setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = _setting(0.95, "AdamW's decay of the mean squared gradient")
    clip_norm: float = _setting(1.0, "global norm to which a larger gradient is scaled down")
    max_skipped_steps: int = _setting(10, "steps without a finite loss and gradient, in a row, that end the run")

    # The data.
    data: tuple[str, ...] = _setting((), "files and folders; none: the standard library's sources (see --data)")
    stdlib_files: tuple[str, ...] = _setting(
        ("*",), "patterns of the standard library's files that are used; !pattern leaves files out"
    )
    data_weights: tuple[float, ...] = _setting(
        (), "rows taken from each path of data, relative to the others; none: all documents are one heap"
    )
    held_out: tuple[str, ...] = _setting((), "patterns of files kept for evaluation, relative to their data path")
    held_out_every: int = _setting(
        0, "every how many rows of a JSONL or parquet file one is kept for evaluation; 0: none"
    )
    skip_bad: bool = _setting(False, "rows that cannot be used are counted and left out; else the first is an error")
    long_conversations: str = _setting(
        "split", "conversations and completions longer than a row: split (between turns where possible) or drop"
    )

    # The model.
    vocab_size: int = _setting(2048, "tokens of the BPE that is trained first, and rows of the embedding")
    width: int = _setting(192, "of the residual stream, D")
    mlp_width: int = _setting(512, "hidden width of the MLPs, F")
    num_layers: int = _setting(4, "layers of the trunk")
    full_attention_interval: int = _setting(4, "every how many layers one is full attention")
    num_heads: int = _setting(6, "query heads")
    num_kv_heads: int = _setting(2, "key/value heads")
    head_dim: int = _setting(32, "width of an attention head")
    rotary_dim: int = _setting(8, "channels of a head that rotate")
    rope_theta: float = _setting(10_000.0, "base of the rotary frequencies")
    delta_v_heads: int = _setting(6, "DeltaNet value heads")
    delta_k_heads: int = _setting(6, "DeltaNet key heads")
    delta_head_k_dim: int = _setting(32, "width of a DeltaNet key")
    delta_head_v_dim: int = _setting(32, "width of a DeltaNet value")
    conv_width: int = _setting(4, "taps of DeltaNet's short convolution")
    tie_embeddings: bool = _setting(True, "the embedding is the output matrix")

    def __post_init__(self) -> None:
        above_0 = ("steps", "batch_size", "log_every", "checkpoint_every", "cross_entropy_chunk", "clip_norm")
        for name in (*above_0, "acceptance_prompts", "acceptance_new_tokens"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        from_0 = ("keep_checkpoints", "eval_every", "acceptance_every", "warmup_steps", "learning_rate", "weight_decay")
        for name in from_0:
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("head_learning_rate_scale", self.head_learning_rate_scale >= 0, "at least 0")
        self._require("balance_loss_weight", self.balance_loss_weight >= 0, "at least 0")
        self._require("router_bias_rate", self.router_bias_rate >= 0, "at least 0")
        self._require("sequence_length", self.sequence_length >= 2, "at least 2")
        self._require(
            "accumulate_steps",
            self.accumulate_steps >= 1 and self.batch_size % self.accumulate_steps == 0,
            f"a divisor of batch_size {self.batch_size}",
        )
        shape = self.mesh_shape()
        rows = self.accumulate_steps * (shape.rows if shape else 1)
        self._require(
            "batch_size",
            self.batch_size % rows == 0,
            f"a multiple of {rows}, accumulate_steps times the mesh's data and fsdp",
        )
        self._require("max_skipped_steps", self.max_skipped_steps >= 1, "at least 1")
        self._require("seed", 0 <= self.seed < 2**32, "between 0 and 2**32 - 1")
        self._require_one_of("dtype", ("float32", "bfloat16", "auto"))
        weights = self.data_weights
        self._require(
            "data_weights",
            not weights or (len(weights) == len(self.data) and all(0 < weight < math.inf for weight in weights)),
            f"none, or {len(self.data)} finite numbers above 0, one for each path of --data",
        )
        self._require("held_out_every", self.held_out_every >= 0 and self.held_out_every != 1, "0, or at least 2")
        self._require("long_conversations", self.long_conversations in ("split", "drop"), "split or drop")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("final_learning_rate", 0 <= self.final_learning_rate <= 1, "between 0 and 1")
        self._require(
            "mtp_weights",
            bool(self.mtp_weights) and all(0 <= weight < math.inf for weight in self.mtp_weights),
            "one or more finite weights, none negative",
        )
        switches = self.mtp_switch_tokens
        self._require(
            "mtp_switch_tokens",
            len(switches) == len(self.mtp_weights) - 1,
            f"{len(self.mtp_weights) - 1} values, one fewer than mtp_weights (mtp_switch_tokens= is none)",
        )
        rising = all(a < b for a, b in zip((-1, *switches), switches, strict=False))
        self._require("mtp_switch_tokens", rising, "rising token counts")
        self._require_one_of("mtp_schedule", ("step", "linear"))
        self._require(
            "depths",
            1 <= self.depths < self.sequence_length,
            f"at least 1 and below sequence_length {self.sequence_length}",
        )
        self.depth_weight_values()
        self._require(
            "measured_depths",
            self.measured_depths == 0 or self.depths <= self.measured_depths < self.sequence_length,
            f"0, or at least depths {self.depths} and below sequence_length {self.sequence_length}",
        )
        self._require_one_of("head_loss", HEAD_LOSSES)
        self._require_one_of("gradient_mode", GRADIENT_MODES)
        self._require_one_of("remat", REMAT_NAMES)
        self._require_one_of("learning_rate_shape", LEARNING_RATE_SHAPES)
        self._check_keep_best()
        self._check_start()
        for name in ("width", "mlp_width", "num_layers", "full_attention_interval", "rope_theta"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        try:
            self.model_config()
        except ValueError as error:
            raise UserError(f"model settings: {error}") from error

    def _check_keep_best(self) -> None:
        if not self.keep_best:
            return
        self._require_one_of("keep_best", (*_EVALUATED, *_DECODED))
        every = "eval_every" if self.keep_best in _EVALUATED else "acceptance_every"
        self._require(
            every,
            getattr(self, every) > 0 and self.checkpoint_every % getattr(self, every) == 0,
            f"a divisor of checkpoint_every {self.checkpoint_every}, so that every checkpoint has {self.keep_best}",
        )

    def _check_start(self) -> None:
        self._require("lora_rank", self.lora_rank >= 0, "at least 0")
        self._require("lora_alpha", self.lora_alpha > 0, "more than 0")
        known = [part + name for name in PROJECTIONS for part in ("", "trunk.", "head.")]
        known.remove("trunk.fc")
        self._require(
            "lora_targets",
            bool(self.lora_targets) and set(self.lora_targets) <= set(known),
            f"some of {', '.join(PROJECTIONS)}, each alone or behind trunk. or head. (fc is the head's)",
        )
        if not self.init:
            self._require("new_head", not self.new_head, "a checkpoint to start from beside it (init)")
            self._require("lora_rank", not self.lora_rank, "0 without a checkpoint to start from (init)")
            return
        if self.lora_rank:
            self._require("router_bias_rate", not self.router_bias_rate, "0 with lora_rank: adapters alone are trained")
        if self.lora_rank and self.gradient_mode == "head_only":
            trunk = [name for name in self.lora_targets if name.startswith("trunk.")]
            self._require("lora_targets", not trunk, "nothing in the trunk, which gradient_mode=head_only leaves alone")
        if self.new_head:
            self._require("lora_rank", not self.lora_rank, "0 with new_head: a fresh head is trained whole")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in MODEL_SETTINGS:
            self._require(name, getattr(self, name) == defaults[name], _NOT_WITH_INIT)

    def _require(self, name: str, holds: bool, expected: str) -> None:
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else (value,)
        # What is finite here must be so on the device; a NaN is not at most anything.
        if not all(abs(number) <= _LARGEST for number in numbers if isinstance(number, float)):
            expected = f"{expected}, and no number beyond {_LARGEST:.3g}"
            holds = False
        if not holds:
            raise UserError(f"setting {name}: expected {expected}, got {shown(value)}")

    def _require_one_of(self, name: str, names: tuple[str, ...]) -> None:
        self._require(name, getattr(self, name) in names, f"{', '.join(names[:-1])} or {names[-1]}")

    def mesh_shape(self) -> MeshShape | None:
        """The setting `mesh`; None: one device."""
        return parse_mesh(self.mesh, "setting mesh")

    def depth_weight_values(self) -> tuple[float, ...]:
        """w_1, .., w_D: a weight for each depth, summing to 1.

        Raises:
          UserError: if the setting is neither a known name nor as many numbers, none negative and not all 0.
        """
        named = {"equal": 1.0, "decay": DECAY}
        if self.depth_weights in named:
            values = [named[self.depth_weights] ** depth for depth in range(self.depths)]
        else:
            try:
                values = [float(part) for part in self.depth_weights.split(",")]
            except ValueError:
                values = [math.nan]
        holds = len(values) == self.depths and min(values) >= 0 and 0 < sum(values) < math.inf
        self._require(
            "depth_weights", holds, f"equal, decay or {self.depths} numbers, as many as depths, none negative"
        )
        return tuple(value / sum(values) for value in values)

    def measured(self) -> "Experiment":
        """The same with `measured_depths` as its depths. Those that are not trained have weight 0 in the MTP loss."""
        more = max(0, self.measured_depths - self.depths)
        weights = ",".join(map(repr, (*self.depth_weight_values(), *[0.0] * more)))
        return dataclasses.replace(self, depths=self.depths + more, depth_weights=weights)

    def model_config(self) -> ModelConfig:
        """The model that this experiment trains if it starts from nothing."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=self.mlp_width,
            layer_types=interleaved(self.num_layers, self.full_attention_interval),
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rotary_dim=self.rotary_dim,
                rope_theta=self.rope_theta,
            ),
            delta=DeltaNetConfig(
                num_v_heads=self.delta_v_heads,
                num_k_heads=self.delta_k_heads,
                head_k_dim=self.delta_head_k_dim,
                head_v_dim=self.delta_head_v_dim,
                conv_width=self.conv_width,
            ),
            tie_embeddings=self.tie_embeddings,
        )

    def override(self, assignments: Iterable[str]) -> "Experiment":
        """The same experiment with some settings changed; of two values for one setting the later counts.

        Args:
          assignments: `key=value` each. Lists are comma-separated.

        Raises:
          UserError: if one has no `=`, names no setting, or its value is not of the setting's type.
        """
        changed = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise UserError(f"--set {assignment}: expected key=value")
            changed[name] = parse_setting(name, text)
        result = dataclasses.replace(self, **changed)
        for name in MODEL_SETTINGS:
            if result.init and name in changed:  # also at its default value
                result._require(name, False, _NOT_WITH_INIT)
        return result

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON holds them."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "Experiment":
        """The experiment that `to_json` described.

        Raises:
          UserError: if there is a setting that this version does not have, or a value of another type.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values = {}
        for name, value in settings.items():
            if name not in known:
                raise UserError(f"setting {name}: this version has no such setting")
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            # Paths may hold commas, so lists of text are taken as they are.
            is_texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
            values[name] = tuple(value) if is_texts else parse_setting(name, text)
        return cls(**values)

    def refused_changes(self, new: "Experiment") -> list[str]:
        """What forbids to continue a run of this experiment as `new`: one line a setting."""
        lines = []
        for field in dataclasses.fields(self):
            before, after = getattr(self, field.name), getattr(new, field.name)
            allowed = field.name in CHANGEABLE and (field.name != "steps" or after >= before)
            # A base may have moved; whether it is the same one shows in what base.json says of it.
            allowed |= field.name == "init" and bool(before and after)
            if before != after and not allowed:
                lines.append(f"{field.name} is {shown(before)} there and {shown(after)} here")
        return lines


def setting_lines(presets: dict[str, Experiment]) -> list[str]:
    """One line a setting: name, type, default (and the presets' own values), meaning."""
    lines = []
    for field in dataclasses.fields(Experiment):
        values = [f"default {shown(field.default)}"]
        values += [
            f"{name} {shown(getattr(preset, field.name))}"
            for name, preset in presets.items()
            if getattr(preset, field.name) != field.default
        ]
        lines.append(f"  {field.name} ({_type_name(field.type)}; {'; '.join(values)})")
        lines.append(f"      {field.metadata['meaning']}")
    return lines


def shown(value: Any) -> str:
    """A setting's value as people write it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"{get_args(kind)[0].__name__}s"
    return kind.__name__


def parse_setting(name: str, text: str) -> Any:
    """A setting's value from text, lists comma-separated.

    Raises:
      UserError: if there is no such setting, or the text is not of its type.
    """
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Experiment)}
    if name not in kinds:
        close = difflib.get_close_matches(name, kinds, n=3, cutoff=0.5)
        hint = f"; close: {', '.join(close)}" if close else "; train.py --help lists them"
        raise UserError(f"setting {name}: there is no such setting{hint}")
    kind = kinds[name]
    try:
        if get_origin(kind) is tuple:
            item = get_args(kind)[0]
            return tuple(_parse_one(item, part.strip()) for part in text.split(",") if part.strip())
        return _parse_one(kind, text.strip())
    except ValueError:
        raise UserError(f"setting {name}: expected {_type_name(kind)}, got {text!r}") from None


def _parse_one(kind: type, text: str) -> Any:
    if kind is bool:
        try:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        except KeyError:
            raise ValueError from None
    if kind is int:
        try:
            return int(text)
        except ValueError:
            number = float(text)  # 3e6 is a handy way to write a token count.
            if not number.is_integer():
                raise ValueError from None
            return int(number)
    return kind(text)
