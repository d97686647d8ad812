"""Makes goldens/text with `transformers` and the published files: `python tests/goldens/make_text_goldens.py`.

Needs the `peer` extra and, once, the network (see published_text.py).
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import published_text
from goldens.peer import peer_version
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "text"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "查天气 <now> & later",
        "parameters": {"city": {"type": "string"}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "武汉", "days": [1, 2]}}}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "hello": ([{"role": "user", "content": "Hello, how are you?"}], {"enable_thinking": False}),
    "thinking": ([{"role": "user", "content": "用一句话介绍一下 Transformer。"}], {"enable_thinking": True}),
    "default": ([{"role": "user", "content": "写一段 200 字的短文，介绍长江。"}], {}),
    "system": (
        [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": [{"type": "text", "text": "Hi\n"}]}],
        {"enable_thinking": False},
    ),
    "history": (
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
            {"role": "user", "content": "isn't it 3?  \n\n\tno"},
        ],
        {},
    ),
    "finished": (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hé!", "reasoning_content": "greet"}],
        {"add_generation_prompt": False},
    ),
    "tools": (
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "18 °C"},
        ],
        {"tools": [TOOL]},
    ),
}


def rendered(peer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Each conversation under each template: the peer's text and ids."""
    result = []
    for template in published_text.TEMPLATES:
        for name, (messages, variables) in CONVERSATIONS.items():
            options = {"add_generation_prompt": True, **variables}
            text = peer.apply_chat_template(
                messages, chat_template=published_text.template(template), tokenize=False, **options
            )
            ids = peer(text, add_special_tokens=False).input_ids
            row = {"template": template, "name": name, "messages": messages, "variables": variables}
            result.append({**row, "text": text, "ids": ids})
    return result


def main() -> None:
    published_text.main()
    peer = PreTrainedTokenizerFast(tokenizer_file=str(published_text.TOKENIZER / "tokenizer.json"))
    rows = rendered(peer)
    record = {**peer_version(), **published_text.WHEELS}
    (FOLDER / "rendered.json").write_text(
        json.dumps({"record": record, "rows": rows}, ensure_ascii=False, indent=1) + "\n"
    )
    part = published_text.part_for((row["text"] for row in rows), published_text.ranks())
    published_text.save(FOLDER, published_text.build(part))
    for name in published_text.TEMPLATES:
        (FOLDER / f"{name}.jinja").write_text(published_text.template(name))
    print({path.name: path.stat().st_size for path in sorted(FOLDER.iterdir())})


if __name__ == "__main__":
    main()
