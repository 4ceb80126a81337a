"""The .bin format and its sidecar: what is written is read again, and what is damaged is refused in one sentence."""

import hashlib
import json

import numpy as np
import pytest
from support.token_file_cases import SOURCE, write, write_pairs

from testbed.data.token_file import (
    TokenFileWriter,
    check_token_file,
    open_token_file,
    scan_token_file,
    sidecar_path,
    targets_path,
)
from testbed.errors import InputError


def test_the_bytes_are_little_endian_uint16(tmp_path):
    path = write(tmp_path / "train_small.bin", [[1, 258], np.array([7], dtype=np.uint32), []])
    assert path.read_bytes() == bytes([1, 0, 2, 1, 43, 1, 7, 0, 43, 1, 43, 1])  # 258 = 0x0102, 299 = 0x012b
    sidecar = json.loads((tmp_path / "train_small.json").read_text())
    assert sidecar == {
        "format_version": 1,
        "dtype": "uint16",
        "vocab_size": 300,
        "tokenizer": "bpe:300",
        "tokenizer_file": "bpe_300.json",
        "end_of_text_id": 299,
        "num_tokens": 6,
        "num_documents": 3,
        "max_token_id": 299,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source": SOURCE,
    }


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_an_array_of_numpy_is_refused(tmp_path, dtype):
    """Its header would be ids of GPT-2's."""
    path = tmp_path / "edufineweb_train_000001.npy"
    np.save(path, np.arange(5000, dtype=dtype))
    with pytest.raises(InputError, match=r"--train_data_path .* is an array of NumPy, .*\.tofile"):
        open_token_file(path)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_are_uint32_only_above_65536_tokens(tmp_path, vocab_size, dtype):
    path = write(tmp_path / "a.bin", [[5, vocab_size - 2]], vocab_size)
    assert np.fromfile(path, dtype).tolist() == [5, vocab_size - 2, vocab_size - 1]
    token_file = open_token_file(path)
    assert token_file.tokens[:].tolist() == [5, vocab_size - 2, vocab_size - 1]
    assert not token_file.tokens[:].flags.writeable


def test_opening_gives_the_sidecars_facts(tmp_path):
    token_file = open_token_file(write(tmp_path / "a.bin", [[1, 2], [3]]))
    assert (token_file.vocab_size, token_file.tokenizer, token_file.end_of_text_id) == (300, "bpe:300", 299)
    assert token_file.tokenizer_file == tmp_path / "bpe_300.json"
    assert token_file.num_documents == 2
    assert token_file.sha256 == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()


def test_without_a_sidecar_a_file_is_gpt2(tmp_path):
    np.array([15496, 995, 50256], dtype="<u2").tofile(tmp_path / "a.bin")
    token_file = open_token_file(tmp_path / "a.bin")
    assert token_file.tokens[:].tolist() == [15496, 995, 50256]
    assert (token_file.vocab_size, token_file.end_of_text_id, token_file.tokenizer) == (50257, 50256, "gpt2")
    assert (token_file.num_documents, token_file.sha256) == (None, None)
    assert check_token_file(token_file, 50257).max_token_id == 50256


def test_an_exception_leaves_the_earlier_files_whole_and_nothing_else(tmp_path):
    path = write(tmp_path / "a.bin", [[1, 2]])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), TokenFileWriter(path, 300, "bpe:300", 299) as writer:
        writer.append_document([4] * 100_000)
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("token_id", [300, -1, 65_536 + 5])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path, token_id):
    """65,541 would wrap around to the valid id 5 in uint16."""
    with pytest.raises(ValueError, match=r"outside 0\.\.299"):
        write(tmp_path / "a.bin", [[1, token_id]])
    assert list(tmp_path.iterdir()) == []


