"""Text out of a folder: what a run leaves is all that is needed, it streams, and what was typed wrong is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from support.characters import write_characters
from support.data_fixtures import gpt2_cache, random_unicode
from support.programs import (
    PROGRAM,
    REPOSITORY,
    TINY_MODEL,
    TINY_RUN,
    data_flags,
    python_command,
    run_here,
    run_program,
    script,
)

from testbed.checkpoint.weights import write_weights
from testbed.data.characters import tokenizer_json
from testbed.data.pairs import encode_prompt
from testbed.data.token_file import TokenFileWriter
from testbed.data.tokenizer import gpt2_cache_name, load_gpt2_tokenizer
from testbed.data.tokenizer_file import load_tokenizer_file, tokenizer_file_name, train_bpe
from testbed.inference import load_model
from testbed.inference.loading import tokenizer_of
from testbed.inference.sample import text_of
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

SAMPLE = REPOSITORY / "scripts" / "sample.py"
TEXT = (
    "def main(arguments):\n    return [argument for argument in arguments if argument]\n" * 40 + "Grüße, 世界 😀\n" * 40
)
BPE_SIZE = 280  # characters outside ASCII stay in several tokens
BPE_FILE = tokenizer_file_name(f"bpe:{BPE_SIZE}")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with a BPE and token files made with it."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_bpe(iter([TEXT]), BPE_SIZE, folder / BPE_FILE)
    for name in ("train", "val"):
        end = tokenizer.end_of_text_id
        with TokenFileWriter(folder / f"{name}.bin", BPE_SIZE, f"bpe:{BPE_SIZE}", end, BPE_FILE) as file:
            file.append_document(tokenizer.encode(TEXT))
    return folder


def exported(folder: Path, data: Path | None, positions: int = 64, vocab_size: int = BPE_SIZE, **named) -> Path:
    """A folder as a run leaves it, with random weights."""
    torch.manual_seed(1)
    shape = ModelShape(
        num_layers=2, num_heads=2, embedding_size=32, vocab_size=vocab_size, max_position_embeddings=positions
    )
    model = GPT2(shape)
    file = None if data is None else (data / BPE_FILE).read_text()
    end, tokenizer = named.get("end_of_text_id", BPE_SIZE - 1), named.get("tokenizer", f"bpe:{BPE_SIZE}")
    write_weights(folder, model.state_dict(), shape, 0.0, end, tokenizer, file)
    return folder


def write_always(folder: Path, token: int) -> None:
    """Change the weights so that this token follows whatever came before."""
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.weight"].zero_()
    weights["transformer.ln_f.bias"].copy_(weights["transformer.wte.weight"][token] * 1e4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("checkpoint"), data)


@pytest.fixture(scope="module")
def sample_program():
    """scripts/sample.py as a module, to be called without a start of its own."""
    return script("sample.py")


@pytest.fixture
def run_sample(sample_program, monkeypatch, capfd):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, words)])
        try:
            code = sample_program.main()
        except SystemExit as ended:  # a mistake that the parser sees
            code = ended.code
        return code, *capfd.readouterr()

    return run


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_leaves_a_folder_that_can_write(data, tmp_path):
    """gpt2.py with a BPE of its own, in whose place another corpus's of the same size is put while it trains; the run's
    folder continues a prompt with the one that its ids belong to."""
    shutil.copytree(data, files := tmp_path / "data")
    train_bpe(iter([TEXT[::-1]]), BPE_SIZE, other := tmp_path / "other.json")
    run = tmp_path / "run"
    flags = f"--train_data_path {files}/train.bin --val_data_path {files}/val.bin --checkpoint_path {run} "
    flags += "--seq_length 32 --device cpu --global_batch_size 4 --max_train_steps 40 --timing_warmup_steps 1 "
    flags += "--steps_per_print 1 --epochs 15 --max_val_steps 1 --sample_prompt"
    command = [sys.executable, str(PROGRAM), *TINY_MODEL, *flags.split(), "def main"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        said = []
        for line in program.stdout:
            said.append(line)
            if line.startswith("step "):
                break
        other.replace(files / BPE_FILE)
        said += program.stdout
    assert program.returncode == 0, "".join(said)
    assert (files / BPE_FILE).read_bytes() != (data / BPE_FILE).read_bytes()
    assert (run / "tokenizer.json").read_bytes() == (data / BPE_FILE).read_bytes()
    sample = json.loads((run / "training_metrics.json").read_text())["sample"]
    prompt = load_tokenizer_file(run / "tokenizer.json").encode("def main")
    assert sample["num_tokens"] == 64 - len(prompt), "--sample_tokens 64 ends where the positions do"
    flags = ["--prompt", "def main", "--seed", "42", "--device", "cpu"]
    again = run_program([sys.executable, str(SAMPLE), "--checkpoint", str(run), *flags])
    assert again.returncode == 0, again.stderr
    # the same weights, settings and seed: the sample of the run, up to an end-of-text
    expected = ("def main" + sample["text"]).replace("\r\n", "\n").replace("\r", "\n")  # as a pipe is read
    assert again.stdout.startswith("def main") and expected.startswith(again.stdout.removesuffix("\n"))
    assert " tokens; the first after " in again.stderr


def test_several_texts_are_those_of_their_seeds(run_sample, checkpoint):
    words = ["--checkpoint", checkpoint, "--prompt", "def main", "--max_new_tokens", 20, "--device", "cpu"]
    alone = [run_sample(*words, "--seed", seed)[1] for seed in range(5, 14)]  # more than one batch
    assert len(set(alone)) == len(alone)
    code, text, said = run_sample(*words, "--seed", 5, "--num_samples", 9)
    assert code == 0 and said.startswith("[9 texts, 1"), said
    assert text == "".join(f"--- {place} of 9, seed {place + 4}\n{each}" for place, each in enumerate(alone, start=1))
    code, text, said = run_sample(*words, "--num_samples", 2, "--temperature", 0)
    assert (code, text) == (2, "") and "raise --temperature" in said
    assert run_sample(*words, "--num_samples", 0)[0] == 2


def test_a_model_of_characters_is_asked_in_its_own(run_sample, tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    folder.mkdir()
    write_characters(data, TEXT)
    number = len(set(TEXT))
    exported(folder, None, vocab_size=number, tokenizer=f"char:{number}", end_of_text_id=None)
    write_always(folder, sorted(set(TEXT)).index("世"))
    words = ["--checkpoint", folder, "--max_new_tokens", 5, "--temperature", 0, "--device", "cpu"]
    code, _, said = run_sample(*words, "--prompt", "def")
    assert code == 2 and f"reads ids of char:{number}" in said
    code, text, said = run_sample(*words, "--prompt", "def", "--tokenizer_file", data / "meta.pkl")
    assert (code, text) == (0, "def世世世世世\n"), said
    (folder / "tokenizer.json").write_bytes(tokenizer_json(data / "meta.pkl"))
    assert run_sample(*words, "--prompt", "def")[:2] == (0, text)
    code, _, said = run_sample(*words, "--prompt", "Q")
    assert code == 2 and said.startswith("sample.py: error: --prompt: 'Q' is none of the")


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_that_was_stopped_is_sampled_from_its_newest_checkpoint(data, run_sample, tmp_path):
    run = tmp_path / "run"
    flags = [*TINY_RUN, *data_flags((data / "train.bin", data / "val.bin")), "--global_batch_size", "4"]
    flags += [
        "--max_train_steps",
        "100000",
        "--steps_per_print",
        "1",
        "--save_every",
        "5",
        "--checkpoint_path",
        str(run),
    ]
    with subprocess.Popen([*python_command(), *flags], stdout=subprocess.PIPE, text=True) as program:
        for line in program.stdout:
            if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= 7:
                program.send_signal(signal.SIGTERM)
                break
        program.stdout.read()
    newest = max((run / "checkpoints").iterdir())
    step = json.loads((newest / "checkpoint.json").read_text())["step"]
    assert not (run / "model.safetensors").exists() and step >= 7
    words = ["--prompt", "def main", "--temperature", 0, "--device", "cpu", "--max_new_tokens", 8]
    code, text, said = run_sample("--checkpoint", run, *words)
    assert code == 0 and text.startswith("def main"), said
    assert f"note: {run} has not ended, so its newest checkpoint is taken, {newest}: " in said
    assert f"the weights are those of step {step}\n" in said
    exported_by_hand = tmp_path / "weights"
    assert run_here("scripts/convert_checkpoint.py", "--from", run, "--to", exported_by_hand).returncode == 0
    assert run_sample("--checkpoint", exported_by_hand, *words)[:2] == (0, text)
    older = run / "checkpoints" / "step_000005"
    code, _, said = run_sample("--checkpoint", older, *words)
    assert code == 0 and f"note: {older} is a checkpoint: the weights are those of step 5" in said
    next(newest.glob("*.distcp")).write_bytes(b"damaged")
    code, text, said = run_sample("--checkpoint", run, *words)
    assert (code, text) == (2, "") and "is damaged" in said and "name another checkpoint of the run" in said


def test_a_folder_opens_as_it_was_saved(checkpoint, data):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    model, tokenizer = load_model(checkpoint), tokenizer_of(checkpoint)
    assert not model.training and tokenizer.name == f"bpe:{BPE_SIZE}"
    text = "def 世界(arguments): 😀 Grüße\n\n  return"
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        expected = GPT2LMHeadModel.from_pretrained(checkpoint).eval()(ids).logits
        assert torch.allclose(model(ids), expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"] == ids[0].tolist()
    assert load_model(checkpoint, dtype=torch.bfloat16).wte.weight.dtype == torch.bfloat16
    assert tokenizer_of(checkpoint, data / BPE_FILE).encode(text) == ids[0].tolist()


def test_gpt2s_own_tokenizer_is_taken_from_the_cache_or_from_its_file(tmp_path, monkeypatch):
    cache = gpt2_cache(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    folder = exported(tmp_path / "run", None, vocab_size=50257, tokenizer="gpt2", end_of_text_id=50256)
    text = random_unicode(1, 300) + " words, 123 numbers"
    expected = load_gpt2_tokenizer().encode(text)
    assert tokenizer_of(folder).encode(text) == expected
    vocabulary = json.loads((cache / gpt2_cache_name("encoder.json")).read_text())
    _, *merges = (cache / gpt2_cache_name("vocab.bpe")).read_text().splitlines()
    published = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [tuple(merge.split()) for merge in merges]))
    published.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    published.add_special_tokens(["<|endoftext|>"])
    published.save(str(folder / "tokenizer.json"))  # as transformers saves it beside the weights
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    assert tokenizer_of(folder).encode(text) == expected == published.encode(text).ids


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_text_are_whole_characters_come_at_once_and_are_the_text(data, seed):
    tokenizer = load_tokenizer_file(data / BPE_FILE)
    text = "x" + random_unicode(seed, 300).replace("\ufffd", "?")
    ids, given = tokenizer.encode(text), []
    pieces = text_of((given.append(token) or token for token in ids), tokenizer)
    first = next(pieces)
    assert first == tokenizer.decode(given) and len(given) == 1
    pieces = [first, *pieces]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert any(tokenizer.decode([token]) == "\ufffd" for token in ids), "some tokens end inside a character"
    cut = [*ids[3:-1], BPE_SIZE + 5]  # begins and ends anywhere; an id that the tokenizer lacks
    assert "".join(text_of(cut, tokenizer)) == tokenizer.decode(cut[:-1])


def test_the_program_writes_what_the_flags_ask_for(run_sample, checkpoint):
    same = ("--checkpoint", checkpoint, "--prompt", "def main", "--device", "cpu", "--max_new_tokens", "20")
    code, text, said = run_sample(*same, "--seed", "5")
    assert code == 0 and text.startswith("def main") and text.endswith("\n")
    assert said.startswith("[") and " + 20 tokens; the first after " in said and "tokens/s]" in said
    assert run_sample(*same, "--seed", "5")[1] == text
    assert run_sample(*same, "--seed", "6")[1] != text
    greedy = run_sample(*same, "--temperature", "0", "--seed", "1")[1]
    assert run_sample(*same, "--temperature", "0", "--seed", "2")[1] == greedy
    assert run_sample(*same, "--top_k", "1")[1] == greedy
    assert run_sample(*same, "--top_k", "0", "--top_p", "1e-6")[1] == greedy
    assert run_sample("--from_pretrained", *same[1:], "--temperature", "0")[1] == greedy


def test_a_pair_is_asked_as_it_was_taught(run_sample, checkpoint, sample_program, monkeypatch):
    asked = []

    def no_tokens(_, prompt, *__, **___):
        asked.append(prompt)
        return iter([1])

    tokenizer = tokenizer_of(checkpoint)
    monkeypatch.setattr("testbed.inference.generate.stream", no_tokens)
    code, text, said = run_sample("--checkpoint", checkpoint, "--prompt", "def ", "--pair", "--device", "cpu")
    assert code == 0 and text == "def \n" + tokenizer.decode([1]) + "\n", said
    assert asked == [encode_prompt(tokenizer, "def ")] and asked[0][-1:] == tokenizer.encode("\n")


def test_out_of_memory_is_one_sentence(run_sample, checkpoint, sample_program, monkeypatch):
    words = ("--checkpoint", checkpoint, "--prompt", "def", "--device", "cpu")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ):
        monkeypatch.setattr(sample_program, "load_model", Mock(side_effect=error))
        code, text, said = run_sample(*words)
        assert (code, text, said.count("\n")) == (1, "", 1) and said.startswith("sample.py: error: out of memory")
    monkeypatch.setattr(sample_program, "load_model", Mock(side_effect=RuntimeError("sizes do not match")))
    with pytest.raises(RuntimeError, match="sizes do not match"):
        run_sample(*words)


def test_a_text_ends_at_end_of_text_which_is_not_shown(run_sample, tmp_path, data):
    folder = exported(tmp_path / "run", data)
    write_always(folder, BPE_SIZE - 1)
    code, text, said = run_sample("--checkpoint", folder, "--prompt", "def", "--temperature", "0", "--device", "cpu")
    assert (code, text) == (0, "def\n") and " + 1 tokens" in said


def bad_folders(root: Path, data: Path) -> dict[str, Path]:
    folders = {"good": exported(root / "good", data), "no tokenizer": exported(root / "alone", None)}
    folders["nothing"] = root / "nothing"
    for name, old, new in (
        ("another vocabulary", '"vocab_size": 280', '"vocab_size": 281'),
        ("heads", '"n_head": 2', '"n_head": 3'),
        ("enormous", '"n_layer": 2', '"n_layer": 2000000'),
        ("no GPT-2", '"model_type": "gpt2"', '"model_type": "llama"'),
    ):
        folders[name] = exported(root / name, data)
        config = folders[name] / "config.json"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
    folders["cut"] = exported(root / "cut", data)
    weights = folders["cut"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    folders["damaged tokenizer"] = exported(root / "damaged", data)
    (folders["damaged tokenizer"] / "tokenizer.json").write_text("{}")
    return folders


@pytest.mark.launches
def test_what_was_typed_wrong_is_said_in_a_sentence(run_sample, tmp_path, data):
    folders = bad_folders(tmp_path, data)
    other = tmp_path / tokenizer_file_name("bpe:270")
    train_bpe(iter([TEXT]), 270, other)
    same_size = tmp_path / BPE_FILE
    train_bpe(iter([TEXT[::-1]]), BPE_SIZE, same_size)
    good = ["--checkpoint", folders["good"]]
    prompt = ["--prompt", "def"]
    cases = [
        ([*good, "--prompt", ""], "--prompt is empty"),
        ([*good, "--pair"], "--pair asks in the form of a pair"),
        ([*good, "--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        ([*good, *prompt, "--max_new_tokens", 64], "--max_new_tokens 64 must be from 1 to "),
        ([*good, *prompt, "--max_new_tokens", 0], "--max_new_tokens: '0' is not a positive whole number"),
        ([*good, *prompt, "--temperature", -1], "--temperature -1.0 must be 0"),
        ([*good, *prompt, "--temperature", "nan"], "--temperature nan must be 0"),
        ([*good, *prompt, "--top_k", -1], "--top_k: '-1' is not a whole number from 0 upwards"),
        ([*good, *prompt, "--top_p", 0], "--top_p 0.0 must be above 0"),
        ([*good, *prompt, "--tokenizer_file", other], "reads ids of bpe:280, but the tokenizer file"),
        (
            [*good, *prompt, "--tokenizer_file", same_size],
            "reads ids of its own tokenizer.json, but the tokenizer file",
        ),
        ([*good, *prompt, "--tokenizer_file", tmp_path / "none.json"], "none.json cannot be read"),
        (["--checkpoint", folders["nothing"], *prompt], "nothing does not exist (looked for in "),
        (["--checkpoint", folders["no tokenizer"], *prompt], "has no tokenizer.json"),
        (["--checkpoint", folders["another vocabulary"], *prompt], "the weight wte.weight is (280, 32)"),
        (["--checkpoint", folders["heads"], *prompt], "sizes of a GPT-2 that can be: n_layer=2, n_head=3, n_embd=32"),
        (["--checkpoint", folders["enormous"], *prompt], "too few for the"),
        (["--checkpoint", folders["no GPT-2"], *prompt], "its model_type is 'llama', not gpt2"),
        (["--checkpoint", folders["cut"], *prompt], "model.safetensors cannot be used"),
        (["--checkpoint", folders["damaged tokenizer"], *prompt], "holds no tokenizer"),
        (["--from_pretrained", "gpt3", *prompt], "--from_pretrained gpt3 does not exist (looked for in "),
        (
            ["--from_pretrained", "gpt2", *prompt, "--tokenizer_file", other],
            "gpt2 reads ids of gpt2, but the tokenizer file",
        ),
    ]
    if not torch.cuda.is_available():
        cases.append(([*good, *prompt, "--device", "cuda"], "--device cuda, but PyTorch finds no CUDA device"))
    for words, says in cases:
        code, text, said = run_sample(*words)
        assert code == 2 and text == "", (words, code, text, said)
        assert said.startswith("sample.py: error: --") and says in said and said.count("\n") == 1, (words, said)


def test_a_text_begins_without_a_prompt_and_a_long_prompt_is_continued_at_its_end(run_sample, checkpoint):
    few = ("--checkpoint", checkpoint, "--device", "cpu", "--max_new_tokens", 5)
    code, _, said = run_sample(*few)
    assert code == 0 and "[1 + 5 tokens" in said, "after end-of-text"
    code, text, said = run_sample(*few, "--prompt", prompt := "def main(arguments)\n" * 64)
    assert code == 0 and text.startswith(prompt) and "[59 + 5 tokens" in said
    assert "note: --prompt has " in said and "it continues the last 59" in said
    assert "[32 + 32 tokens" in run_sample(*few[:-2], "--prompt", prompt)[2]


def test_published_weights_that_cannot_be_had_are_no_mistake_of_the_user(run_sample, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache(tmp_path)))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    code, text, said = run_sample("--from_pretrained", "gpt2", "--prompt", "def")
    assert (code, text) == (1, "")
    assert said.count("\n") == 1 and "--from_pretrained gpt2: the published weights could not be fetched" in said


@pytest.mark.launches
def test_text_streams_and_ctrl_c_ends_it(tmp_path, data):
    """The first characters are there long before the last, and an interrupted program leaves no traceback."""
    folder = exported(tmp_path / "run", data, positions=100_000)
    write_always(folder, load_tokenizer_file(folder / "tokenizer.json").encode("x")[0])
    command = [sys.executable, str(SAMPLE), "--checkpoint", str(folder), "--prompt", "def", "--max_new_tokens", "90000"]
    command += ["--device", "cpu"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as program:
        got = b""
        while len(got) < 20:
            got += os.read(program.stdout.fileno(), 1 << 20)
            assert program.poll() is None
        assert len(got) < 4096, "not token by token: a buffer was filled first"
        program.send_signal(signal.SIGINT)
        rest, said = program.communicate(timeout=30)
    assert got.startswith(b"def") and program.returncode == 130
    assert said.strip() == b"sample.py: interrupted"
    assert set((got + rest).decode().removeprefix("def")) == {"x"}


@pytest.mark.launches
def test_no_torch_before_what_was_typed_is_checked(tmp_path, data):
    folder = exported(tmp_path / "run", data)
    code = (
        "import sys, runpy; sys.argv = ['sample.py', *sys.argv[1:]]\n"
        "try: runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    words = ["--checkpoint", str(folder), "--prompt", "def", "--max_new_tokens", "64"]
    done = run_program([sys.executable, "-c", code, str(SAMPLE), *words])
    assert done.stdout == "2 False\n", (done.stdout, done.stderr)


@pytest.mark.launches
def test_a_reader_that_has_enough_is_no_failure(tmp_path, data):
    """As with `| head -c 1`."""
    folder = exported(tmp_path / "run", data)
    words = ["--checkpoint", str(folder), "--prompt", "def", "--max_new_tokens", "40", "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, str(SAMPLE), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        program.stdout.close()
        said = program.stderr.read()
    assert program.returncode == 0 and "Traceback" not in said, said
