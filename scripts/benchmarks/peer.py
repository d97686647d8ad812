"""The same weights in `transformers`, on the same device."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array


class Peer:
    """A checkpoint loaded by transformers, in evaluation mode."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch  # pyright: ignore[reportMissingImports]  (the peer extra)
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        self.torch: Any = torch
        self.device = _device(torch)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None

    def ids(self, tokens: Sequence[int]) -> Any:
        """One row, on the device."""
        return self.torch.tensor([list(tokens)], device=self.device)

    def timed(self, function: Callable[[], Any]) -> float:
        return _timed(self.torch, self.device, function)

    def decode_seconds(self, prompt: Sequence[int], num_new: int) -> float:
        """Plain greedy decoding of so many tokens, the reading of the prompt included."""
        ids = self.ids(prompt)
        settings = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}
        with self.torch.no_grad():
            return self.timed(lambda: self.model.generate(ids, **settings))

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """One pass over the prompt that keeps its cache and makes the last token's logits."""
        ids = self.ids(prompt)
        with self.torch.no_grad():
            return self.timed(lambda: self.model(ids, logits_to_keep=1, use_cache=True))

    def train_seconds(self, tokens: Sequence[int]) -> float:
        """Forward and backward of the next token's loss; the gradients go afterwards."""
        ids = self.ids(tokens)
        seconds = self.timed(lambda: self.model(ids, labels=ids, use_cache=False).loss.backward())
        self.model.zero_grad(set_to_none=True)
        return seconds


class PeerDeltaRule:
    """Its chunked gated delta rule, on given inputs (layouts are ours; its queries are scaled within)."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        import torch  # pyright: ignore[reportMissingImports]  (the peer extra)
        from transformers.models.qwen3_5 import modeling_qwen3_5  # pyright: ignore[reportMissingImports]

        self.rule: Any = modeling_qwen3_5.torch_chunk_gated_delta_rule
        self.torch: Any = torch
        self.device = _device(torch)
        names = {"query": "q", "key": "k", "value": "v", "g": "g", "beta": "beta"}
        self.inputs = {
            theirs: torch.tensor(np.asarray(inputs[ours]), device=self.device) for theirs, ours in names.items()
        }

    def forward(self) -> Any:
        with self.torch.no_grad():
            return self.rule(**self.inputs)[0]

    def backward(self) -> Any:
        """The gradients of the sum of what comes out."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.inputs.items()}
        self.rule(**leaves)[0].sum().backward()
        return [leaf.grad for leaf in leaves.values()]

    def timed(self, function: Callable[[], Any]) -> float:
        return _timed(self.torch, self.device, function)


def _device(torch: Any) -> str:
    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def _timed(torch: Any, device: str, function: Callable[[], Any]) -> float:
    """Seconds until what the function has started is done."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - started
