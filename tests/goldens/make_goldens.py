"""Makes the goldens beside it with `transformers`: `python tests/goldens/make_goldens.py` (needs the `peer` extra).

Run it again only if a golden was meant to change; each records the peer's version, the seed and the checkpoint's hash.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from goldens.peer import Peer, peer_version
from goldens.variants import NEW_TOKENS, PROMPTS, VARIANTS, WITH_STATES, golden_path, kept, prompt_ids
from random_checkpoint import BF16, Variant, checkpoint_hash, write_variant


def golden(variant: Variant) -> dict[str, np.ndarray]:
    """What a variant's golden holds: the peer's values at the kept positions."""
    result, gaps = {}, []
    with tempfile.TemporaryDirectory() as name:
        folder = write_variant(Path(name) / "checkpoint", variant)
        peers = {"": Peer(folder)}
        if variant.dtype == BF16:
            peers["bfloat16/"] = Peer(folder, "bfloat16")
        record = {**peer_version(), "seed": variant.seed, "checkpoint_sha256": checkpoint_hash(folder)}
        for prompt in PROMPTS:
            ids = prompt_ids(variant, prompt)
            for prefix, peer in peers.items():
                for key, value in peer.outputs(ids).items():
                    if key.startswith(("memory", "conv")):
                        if prefix or prompt not in WITH_STATES:
                            continue
                    elif key != "chained_logits":
                        value = value[:, kept(value.shape[1])]
                    result[f"{prefix}{prompt}/{key}"] = value
            result[f"{prompt}/greedy"], gap = peers[""].greedy(ids, NEW_TOKENS)
            gaps.append(gap)
        record["least_greedy_gap"] = min(gaps)
    result["record"] = np.array(json.dumps(record))
    return result


def main() -> None:
    for variant in VARIANTS:
        values = golden(variant)
        np.savez_compressed(golden_path(variant), allow_pickle=False, **values)
        print(golden_path(variant).name, golden_path(variant).stat().st_size, values["record"])


if __name__ == "__main__":
    main()
