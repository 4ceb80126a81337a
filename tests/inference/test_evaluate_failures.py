"""Check what evaluate.py refuses, and what its file says when it ends early."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from support.evaluate_cases import SHAPE, TRAINED, model_of, save_checkpoint
from support.programs import write_token_files

from testbed.data.token_file import TokenFileWriter, open_token_file, scan_token_file
from testbed.inference import evaluation, loading, wrapped
from testbed.inference.evaluation import Evaluation
from testbed.inference.report import read_inference

CHECKPOINT = ("--checkpoint", "run", "--data_path", "data.bin", "--out", "new.json")


REFUSED = {
    "no checkpoint": (("--checkpoint", "nowhere"), "--checkpoint nowhere does not exist (looked for in "),
    "no model": ((), "one of the arguments --checkpoint --from_pretrained is required"),
    "no data": (("--checkpoint", "run", "--data_path", "no.bin"), "--data_path no.bin does not exist"),
    "another vocabulary": (("--checkpoint", "run", "--data_path", "other.bin"), "other.bin is written with bpe:400"),
    "pairs": (("--checkpoint", "run", "--data_path", "pairs.bin"), "pairs.bin is a file of pairs"),
    "unknown scheme": ((*CHECKPOINT, "--quantize", "none,int3"), "'int3' is not one of all, none"),
    "a long window": ((*CHECKPOINT, "--window", "65"), "--window 65 is longer than the 64 positions"),
    "a long stride": ((*CHECKPOINT, "--window", "8", "--stride", "9"), "--stride 9 is longer than the window"),
    "a long prompt": ((*CHECKPOINT, "--prompt_tokens", "60", "--new_tokens", "9"), "more than the 64 positions"),
    "one new token": ((*CHECKPOINT, "--new_tokens", "1"), "nothing to decode"),
    "a negative number": ((*CHECKPOINT, "--max_windows", "-3"), "'-3' is not a whole number from 0 upwards"),
    "no rate": ((*CHECKPOINT, "--load", "--rates", "1,nan"), "'1,nan' is not a list of requests per second"),
    "more at once than may wait": (
        (*CHECKPOINT, "--load", "--concurrency", "1,9", "--max_queue", "8"),
        "--concurrency 9 begins with as many requests at once",
    ),
    "more at once than there are": (
        (*CHECKPOINT, "--load", "--requests", "40", "--concurrency", "1,41"),
        "--requests 40 are too few for --max_batch 8 and --concurrency 41",
    ),
    "fewer requests than fill the batch": (
        (*CHECKPOINT, "--load", "--requests", "31"),
        "they would be over before a queue could grow; give --requests 32",
    ),
    "load of nothing": ((*CHECKPOINT, "--load", "--load_scheme", "bf16"), "--load_scheme bf16 is not among"),
    "a damaged pair": ((*CHECKPOINT, "--bleu", "data.json"), "--bleu data.json line 1"),
    "no pairs": ((*CHECKPOINT, "--bleu", "no.jsonl"), "--bleu no.jsonl cannot be read"),
    "a file without pairs": ((*CHECKPOINT, "--bleu", "empty.jsonl"), "--bleu empty.jsonl holds no pairs"),
    "a long pair": ((*CHECKPOINT, "--bleu", "long.jsonl"), "--bleu long.jsonl: the prompt of pair 2 has"),
    "another tokenizer": (
        ("--from_pretrained", "theirs", "--tokenizer_file", "bpe_290.json", *CHECKPOINT[2:]),
        "data.bin is written with bpe:300 of 300 tokens, but the tokenizer of --from_pretrained theirs is bpe:290",
    ),
    "out is a folder": ((*CHECKPOINT[:-1], "run", "--overwrite"), "--out run is a folder; name a file in it"),
    "no folder": ((*CHECKPOINT[:-1], "no/where.json"), "no is not a folder that can be written into"),
    "nothing to do": (("--checkpoint", "run", "--no-latency", "--out", "new.json"), "nothing is left to measure"),
    "another device": (
        (*CHECKPOINT, "--device", "cuda", "--quantize", "torch_dynamic"),
        "runs on cpu only" if torch.cuda.is_available() else "no CUDA device",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence(evaluate, files, case):
    words, sentence = REFUSED[case]
    code, said, error = evaluate(*words)
    lines = [line for line in error.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1 and sentence in lines[0], (code, said, error)
    assert "Traceback" not in error and not (files / "new.json").exists()


def test_a_scheme_that_does_not_run_here(evaluate, files, monkeypatch):
    """Asked for by name it is refused; under "all" the others are measured and the file says why it is missing."""
    monkeypatch.setattr(torch.ao.quantization, "quantize_dynamic", None)
    words = ("--checkpoint", "run", "--data_path", "data.bin", "--no-latency", "--quick", "--out", "without.json")
    code, _, error = evaluate(*words, "--quantize", "torch_dynamic")
    assert code == 2 and "--quantize torch_dynamic does not run here" in error
    assert not (files / "without.json").exists()
    code, said, _ = evaluate(*words, "--quantize", "all")
    content = read_inference(files / "without.json")
    assert code == 0 and content["status"] == "complete" and "torch_dynamic" in said
    assert "does not run here" in content["schemes"]["torch_dynamic"]["unavailable"]
    assert content["schemes"]["torch_dynamic"]["bytes_in_memory"] is None
    assert content["schemes"]["bf16"]["perplexity"]["value"] > 1


def test_an_earlier_evaluation_is_kept_unless_asked(evaluate, files):
    earlier = files / "earlier.json"
    earlier.write_text("{}")
    words = ("--checkpoint", "run", "--data_path", "data.bin", "--quick", "--no-latency", "--out", earlier)
    code, _, error = evaluate(*words)
    assert code == 2 and "give --overwrite, or to keep both --out" in error and earlier.read_text() == "{}"
    assert evaluate(*words, "--overwrite")[0] == 0
    assert read_inference(earlier)["status"] == "complete"


def test_what_ends_early_says_so_in_the_file(evaluate, files):
    """Weights that are not numbers are refused; weights so large that the losses are none end the evaluation."""
    model = model_of()
    with torch.no_grad():
        model.h["0"].mlp.c_fc.weight[0, 0] = math.nan
    save_checkpoint(files / "diverged", model, files / "bpe_300.json")
    code, _, error = evaluate("--checkpoint", "diverged", "--data_path", "data.bin", "--quick")
    assert code == 2 and "NaN or infinite" in error and "Traceback" not in error
    with torch.no_grad():
        model.h["0"].mlp.c_fc.weight[0, 0] = 3e38
        model.h["0"].mlp.c_proj.weight.fill_(3e38)
    save_checkpoint(files / "diverged", model, files / "bpe_300.json")
    code, _, error = evaluate("--checkpoint", "diverged", "--data_path", "data.bin", "--quick")
    assert code == 1 and "losses are not finite numbers" in error and "Traceback" not in error
    content = json.loads((files / "diverged" / "inference_metrics.json").read_text())
    assert content["status"] == "failed" and "not finite" in content["failure"]


ALL = ("--checkpoint", "run", "--data_path", "data.bin", "--quick")


@pytest.mark.parametrize(
    ("part", "error", "code", "said"),
    [
        ("measure_latency", torch.OutOfMemoryError("CUDA out of memory\nmore of it"), 1, "CUDA out of memory"),
        ("measure_perplexity", ValueError("a bug"), 1, "ValueError: a bug"),
        ("measure_latency", KeyboardInterrupt(), 130, "interrupted"),
        ("measure_latency", SystemExit(143), 143, "interrupted"),
    ],
    ids=["out of memory", "ValueError", "Ctrl-C", "SIGTERM"],
)
def test_whatever_ends_a_part_is_in_the_file_and_no_traceback(evaluate, files, monkeypatch, part, error, code, said):
    def end(*_):
        raise error

    monkeypatch.setattr(Evaluation, part, end)
    out = files / "ended.json"
    found, _, printed = evaluate(*ALL, "--out", out, "--overwrite")
    content = read_inference(out)
    assert found == code and content["status"] == "failed" and said in content["failure"]
    assert content["schemes"]["none"]["bytes_in_memory"] > 0  # what was complete is kept
    assert "Traceback" not in printed and printed.count("error: ") == (code == 1)


def test_a_model_that_does_not_fit_is_one_line(evaluate, files, monkeypatch):
    def load_model(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "load_model", load_model)
    code, _, printed = evaluate(*ALL, "--out", "unfit.json")
    assert code == 1 and printed == "evaluate.py: error: OutOfMemoryError: CUDA out of memory\n"
    assert not (files / "unfit.json").exists()


def test_a_number_that_the_file_may_not_hold_is_said_in_the_file(evaluate, files, monkeypatch):
    real = evaluation.latency_fields
    monkeypatch.setattr(evaluation, "latency_fields", lambda *of: real(*of) | {"decode_tokens_per_s": math.nan})
    code, _, printed = evaluate(*ALL, "--out", "nan.json")
    content = read_inference(files / "nan.json")
    assert code == 1 and "is nan: a number" in printed and "Traceback" not in printed
    assert content["status"] == "failed" and "is nan" in content["failure"]
    assert content["schemes"]["none"]["latency"] is None and content["schemes"]["none"]["perplexity"] is not None


def test_an_earlier_evaluation_outlives_one_that_fails_at_once(evaluate, files, monkeypatch):
    def end(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(Evaluation, "measure_sizes", end)
    earlier = files / "kept.json"
    earlier.write_text("{}")
    code, _, printed = evaluate(*ALL, "--out", earlier, "--overwrite")
    assert code == 1 and "no room" in printed and earlier.read_text() == "{}"
    assert evaluate(*ALL, "--out", "fresh.json")[0] == 1
    assert read_inference(files / "fresh.json")["failure"] == "RuntimeError: no room"


def test_a_training_engine_that_does_not_run_is_a_failure(evaluate, files, monkeypatch):
    """The comparison that was asked for is missing; what init_inference can do depends on the version."""

    def unavailable(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(wrapped, "_training_engine", unavailable)
    monkeypatch.setattr(wrapped, "_init_inference", lambda model, _: model)
    words = (*ALL, "--no-latency", "--wrapped", "--out", "unwrapped.json")
    code, said, printed = evaluate(*words)
    assert code == 1 and "--wrapped: DeepSpeed's training engine does not run here" in printed
    content = read_inference(files / "unwrapped.json")
    assert content["status"] == "complete" and "NOT MEASURED, DeepSpeed's training engine" in said
    assert content["wrapped"]["arms"]["training_engine"]["unavailable"] == "RuntimeError: no compiler"
    monkeypatch.setattr(wrapped, "_training_engine", lambda model, _: model)
    assert evaluate(*words, "--overwrite")[0] == 0


def test_without_a_tokenizer_there_are_no_bits_per_byte(evaluate, tmp_path):
    _, data = write_token_files(tmp_path)
    folder = save_checkpoint(tmp_path / "run", model_of())
    code, said, _ = evaluate("--checkpoint", folder, "--data_path", data, "--quick", "--no-latency")
    content = read_inference(folder)
    assert code == 0 and "no bits per byte" in said
    assert content["data"]["num_bytes"] is None and content["schemes"]["none"]["perplexity"]["bits_per_byte"] is None


def test_a_folder_of_transformers_needs_no_run_around_it(evaluate, files, tmp_path):
    """Only config.json and model.safetensors; without data, prompts are random ids and there is no perplexity."""
    folder = shutil.copytree(files / "theirs", tmp_path / "theirs")
    code, said, error = evaluate("--from_pretrained", folder, "--quick")
    assert "no bits per byte" not in said  # nothing was lost that could have been had
    content = read_inference(folder)
    assert code == 0, error
    assert content["data"] is None and content["schemes"]["none"]["perplexity"] is None
    assert content["schemes"]["none"]["latency"]["repeats"] == 2
    assert content["checkpoint"]["num_parameters"] == SHAPE.num_parameters


def test_without_data_path_the_runs_own_validation_file_is_read(evaluate, files, tmp_path):
    folder = shutil.copytree(files / "run", tmp_path / "run")
    data = str(shutil.copy(files / "data.bin", tmp_path))
    shutil.copy(files / "data.json", tmp_path)
    shutil.copy(files / "bpe_300.json", tmp_path)

    def perplexity(*words: object) -> tuple[str, float | None]:
        code, said, error = evaluate("--checkpoint", folder, "--quick", "--overwrite", *words)
        assert code == 0, error
        found = read_inference(folder)["schemes"]["none"]["perplexity"]
        return said, found and found["value"]

    def record(**changes: dict) -> None:
        config = {"seq_len": TRAINED, "dataset_sha256": {"val": scan_token_file(open_token_file(data)).sha256}}
        content = {"training_config": config, "settings": {"val_data_path": data}}
        for part, changed in changes.items():
            content[part] |= changed
        (folder / "training_metrics.json").write_text(json.dumps(content))

    record()
    said, own = perplexity()
    assert f"data: {data}, the validation file of the run" in said and own == perplexity("--data_path", data)[1]
    assert "no perplexity" not in perplexity("--no-perplexity")[0]
    for changes, reason in (
        ({"training_config": {"dataset_sha256": {"val": "0" * 64}}}, "holds other data now (sha256 "),
        ({"training_config": {"dataset_sha256": None}}, "the run's was not recorded)"),
        ({"settings": {"val_data_path": "gone.bin"}}, "the run's --val_data_path gone.bin does not exist"),
        ({"settings": {"val_data_path": str(files / "pairs.bin")}}, "is a file of pairs"),
        ({"settings": {"val_data_path": None}}, "has no record of a run that names its validation file"),
    ):
        record(**changes)
        said, nothing = perplexity()
        line = next(line for line in said.splitlines() if line.startswith("no perplexity: "))
        assert nothing is None and reason in line and line.endswith("; name a token file with --data_path"), line


@pytest.mark.launches  # the tokenizer is tried in a process of its own
def test_a_tokenizer_whose_tokens_have_no_bytes_gives_no_bits_per_byte(evaluate, files, tmp_path):
    content = json.loads((files / "bpe_300.json").read_text()) | {"decoder": {"type": "Fuse"}}
    (tmp_path / "tokenizer_300.json").write_text(json.dumps(content))
    with TokenFileWriter(tmp_path / "data.bin", 300, "json:300", 299, "tokenizer_300.json") as writer:
        writer.append_document([*range(200)])
    folder = save_checkpoint(tmp_path / "run", model_of(), tmp_path / "tokenizer_300.json")
    config = json.loads((folder / "config.json").read_text()) | {"tokenizer": "json:300"}
    (folder / "config.json").write_text(json.dumps(config))
    code, said, error = evaluate(
        "--checkpoint", folder, "--data_path", tmp_path / "data.bin", "--quick", "--no-latency"
    )
    assert code == 0 and "no bits per byte: a token of json:300 has no bytes of its own" in said, error
    assert read_inference(folder)["schemes"]["none"]["perplexity"]["bits_per_byte"] is None