def change_sidecar(path, **changes):
    fields = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(json.dumps(fields | changes))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda path: path.unlink(),
            r"does not exist \(looked for in /.*\); make it with: python download_data.py && python preprocess_small",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder, not a file; name a .bin"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "has 7 bytes, not a multiple of the 2 bytes of a token",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "holds 3 tokens but its sidecar a.json says 4"),
        (lambda path: sidecar_path(path).write_text("{"), "is not JSON"),
        (lambda path: sidecar_path(path).write_bytes(b"\xff"), "is not JSON"),
        (lambda path: sidecar_path(path).write_text("[]"), "holds no JSON object"),
        (lambda path: change_sidecar(path, format_version=3), "format_version 3, this program reads 1 and 2"),
        (lambda path: change_sidecar(path, format_version=True), "format_version True"),
        (lambda path: change_sidecar(path, format_version=2), "targets_file missing, must be a file name without"),
        (lambda path: change_sidecar(path, dtype="float32"), "dtype 'float32', must be uint16 or uint32"),
        (lambda path: change_sidecar(path, dtype=["uint16"]), r"dtype \['uint16'\], must be"),
        (lambda path: change_sidecar(path, vocab_size="300"), "vocab_size '300', must be a whole number"),
        (lambda path: change_sidecar(path, vocab_size=True), "vocab_size True"),
        (lambda path: change_sidecar(path, tokenizer_file="../x.json"), "must be a file name without folders"),
        (lambda path: change_sidecar(path, end_of_text_id=300), "must be below its vocab_size 300"),
        (lambda path: change_sidecar(path, sha256="abc"), "sha256 'abc', must be 64"),
    ],
)
def test_every_damage_is_one_sentence_with_the_flag(tmp_path, damage, sentence):
    path = write(tmp_path / "a.bin", [[1, 2], []])
    damage(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_token_file(path, "--val_data_path")
    message = str(caught.value)
    assert message.startswith("--val_data_path") and "\n" not in message


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.bin", [[1]])
    monkeypatch.setattr("os.access", lambda *_: False)  # root reads everything, so the mode bits prove nothing here
    with pytest.raises(ValueError, match="cannot be read"):
        open_token_file(path)


def test_an_id_beyond_the_vocabulary_is_named_with_its_position(tmp_path, monkeypatch):
    monkeypatch.setattr("testbed.data.disk_array.CHUNK_ITEMS", 4)  # so that the id lies in the third chunk
    token_file = open_token_file(write(tmp_path / "a.bin", [[1, 2, 3, 4, 5, 6, 7, 8, 250, 260]]))
    with pytest.raises(ValueError, match=r"token id 250 at position 8, but --vocab_size 250 .* pass --vocab_size 300"):
        check_token_file(token_file, 250)
    with pytest.raises(
        ValueError, match=r"--vocab_size 250 .*; so it is not the data of the run that --config c\.json "
    ):
        check_token_file(token_file, 250, config="c.json")
    scan = check_token_file(token_file, 300)
    assert scan.max_token_id == 299
    assert scan.sha256 == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest() == token_file.sha256
    assert scan_token_file(token_file) == scan


def test_an_id_equal_to_the_vocabulary_size_is_beyond_it(tmp_path):
    """Ids count from 0: 299, the largest here, needs 300 rows of the embedding."""
    token_file = open_token_file(write(tmp_path / "a.bin", [[1, 2]]))
    with pytest.raises(ValueError, match=r"token id 299 at position 2, but --vocab_size 299"):
        check_token_file(token_file, 299)
    assert check_token_file(token_file, 300).max_token_id == 299


def test_changed_tokens_are_found_by_the_hash(tmp_path):
    path = write(tmp_path / "a.bin", [[1, 2, 3]])
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the tokens changed after they were written"):
        check_token_file(open_token_file(path), 300)


def test_targets_are_a_byte_per_token_in_version_2(tmp_path):
    path = write_pairs(tmp_path / "a.bin")
    assert targets_path(path).read_bytes() == bytes([0, 0, 1, 1, 1, 0, 1, 1])
    sidecar = json.loads((tmp_path / "a.json").read_text())
    assert sidecar["format_version"] == 2 and sidecar["num_target_tokens"] == 5
    assert sidecar["targets_file"] == "a.targets.bin"
    assert sidecar["targets_sha256"] == hashlib.sha256(targets_path(path).read_bytes()).hexdigest()
    file = open_token_file(path)
    assert file.targets[:].tolist() == [0, 0, 1, 1, 1, 0, 1, 1]
    assert [each.tolist() for each in file.documents] == [[0, 5], [5, 8]]
    scan = check_token_file(file, 300)
    assert scan.sha256 == sidecar["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    both = path.read_bytes() + targets_path(path).read_bytes()
    assert scan.data_sha256 == hashlib.sha256(both).hexdigest(), "other targets are other work"
    text = write(tmp_path / "b.bin", [[1, 2]])
    scan = check_token_file(open_token_file(text), 300)
    assert open_token_file(text).targets is None
    assert scan.data_sha256 == scan.sha256


def test_the_targets_themselves_are_no_tokens(tmp_path):
    path = write_pairs(tmp_path / "a.bin")
    with pytest.raises(
        ValueError, match=r"a.targets.bin says which tokens of a file are learned; name the .bin next to it"
    ):
        open_token_file(targets_path(path))


def test_an_exception_leaves_earlier_pairs_whole(tmp_path):
    path = write_pairs(tmp_path / "a.bin")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with (
        pytest.raises(KeyboardInterrupt),
        TokenFileWriter(path, 300, "bpe:300", 299, has_targets=True) as writer,
    ):
        writer.append_document([4] * 100_000, 50)
        raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def change_targets(path, *targets):
    """Other targets, with a sidecar that says they are these."""
    targets_path(path).write_bytes(bytes(targets))
    change_sidecar(path, targets_sha256=hashlib.sha256(bytes(targets)).hexdigest())


def change_tokens(path, *tokens):
    """Other tokens, with a sidecar that knows no hash of them."""
    path.write_bytes(np.array(tokens, "<u2").tobytes())
    change_sidecar(path, sha256=None)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: targets_path(path).unlink(), r"a.targets.bin cannot be read \(No such file"),
        (lambda path: (targets_path(path).unlink(), targets_path(path).mkdir()), "not one for each of 8 tokens"),
        (lambda path: targets_path(path).write_bytes(bytes(7)), "have 7 bytes, not one for each of 8 tokens"),
        (lambda path: sidecar_path(path).unlink(), "is a file of pairs, for a.targets.bin lies next to it, but its"),
        (lambda path: change_sidecar(path, targets_file="../a.bin"), "targets_file '../a.bin', must be a file name"),
        (lambda path: change_sidecar(path, targets_file=None), "targets_file None, must be a file name"),
        (lambda path: change_sidecar(path, targets_sha256=None), "targets_sha256 None, must be 64"),
        (lambda path: change_sidecar(path, num_documents=None), "num_documents None, must be a whole number"),
        (lambda path: targets_path(path).write_bytes(bytes([0, 0, 0, 1, 1, 0, 1, 1])), "changed after they were"),
        (lambda path: change_targets(path, 0, 0, 1, 1, 2, 0, 1, 1), "hold the byte 2, must be 0 or 1"),
        (lambda path: change_targets(path, 0, 0, 1, 1, 1, 0, 0, 0), "leave a pair without any"),
        (lambda path: change_targets(path, 0, 0, 1, 1, 1, 1, 1, 1), "begin with the first token of a pair"),
        (lambda path: change_tokens(path, 1, 2, 10, 11, 299, 3, 10, 10), "belong to 2 pairs, but the .bin holds 1"),
        (lambda path: change_tokens(path, 1, 2, 10, 299, 11, 3, 299, 10), "must end with one"),
        (lambda path: change_tokens(path, *range(8)), "belong to 2 pairs, but the .bin holds 0"),
    ],
)
def test_damaged_targets_are_one_sentence_with_the_flag(tmp_path, damage, sentence):
    path = write_pairs(tmp_path / "a.bin")
    damage(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        check_token_file(open_token_file(path, "--val_data_path"), 300, "--val_data_path")
    message = str(caught.value)
    assert message.startswith("--val_data_path") and "\n" not in message and "preprocess_small.py" in message
