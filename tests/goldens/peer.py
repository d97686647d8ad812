"""Reference values from `transformers`; needs the `peer` extra.

Its MTP model is not meant for this family as published: the text config must say how many layers there are, and one
pattern must name the head's tensors.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

CHAINED = 4


def peer_version() -> dict[str, str]:
    """Names and versions for a golden's record."""
    return {"peer": f"transformers {transformers.__version__}", "torch": torch.__version__}


class Peer:
    """A checkpoint loaded by `transformers`, trunk and head."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        text = self.model.config.get_text_config()
        text.num_mtp_layers = 1
        text.mtp_layer_types = ["full_attention"]
        self.model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
        self.head = MtpModel.from_pretrained(self.model).eval()

    @torch.no_grad()
    def outputs(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Logits and hidden states at all positions, and the DeltaNet layers' states after the last one."""
        tokens = torch.from_numpy(ids)
        rows, length = ids.shape
        before: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda _, inputs, __: before.append(inputs[0]))
        out = self.model.model(input_ids=tokens, use_cache=True)
        hook.remove()
        hidden = out.last_hidden_state
        main = self.model.lm_head(hidden)
        result = {"main_logits": main, "hidden": hidden, "hidden_before_norm": before[0]}
        cache = MtpCache(config=self.model.config.get_mtp_config())

        def head(hidden: torch.Tensor, next_tokens: torch.Tensor, position: int) -> torch.Tensor:
            # Positions of the embedded tokens.
            positions = torch.arange(position, position + next_tokens.shape[1])[None].expand(rows, -1)
            return self.head.forward_layer(0, hidden, positions, cache, input_ids=next_tokens)

        drafted = main[:, :0]
        if length > 1:
            drafted = self.model.lm_head(head(hidden[:, :-1], tokens[:, 1:], 1))
        result["mtp_logits"] = drafted
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
        return {name: value.float().numpy() for name, value in result.items()}

    @torch.no_grad()
    def greedy(self, ids: np.ndarray, new_tokens: int) -> tuple[np.ndarray, float]:
        """New tokens of plain greedy decoding without an end, and the least gap between a first and second logit."""
        self.model.generation_config.eos_token_id = None
        tokens = torch.from_numpy(ids)
        # Without a mask of its own `generate` takes every id equal to the padding id for padding.
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0, "eos_token_id": None}
        out = self.model.generate(
            tokens,
            **options,
            do_sample=False,
            max_new_tokens=new_tokens,
            output_scores=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(out.scores).topk(2).values
        return out.sequences[:, ids.shape[1] :].numpy(), float((top[..., 0] - top[..., 1]).min())
