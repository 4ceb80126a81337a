"""Flags that break a rule or do not work together are refused in one sentence, before torch is loaded."""

from __future__ import annotations

import importlib.metadata
import os
from unittest.mock import Mock

import pytest
from support.programs import TINY_RUN, data_flags, python_command, run_program
from support.settings import refusal, settings_of

# flags, ranks, and what the sentence names. Flags that begin with a run type have it after --run_type.
REFUSED = [
    ("--seq_length 65", 1, ["--seq_length 65", "64 positions", "--max_position_embeddings"]),
    ("--num_heads 5", 1, ["--embedding_size 32", "--num_heads 5"]),
    ("--global_batch_size 1000", 1, ["holds 624 windows", "the global batch of 1000", "a smaller --global_batch_size"]),
    ("--seq_length 4000 --max_position_embeddings 4000", 1,
        ["--val_data_path", "holds 0 windows of --seq_length 4000 (3,000 tokens)", "--max_val_steps 0"]),
    ("--stop_at_step 20", 1, ["--stop_at_step 20 is after the run's last step, 19"]),
    ("--allow-setting-change", 1, ["--allow-setting-change: ", "--resume"]),
    ("--eval_only --resume", 1, ["--eval_only with --resume auto: ", "leave one"]),
    ("allreduce --skip_gradient_sync --save_every 5", 2, ["--skip_gradient_sync all with --save_every 5"]),
    ("allreduce --skip_gradient_sync --run_inference_benchmark", 2, ["--run_inference_benchmark", "leaves none"]),
    ("--skip_gradient_sync", 1, ["--skip_gradient_sync belongs to --run_type allreduce, ddp, not to baseline"]),
    ("--run_inference_benchmark", 1, ["--run_inference_benchmark with --max_position_embeddings 64", "give", "116"]),
    ("--profile --max_train_steps 6 --profile_steps 5", 1, ["--profile looks at 5 steps", "the run has 6", "10"]),
    # optimizer and schedule
    ("--muon_learning_rate 0.1", 1, ["--muon_learning_rate belongs to --optimizer muon, not to adamw"]),
    ("--optimizer muon --learning_rate 0 --muon_learning_rate 1", 1, ["--muon_learning_rate 1 with --learning_rate 0"]),
    ("--decay_share 0.3", 1, ["--decay_share belongs to --lr_schedule wsd, not to cosine"]),
    ("--lr_schedule constant --min_learning_rate 0", 1, ["--min_learning_rate belongs to --lr_schedule cosine or wsd"]),
    ("--lr_schedule wsd --decay_share 0", 1, ["--decay_share", "above 0"]),
    ("--lr_schedule wsd --decay_share 1.1", 1, ["--decay_share", "at most 1"]),
    ("--lr_schedule wsd --max_train_steps 10 --warmup_steps 6 --decay_share 0.5", 1, ["of 10 steps is 5", "_steps 6"]),
    ("optimized --async_mode async", 2, ["--async_mode async with --run_type optimized", "leave --async_mode out"]),
    ("optimized --optimizer muon", 2, ["--optimizer muon with --zero_stage 1", "--zero_stage 0", "fsdp"]),
    ("--backend nccl", 1, ["--backend nccl with --device cpu", "gloo"]),
    ("--init_from gpt2", 1, ["--init_from gpt2", "tokenizer"]),
    ("--overwrite --resume", 1, ["--overwrite", "--resume"]),
    ("--init_from resume", 1, ["--init_from resume is nanoGPT's way", "here it is --resume"]),
    ("--early_stop_patience 2", 1, ["--early_stop_patience 2 cannot end a run that validates", "--eval_every STEPS"]),
    ("--early_stop_patience 2 --max_val_steps 0", 1, ["--early_stop_patience 2 needs validations", "_steps 0"]),
    ("--eval_multiple_choice q --max_val_steps 0", 1, ["--eval_multiple_choice q needs validations"]),
    ("--keep_best --max_val_steps 0", 1, ["--keep_best needs validations", "--max_val_steps 0"]),
    ("--warmup_steps 100", 1, ["--warmup_steps 100", "step 19"]),
    ("--min_learning_rate 1", 1, ["--min_learning_rate 1 ", "--learning_rate"]),
    # the mesh
    ("baseline", 2, ["baseline", "ddp", "optimized"]),
    ("dp", 2, ["dp", "one process", "2 ranks", "ddp"]),
    ("tensor", 1, ["tensor", "torchrun", "baseline"]),
    ("pipeline --pipeline_stages 3", 4, ["--pipeline_stages 3", "4 ranks", "3 "]),
    ("tensor --tensor_parallel_size 2", 3, ["size 2", "3 ranks", "2 ranks"]),
    ("tensor", 4, ["--tensor_parallel_size 4", "--num_heads 2"]),
    ("fsdp --shard_size 3", 4, ["--shard_size 3", "4 data ranks", "1, 2, 4"]),
    ("mesh --tensor_parallel_size 2 --shard_size 4", 4, ["--shard_size 4", "the 2 data ranks", "1, 2"]),
    ("mesh --context_parallel_size 4 --shard_size 2", 8, ["--shard_size 2", "size 4", "give one of 1, 4, 8"]),
    ("mesh --context_parallel_method allgather", 2, ["--context_parallel_size 1 does nothing", "leave it out"]),
    ("mesh --pipeline_schedule zero_bubble", 2, ["--pipeline_stages 1 does nothing", "--pipeline_stages 2"]),
    ("mesh --pipeline_schedule interleaved_1f1b --stages_per_rank 4", 2, ["--pipeline_stages 1 does nothing"]),
    ("mesh --stages_per_rank 2", 2, ["--stages_per_rank 2 with --pipeline_stages 1"]),
    ("mesh --context_parallel_size 2 --tensor_parallel_size 2 --sequence_parallel on --seq_length 30", 4,
        ["with 2 tensor ranks need; the next that is: 32"]),
    ("mesh --tensor_parallel_size 2 --pipeline_stages 2", 6,
        ["--pipeline_stages 2 x --tensor_parallel_size 2", "6 ranks", "4 ranks"]),
    ("mesh --context_parallel_size 3", 4, ["--context_parallel_size 3", "4 ranks"]),
    ("mesh --context_parallel_size 2 --seq_length 30", 4, ["--seq_length 30", "--context_parallel_size 2", "32"]),
    ("mesh --tensor_parallel_size 2 --sequence_parallel on --seq_length 31", 2, ["--seq_length 31", "tensor", "32"]),
    ("tensor --sequence_parallel on --tensor_parallel_size 1", 2, ["--sequence_parallel on", "leave it out"]),
    ("mesh --context_parallel_size 2 --dropout 0.1", 2, ["--dropout 0.1", "--context_parallel_size 2", "--dropout 0"]),
    ("mesh --context_parallel_size 2 --attention math", 2, ["--attention math", "allgather"]),
    ("mesh --pipeline_stages 2 --pipeline_schedule zero_bubble --reshard_after_forward on --num_layers 4", 4,
        ["zero_bubble", "--reshard_after_forward on", "leave"]),
    ("mesh --precision fp16", 2, ["fp16", "mesh", "bf16"]),
    ("fsdp --context_parallel_size 2", 2, ["--context_parallel_size belongs to --run_type mesh, not to fsdp"]),
    # pipelines
    ("ddp --pipeline_schedule 1f1b", 2, ["--pipeline_schedule", "pipeline"]),
    ("pipeline", 5, ["--pipeline_stages 5", "--num_layers 2", "4 pieces"]),
    ("pipeline --pipeline_schedule zero_bubble", 4, ["= 8 stages", "--num_layers 2"]),
    ("pipeline --micro_batch_size_per_gpu 4 --global_batch_size 4", 2,
        ["1f1b", "pipeline ranks, 2", "has 1", "--micro_batch_size_per_gpu"]),
    ("pipeline --pipeline_schedule interleaved_1f1b --micro_batch_size_per_gpu 2 --global_batch_size 10", 2,
        ["interleaved_1f1b", "2 equal rounds", "has 5"]),
    ("pipeline --stages_per_rank 2", 2, ["--stages_per_rank 2", "1f1b", "interleaved_1f1b"]),
    ("pipeline --pipeline_schedule zero_bubble --stages_per_rank 1", 2, ["--stages_per_rank 1", "exactly 2 stages"]),
    ("pipeline --pipeline_schedule zero_bubble --activation_checkpointing block", 2,
        ["--activation_checkpointing block", "zero_bubble", "1f1b"]),
    # DeepSpeed
    ("ddp --offload optimizer", 2, ["--offload", "optimized", "not to ddp"]),
    ("optimized --zero_stage 0 --offload optimizer", 2, ["--offload optimizer", "1, 2 or 3"]),
    ("optimized --zero_stage 2 --offload parameters", 2, ["--zero_stage 2", "stage 3"]),
    ("optimized --allgather_bucket_size 7", 2, ["size 7", "give 8"]),
    ("optimized --zero_stage 3 --activation_checkpointing selective", 2, ["selective", "--zero_stage 3", "block"]),
    ("optimized --checkpoint_path checkpoint/o[1]", 2,
        ["--checkpoint_path checkpoint/o[1]: DeepSpeed looks for its files by patterns"]),
    # precision, dropout, compilation
    ("optimized --zero_stage 0 --precision fp16", 1, ["--zero_stage 0", "fp16"]),
    ("optimized --zero_stage 0 --precision bf16 --mixed_precision native", 2, ["native", "stage 1"]),
    ("fsdp --precision fp32 --mixed_precision native", 2, ["native", "fp32", "bf16"]),
    ("fsdp --mixed_precision native", 2, ["native", "--precision bf16"]),
    ("fsdp --precision fp16", 2, ["fp16", "bf16"]),
    ("pipeline --precision fp16", 2, ["fp16", "bf16"]),
    ("tensor --dropout 0.1", 2, ["--dropout 0.1", "--dropout 0"]),
    ("dp --dropout 0.1", 1, ["--dropout 0.1", "dp", "ddp"]),
    ("dp --compile", 1, ["--compile", "dp", "ddp"]),
    ("tensor --compile --activation_checkpointing block", 2, ["--compile", "tensor", "block", "selective"]),
    ("pipeline --pipeline_schedule zero_bubble --compile --num_layers 4", 2, ["--compile", "1f1b"]),
    ("optimized --zero_stage 3 --compile", 2, ["--compile", "--zero_stage 3"]),
    ("ddp --compile maybe", 2, ["--compile", "maybe", "auto, on, off"]),
    ("ddp --bucket_cap_mb abc", 2, ["--bucket_cap_mb", "'abc'", "above 0"]),
    # numbers that no machine or clock can take
    ("--threads_per_rank 1000000", 1, ["--threads_per_rank: 1000000 is more than 1024", "cores"]),
    ("--num_workers 100000000", 1, ["--num_workers: 100000000 is more than 1024", "memory"]),
    ("--sample_tokens 100000000", 1, ["--sample_tokens: 100000000 is more than 1000000", "last position"]),
    ("--collective_timeout 1e300", 1, ["--collective_timeout: 1e300 is more than 604800", "week"]),
    ("--grace_seconds 1e300", 1, ["--grace_seconds: 1e300 is more than 604800", "week"]),
    ("ddp --bucket_cap_mb 1e300", 2, ["--bucket_cap_mb: 1e300 is more than 1048576", "1 TiB"]),
    ("--num_layers 1000000 --model nano", 1, ["--num_layers: 1000000 is more than 1000", "before the first step"]),
    *[(f"--{flag} {value}", 1, [f"--{flag}: {value!r} is not a number from 0 to 3.4e+38", "float32"])
      for flag in ("learning_rate", "max_grad_norm") for value in ("1e300", "inf", "nan")],
    # an automatic micro batch
    ("baseline --micro_batch_size_per_gpu auto --grad_accum_steps 4", 1,
        ["auto", "--grad_accum_steps 4", "--global_batch_size"]),
    ("pipeline --micro_batch_size_per_gpu auto", 2, ["auto", "pipeline", "fsdp"]),
    ("mesh --pipeline_stages 2 --micro_batch_size_per_gpu auto", 2, ["auto with --pipeline_stages 2", "give a number"]),
    # 8 bits
    ("ddp --matmul fp8 --device cpu", 2, ["--matmul fp8", "--device cpu"]),
    ("pipeline --matmul fp8 --device auto", 2, ["--matmul fp8", "pipeline", "fsdp"]),
    ("ddp --matmul fp8 --precision fp32 --device auto", 2, ["--precision fp32", "--precision bf16"]),
    ("fsdp --matmul fp8 --device auto --precision bf16 --mixed_precision native", 2,
        ["--mixed_precision native", "autocast"]),
    ("ddp --matmul fp8 --device auto --precision auto --embedding_size 24 --num_heads 2", 2,
        ["--embedding_size 24", "16", "give 32"]),
]  # fmt: skip


