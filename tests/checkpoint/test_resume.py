"""Resume runs: bit for bit with the same strategy and ranks, within rounding with others."""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path

import pytest
import torch
from support.hostile_files import Planted
from support.programs import TINY_RUN, data_flags
from support.ranks import RanksFailed
from support.settings import settings_of, typed
from support.variants import slow_but
from torch.distributed.checkpoint import FileSystemReader

from testbed.checkpoint.changed_settings import check_changes
from testbed.config.run_types import STRATEGIES
from testbed.errors import InputError
from testbed.metrics.file import read_metrics
from testbed.model.gpt2 import GPT2
from testbed.strategies import state_files
from testbed.strategies.baseline import Baseline
from testbed.strategies.description import read_description

WORKER = "support.resume_worker"
CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of a loss: float32 sums in another order
DROPOUT = "--dropout 0.1"
# name -> ranks, flags; what runs with dropout goes on bit for bit only with its random state
RUNS = {
    **{
        run_type: (2 if entry.is_distributed else 1, f"--run_type {run_type} {DROPOUT}")
        for run_type, entry in STRATEGIES.items()
    },
    "dp": (1, "--run_type dp"),  # these two refuse dropout
    "tensor": (2, "--run_type tensor"),
    "baseline, Muon": (1, f"--run_type baseline {DROPOUT} --optimizer muon"),
    "fsdp, native": (2, f"--run_type fsdp {DROPOUT} --precision bf16 --mixed_precision native"),
    "ZeRO 1, 1 rank": (1, "--run_type optimized"),
    "ZeRO 0": (2, f"--run_type optimized {DROPOUT} --zero_stage 0"),
    "ZeRO 0, Muon": (2, f"--run_type optimized {DROPOUT} --zero_stage 0 --optimizer muon"),
    "ZeRO 2": (2, f"--run_type optimized {DROPOUT} --zero_stage 2"),
    "ZeRO 3": (2, f"--run_type optimized {DROPOUT} --zero_stage 3"),
    "fsdp, 3 ranks": (3, "--run_type fsdp"),  # shards of unlike sizes
    "ZeRO 3, 3 ranks": (3, "--run_type optimized --zero_stage 3"),
    "ZeRO 2, native": (2, f"--run_type optimized {DROPOUT} --zero_stage 2 --precision bf16 --mixed_precision native"),
    "ZeRO 3, native": (2, f"--run_type optimized {DROPOUT} --zero_stage 3 --precision bf16 --mixed_precision native"),
    "ZeRO 1, offloaded": (2, f"--run_type optimized {DROPOUT} --zero_stage 1 --offload optimizer"),
    "ZeRO 3, offloaded": (2, f"--run_type optimized {DROPOUT} --zero_stage 3 --offload parameters"),
    "fsdp, Muon": (2, f"--run_type fsdp {DROPOUT} --optimizer muon"),
    "pipeline, Muon": (2, f"--run_type pipeline {DROPOUT} --optimizer muon"),
    "tensor, Muon": (2, "--run_type tensor --optimizer muon"),
    # several buckets, and enough ranks for their layout to matter: a sum of two does not depend on the order
    "ddp, 4 ranks": (4, f"--run_type ddp {DROPOUT} --bucket_cap_mb 0.02"),
    "ZeRO 2, 4 ranks": (4, f"--run_type optimized {DROPOUT} --zero_stage 2 --reduce_bucket_size 3000"),
    "ZeRO 3, 4 ranks": (4, f"--run_type optimized {DROPOUT} --zero_stage 3 --reduce_bucket_size 3000"),
    "hybrid": (4, f"--run_type fsdp {DROPOUT} --shard_size 2"),
    "pipeline x data": (4, f"--run_type pipeline {DROPOUT} --pipeline_stages 2"),
    "tensor x data": (4, "--run_type tensor --tensor_parallel_size 2"),
    "shards x tensor": (4, "--run_type mesh --tensor_parallel_size 2 --sequence_parallel on"),
    "shards x context": (4, "--run_type mesh --context_parallel_size 2"),
    "stages x shards": (4, f"--run_type mesh --pipeline_stages 2 {DROPOUT}"),
    "stages x tensor": (4, "--run_type mesh --pipeline_stages 2 --tensor_parallel_size 2 --sequence_parallel on"),
    "zero bubble x shards": (4, f"--run_type mesh --pipeline_stages 2 --pipeline_schedule zero_bubble {DROPOUT}"),
}
EVERY_DAY = ("ddp", "fsdp", "optimized", "pipeline", "tensor")
# what reads a state that another strategy wrote: everything, and these on other numbers of ranks
READERS = {
    **RUNS,
    "ddp, 3 ranks": (3, "--run_type ddp"),
    "fsdp, 1 rank": (1, "--run_type fsdp"),
    "ZeRO 2, 3 ranks": (3, "--run_type optimized --zero_stage 2"),
    "ZeRO 3, 1 rank": (1, "--run_type optimized --zero_stage 3"),
    "tensor, 4 ranks": (4, "--run_type tensor --num_heads 4"),
    "pipeline, 4 ranks": (4, "--run_type pipeline"),
    # three shards of what two tensor ranks have: rows that do not divide, and pieces of queries, keys and values
    "3 shards x tensor": (6, "--run_type mesh --tensor_parallel_size 2"),
    "stages x shards x tensor": (
        *(8, "--run_type mesh --pipeline_stages 2 --tensor_parallel_size 2 --sequence_parallel on"),
    ),
}


