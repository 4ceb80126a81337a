"""Pairs of prompt and reference: read, split, tokenized, and given back; what is wrong with a file is one sentence."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from support.settings import checked_run

from testbed.data.pairs import Pair, encode_pair, encode_prompt, read_pairs
from testbed.data.sidecar import targets_path
from testbed.data.token_file import TokenFileWriter, check_token_file, open_token_file
from testbed.data.tokenizer_file import load_tokenizer, load_tokenizer_file, train_bpe

COLOURS = {"red": "rot", "blue": "blau", "green": "grün", "white": "weiß"}
PAIRS = [
    {"prompt": f"the {colour} house has {number} doors", "reference": f"das {farbe} Haus hat {number} Türen"}
    for colour, farbe in COLOURS.items()
    for number in range(2, 12)
]


def write_pairs(path, pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return path


def test_a_pair_is_prompt_separator_reference_and_no_token_spans_two_of_them(tmp_path):
    text = "".join(f"{pair['prompt']} \n\n{pair['reference']}" for pair in PAIRS)
    tokenizer = train_bpe(iter([text] * 3), 300, tmp_path / "bpe_300.json")
    assert len(tokenizer.encode(" \n")) == 1, "a blank at a prompt's end would be one token with the separator"
    pair = Pair("the red house has 2 doors ", ("das rote Haus", "das Haus in Rot"))
    token_ids, first_target = encode_pair(tokenizer, pair)
    assert token_ids[:first_target] == encode_prompt(tokenizer, pair.prompt), "asked as it was taught"
    assert tokenizer.decode(token_ids[:first_target]) == "the red house has 2 doors \n"
    assert tokenizer.decode(token_ids[first_target:]) == "das rote Haus"
    assert len(tokenizer.encode("\n")) == 1 and token_ids[first_target - 1] == tokenizer.encode("\n")[0]
    assert pair.text == "the red house has 2 doors \ndas rote Haus"


def test_pairs_are_read_with_one_reference_or_several(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "reference": "b", "id": 7}\n\n{"prompt": "c", "reference": ["d", "ü"]}')
    assert list(read_pairs(path)) == [Pair("a", ("b",)), Pair("c", ("d", "ü"))]


BAD_LINES = [
    ("[]", r'is no {"prompt": TEXT, "reference": TEXT}'),
    ("{", "is not JSON"),
    ('{"prompt": "a"}', 'has no "reference"'),
    ('{"reference": "a", "completion": "b"}', 'has no "prompt"'),
    ('{"prompt": 3, "reference": "b"}', "has the prompt 3, which is not text"),
    ('{"prompt": "a", "reference": null}', "has the reference None, which is not text"),
    ('{"prompt": "a", "reference": ["b", 3]}', "has the reference 3, which is not text"),
    ('{"prompt": "a", "reference": []}', "an empty list as its reference"),
    ('{"prompt": "a", "reference": ["b", " "]}', "has a blank reference"),
    ('{"prompt": "\\n", "reference": "b"}', "has a blank prompt"),
    ('{"prompt": "\\ud800", "reference": "b"}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "sentence"), BAD_LINES, ids=[sentence for _, sentence in BAD_LINES])
def test_a_bad_line_is_named_by_its_number(tmp_path, line, sentence):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "a", "reference": "b"}}\n\n{line}\n')
    with pytest.raises(ValueError) as caught:
        list(read_pairs(path, "--bleu"))
    message = str(caught.value)
    assert message.startswith(f"--bleu {path} line 3 ") and sentence in message and "\n" not in message


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(ValueError, match=f"^--pairs {path} cannot be read"):
            list(read_pairs(path))


def pairs_in(path):
    """The texts of a token file of pairs, as its targets part them."""
    file = open_token_file(path)
    check_token_file(file, file.vocab_size)
    tokenizer = load_tokenizer(file.tokenizer, file.tokenizer_file)
    found = []
    for start, end in zip(*file.documents, strict=True):
        tokens, is_target = file.tokens[start:end], file.targets[start:end].astype(bool)
        assert np.all(np.diff(is_target.astype(int)) >= 0) and tokens[-1] == file.end_of_text_id and is_target[-1]
        found.append((tokenizer.decode(tokens[~is_target]), tokenizer.decode(tokens[is_target][:-1])))
    assert len(found) == file.num_documents
    return found


def test_token_files_give_every_pair_back_with_its_reference_alone_as_target(preprocess, tmp_path):
    other = {"prompt": PAIRS[0]["prompt"], "reference": ["eine andere Antwort", "noch eine"]}
    several = [{"prompt": pair["prompt"], "reference": [pair["reference"], "auch gut"]} for pair in PAIRS]
    write_pairs(tmp_path / "all.jsonl", [*several, other])
    arguments = ("--pairs", "all.jsonl", "--tokenizer", "bpe:280", "--val_fraction", 0.2)
    result = preprocess(*arguments)
    assert result.returncode == 0, result.stderr
    train, val = pairs_in(tmp_path / "train_pairs.bin"), pairs_in(tmp_path / "val_pairs.bin")
    expected = [(f"{pair['prompt']}\n", pair["reference"]) for pair in PAIRS]
    expected.append((f"{other['prompt']}\n", "eine andere Antwort"))
    assert sorted(train + val) == sorted(expected)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in val}, "no prompt is on both sides"
    assert len(val) == pytest.approx(0.2 * len(expected), abs=2)
    held_out = list(read_pairs(tmp_path / "val_pairs.jsonl"))
    assert [(f"{pair.prompt}\n", pair.references[0]) for pair in held_out] == val, "BLEU is of what was not trained on"
    assert all(len(pair.references) == 2 for pair in held_out)
    assert "bpe_pairs_280.json: the tokenizer" in result.stdout and "tokens to be learned" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "hf") == [
        *("all.jsonl", "bpe_pairs_280.json", "train_pairs.bin", "train_pairs.json", "train_pairs.targets.bin"),
        *("val_pairs.bin", "val_pairs.json", "val_pairs.jsonl", "val_pairs.targets.bin"),
    ]
    source = json.loads((tmp_path / "train_pairs.json").read_text())["source"]
    assert source["name"] == "all.jsonl" and len(source["sha256"]) == 64


def test_a_tokenizer_that_is_there_already_is_used_and_kept_beside_the_tokens(preprocess, tmp_path):
    """To train a model further, its own ids are needed: another BPE of the same size has the same name."""
    text = "".join(f"{pair['prompt']} {pair['reference']}\n" for pair in PAIRS)
    given = tmp_path / "tokenizer.json"
    tokenizer = train_bpe(iter([text] * 3), 290, given)
    write_pairs(tmp_path / "all.jsonl", PAIRS)
    arguments = ("--pairs", "all.jsonl", "--tokenizer", "tokenizer.json", "--output_dir", "out")
    result = preprocess(*arguments)
    assert result.returncode == 0, result.stderr
    assert "tokenizer: bpe:290 (from tokenizer.json)" in result.stdout
    assert (tmp_path / "out" / "bpe_pairs_290.json").read_bytes() == given.read_bytes()
    file = open_token_file(tmp_path / "out" / "train_pairs.bin")
    start, end = file.documents[0][0], file.documents[1][0]
    prompt = load_tokenizer_file(file.tokenizer_file).decode(file.tokens[start : end - 1]).partition("\n")[0]
    assert file.tokens[start:].tolist()[: len(tokenizer.encode(prompt))] == tokenizer.encode(prompt)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--pairs", "missing.jsonl"), "--pairs missing.jsonl cannot be read (No such file"),
        (("--pairs", "broken.jsonl"), '--pairs broken.jsonl line 2 has no "reference"'),
        (("--pairs", "one.jsonl"), "--pairs holds 1 different prompts"),
        (("--pairs", "two.jsonl", "--input", "two.jsonl"), "--pairs takes the place of --input"),
        (("--pairs", "two.jsonl", "--tokenizer", "bpe:8192"), "finds only"),
        (("--pairs", "two.jsonl", "--tokenizer", "missing.json"), "the tokenizer file missing.json cannot be read"),
        pytest.param(
            *(("--pairs", "two.jsonl", "--tokenizer", "two.json"), "the tokenizer file two.json holds no tokenizer"),
            marks=pytest.mark.launches,
        ),
        *(
            (("--pairs", name, "--tokenizer", "bpe:260"), f"--pairs {name} lies where the program writes its own")
            for name in ("val_pairs.jsonl", "train_pairs.json", "val_pairs.json", "link.jsonl", "bpe_pairs_260.json")
        ),
    ],
)
def test_what_cannot_work_is_one_sentence_and_leaves_no_file(preprocess, tmp_path, arguments, sentence):
    write_pairs(tmp_path / "one.jsonl", [{"prompt": "a", "reference": "b"}, {"prompt": "a", "reference": "c"}])
    write_pairs(tmp_path / "two.jsonl", PAIRS[:2])
    for name in ("val_pairs.jsonl", "train_pairs.json", "val_pairs.json", "bpe_pairs_260.json"):
        write_pairs(tmp_path / name, PAIRS)
    (tmp_path / "link.jsonl").symlink_to("val_pairs.json")
    write_pairs(tmp_path / "broken.jsonl", [PAIRS[0], {"prompt": "a"}])
    (tmp_path / "two.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = preprocess(*arguments)
    said = [line for line in result.stderr.splitlines() if line.startswith("preprocess_small.py: ")]
    assert (result.returncode, len(said)) == (2, 1), result.stderr
    assert sentence in said[0] and "Traceback" not in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "hf"} == before


def test_what_is_wrong_with_a_file_of_pairs_is_mended_with_pairs(tmp_path, pair_files):
    """Made again from documents, it would not be of pairs any more."""
    path = tmp_path / "train_pairs.bin"
    for content in (None, b"", b"123"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=r"preprocess_small\.py --pairs FILE\.jsonl"):
            open_token_file(path)
    path.with_suffix(".json").write_text("{}")
    path.write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"preprocess_small\.py --pairs FILE\.jsonl"):
        open_token_file(path)
    other = tmp_path / "answers.bin"
    for source in (pair_files[0], pair_files[0].with_suffix(".json"), targets_path(pair_files[0])):
        (tmp_path / source.name.replace(pair_files[0].stem, "answers")).write_bytes(source.read_bytes())
    other.write_bytes(other.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"make both again with: python preprocess_small\.py --pairs"):
        open_token_file(other)


def test_a_sequence_that_holds_no_pairs_is_refused_with_the_length_that_holds_all(pair_files):
    documents = [open_token_file(path).documents for path in pair_files]
    train, val = (max(ends - starts) - 1 for starts, ends in documents)
    with pytest.raises(
        ValueError, match=rf"holds 0 pairs .*pair needs {val}\).*, a longer sequence, or --max_val_steps 0"
    ):
        checked_run(pair_files, "--seq_length", "1")
    with pytest.raises(ValueError, match=rf"holds 0 pairs that fit whole .* \(the longest pair needs {train}\)"):
        checked_run(pair_files, "--seq_length", "1", "--max_val_steps", "0")
    assert checked_run(pair_files, "--seq_length", str(train)).settings.plan.steps_per_epoch == 170 // 32


def test_a_model_is_not_trained_further_on_the_ids_of_another_bpe_of_the_same_name(tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    (start / "model.safetensors").touch()
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "n_positions": 64}
    (start / "config.json").write_text(json.dumps({**config, "tokenizer": "bpe:300"}))
    (start / "tokenizer.json").write_text("its own")
    files = tmp_path / "train.bin", tmp_path / "val.bin"
    for path in files:
        with TokenFileWriter(path, 300, "bpe:300", 299, "bpe_300.json", has_targets=True) as writer:
            for _ in range(40):
                writer.append_document([1, 2, 3], 1)
    bpe_file = tmp_path / "bpe_300.json"
    bpe_file.write_text("another")
    with pytest.raises(ValueError, match=r"reads ids of its own tokenizer.json, .* written with another bpe:300"):
        checked_run(files, "--init_from", str(start))
    bpe_file.write_text("its own")
    assert checked_run(files, "--init_from", str(start)).settings.model.vocab_size == 300
    os.truncate(start / "tokenizer.json", 1 << 42)  # it takes no room on the disk, and no memory holds it
    with pytest.raises(ValueError, match=r"^--init_from .*/tokenizer.json cannot be read \(it holds more than [^\n]*$"):
        checked_run(files, "--init_from", str(start))
