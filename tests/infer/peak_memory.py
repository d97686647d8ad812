"""Peak memory of a fresh process that continues a long prompt: `python tests/infer/peak_memory.py TOKENS [CHECKPOINT]`.

Prints one JSON object: the peak before the prompt (the model loaded and a short prompt continued) and after it, in MiB.
"""

import json
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NEW = 8


def main(num_tokens: int, checkpoint: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from infer import Generator

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    generator = Generator.from_pretrained(checkpoint)
    assert generator.tokenizer is not None
    text = "".join(path.read_text() for path in sorted((ROOT / "mtp_jax").rglob("*.py")))
    ids = generator.tokenizer.encode(text)
    ids = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
    generator.generate([ids[:64]], max_new_tokens=NEW)
    before = peak()
    (got,) = generator.generate([ids], max_new_tokens=NEW)
    assert len(got.tokens) == NEW
    print(json.dumps({"tokens": num_tokens, "before": round(before), "after": round(peak())}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "models" / "demo")