LARGEST = "--threads_per_rank 1024 --num_workers 1024 --sample_tokens 1000000 --collective_timeout 604800"


def test_the_largest_numbers_that_the_rules_name_are_allowed(token_files):
    settings = settings_of(token_files, *LARGEST.split(), "--grace_seconds", "604800")
    assert (settings.compute.threads_per_rank, settings.training.grace_seconds) == (1024, 604800)


def test_a_pattern_that_matches_what_is_validated_on_is_refused(token_files):
    folder = token_files[0].parent
    pattern = ["--train_data_path", str(folder / "*.bin")]
    said = refusal(token_files, *pattern)
    assert (
        f"matches {token_files[1].name} too, which --val_data_path validates on" in said and "DIR/train_*.bin" in said
    )
    assert settings_of(token_files, "--train_data_path", str(folder / f"{token_files[0].stem}*.bin"))
    assert settings_of(token_files, "--train_data_path", str(token_files[1])), "a file may be both where that is meant"


def test_data_that_no_step_reads_may_be_short(token_files):
    long = ("--seq_length", "4000", "--max_position_embeddings", "4000", "--global_batch_size", "4")
    assert settings_of(token_files, *long, "--max_val_steps", "0").plan.steps_per_epoch == 1
    assert settings_of(token_files, "--eval_only", "--global_batch_size", "1000").last_step == 0


