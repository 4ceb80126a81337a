"""Every file that a program reads, broken in thousands of ways: read, or refused in one sentence; and left as it is.

A reader is asked for what its program would do with the content, not only whether it can be parsed. The draws are the
same on every machine. training_metrics.json and what the audit reads beside it have a fuzz of their own,
test_metrics_fuzz.py; flags have test_fuzz_command_line.py. No program reads YAML.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support import nsys_examples, scaling_examples
from support.corpus_cases import ALL, Documents
from support.fuzz import Fuzz, Refused, bad_places, draw_many, gpt2_accepts, run_in_process, say_how_many
from support.metrics_examples import example_metrics, save
from support.mutations import broken_bytes, broken_json, broken_words
from support.nsight_cases import chrome_trace, run_folder, text_file
from support.peers_examples import NANOGPT, OURS, THREE, TRAINER, example, one_set
from support.programs import REPOSITORY, SEQUENCE, TINY_RUN, VOCABULARY, write_pair_files, write_token_files
from support.sweep_cases import as_sweep, finish, request

from testbed.analysis.profiles.nsight import read_stats
from testbed.analysis.profiles.nsight_sqlite import read_export
from testbed.analysis.profiles.page import summary_text
from testbed.analysis.profiles.summary import write_summary
from testbed.analysis.profiles.trace_operators import read_operators
from testbed.analysis.runs.verify import as_tsv, verify
from testbed.analysis.scaling.report import report_on_directory
from testbed.checkpoint import writer as checkpoint
from testbed.checkpoint.manifest import write_manifest
from testbed.checkpoint.newest import newest_whole
from testbed.checkpoint.weights import export_weights, read_initial_weights
from testbed.config.initial_shape import shape_of_folder
from testbed.data.corpus import CorpusError, existing_corpus, find_corpus, read_documents, write_corpus
from testbed.data.pairs import read_pairs
from testbed.data.token_file import TokenFileWriter, check_token_file, open_token_file, sidecar_path
from testbed.data.tokenizer import load_tokenizer, train_bpe
from testbed.data.windows import Windows
from testbed.experiments.peers.results_file import peers_table, read_peers, write_peers
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.profiling.trace import TraceUnreadable, read_trace
from testbed.strategies.deepspeed_config import effective_config, sha256_of
from testbed.sweep.state import table, take_over

AT_LEAST = 5000
SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=8, vocab_size=VOCABULARY, max_position_embeddings=64)
TEXT = "Any text at all: naïve, 汉字, 🙂, \x00\x7f\xff and " + " ".join(f"word{number}" for number in range(60))
SCRIPTS = REPOSITORY / "scripts"


@dataclass
class Reader:
    """A file and what reads it.

    Attributes:
        prepare: puts whole files into a folder.
        subject: the one of them that is broken.
        read: does with the folder what the program does.
        number: of draws.
        broken: makes the strategy from the file's whole content.
        errors: what may be raised, with one sentence.
        os_errors: what also may, where something else stands in the file's place; the program says it in a sentence.
        is_named: whether the sentence must name the file; not where its values are held to the rules of flags.
        least_read, least_refused: shares that the fuzz must have, else it tests one line.
    """

    prepare: Callable[[Path], object]
    subject: str
    read: Callable[[Path], object]
    number: int
    broken: Callable[[bytes], Any] = lambda content: broken_json(json.loads(content))
    errors: tuple[type, ...] = (ValueError,)
    os_errors: tuple[type, ...] = ()
    is_named: bool = True
    least_read: float = 0.02
    least_refused: float = 0.1


OS_ERRORS = (FileNotFoundError, IsADirectoryError, OSError)  # what opening a file raises


def data_in(folder: Path) -> list[str]:
    return ["--train_data_path", str(folder / "train.bin"), "--val_data_path", str(folder / "val.bin")]


def tiny_tokens(folder: Path) -> None:
    write_token_files(folder, train_tokens=2000, val_tokens=400)


def tokens_without_sidecar(folder: Path) -> None:
    np.arange(500, dtype="<u2").tofile(folder / "train.bin")


def wide_tokens(folder: Path) -> None:
    """uint32 ids and a sidecar that has no hash, so that other contents are not refused for that."""
    with TokenFileWriter(folder / "train.bin", 70_000, "bpe:70000", 69_999) as writer:
        writer.append_document(np.arange(63) * 1000)
    sidecar = sidecar_path(folder / "train.bin")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "sha256": None}))


def read_tokens(folder: Path) -> None:
    for name in ("train.bin", "val.bin"):
        if os.path.lexists(folder / name):
            file = open_token_file(folder / name, "--train_data_path")
            check_token_file(file, file.vocab_size)


def tiny_pairs(folder: Path) -> None:
    write_pair_files(folder, train_pairs=20, val_pairs=2)


def read_pair_tokens(folder: Path) -> None:
    file = open_token_file(folder / "train_pairs.bin", "--train_data_path")
    check_token_file(file, file.vocab_size)
    windows = Windows(file, SEQUENCE)
    _, is_target = windows.read(range(len(windows)), len(windows))
    assert is_target.sum() == windows.num_target_tokens()


def pairs_of_texts(folder: Path) -> None:
    lines = [{"prompt": "one", "reference": "two \ud83d\ude42"}, {"prompt": "a", "reference": ["b", "c"], "more": [1]}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_all_pairs(folder: Path) -> None:
    for pair in read_pairs(folder / "pairs.jsonl"):
        "".join([pair.prompt, *pair.references]).encode()


def odd_ids(dtype: str, length: int, limits: list[int]) -> Any:
    """Ids of the vocabulary, up to three of them at its end or at the end of the type."""
    places = st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from(limits)), max_size=3)

    def content(odd: list[tuple[int, int]]) -> bytes:
        ids = np.arange(length, dtype=np.int64)
        for place, number in odd:
            ids[place] = number
        return ids.astype(dtype).tobytes()

    return places.map(content)


def config_file(folder: Path) -> None:
    tiny_tokens(folder)
    checked = gpt2_accepts([*TINY_RUN, *data_in(folder), "--optimizer", "muon", "--lr_schedule", "wsd", "--seed", "7"])
    (folder / "run.json").write_text(json.dumps(checked.settings.as_config()))


def deepspeed_file(folder: Path) -> None:
    tiny_tokens(folder)
    content = json.loads((REPOSITORY / "src" / "deepspeed_config.json").read_text())
    content |= {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}
    content["zero_optimization"] = {
        **content.get("zero_optimization", {}), "stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }  # fmt: skip
    content["bf16"], content["fp16"] = {"enabled": "auto"}, {"enabled": False, "loss_scale": 0}
    (folder / "ds.json").write_text(json.dumps(content))


def accept_deepspeed(folder: Path) -> None:
    words = ["--run_type", "optimized", "--deepspeed_config", str(folder / "ds.json"), *TINY_RUN[:-4]]
    checked = gpt2_accepts([*words, *data_in(folder)])
    sha256_of(effective_config(checked.settings))


def weights_folder(folder: Path) -> None:
    tiny_tokens(folder)
    flags = ["--num_layers", "1", "--num_heads", "2", "--embedding_size", "8", "--max_position_embeddings", "64"]
    settings = gpt2_accepts([*flags, "--seq_length", "16", *data_in(folder)]).settings
    export_weights(folder / "start", GPT2(SHAPE).state_dict(), settings, VOCABULARY - 1, f"bpe:{VOCABULARY}")


def accept_weights(folder: Path) -> None:
    words = ["--init_from", str(folder / "start"), "--seq_length", "16", "--checkpoint_path", str(folder / "run")]
    gpt2_accepts([*words, *data_in(folder)])


def load_weights(folder: Path) -> None:
    GPT2(SHAPE).load_state_dict(read_initial_weights(str(folder / "start"), shape_of_folder(folder / "start")))


def broken_safetensors(content: bytes) -> Any:
    """The bytes, or the header's JSON under a length that fits it again, or the length."""
    length = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + length]), content[8 + length :]
    lengths = st.sampled_from([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    return st.one_of(
        broken_bytes(content),
        broken_json(header).map(lambda text: len(text).to_bytes(8, "little") + text + tensors),
        lengths.map(lambda number: number.to_bytes(8, "little") + content[8:]),
    )


def trained_bpe(folder: Path) -> None:
    train_bpe(iter([TEXT]), 300, folder / "bpe_300.json")


def use_bpe(folder: Path) -> None:
    tokenizer = load_tokenizer("bpe:300", folder / "bpe_300.json")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def corpus(folder: Path) -> None:
    write_corpus(Documents(), ALL, folder)


def use_corpus(folder: Path) -> None:
    find_corpus(folder)
    existing_corpus(Documents(), ALL, folder)


def documents(folder: Path) -> None:
    lines = [{"text": "one"}, {"text": "two \ud83d\ude42", "more": [1]}, {"text": ""}, {"text": "three"}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_all_documents(folder: Path) -> None:
    for text in read_documents(find_corpus(folder / "mine.jsonl").documents):
        text.encode()


ASKED = request(repeats=1)


def planned_sweep(folder: Path) -> None:
    sweep = as_sweep(ASKED)
    sweep.write(folder)
    finish(next(cell for cell in sweep.cells if cell.status == "pending"), folder, num_steps=3, warmup_steps=1)


def go_on_with_sweep(folder: Path) -> None:
    sweep = as_sweep(ASKED)
    take_over(sweep, folder, allow_mismatch=False)
    table(sweep.cells, folder)


def analysed_sweep(folder: Path) -> None:
    cells = [
        {"name": f"{name}_1", "variant": name, "run_type": name, "ranks": 2, "batch_size": 8, "repeat": 1, "seed": 1,
         "folder": f"{name}_1/run_1", "command": ["python", "src/gpt2.py", "--run_type", name], "status": "complete",
         "reason": None, "seconds": 9.0, "profiled": False}
        for name in ("ddp", "fsdp")
    ]  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps({"schema": 1, "protocol": "strong", "cells": cells}))
    save(folder / "ddp_1" / "run_1", example_metrics(num_steps=3, warmup_steps=1))


def analyse_sweep(folder: Path) -> None:
    as_tsv(verify(folder))
    json.dumps(report_on_directory(folder))


def launcher_file(folder: Path) -> None:
    analysed_sweep(folder)
    content = {"world_size": 2, "nccl_env": {"NCCL_DEBUG": "INFO"}, "hosts": "a\nb", "slurm": {"job_id": "7"}}
    (folder / "ddp_1" / "run_1" / "launcher_metadata.json").write_text(json.dumps(content))
    (folder / "ddp_1" / "run_1" / "RUN_COMPLETE.txt").write_text(
        "[Rank 0] RUN_COMPLETE checkpoint_path=x world_size=2 tokens_per_sec=2560.00 total_wall_time_sec=5.00"
    )


def read_launcher(folder: Path) -> None:
    as_tsv(verify(folder))


def profiled_run(folder: Path) -> None:
    metrics = example_metrics(num_steps=3, warmup_steps=1)
    run_folder(folder, text=nsys_examples.stats_text("us"), metrics=metrics)
    (folder / "launcher_metadata.json").write_text(
        json.dumps({"world_size": 2, "nccl_env": {"NCCL_DEBUG": "INFO"}, "hosts": "a\nb", "slurm": {"job_id": "7"}})
    )


def profile_summary(folder: Path) -> None:
    for name in ("a", "b"):
        run_folder(folder / name, text=nsys_examples.stats_text("us"), metrics=example_metrics(num_steps=3))
        write_summary(folder / name)


def summarise_profile(folder: Path) -> None:
    """As scripts/profiling/parse_nsys_stats.py does; what it writes goes again."""
    path = folder / "profiles" / "profile_summary.json"
    try:
        _, summary = write_summary(folder)
        summary_text(summary, 5)
        json.loads(path.read_text(encoding="utf-8"))
    finally:
        path.unlink(missing_ok=True)


def scaling_report(folder: Path) -> None:
    runs = folder.parent / f"runs_of_{folder.name}"
    for run_type, ranks, rate in (("baseline", 1, 1000.0), ("ddp", 1, 950.0), ("ddp", 2, 1800.0)):
        scaling_examples.write_arm(runs, run_type, ranks, rate, n=2, num_steps=6, warmup_steps=1)
    (folder / "scaling_report.json").write_text(json.dumps(scaling_examples.report_of(runs, directory=runs)))
    shutil.rmtree(runs)


def show_scaling_report(folder: Path) -> None:
    path = folder / "scaling_report.json"
    layout = hashlib.sha256(path.read_bytes()).digest()[0] % 5 if path.is_file() else 0
    more = [] if layout == 0 else ["--table", f"00{layout}"]
    run_in_process(SCRIPTS / "generate_scaling_table.py", "--report", path, *more)


def peers_file(folder: Path) -> None:
    write_peers(folder / "peers.json", example(THREE, one_set(OURS, TRAINER, NANOGPT)))


def trials_file(folder: Path) -> None:
    run = {
        "precision": "fp32",
        "pairs": [[0.5, 0.6], [0.5, 0.55]],
        "matrix_flops_per_s": 2e11,
        "copy_bytes_per_s": 1e10,
    }
    trial = {"what": "w", "predicted": "p", "kept": "no", "not_measured": None, "repeats": [run] * 5}
    content = {
        "schema": 2, "precision": "fp32", "causal_flops_per_step": 10**11, "palm_flops_per_step": 11 * 10**10,
        "least_bytes_per_step": 10**9, "trials": {"a": trial, "b": {**trial, "not_measured": "why", "repeats": []}},
    }  # fmt: skip
    (folder / "trials.json").write_text(json.dumps(content))


def trace_file(folder: Path) -> None:
    chrome_trace(folder, distributedInfo={"rank": 0, "world_size": 2})


def gzipped_trace(folder: Path) -> None:
    plain = chrome_trace(folder)
    plain.with_name("rank0.pt.trace.json.gz").write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()


def attribute_trace(name: str, folder: Path) -> None:
    read_trace(folder / "profiler_logs" / name)
    read_operators(folder / "profiler_logs" / name)


def benchmark_folder(folder: Path) -> None:
    rows = ["corpus\tok\t3\t0\t\tpython x", "agree\tfailed\t7\t1\tit broke\tpython y", "peers\tlate\t0\t-\t\tpython z"]
    (folder / "steps.tsv").write_text("\n".join(rows) + "\n")
    (folder / "checks.tsv").write_text("a\tb\t1e-3\n")
    (folder / "matrix_rate.json").write_text(json.dumps({"fp32": {"flops_per_s": 2e11, "source": "measured"}}))
    for name in ("a", "b"):
        save(folder / "runs" / name, example_metrics(num_steps=3, warmup_steps=1))


def summarise_benchmark(folder: Path) -> None:
    try:
        words = ["--device", "cpu", "--seconds", "9", "--deadline_s", "10"]
        run_in_process(SCRIPTS / "summarise_benchmark.py", folder, *words)
    finally:
        (folder / "summary.json").unlink(missing_ok=True)


def checkpoint_folder(folder: Path) -> None:
    directory = folder / "checkpoints" / "step_000020"
    directory.mkdir(parents=True)
    content = {
        "step": 20, "elapsed_s": 1.5, "useful_wall_s": 1.5, "world_size": 2, "run_type": "ddp", "mesh": {"data": 2},
        "settings": {"seed": 1, "run_type": "ddp"},
    }  # fmt: skip
    (directory / checkpoint.DESCRIPTION).write_text(json.dumps(content))
    (directory / "weights.bin").write_bytes(b"weights" * 10)
    write_manifest(directory)


def look_at_checkpoint(folder: Path) -> None:
    """As --resume auto does. A checkpoint that is skipped is refused, with the reason."""
    _, skipped = newest_whole(folder)
    if skipped:
        raise ValueError(f"{next(iter(skipped))}: {next(iter(skipped.values()))}")


def describe_checkpoint(folder: Path) -> None:
    checkpoint.read_description(folder / "checkpoints" / "step_000020")


in_bytes = broken_bytes


def both(content: bytes) -> Any:
    return st.one_of(broken_words(content), broken_bytes(content))


READERS = {
    "sidecar of a token file": Reader(tiny_tokens, "train.json", read_tokens, 400),
    "token file": Reader(tiny_tokens, "train.bin", read_tokens, 100, in_bytes, least_read=0),
    "token file without a sidecar": Reader(
        tokens_without_sidecar, "train.bin", read_tokens, 200,
        lambda content: st.one_of(broken_bytes(content), odd_ids("<u2", 60, [50_256, 50_257, 65_535])),
    ),
    "token file of 32-bit ids": Reader(
        wide_tokens, "train.bin", read_tokens, 100,
        lambda content: odd_ids("<u4", 64, [69_999, 70_000, 2**31, 2**32 - 1]),
    ),
    "sidecar of pairs": Reader(tiny_pairs, "train_pairs.json", read_pair_tokens, 200, is_named=False),
    "targets of pairs": Reader(tiny_pairs, "train_pairs.targets.bin", read_pair_tokens, 60, in_bytes, least_read=0),
    "pairs": Reader(pairs_of_texts, "pairs.jsonl", read_all_pairs, 200, both),
    "--config": Reader(
        config_file, "run.json", lambda folder: gpt2_accepts(["--config", str(folder / "run.json")]), 400,
        errors=(Refused,), is_named=False,
    ),
    "--deepspeed_config": Reader(deepspeed_file, "ds.json", accept_deepspeed, 350, errors=(Refused,), is_named=False),
    "config.json of --init_from": Reader(
        weights_folder, "start/config.json", accept_weights, 250, errors=(Refused,), is_named=False
    ),
    "model.safetensors of --init_from": Reader(
        weights_folder, "start/model.safetensors", load_weights, 200, broken_safetensors
    ),
    "tokenizer": Reader(trained_bpe, "bpe_300.json", use_bpe, 300),
    "manifest of a corpus": Reader(corpus, "manifest.json", use_corpus, 200, errors=(CorpusError, ValueError),
                                   os_errors=OS_ERRORS, is_named=False),
    "documents": Reader(documents, "mine.jsonl", read_all_documents, 300, both,
                        errors=(CorpusError, ValueError), os_errors=OS_ERRORS),
    "sweep.json of a sweep that goes on": Reader(planned_sweep, "sweep.json", go_on_with_sweep, 200, is_named=False),
    "sweep.json that is analysed": Reader(analysed_sweep, "sweep.json", analyse_sweep, 120, is_named=False),
    "launcher_metadata.json": Reader(
        launcher_file, "ddp_1/run_1/launcher_metadata.json", read_launcher, 150, least_refused=0
    ),
    "RUN_COMPLETE.txt": Reader(
        launcher_file, "ddp_1/run_1/RUN_COMPLETE.txt", read_launcher, 100, both, least_refused=0
    ),
    "launcher_metadata.json of a profile": Reader(
        profiled_run, "launcher_metadata.json", summarise_profile, 150, is_named=False
    ),
    "scaling_report.json": Reader(
        scaling_report, "scaling_report.json", show_scaling_report, 200, errors=(Refused,)
    ),
    "peers.json": Reader(
        peers_file, "peers.json", lambda folder: peers_table(read_peers(folder / "peers.json")).encode(), 200
    ),
    "trials.json": Reader(
        trials_file, "trials.json",
        lambda folder: run_in_process(SCRIPTS / "measure_trials.py", "--table", folder / "trials.json"), 200,
        errors=(Refused,),
    ),
    "trace of torch.profiler": Reader(
        trace_file, "profiler_logs/rank0.pt.trace.json", partial(attribute_trace, "rank0.pt.trace.json"), 300,
        errors=(TraceUnreadable, ValueError),
    ),
    "trace of torch.profiler, gzip": Reader(
        gzipped_trace, "profiler_logs/rank0.pt.trace.json.gz", partial(attribute_trace, "rank0.pt.trace.json.gz"), 100,
        in_bytes, errors=(TraceUnreadable, ValueError), least_read=0,
    ),
    "text of nsys stats": Reader(
        lambda folder: text_file(folder, nsys_examples.stats_text("indian")), "nsys_stats_node0.txt",
        lambda folder: read_stats(folder / "nsys_stats_node0.txt"), 300, both, os_errors=OS_ERRORS, least_read=0,
    ),
    "CSV of nsys stats": Reader(
        lambda folder: text_file(folder, nsys_csv(), "nsys_17_node0_nvtx_sum.csv"), "nsys_17_node0_nvtx_sum.csv",
        lambda folder: read_stats(folder / "nsys_17_node0_nvtx_sum.csv"), 200, both, os_errors=OS_ERRORS, least_read=0,
    ),
    "SQLite export of nsys": Reader(
        lambda folder: nsys_examples.write_sqlite(folder / "nsys_17_node0.sqlite"), "nsys_17_node0.sqlite",
        lambda folder: read_export(folder / "nsys_17_node0.sqlite"), 150, in_bytes,
    ),
    "profile_summary.json": Reader(
        profile_summary, "a/profiles/profile_summary.json",
        lambda folder: run_in_process(SCRIPTS / "profiling" / "diff_profiles.py", folder / "a", folder / "b"), 200,
        errors=(Refused,), is_named=False,
    ),
    "steps.tsv of a benchmark": Reader(
        benchmark_folder, "steps.tsv", summarise_benchmark, 60, both, errors=(Refused,), least_read=0
    ),
    "checks.tsv of a benchmark": Reader(
        benchmark_folder, "checks.tsv", summarise_benchmark, 60, both, errors=(Refused,), least_read=0
    ),
    "matrix_rate.json of a benchmark": Reader(
        benchmark_folder, "matrix_rate.json", summarise_benchmark, 60, errors=(Refused,)
    ),
    "manifest.json of a checkpoint": Reader(
        checkpoint_folder, "checkpoints/step_000020/manifest.json", look_at_checkpoint, 200, is_named=False
    ),
    "checkpoint.json of a checkpoint": Reader(
        checkpoint_folder, "checkpoints/step_000020/checkpoint.json", describe_checkpoint, 200
    ),
}  # fmt: skip


def nsys_csv() -> str:
    name = ":train/step"
    header = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range"
    rows = [f"75.0,300,3,100.0,100.0,90,110,10.0,PushPop,{name}", '25.0,100,1,100.0,100.0,100,100,0.0,PushPop,":a,b"']
    return "\n".join([header, *rows]) + "\n"


@pytest.mark.parametrize("name", READERS)
def test_no_file_breaks_its_reader(tmp_path, name):
    reader = READERS[name]
    folder = tmp_path / "files"
    folder.mkdir()
    reader.prepare(folder)
    subject = folder / reader.subject
    whole = subject.read_bytes()
    reader.read(folder)  # the whole file is read
    fuzz = Fuzz(name, folder, subject.name if reader.is_named else None)

    def one_file(content: bytes) -> None:
        subject.write_bytes(content)
        fuzz.case(lambda: reader.read(folder), lambda: repr(content), reader.errors)

    draw_many(reader.broken(whole), reader.number, one_file)
    told_by_program = reader.errors + reader.os_errors
    for place, put in bad_places(folder):
        remove(subject)
        put(subject)
        fuzz.case(lambda: reader.read(folder), lambda place=place: place, told_by_program)
    fuzz.check(reader.least_read, reader.least_refused)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def test_no_value_in_an_export_of_nsys_breaks_its_reader(tmp_path):
    """A column of SQLite holds values of any type, whatever its name says."""
    path = nsys_examples.write_sqlite(tmp_path / "nsys_17_node0.sqlite")
    whole = path.read_bytes()
    with sqlite3.connect(path) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        places = [
            (table, row[1]) for table in tables for row in database.execute(f"PRAGMA table_info({table})").fetchall()
        ]
    values = st.sampled_from([None, -1, 0, 2**62, -(2**63), 0.5, 1e300, float("inf"), "", "text", "a\nb", b"\xff\x00"])
    change = st.tuples(st.sampled_from(places), values, st.integers(0, 3))
    fuzz = Fuzz("values in an SQLite export of nsys", tmp_path, path.name)

    def one_change(changes: list) -> None:
        path.write_bytes(whole)
        database = sqlite3.connect(path)
        for (name, column), value, row in changes:
            where = f"WHERE rowid = (SELECT rowid FROM {name} LIMIT 1 OFFSET {row})" if row else ""
            with contextlib.suppress(sqlite3.Error):  # a key keeps its type
                database.execute(f'UPDATE {name} SET "{column}" = ? {where}', (value,))
        database.commit()
        database.close()
        fuzz.case(lambda: read_export(path), lambda: repr(changes), (ValueError,))

    draw_many(st.lists(change, min_size=1, max_size=2), 150, one_change)
    fuzz.check(least_read=0.1, least_refused=0.1)


def test_a_damaged_note_of_an_interrupted_download_never_spoils_the_corpus(tmp_path):
    """partial.json says where to go on. Whatever it says, the corpus is the whole one, or the download begins anew."""
    write_corpus(Documents(), ALL, tmp_path / "whole")
    wanted = (tmp_path / "whole" / "documents.jsonl").read_bytes()
    lines = wanted.splitlines(keepends=True)
    folder = tmp_path / "five"
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    identity = {name: manifest[name] for name in ("source", "config", "split", "revision", "limits")}
    note = {"identity": {**identity, "text_field": None}, "position": {"stream": 2}, "documents": 2, "text_bytes": 11}
    note["bytes"] = len(lines[0] + lines[1])
    note["sha256"] = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
    fuzz = Fuzz("partial.json of a download")
    started_at = []

    def one_note(content: bytes) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "documents.jsonl.partial").write_bytes(lines[0] + lines[1] + b"half a li")
        (folder / "partial.json").write_bytes(content)

        def download() -> None:
            source = Documents()
            write_corpus(source, ALL, folder)
            assert (folder / "documents.jsonl").read_bytes() == wanted, "the corpus is spoilt"
            started_at.append(source.first)

        fuzz.case(download, lambda: repr(content), (CorpusError, ValueError))

    draw_many(broken_json(note), 150, one_note)
    fuzz.check(least_read=1.0)
    assert set(started_at) == {0, 2}


def test_so_many_cases_were_run(capsys):
    names = [*READERS, "values in an SQLite export of nsys", "partial.json of a download"]
    say_how_many(capsys, names, AT_LEAST)
