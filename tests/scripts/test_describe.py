"""The command line that says what a model takes."""

import json

import pytest
from documented import BOUND_KEYS, DESCRIPTION_KEYS, ESTIMATE_KEYS

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
    counts = [1, 2, 4, 8, 16, 32, 64]
    status, out, err = call("describe", "--config", name, "--json", "--devices", ",".join(map(str, counts)))
    assert status == 0, err
    record = json.loads(out)
    assert record["name"] == name
    assert [(e["chip"], e["devices"]) for e in record["estimates"]] == [
        (chip, count) for chip in ("h200", "tpu-v5p") for count in counts
    ]
    for estimate in record["estimates"]:
        memory = record["plan"]["chips"][estimate["chip"]]["memory"]
        for use, bound in (("inference", "decode"), ("training", "step")):
            fits = estimate[use]["memory_bytes"] <= memory
            assert estimate[use]["fits"] == fits == (bound in estimate[use])
    assert record["estimates"][-1]["inference"]["fits"]
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


CPU = "cpu:dtype=float32,memory=16e9,bandwidth=60e9,flops=4e11"


def test_estimates_for_a_chip_that_is_described(call):
    flags = "--config", "0.8b", "--devices", "1", "--chip", CPU, "--context", "512"
    status, out, err = call("describe", *flags, "--json", "--num-draft-tokens", "2", "--acceptance", "0.5")
    assert status == 0, err
    record = json.loads(out)
    (estimate,) = record["estimates"]
    assert estimate.keys() == ESTIMATE_KEYS
    inference, training = estimate["inference"], estimate["training"]
    assert inference["decode"].keys() == inference["prefill"].keys() == training["step"].keys() == BOUND_KEYS
    # 752.4 million parameters of the trunk, and 19.3 MB of its memories twice.
    assert inference["decode"]["seconds"] == pytest.approx((4 * 752.4e6 + 2 * 19.3e6) / 60e9, rel=0.01)
    assert inference["decode"]["limit"] == "memory"
    assert inference["prefill"]["seconds"] == pytest.approx(512 * record["flops_per_token"]["prefill"] / 4e11, rel=0.05)
    assert inference["round"]["tokens"] == 1.75
    assert inference["round"]["speedup"] == 1.75 * inference["decode"]["seconds"] / inference["round"]["seconds"]
    flops = record["flops_per_token"]
    assert training["step"]["compute"] == 512 * (flops["train"] + flops["train_mtp"]) / 4e11

    status, out, _ = call("describe", *flags, "--json", "--num-draft-tokens", "2", "--draft-vocab", "32768")
    saved = inference["round"]["seconds"] - json.loads(out)["estimates"][0]["inference"]["round"]["seconds"]
    assert saved == pytest.approx(2 * (248320 - 32768) * 1024 * 4 / 60e9)
    status, out, _ = call("describe", *flags, "--json", "--trunk-only")
    assert json.loads(out)["estimates"][0]["inference"]["round"] is None


def test_tables_of_estimates_say_what_they_are_and_what_does_not_fit(call):
    status, out, err = call("describe", "--config", "397b-a17b", "--devices", "1,8", "--chip", "H200")
    assert status == 0, err
    assert "Bounds, not predictions" in out
    assert "120 sums" in " ".join(out.split())
    lines = [row_cells(line) for line in out.splitlines()]
    decoding, training = [cells[1:] for cells in lines if cells[0] == "1 h200"]
    assert decoding[:2] == ["752 of 131 GiB", "does not fit"]
    assert training[:2] == ["6,005 of 131 GiB", "does not fit"]
    (memory, step, limit, *_), prompt, _ = [cells[1:] for cells in lines if cells[0] == "8 h200"]
    assert (memory, limit) == ("94.37 GiB", "memory")
    assert step.endswith(" us")
    assert prompt[1] == "compute"


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
        (["--config", "0.8b", "--devices", "1,1"], "--devices: expected different numbers from 1 to 100,000, such as"),
        (["--config", "0.8b", "--devices", "1,100001"], "to 100,000, such as 1,8,64, got '1,100001'"),
        (["--config", "0.8b", "--context", "300000"], "--context 300000: the model holds at most 262144 tokens"),
        (["--context", "512"], "--context goes with --config or --checkpoint"),
        (["--chip", "h200"], "--chip goes with --config or --checkpoint"),
        (["--config", "0.8b", "--chip", "h300"], "expected h200, tpu-v5p or NAME:KEY=X,.., got 'h300'"),
        (["--config", "0.8b", "--chip", "cpu:memory=1e9,flops=1e9"], "cpu: bandwidth must be given"),
        (["--config", "0.8b", "--chip", ":memory=1e9,flops=1e9,bandwidth=1e9"], "expected a name before the colon"),
        (["--config", "0.8b", "--chip", "cpu:memory=1e9,memory=2e9"], "cpu: expected each figure once"),
        (
            ["--config", "0.8b", "--chip", CPU + ",cores=2"],
            "cpu: expected memory, bandwidth, flops, link, dtype, got 'co",
        ),
        (["--config", "0.8b", "--chip", CPU + ",link=0"], "link must be a positive number, such as 60e9, got '0'"),
        (["--config", "0.8b", "--chip", CPU.replace("float32", "int8")], "cpu: dtype must be bfloat16 or float32"),
        (["--config", "0.8b", "--chip", CPU], "--devices 64 --chip cpu: a chip without link works alone, got 64"),
        (["--config", "0.8b", "--draft-vocab", "248321"], "--draft-vocab 248321: the model has 248320 tokens"),
        (["--config", "0.8b", "--trunk-only", "--num-draft-tokens", "1"], "without a head there is nothing to draft"),
        (["--config", "0.8b", "--acceptance", "1.1"], "expected a number from 0 to 1, got '1.1'"),
        (["--trunk-only"], "--trunk-only goes with --config or --checkpoint"),
    ],
)
def test_mistakes(call, flags, message):
    status, out, err = call("describe", *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