def test_more_threads_than_a_process_can_have_are_refused_from_the_environment_too(token_files, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1000000")
    assert "OMP_NUM_THREADS=1000000 is more than 1024" in refusal(token_files)
    assert settings_of(token_files, "--threads_per_rank", "2").compute.threads_per_rank == 2


def words_of(flags: str) -> list[str]:
    return flags.split() if flags.startswith("--") else ["--run_type", *flags.split()]


@pytest.mark.parametrize(("flags", "ranks", "named"), REFUSED, ids=[f"{flags}, {n}" for flags, n, _ in REFUSED])
def test_flags_are_refused_in_a_sentence(token_files, flags, ranks, named):
    message = refusal(token_files, *words_of(flags), world_size=ranks)
    assert all(part in message for part in named), message


BY_A_RANK = [case for case in REFUSED if case[:2] in (("tensor", 4), ("ddp --offload optimizer", 2))]


@pytest.mark.launches
@pytest.mark.parametrize(("flags", "ranks", "named"), BY_A_RANK)
def test_a_rank_exits_with_2_before_any_process_group(token_files, tmp_path, flags, ranks, named):
    """One rank alone: had it begun to look for the others, it would wait for them."""
    command = [*python_command(), *TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(tmp_path / "run")]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    done = run_program([*command, *words_of(flags)], timeout_s=120, env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and all(part in done.stderr for part in named)
    assert not (tmp_path / "run").exists()


def test_an_older_pytorch_is_refused(token_files, monkeypatch):
    version = "2.10.0+cu128"
    monkeypatch.setattr("importlib.metadata.version", {"torch": version}.__getitem__)
    message = refusal(token_files)
    assert f"PyTorch {version} is too old" in message and "pip install 'torch>=2.11'" in message


def test_a_newer_pytorch_is_not_refused_nor_a_machine_without(token_files, monkeypatch):
    for version in ("2.11.0", "2.11.0a0+1234.nv26.01", "3.0", "main", None):
        monkeypatch.setattr("importlib.metadata.version", {"torch": version}.__getitem__)
        settings_of(token_files)
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    settings_of(token_files)


@pytest.mark.launches
def test_data_parallel_without_two_devices_is_refused(ranks, token_files, tmp_path):
    flags = ["--run_type", "dp", "--checkpoint_path", str(tmp_path / "run")]
    done = ranks.run_program([*TINY_RUN, *data_flags(token_files), *flags], tmp_path / "ranks")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "--run_type dp" in done.stderr and "needs two" in done.stderr and "ddp" in done.stderr
