"""Reference values from `transformers`; needs the `peer` extra.

Its MTP model is not meant for these families as published: the text config must say how many layers there are, and one
pattern must name the head's tensors.
"""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from random_checkpoint import GLM, Variant, config_json, tensors, write
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

CHAINED = 4

# Tiny products, which threads only wait for each other in: ten times slower.
torch.set_num_threads(1)


def peer_version() -> dict[str, str]:
    """Names and versions for a golden's record."""
    return {"peer": f"transformers {transformers.__version__}", "torch": torch.__version__}


def write_for_peer(folder: Path, variant: Variant) -> Path:
    """Writes a variant as the peer reads it: several layers of a Qwen head share what the peer has in each."""
    content = tensors(variant)
    shared = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    if variant.family != GLM:
        for layer in range(1, variant.num_mtp_layers):
            for name, of_peer in shared.items():
                content[f"mtp.layers.{layer}.{of_peer}.weight"] = content[f"mtp.{name}.weight"]
    return write(folder, content, config_json(variant))


class Peer:
    """A checkpoint loaded by `transformers`, trunk and head.

    Attributes:
      least_router_gap: the least gap between the last expert (or group of experts) that a router chose and the next
        one, in all tokens so far: of logits, or of biased sigmoid scores where there is a bias. None without experts.
    """

    def __init__(self, folder: Path, variant: Variant, dtype: str = "float32") -> None:
        self.model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), experts_implementation="eager", output_loading_info=True
        )
        wrong = {key: names for key, names in report.items() if names}
        # The peer knows the head's names in Qwen's layouts, in GLM's only at the depths of the releases.
        unexpected = wrong.pop("unexpected_keys", [])
        if wrong or not all(re.search(variant.head_pattern, name) for name in unexpected):
            raise RuntimeError(f"the peer did not load the checkpoint as it is: {report}")
        self.model.eval()
        text = self.model.config.get_text_config()
        text.num_mtp_layers = variant.mtp_layers
        if hasattr(text, "layer_types"):
            text.mtp_layer_types = ["full_attention"] * variant.mtp_layers
        self.model._keys_to_ignore_on_load_unexpected = [variant.head_pattern]
        # Raises if a tensor is missing.
        self.head = MtpModel.from_pretrained(self.model).eval()
        self.least_router_gap: float | None = None
        self._choices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for part, module in (("", self.model.model), ("mtp_", self.head)):
            for path, router in module.named_modules():
                if type(router).__name__.lower().endswith("topkrouter"):
                    self._watch(router, part + path.split(".")[1])

    def _watch(self, router: Any, name: str) -> None:
        def note(router: Any, _: Any, out: tuple[torch.Tensor, ...]) -> None:
            logits, weights, experts = out
            gap = _router_gap(router, logits)
            self.least_router_gap = gap if self.least_router_gap is None else min(gap, self.least_router_gap)
            experts, order = experts.sort(-1)
            self._choices[name] = (experts, weights.gather(-1, order))

        router.register_forward_hook(note)

    def _chosen(self, rows: int, names: str) -> dict[str, torch.Tensor]:
        """Experts in ascending order and their weights, [B, T, E], of the last call of a trunk's or head's layers."""
        result = {}
        for name, (experts, weights) in self._choices.items():
            if re.fullmatch(names, name):
                result[f"experts_{name}"] = experts.reshape(rows, -1, experts.shape[-1])
                result[f"weights_{name}"] = weights.reshape(rows, -1, weights.shape[-1])
        return result

    @torch.no_grad()
    def outputs(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Logits, hidden states and routers' choices at all positions, and DeltaNet layers' states after the last.

        `mtp_logits`, and choices named mtp_0, are those of the first MTP layer. `chained_logits` has four entries for
        one layer, and one a layer for several, each reading at every index what the one before it gave there.
        """
        tokens = torch.from_numpy(ids)
        rows, length = ids.shape
        before: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda _, inputs, __: before.append(inputs[0]))
        out = self.model.model(input_ids=tokens, use_cache=True)
        hook.remove()
        hidden = out.last_hidden_state
        main = self.model.lm_head(hidden)
        result = {"main_logits": main, "hidden": hidden, "hidden_before_norm": before[0]}
        result |= self._chosen(rows, r"\d+")
        cache = MtpCache(config=self.model.config.get_mtp_config())

        def head(hidden: torch.Tensor, next_tokens: torch.Tensor, position: int) -> torch.Tensor:
            # Positions of the embedded tokens.
            positions = torch.arange(position, position + next_tokens.shape[1])[None].expand(rows, -1)
            return self.head.forward_layer(0, hidden, positions, cache, input_ids=next_tokens)

        drafted = main[:, :0]
        if length > 1:
            drafted = self.model.lm_head(head(hidden[:, :-1], tokens[:, 1:], 1))
            result |= self._chosen(rows, "mtp_0")
        result["mtp_logits"] = drafted
        if self.head.num_mtp_layers > 1:
            result["chained_logits"] = self._drafts(tokens, hidden, main)
        else:
            chained, own, logits = [], hidden[:, -1:], main[:, -1:]
            for step in range(CHAINED):
                own = head(own, logits.argmax(-1), length + step)
                logits = self.model.lm_head(own)
                chained.append(logits)
            result["chained_logits"] = torch.cat(chained, 1)
        for number, layer in enumerate(out.past_key_values.layers):
            if getattr(layer, "recurrent_states", None):
                result[f"memory_{number}"] = layer.recurrent_states[0]
                # The peer keeps one column more than the convolution reads again.
                result[f"conv_{number}"] = layer.conv_states[0][..., -3:].transpose(1, 2)
        return {
            name: value.numpy().astype(np.uint8) if name.startswith("experts") else value.float().numpy()
            for name, value in result.items()
        }

    def _drafts(self, tokens: torch.Tensor, hidden: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
        """Logits of the peer's own drafting, one entry a layer, after the whole of `tokens`."""
        following = torch.cat([tokens[:, 1:], main[:, -1:].argmax(-1)], 1)
        positions = torch.arange(1, tokens.shape[1] + 1)[None].expand(len(tokens), -1)
        cache = MtpCache(config=self.model.config.get_mtp_config())
        return self.head(following, hidden, None, positions, cache)[1]

    def _generate(self, ids: np.ndarray, new_tokens: int, **options: Any) -> Any:
        self.model.generation_config.eos_token_id = None
        tokens = torch.from_numpy(ids)
        return self.model.generate(
            tokens,
            # Without a mask of its own `generate` takes every id equal to the padding id for padding.
            attention_mask=torch.ones_like(tokens),
            pad_token_id=0,
            eos_token_id=None,
            do_sample=False,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            **options,
        )

    @torch.no_grad()
    def greedy(self, ids: np.ndarray, new_tokens: int) -> tuple[np.ndarray, float]:
        """New tokens of plain greedy decoding without an end, and the least gap between a first and second logit."""
        out = self._generate(ids, new_tokens, output_scores=True)
        top = torch.stack(out.scores).topk(2).values
        return out.sequences[:, ids.shape[1] :].numpy(), float((top[..., 0] - top[..., 1]).min())

    @torch.no_grad()
    def speculative(self, ids: np.ndarray, new_tokens: int) -> tuple[np.ndarray, int]:
        """New tokens of the peer's own greedy speculative decoding (it has one for GLM), and the drafts accepted."""
        accepted = 0

        def count(_: Any, ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
            nonlocal accepted
            accepted += int(num_matches)

        rows = []
        with patch.object(MTPCandidateGenerator, "update_candidate_strategy", count):
            for row in ids:
                rows.append(self._generate(row[None], new_tokens, use_mtp=True).sequences[0, len(row) :].numpy())
        return np.stack(rows), accepted


def _router_gap(router: Any, logits: torch.Tensor) -> float:
    logits = logits.float()
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is None:
        return _gap(logits, router.top_k)
    scores = logits.sigmoid() + bias
    grouped = scores.reshape(len(scores), router.num_group, -1)
    sums = grouped.topk(2).values.sum(-1)
    least = _gap(sums, router.topk_group) if router.topk_group < router.num_group else torch.inf
    out = sums < sums.topk(router.topk_group).values[:, -1:]
    return min(least, _gap(grouped.masked_fill(out[..., None], -torch.inf).flatten(1), router.top_k))


def _gap(scores: torch.Tensor, chosen: int) -> float:
    top = scores.topk(chosen + 1).values
    return float((top[:, -2] - top[:, -1]).min())
