"""Makes the goldens beside it with `transformers`: `python tests/goldens/make_goldens.py [NAME ...]` (extra `peer`).

Run it again only if a golden was meant to change; each records the peer's version, the seed and the checkpoint's hash.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from goldens.peer import Peer, peer_version, write_for_peer
from goldens.variants import ALL, NEW_TOKENS, golden_path, has_bfloat16, has_states, kept, prompt_ids, prompts
from random_checkpoint import GLM, Variant, checkpoint_hash, write_variant


def golden(variant: Variant) -> dict[str, np.ndarray]:
    """What a variant's golden holds: the peer's values at the kept positions."""
    result, gaps, accepted = {}, [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = write_for_peer(Path(name) / "for_peer", variant)
        exact, rounded = Peer(folder, variant), None
        if any(has_bfloat16(variant, prompt) for prompt in prompts(variant)):
            rounded = Peer(folder, variant, "bfloat16")
        checkpoint = write_variant(Path(name) / "checkpoint", variant)
        record = {**peer_version(), "seed": variant.seed, "checkpoint_sha256": checkpoint_hash(checkpoint)}
        for prompt in prompts(variant):
            ids = prompt_ids(variant, prompt)
            for prefix, peer in (("", exact), ("bfloat16/", rounded)):
                if peer is None or (prefix and not has_bfloat16(variant, prompt)):
                    continue
                for key, value in peer.outputs(ids).items():
                    if key.startswith(("memory", "conv")):
                        if prefix or not has_states(variant, prompt):
                            continue
                    elif prefix and key.startswith(("experts", "weights")):
                        continue
                    elif key != "chained_logits":
                        value = value[:, kept(value.shape[1])]
                    result[f"{prefix}{prompt}/{key}"] = value
            result[f"{prompt}/greedy"], gap = exact.greedy(ids, NEW_TOKENS)
            gaps.append(gap)
            # The peer trips over prompts shorter than its MTP layers are many.
            if variant.family == GLM and ids.shape[1] >= variant.mtp_layers:
                result[f"{prompt}/speculative"], drafts = exact.speculative(ids, NEW_TOKENS)
                accepted += drafts
        record["least_greedy_gap"] = min(gaps)
        if exact.least_router_gap is not None:
            record["least_router_gap"] = exact.least_router_gap
        if variant.family == GLM:
            record["accepted"] = accepted
    result["record"] = np.array(json.dumps(record))
    return result


def main(names: list[str]) -> None:
    for variant in ALL:
        if names and variant.name not in names:
            continue
        values = golden(variant)
        np.savez_compressed(golden_path(variant), allow_pickle=False, **values)
        print(golden_path(variant).name, golden_path(variant).stat().st_size, values["record"])


if __name__ == "__main__":
    main(sys.argv[1:])
