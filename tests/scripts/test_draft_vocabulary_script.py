"""The corpus counter's command line, and the file that it made for the shipped model."""

import json

import pytest
from bent_model import write_checkpoint

from infer.draft_vocabulary import FILE_NAME, load_draft_vocabulary, read_ids
from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint, save_checkpoint
from mtp_jax.text import Tokenizer


def test_it_writes_where_draft_vocab_looks(script, tmp_path):
    checkpoint, texts = tmp_path / "checkpoint", tmp_path / "texts"
    write_checkpoint(checkpoint)
    texts.mkdir()
    (texts / "a.py").write_text("xxxx xxx\n")
    (texts / "b.bin").write_bytes(b"\0\1")
    script("draft_vocabulary").main(["--checkpoint", str(checkpoint), "--data", str(texts)])
    tokenizer = Tokenizer.from_folder(checkpoint)
    x = tokenizer.encode("x")[0]
    assert read_ids(checkpoint / FILE_NAME, 307)[0] == x
    assert load_draft_vocabulary(1, checkpoint, 307, [tokenizer.end_id]).tolist() == sorted([x, tokenizer.end_id])


def test_json_says_what_was_counted(script, tmp_path, capsys):
    write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "a.py").write_text("xx")
    flags = ["--data", str(tmp_path / "a.py"), "--out", str(tmp_path / "ids.txt"), "--json"]
    script("draft_vocabulary").main(["--checkpoint", str(tmp_path / "checkpoint"), *flags])
    ids = read_ids(tmp_path / "ids.txt", 307)
    # Two letters and the end of the text.
    assert json.loads(capsys.readouterr().out) == {"out": flags[3], "num_ids": len(ids), "num_tokens": 3}


def test_mistakes_are_named(script, tmp_path):
    write_checkpoint(tmp_path / "checkpoint")
    main, checkpoint = script("draft_vocabulary").main, ["--checkpoint", str(tmp_path / "checkpoint")]
    with pytest.raises(UserError, match="one of the arguments --data --config is required"):
        main(checkpoint)
    with pytest.raises(UserError, match="expected a file or a folder"):
        main([*checkpoint, "--data", str(tmp_path / "absent")])
    text = tmp_path / "text.txt"
    text.write_text("x")
    with pytest.raises(UserError, match=r"--out .*: cannot be written"):
        main([*checkpoint, "--data", str(text), "--out", str(tmp_path / "no" / "folder.txt")])
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"expected a tokenizer\.json"):
        main([*checkpoint, "--data", str(text)])


def test_the_shipped_file_is_valid_and_goes_where_the_model_goes(script, tmp_path):
    folder = script("draft_vocabulary")._cli.DEMO_CHECKPOINT
    config = json.loads((folder / "config.json").read_text())
    ids = read_ids(folder / FILE_NAME, config["vocab_size"])
    assert len(ids) > 1500
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(ids[:4]).count("\n") >= 1, "line ends are among the most frequent tokens of code"
    checkpoint = load_checkpoint(folder)
    save_checkpoint(tmp_path / "copy", checkpoint.config, checkpoint.params, checkpoint.manifest)
    assert (tmp_path / "copy" / FILE_NAME).read_bytes() == (folder / FILE_NAME).read_bytes()