def flags_of(token_files, flags: str, ranks: int) -> list[str]:
    """Each step is of 24 sequences, in two micro batches or more on one data rank to four."""
    work = ["--global_batch_size", "24", "--micro_batch_size_per_gpu", "2", "--max_train_steps", "8"]
    recipe = ["--learning_rate", "0.01", "--warmup_steps", "2", "--max_grad_norm", "0.25"]
    words = [*TINY_RUN, *data_flags(token_files), *work, *recipe, *flags.split()]
    data_ranks = typed(words, ranks).settings.plan.data_world_size
    return words if data_ranks == 4 else [*words, "--micro_batch_size_per_gpu", "4"]


def task(flags: list[str], steps: tuple[int, int], load=None, save=None) -> dict:
    paths = [[str(given[0]), *given[1:]] if given else None for given in (load, save)]
    return {"flags": flags, "steps": list(steps), "load": paths[0], "save": paths[1]}


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, put together by PyTorch's own reader from our description."""
    folder = folder / "full_state" if (folder / "full_state").exists() else folder
    description = read_description(folder)
    reader = FileSystemReader(folder)
    reader.read_metadata = lambda: description
    state = {
        name: torch.zeros(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in description.state_dict_metadata.items()
    }
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.fixture(scope="module")
def states(ranks, token_files, tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """A state after two steps of the single process, for each optimizer: its folder, and the hash of its weights."""
    folder = tmp_path_factory.mktemp("states")
    runs = {"adamw": "", "muon": "--optimizer muon"}
    tasks = [
        task(flags_of(token_files, f"--run_type baseline {recipe}", 1), (0, 2), save=(folder / name, 2, False))
        for name, recipe in runs.items()
    ]
    results = ranks.run(WORKER, folder, tasks, 1)
    return {name: (folder / name, result["saved"]) for name, result in zip(runs, results, strict=True)}


@pytest.fixture(scope="module")
def starts(ranks, token_files, states, tmp_path_factory):
    """Return for a name: of RUNS the whole run and its second half; then what only read another's state and wrote it
    again, and the folder that this wrote. Each name is run once for all tests that ask for it."""

    @functools.cache
    def start(name: str) -> tuple:
        (number, flags), folder = READERS[name], tmp_path_factory.mktemp("start")
        arguments = flags_of(token_files, flags, number)
        state, _ = states["muon" if "muon" in flags else "adamw"]
        tasks = [task(arguments, (2, 2), load=(state, "load_full_state"), save=(folder / "full", 2, True))]
        if name in RUNS:
            whole = task(arguments, (0, 4), save=(folder / "own", 2, True))
            tasks = [whole, task(arguments, (2, 4), load=(folder / "own", "load_checkpoint")), *tasks]
        return (*ranks.run(WORKER, folder, tasks, number), folder / "full")

    return start


@pytest.mark.launches
@pytest.mark.parametrize("name", slow_but(EVERY_DAY, RUNS))
def test_a_run_goes_on_bit_for_bit(starts, name):
    """Saved after two steps, in the background where the strategy can; the second start draws other weights first."""
    whole, second, *_ = starts(name)
    assert second["losses"] == whole["losses"][2:]
    assert (second["weights"], second["held"]) == (whole["weights"], whole["held"])
    assert second["begins_with"] == whole["saved"] != whole["begins_with"], "it began where the first had saved"


@pytest.mark.launches
@pytest.mark.parametrize("name", slow_but(EVERY_DAY, READERS))
def test_every_strategy_reads_and_writes_the_same_state(starts, states, name):
    """A state that one process wrote is the same to the last bit after others have read and written it: weights,
    moments and step counters, under the same names."""
    _, flags = READERS[name]
    *_, result, folder = starts(name)
    state, hash_of_weights = states["muon" if "muon" in flags else "adamw"]
    assert result["begins_with"] == hash_of_weights, "the weights that it computes with, not only what it writes"
    if STRATEGIES[flags.split()[1]].state_layout == "per_rank":
        return  # it writes each rank's own, which no other strategy reads
    written, expected = contents(folder), contents(state)
    assert written.keys() == expected.keys()
    differing = [key for key, tensor in expected.items() if not torch.equal(tensor, written[key])]
    assert differing == []
    if "muon" not in flags:
        assert float(expected["optimizer.state.wte.weight.step"]) == 2.0
        assert expected["optimizer.state.h.0.attn.c_attn.weight.exp_avg"].abs().sum() > 0


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_passes_through_four_strategies(ranks, token_files, tmp_path):
    """ddp -> fsdp -> ZeRO 3 on two ranks, then one process: every loss within 1e-5 of the run that one process did."""
    relay = ["--run_type ddp", "--run_type fsdp", "--run_type optimized --zero_stage 3"]
    tasks = []
    for leg, flags in enumerate(relay):
        load = (tmp_path / str(leg - 1), "load_full_state") if leg else None
        save = (tmp_path / str(leg), 2 * leg + 2, False)
        tasks.append(task(flags_of(token_files, flags, 2), (2 * leg, 2 * leg + 2), load, save))
    on_two = ranks.run(WORKER, tmp_path / "two", tasks, 2)
    alone = flags_of(token_files, "--run_type baseline", 1)
    last = task(alone, (6, 8), load=(tmp_path / "2" / "full_state", "load_full_state"))
    # the first task's weights are those that the ranks of the relay began with
    uninterrupted, passed_on = ranks.run(WORKER, tmp_path / "one", [task(alone, (0, 8)), last], 1)
    losses = [loss for result in [*on_two, passed_on] for loss in result["losses"]]
    assert losses == pytest.approx(uninterrupted["losses"], abs=TOLERANCE)


@pytest.fixture
def run_to_its_end(ranks, token_files, tmp_path):
    """Run gpt2.py on a number of ranks and return the run's metrics."""
    numbers = itertools.count()

    def run(number: int, directory: Path, flags: str) -> dict:
        arguments = [*flags_of(token_files, "", 1), *flags.split(), "--checkpoint_path", str(directory)]
        arguments += ["--timing_warmup_steps", "1", "--max_train_steps", "6"]
        done = ranks.run_program(arguments, tmp_path / f"ranks_{next(numbers)}", number)
        assert done.returncode == 0, done.stderr[-3000:]
        return read_metrics(directory / "training_metrics.json")

    return run


@pytest.mark.launches
@pytest.mark.slow
def test_the_program_goes_on_bit_for_bit_on_two_ranks(run_to_its_end, tmp_path):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    ddp = f"--run_type ddp {DROPOUT} --save_every 3"
    expected = run_to_its_end(2, whole, f"{ddp} --async_mode async")
    saved = whole / "checkpoints" / "step_000003"
    resumed = run_to_its_end(2, rest, f"{ddp} --resume {saved}")
    assert [row["step"] for row in resumed["steps"]] == [4, 5, 6], "it began at the step that was saved"
    assert [row["loss"] for row in resumed["steps"]] == [row["loss"] for row in expected["steps"][3:]]
    assert (rest / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.launches
@pytest.mark.slow
def test_the_program_moves_a_run_from_two_ranks_to_one_and_back(run_to_its_end, tmp_path):
    """The metrics stay one file: a segment for each start, and rows without a seam."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    expected = run_to_its_end(1, whole, "--run_type baseline")
    run_to_its_end(2, moved, "--run_type ddp --stop_at_step 2")
    run_to_its_end(1, moved, "--run_type baseline --resume --stop_at_step 4")
    zero = "--run_type optimized --zero_stage 2 --resume"
    metrics = run_to_its_end(2, moved, zero)
    starts = [(segment["run_type"], segment["world_size"], segment["first_step"]) for segment in metrics["segments"]]
    assert starts == [("ddp", 2, 1), ("baseline", 1, 3), ("optimized", 2, 5)]
    losses = [row["loss"] for row in metrics["steps"]]
    assert losses == pytest.approx([row["loss"] for row in expected["steps"]], abs=TOLERANCE)


def strategy_alone(token_files, *flags: str) -> Baseline:
    checked = typed(flags_of(token_files, " ".join(flags), 1))
    return Baseline(checked.settings, GPT2(checked.settings.shape), CPU)


def test_the_loss_scale_of_fp16_comes_back(token_files, tmp_path):
    strategy = strategy_alone(token_files, "--precision fp16")
    strategy.scaler.scale(torch.ones(()))  # begins when it is first used
    strategy.scaler.load_state_dict({**strategy.scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7})
    strategy.save_checkpoint(tmp_path)
    other = strategy_alone(token_files, "--precision fp16")
    other.load_checkpoint(tmp_path)
    assert other.scaler.state_dict() == strategy.scaler.state_dict()
    assert other.scaler.scale(torch.ones(())) == 512.0


@pytest.mark.parametrize("known", [{}, {"scale": 512.0}], ids=["none, as of fp32", "the scale alone, as of DeepSpeed"])
def test_a_loss_scale_that_a_state_lacks_is_the_default(token_files, tmp_path, known):
    writer, reader = (strategy_alone(token_files, "--precision fp16") for _ in range(2))
    state = writer.state()
    state["scaler"] = {name: torch.tensor(value, dtype=torch.float64) for name, value in known.items()}
    state_files.save({section: tensors for section, tensors in state.items() if tensors}, tmp_path, None)
    expected = reader.scaler.state_dict() | known
    reader.load_checkpoint(tmp_path)
    assert reader.scaler.state_dict() == expected
    assert torch.equal(reader.model.wte.weight, writer.model.wte.weight)


def test_the_background_writer_never_waits_for_the_gpu(tmp_path, monkeypatch):
    """Where CUDA is available PyTorch's writer would wait for the training stream once per tensor, on GPU 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_stream", "stream", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: pytest.fail(f"torch.cuda.{name}"))
    monkeypatch.setattr("testbed.strategies.state_files.torch.cuda.is_initialized", lambda: False)
    state = {"model": {f"w{number}": torch.full((3, 2), float(number)) for number in range(20)}}
    state_files.save(state, tmp_path, None, state_files.HostCopy()).result()
    read = {"model": {name: torch.zeros(3, 2) for name in state["model"]}}
    monkeypatch.undo()
    state_files.load(read, tmp_path, None)
    assert all(torch.equal(read["model"][name], tensor) for name, tensor in state["model"].items())


def test_what_is_written_in_the_background_is_a_copy():
    """Of the state at that moment, in memory that the next one uses again."""
    weights, host_copy = torch.zeros(3), state_files.HostCopy()
    first = host_copy.stage({"model": {"w": weights}})["model"]["w"]
    weights += 1
    assert first.tolist() == [0, 0, 0]
    second = host_copy.stage({"model": {"w": weights}})["model"]["w"]
    weights += 1
    assert second.tolist() == [1, 1, 1] and second.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("recipe", ["", "--optimizer muon"])
def test_a_state_before_the_first_step_counts_none(token_files, recipe):
    moments = strategy_alone(token_files, recipe).state()["optimizer"]
    assert moments["state.wte.weight.step"] == 0 and not any(tensor.any() for tensor in moments.values())


@pytest.mark.launches
@pytest.mark.slow
def test_a_planted_pickle_is_not_run_by_deepspeeds_reader(ranks, token_files, starts, tmp_path):
    """In place of its own file of the optimizer's state, which it reads with every other resume."""
    *_, folder = starts("ZeRO 1, 1 rank")
    checkpoint = shutil.copytree(folder.parent / "own", tmp_path / "checkpoint")
    (file,) = checkpoint.glob("deepspeed/*optim_states.pt")
    torch.save({"optimizer_state_dict": Planted(tmp_path / "ran")}, file)
    flags = flags_of(token_files, READERS["ZeRO 1, 1 rank"][1], 1)
    with pytest.raises(RanksFailed, match="mkdir"):
        ranks.run(WORKER, tmp_path, [task(flags, (2, 3), load=(checkpoint, "load_checkpoint"))], 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.launches
@pytest.mark.slow
def test_deepspeeds_own_weights_that_are_no_numbers_are_named(ranks, token_files, starts, tmp_path):
    *_, folder = starts("ZeRO 1, 1 rank")
    checkpoint = shutil.copytree(folder.parent / "own", tmp_path / "checkpoint")
    (file,) = checkpoint.glob("deepspeed/*optim_states.pt")
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] = float("nan")
    torch.save(content, file)
    flags = flags_of(token_files, READERS["ZeRO 1, 1 rank"][1], 1)
    with pytest.raises(RanksFailed, match=r"wte.weight in .*deepspeed holds numbers that are NaN or infinite"):
        ranks.run(WORKER, tmp_path, [task(flags, (2, 3), load=(checkpoint, "load_checkpoint"))], 1)


def test_a_folder_without_a_state_is_refused(token_files, tmp_path):
    strategy = strategy_alone(token_files)
    with pytest.raises(ValueError, match="holds no state of a whole model"):
        state_files.load(strategy.state(), tmp_path, group=None)


def test_a_checkpoint_of_other_data_is_called_so(token_files):
    """Its vocabulary follows from the data: to give the same value would not help."""
    settings = settings_of(token_files)
    vocabulary = {"name": "vocab_size", "now": 300, "before": 8192}
    data = {"name": "train_data_path", "now": "SHA-256 ab", "before": "SHA-256 cd"}
    for of_work, said in (
        ([vocabulary, data], r"data of another tokenizer: .*; name its own files with --train_data_path, or start"),
        ([vocabulary], "another model or optimizer: --vocab_size is 300, was 8192; give the same values"),
        ([data], "other settings: --train_data_path is 'SHA-256 ab'"),
    ):
        with pytest.raises(InputError, match=said):
            check_changes(of_work, settings, Path("run/checkpoints/step_000002"))


def test_a_refused_change_names_the_flags_that_were_typed(token_files):
    """--min_learning_rate follows from --learning_rate, and a model's dimensions from --model."""
    changes = [{"name": name, "now": 2, "before": 1} for name in ("learning_rate", "min_learning_rate")]
    typed = settings_of(token_files, "--learning_rate", "2")
    with pytest.raises(InputError, match="other settings: --learning_rate is 2, was 1; give the same"):
        check_changes(changes, typed, Path("run"))
    with pytest.raises(InputError, match="--learning_rate is 2, was 1, --min_learning_rate is 2, was 1; give"):
        check_changes(changes, settings_of(token_files), Path("run"))
