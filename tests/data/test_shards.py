"""Many token files read as one: the same tokens as in one file, the manifest, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sparse_shards
from support.token_file_cases import write, write_pairs

from testbed.data import shards
from testbed.data.disk_array import DiskArray, FileChanged
from testbed.data.shards import MANIFEST, ShardedArray, is_at_hand
from testbed.data.token_file import check_token_file, open_token_file, scan_token_file
from testbed.data.windows import Windows
from testbed.distributed import process_group
from testbed.errors import InputError
from testbed.train.ending import Refused
from testbed.train.run import check_same_data

HEADER = np.zeros(256, dtype="<i4")
HEADER[:2] = 20240520, 1


def write_llmc(path, tokens) -> None:
    header = HEADER.copy()
    header[2] = len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


@pytest.fixture
def folder(tmp_path):
    """Three shards of 70, 1 and 60 tokens, whose names sort otherwise as text; whole.bin has them all."""
    tokens = np.random.default_rng(0).integers(0, 50256, 131)
    for name, part in (("s_2.bin", tokens[:70]), ("s_10.bin", tokens[70:71]), ("s_11.bin", tokens[71:])):
        write_llmc(tmp_path / name, part)
    tokens.astype("<u2").tofile(tmp_path / "whole.bin")
    return tmp_path


def test_shards_hold_what_one_file_holds(folder):
    whole, parts = open_token_file(folder / "whole.bin"), open_token_file(folder / "s_*.bin")
    assert len(parts.tokens) == 131 and parts.vocab_size == 50257
    windows = [Windows(file, 16) for file in (whole, parts)]
    assert len(windows[0]) == len(windows[1]) == 8
    for number in range(8):
        assert (windows[0].read([number], 1)[0] == windows[1].read([number], 1)[0]).all()


@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_slice_is_that_of_the_whole(tmp_path_factory, data, lengths):
    folder, whole, arrays = tmp_path_factory.mktemp("shards"), np.arange(sum(lengths), dtype="<u2"), []
    for number, (start, length) in enumerate(zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True)):
        whole[start : start + length].tofile(folder / f"{number}.bin")
        arrays.append(DiskArray(folder / f"{number}.bin", np.dtype("<u2"), length))
    array = ShardedArray(folder / "*.bin", arrays, [None] * len(arrays))
    start, stop = (data.draw(st.integers(-2, len(whole) + 2)) for _ in range(2))
    assert (array[start:stop] == whole[start:stop]).all() and len(array[start:stop]) == len(whole[start:stop])
    place = data.draw(st.integers(-len(whole), len(whole) - 1))
    assert array[place] == whole[place]


def test_one_file_with_the_header_of_llmc(folder):
    file = open_token_file(folder / "s_2.bin")
    assert len(file.tokens) == 70 and file.tokens[0] == open_token_file(folder / "whole.bin").tokens[0]
    short = (folder / "s_2.bin").read_bytes()[:-2]
    (folder / "s_2.bin").write_bytes(short)
    with pytest.raises(InputError, match="counts 70 tokens and holds 69"):
        open_token_file(folder / "s_2.bin")
    (folder / "s_2.bin").write_bytes(short[:4] + b"\2" + short[5:])
    with pytest.raises(InputError, match="header of version 2, and 1 is read"):
        open_token_file(folder / "s_2.bin")


def test_the_manifest_saves_the_second_reading(folder, monkeypatch):
    first = check_token_file(open_token_file(folder / "s_*.bin"), 50257)
    content = json.loads((folder / MANIFEST).read_text())
    sha256 = hashlib.sha256((folder / "s_10.bin").read_bytes()[1024:]).hexdigest()
    assert content["shards"]["s_10.bin"]["sha256"] == sha256 and len(content["shards"]) == 3
    monkeypatch.setattr(shards, "_read_one", None)  # nothing is read again
    assert check_token_file(open_token_file(folder / "s_*.bin"), 50257) == first
    assert scan_token_file(open_token_file(folder / "s_1*.bin")).sha256 != first.sha256


def test_touched_shards_are_read_again_and_others_are_not(folder, monkeypatch):
    file = open_token_file(folder / "s_*.bin")
    file.data_sha256 = check_token_file(file, 50257).data_sha256
    time.sleep(0.02)
    os.utime(folder / "s_2.bin")
    read, real = [], shards._read_one
    monkeypatch.setattr(shards, "_read_one", lambda shard, bar: read.append(shard.path.name) or real(shard, bar))
    assert file.check_unchanged() and read == ["s_2.bin"] and not file.check_unchanged()


def test_a_changed_or_missing_shard_is_a_sentence(folder):
    file = open_token_file(folder / "s_*.bin")
    file.data_sha256 = scan_token_file(file).data_sha256
    time.sleep(0.02)
    write_llmc(folder / "s_10.bin", [1])
    with pytest.raises(InputError, match=r"s_10\.bin holds other tokens than when token_shards\.json was written"):
        scan_token_file(open_token_file(folder / "s_*.bin"))
    with pytest.raises(FileChanged, match=r"s_10\.bin is no longer the file that was opened"):
        file.check_unchanged()
    (folder / "s_10.bin").unlink()
    with pytest.raises(InputError, match=r"s_10\.bin was among the shards .* and is missing; put it back, or delete"):
        scan_token_file(open_token_file(folder / "s_*.bin"))
    (folder / MANIFEST).unlink()
    scan_token_file(open_token_file(folder / "s_*.bin"))
    with (folder / "s_2.bin").open("ab") as shard:
        shard.write(b"xx")
    with pytest.raises(InputError, match=r"s_2\.bin has a header of llm\.c"):
        open_token_file(folder / "s_*.bin")
    with pytest.raises(FileChanged, match=r"s_2\.bin is no longer the file that was opened"):
        file.check_unchanged()


def test_other_tokens_with_the_old_time_are_found(folder):
    """As a copy that keeps times leaves them; a manifest from elsewhere knows nothing of this machine's files."""
    file = open_token_file(folder / "s_*.bin")
    file.data_sha256 = scan_token_file(file).data_sha256
    before = (folder / "s_10.bin").stat()
    time.sleep(0.02)
    with (folder / "s_10.bin").open("r+b") as shard:
        shard.seek(1024)
        shard.write(b"\7\0")
    os.utime(folder / "s_10.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FileChanged, match=r"s_10\.bin"):
        file.check_unchanged()
    with pytest.raises(InputError, match=r"s_10\.bin holds other tokens"):
        scan_token_file(open_token_file(folder / "s_*.bin"))


def test_hidden_files_are_no_shards_and_equal_numbers_have_an_order(folder):
    (folder / "._s_3.bin").write_bytes(b"x")
    write_llmc(folder / "s_02.bin", [7])
    assert open_token_file(folder / "s_2.bin").listing == []
    assert open_token_file(folder / "s_*.bin").listing == ["s_02.bin", "s_2.bin", "s_10.bin", "s_11.bin"]
    assert is_at_hand(folder / "s_*.bin") and is_at_hand(folder / "s_2.bin") and not is_at_hand(folder / "t_*.bin")


@pytest.mark.parametrize("text", ["", '{"format_version": 1, "shards": {"a": {}}}', '{"format_version": 2}'])
def test_a_damaged_manifest_is_a_sentence(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=MANIFEST):
        scan_token_file(open_token_file(folder / "s_*.bin"))


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--train_data_path .* matches no \.bin file"):
        open_token_file(tmp_path / "*.bin")
    with pytest.raises(InputError, match="has a pattern in the name of a folder"):
        open_token_file(tmp_path / "*" / "a.bin")
    write(tmp_path / "a.bin", [[1, 2]])
    write_llmc(tmp_path / "b.bin", [1, 2])
    with pytest.raises(InputError, match=r"a\.bin has vocab_size 300 and b\.bin has 50257"):
        open_token_file(tmp_path / "?.bin")
    (tmp_path / "b.bin").unlink()
    write(tmp_path / "b.bin", [[3], [4]])
    joined = open_token_file(tmp_path / "?.bin")
    assert joined.num_documents == 3 and joined.tokens[:].tolist() == [1, 2, 299, 3, 299, 4, 299]
    check_token_file(joined, 300)
    sidecar = json.loads((tmp_path / "b.json").read_text()) | {"sha256": "0" * 64}
    (tmp_path / "b.json").write_text(json.dumps(sidecar))
    with pytest.raises(InputError, match=r"b\.bin has sha256 .* but its sidecar says 0000"):
        check_token_file(open_token_file(tmp_path / "?.bin"), 300)
    write_pairs(tmp_path / "b.bin")
    with pytest.raises(InputError, match=r"b\.bin is a file of pairs"):
        open_token_file(tmp_path / "?.bin")


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path):
    np.array([1, 2, 3], dtype="<u2").tofile(tmp_path / "a[1].bin")
    assert len(open_token_file(tmp_path / "a[1].bin").tokens) == 3


