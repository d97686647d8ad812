"""The command line that says what a model takes."""

import json

import pytest
from documented import DESCRIPTION_KEYS

from configs.released import RELEASED


def test_without_a_model_it_lists_the_names(call):
    status, out, _ = call("describe")
    assert status == 0
    assert out.split() == list(RELEASED)
    status, out, _ = call("describe", "--json")
    assert json.loads(out) == {"names": list(RELEASED)}


def test_tables(call):
    status, out, err = call("describe", "--config", "0.8b", "--devices", "4", "--context", "1000")
    assert status == 0, err
    assert out.startswith("qwen3.5-0.8b: 772.85 M parameters")
    rows = {cells[0]: cells[1:] for cells in (row_cells(line) for line in out.splitlines()) if len(cells) > 1}
    assert rows["trunk: linear attention + mlp"] == ["18"]
    assert rows["head: all"] == ["20,452,864", "20,452,864"]
    assert rows["trunk: each token"] == ["12.00 KiB", "24.00 KiB"]
    assert rows["4"][2] == "2.16 GiB"  # three float32 each of 772.8 million, divided by 4
    assert "1,000 tokens" in rows


@pytest.mark.parametrize("name", RELEASED)
def test_every_released_shape(call, name):
    status, out, err = call("describe", "--config", name, "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["name"] == name
    assert (
        sum(number for stack in record["layers"].values() for number in stack.values()) == RELEASED[name].num_layers + 1
    )
    # What a token uses is multiplied with, twice, but for its row of the embedding and vectors.
    active = record["parameters"]["active"]
    of_head = sum(part["active"] for part in record["parameters"]["head"].values())
    assert record["flops_per_token"]["decode"] > 1.99 * (active - of_head)


def row_cells(line):
    return [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")]


def test_json_has_the_documented_keys(call, tmp_path):
    status, out, err = call("describe", "--config", "qwen3.5-2b", "--json", "--devices", "1,3")
    assert status == 0, err
    record = json.loads(out)
    assert record.keys() == DESCRIPTION_KEYS
    assert record["context"] == 32768
    one, three = record["memory_bytes"]
    assert (one.pop("devices"), three.pop("devices")) == (1, 3)
    assert all(0 <= 3 * three[key] - one[key] < 3 for key in one)
    every = [count for stack in ("trunk", "head") for count in record["parameters"][stack].values()]
    assert record["parameters"]["total"] == sum(count["total"] for count in every)
    sizes = record["row_bytes"]["float32"]
    stacks = sizes["trunk"], sizes["head"]
    assert sizes["at_context"] == sum(stack["fixed"] + 32768 * stack["per_slot"] for stack in stacks)

    target = tmp_path / "description.json"
    status, out, _ = call("describe", "--config", "qwen3.5-2b", "--json", target, "--trunk-only")
    assert json.loads(target.read_text())["parameters"]["head"] == {}
    assert "head: all" in out


def test_a_checkpoint(call, checkpoint):
    status, out, err = call("describe", "--checkpoint", checkpoint, "--json")
    assert status == 0, err
    record = json.loads(out)
    stored = json.loads((checkpoint / "config.json").read_text())
    assert record["name"] == str(checkpoint)
    assert record["width"] == stored["hidden_size"]
    assert record["context"] == min(32768, stored["max_position_embeddings"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "gpt-2"], "qwen3.5-397b-a17b"),
        (["--config", "0.8b", "--checkpoint", "x"], "not allowed with"),
        (["--checkpoint", "absent"], "absent"),
        (["--config", "0.8b", "--devices", "8,0"], "--devices"),
        (["--config", "0.8b", "--context", "300000"], "--context 300000: the model holds at most 262144 tokens"),
        (["--context", "512"], "--context goes with --config or --checkpoint"),
        (["--trunk-only"], "--trunk-only goes with --config or --checkpoint"),
    ],
)
def test_mistakes(call, flags, message):
    status, out, err = call("describe", *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