def test_an_id_beyond_the_vocabulary_is_found_in_its_place(folder):
    write_llmc(folder / "s_2.bin", [1, 2, 3])
    write_llmc(folder / "s_10.bin", [4, 5, 60])
    with pytest.raises(InputError, match=r"s_10.bin holds token id 60 at position 2, but --vocab_size 7 allows"):
        check_token_file(open_token_file(folder / "s_*.bin"), 7)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"]["s_10.bin"]["max_token_id"] = 60_000
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=f"{MANIFEST} names an id that no shard holds; delete it"):
        check_token_file(open_token_file(folder / "s_*.bin"), 50257)


def test_a_rank_that_sees_other_shards_is_refused(folder, monkeypatch):
    """Rank 0 alone reads the tokens; what the others see decides the order of their windows."""
    whole = open_token_file(folder / "s_*.bin")
    checked = SimpleNamespace(train_file=whole, val_file=whole)
    theirs = [(["s_2.bin"], 70), (["s_2.bin"], 70)]
    for other, said in (
        (None, None),
        (theirs, r"rank 1 sees 70 tokens and rank 0 131, and not the same shards \(s_10"),
    ):
        monkeypatch.setattr(process_group, "gather_objects", lambda mine, other=other: [mine, other or mine])
        if said is None:
            check_same_data(checked)
        else:
            with pytest.raises(Refused, match=said):
                check_same_data(checked)


def test_a_shard_that_is_not_its_sidecars_is_not_remembered(tmp_path):
    """Else the shard that is made again would contradict the manifest."""
    write(tmp_path / "a.bin", [[1, 2]])
    sidecar = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(sidecar | {"sha256": "0" * 64}))
    with pytest.raises(InputError, match="but its sidecar says 0000"):
        scan_token_file(open_token_file(tmp_path / "?.bin"))
    assert not (tmp_path / MANIFEST).exists()


def test_ten_billion_tokens_start_within_two_seconds_once_there_is_a_manifest(tmp_path, monkeypatch):
    def unread(shard, _):
        return shards._Entry(len(shard) * 2, shard.look(), "0" * 64, 0)

    sparse_shards.make(tmp_path)
    monkeypatch.setattr(shards, "_read_one", unread)  # 20 GB of holes
    sparse_shards.start(tmp_path)
    monkeypatch.setattr(shards, "_read_one", None)
    assert sparse_shards.start(tmp_path)[1] < 2, "seconds of CPU, as the tests beside it take the clock's"
