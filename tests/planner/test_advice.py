"""What a plan advises beside its first row: another batch, precision, number of devices, or run type."""

from __future__ import annotations

import re

import pytest
from support.programs import run_here

PLAN = "scripts/plan.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h100-sxm", "--gpus", 7], ["448 x 1,024 tokens", "Best: ddp"]),  # not 512, which 7 does not divide
        (["--gpu", "h100-sxm", "--gpus", 56], ["448 x 1,024 tokens"]),
        (["--gpu", "t4"], ["--precision fp16 would be about"]),
        (["--gpu", "mi300x"], ["No published run on mi300x is known"]),
        (
            ["--gpu", "h100-sxm", "--gpus", 512, "--global_batch_size", 512],
            ["The batch is too small for so many devices"],
        ),
        (["--gpu", "gb200", "--gpus", 128], ["--nnodes 32 --nproc-per-node 4 ", "--compile o"]),
        (["--gpu", "h100-sxm", "--gpus", 7, "--global_batch_size", 512, "--run_type", "pipeline"], ["costs most"]),
        (["--gpu", "h100-sxm", "--gpus", 7, "--global_batch_size", 512], ["--global_batch_size 448 lets them"]),
    ],
)
def test_advice_that_can_be_followed(words, said):
    done = run_here(PLAN, "--model", "gpt2", *words)
    assert done.returncode == 0, done.stderr
    for each in said:
        assert each in done.stdout
    own = run_here(PLAN, "--model", "gpt2", "--gpu", "a100-80")
    for absent in ("fp16 would", "No published run", "too small", "is tight", "does not divide"):
        assert absent not in own.stdout


def test_a_comparison_says_what_a_plan_of_each_kind_would():
    kinds = ["--gpu", "t4,v100,h200", "--gpus", 8, "--tokens", "10B"]
    done = run_here(PLAN, "--model", "gpt2", *kinds)
    assert "8 x t4: --precision fp16 would be about 5" in done.stdout
    assert "8 x v100-16gb: --precision fp16 would be about" in done.stdout
    assert "8 x h200: No published run on h200 is known" in done.stdout


def test_a_batch_is_small_by_the_tokens_of_a_data_rank():
    """Llama 3 trained well with 1,024 tokens a GPU (arXiv:2407.21783, table 4); here are 256 sequences a data rank."""
    words = ["--model", "llama3-405b", "--gpu", "h100-sxm", "--gpus", 4096, "--global_batch_size", 2048]
    assert "too small" not in run_here(PLAN, *words).stdout
    assert "too small" in run_here(PLAN, "--model", "gpt2", "--gpu", "h100-sxm", "--gpus", 4096).stdout


def test_deepspeed_alone_holds_the_whole_model_on_a_device():
    words = ["--gpu", "a100-40", "--gpus", 64, "--num_layers", 60, "--num_heads", 56, "--embedding_size", 7168]
    done = run_here(PLAN, *words, "--run_type", "optimized", "--zero_stage", 3)
    assert done.returncode == 2 and "DeepSpeed puts the whole model on each device before it cuts it" in done.stderr
    done = run_here(PLAN, *words, "--run_type", "fsdp")
    assert done.returncode == 0 and "Best: fsdp" in done.stdout


def test_what_a_flag_leaves_out_is_said_where_nothing_else_fits():
    words = ["--num_layers", 40, "--num_heads", 40, "--embedding_size", 5120, "--gpus", 64, "--gpu", "h100"]
    done = run_here(PLAN, *words, "--matmul", "fp8", "--mixed_precision", "native")
    assert done.returncode == 2 and "what is not multiplied in 8 bits runs in bf16 autocast" in done.stderr
    words = ["--model", "gpt2-xl", "--gpu", "h200", "--gpus", 64, "--mixed_precision", "native"]
    done = run_here(PLAN, *words, "--global_batch_size", 32)
    assert done.returncode == 2 and "--global_batch_size 32 is not a multiple" in done.stderr
    done = run_here(PLAN, "--model", "gpt2-xl", "--gpu", "h100", "--gpus", 8, "--mixed_precision", "native", "--top", 0)
    assert "not possible: ddp: --mixed_precision belongs" in done.stdout and "Best: " in done.stdout
    done = run_here(PLAN, "--model", "gpt2", "--gpu", "h100", "--gpus", 1, "--run_type", "optimized")
    assert "on one device does what baseline does" in done.stderr and "--offload optimizer" in done.stderr


def test_meshes_are_tried_with_schedules_that_idle_less():
    words = ["--model", "llama3-70b", "--gpu", "h200", "--gpus", 1024, "--global_batch_size", 2048, "--top", 0]
    assert re.search(r"mesh .* stages x .*, interleaved_1f1b", run_here(PLAN, *words).stdout)


@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved_1f1b"])
def test_a_schedule_is_for_meshes_that_have_stages(schedule):
    words = ["--model", "gpt2-large", "--gpu", "a100-80", "--gpus", 8, "--pipeline_schedule", schedule]
    done = run_here(PLAN, *words, "--top", 0)
    assert done.returncode == 0, done.stderr
    assert f", {schedule}" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--gpu l4 --gpus 12 --gpus_per_node 4 --network 50mbit",
            r"4 of them \(\S+\) would be \d+(\.\d+)? times as fast",
        ),
        ("--gpu rtx-3090 --gpus 2 --gpus_per_node 1 --network 100mbit", r"1 of them \(baseline\) would be"),
    ],
)
def test_fewer_devices_are_named_where_the_network_costs_more_than_they_bring(words, said):
    assert re.search(said, run_here(PLAN, "--model", "gpt2-medium", *words.split()).stdout)
    assert "of them" not in run_here(PLAN, "--model", "gpt2-medium", "--gpu", "l4", "--gpus", 8).stdout
    assert "of them" not in run_here(PLAN, "--here", "--gpus", 4, "--global_batch_size", 15).stdout  # shares of cores
    assert "7 of them" in run_here(PLAN, "--gpu", "h100-sxm", "--gpus", 8, "--global_batch_size", 7).stdout


def test_a_batch_that_is_named_can_be_run_and_gains():
    words = ["--gpu", "h100-sxm", "--gpus", 8, "--micro_batch_size_per_gpu", 25]
    named = re.search(r"--global_batch_size (\d+) lets them", run_here(PLAN, *words, "--global_batch_size", 100).stdout)
    assert named is not None
    assert "Best: ddp" in run_here(PLAN, *words, "--global_batch_size", named[1]).stdout
    words = ["--gpu", "rtx-4090", "--gpus", 3, "--model", "gpt2-xl", "--global_batch_size", 64]
    assert "lets them run" not in run_here(PLAN, *words).stdout, "a pipeline is as fast"


def test_offload_is_named_where_nothing_else_has_room():
    done = run_here(PLAN, "--model", "gpt2-xl", "--gpu", "a10g", "--gpus", 1)
    assert done.returncode == 2 and "--run_type optimized --offload optimizer has room: ZeRO-" in done.stderr
    tight = run_here(PLAN, "--model", "gpt2-large", "--gpu", "t4", "--gpus", 1).stdout
    assert re.search(r"fp16 would be .* tight\); with it --run_type optimized --offload optimizer has room", tight)


def test_bf16_that_a_device_does_not_have_is_not_compiled():
    done = run_here(PLAN, "--model", "gpt2-medium", "--gpu", "v100", "--gpus", 8, "--precision", "bf16")
    assert "--compile off" in done.stdout and "--compile on" not in done.stdout
    assert "--precision fp16 would be about" in done.stdout
    done = run_here(PLAN, "--model", "gpt2", "--gpu", "v100", "--precision", "bf16", "--compile", "on")
    assert done.returncode == 2 and "v100-16gb has no bf16" in done.stderr


@pytest.mark.parametrize(("gpus", "gbits"), [(2, "512"), (8, "3,584")])
def test_two_devices_without_a_switch_have_the_link_between_them(gpus, gbits):
    done = run_here(PLAN, "--model", "gpt2", "--gpu", "mi300x", "--gpus", gpus)
    assert f"link within a node: {gbits} Gbit/s" in done.stdout


def test_the_reason_is_of_typed_flags_where_they_are_refused_alone():
    words = ["--model", "gpt2-xl", "--gpu", "a100-80", "--gpus", 8, "--run_type", "mesh"]
    done = run_here(PLAN, *words, "--pipeline_stages", 1, "--pipeline_schedule", "gpipe")
    assert done.returncode == 2 and "--pipeline_schedule gpipe with --pipeline_stages 1 does nothing" in done.stderr
    assert "--tensor_parallel_size" not in done.stderr


@pytest.mark.parametrize("flag", ["--context_parallel_size", "--pipeline_stages"])
def test_a_mesh_that_does_not_divide_is_missing_with_the_reason(flag):
    done = run_here(PLAN, "--model", "gpt2-xl", "--gpu", "h100-sxm", "--gpus", 128, flag, 3)
    assert re.search(f"not possible: mesh: {flag} 3 .*does not divide the 128 ranks", done.stdout)


def test_another_run_type_is_named_where_the_asked_one_fits_on_no_number_of_devices():
    words = ["--num_layers", 96, "--num_heads", 96, "--embedding_size", 12288, "--gpu", "h100-sxm", "--gpus", 512]
    done = run_here(PLAN, *words, "--run_type", "optimized", "--zero_stage", 3)
    assert done.returncode == 2 and "leave --run_type optimized out" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt2-medium --gpu gb200 --gpus 1 --matmul fp8", r"--compile on would be 1\.\d+ times as fast"),
        (
            "--num_layers 96 --num_heads 96 --embedding_size 12288 --gpu b200 --gpus 512 --matmul fp8",
            r"leaving --matmul fp8 out would be \d\.\d+ times as fast \(mesh",
        ),
        ("--model gpt2-xl --gpu l4 --gpus 8 --offload optimizer", r"--offload optimizer is ZeRO's alone.*: with it, "),
        (
            "--model gpt2 --gpu rtx4090 --gpus 8 --gpus_per_node 1 --network 100mbit --run_type pipeline",
            r"1 of them \(baseline\) would be",
        ),
        ("--model gpt2-xl --gpu a100-80 --gpus 1 --mixed_precision native", r"Best: ZeRO-1 on 1 x"),
    ],
)
def test_a_typed_flag_that_costs_more_than_it_brings_is_named(words, said):
    done = run_here(PLAN, *words.split())
    assert done.returncode == 0 and re.search(said, done.stdout), done.stdout[:2000] + done.stderr
    assert (
        "--matmul" not in run_here(PLAN, "--model", "gpt2-xl", "--gpu", "h100", "--matmul", "fp8").stdout.split("\n")[1]
    )


def test_another_schedule_is_named_where_the_typed_one_has_no_room():
    words = ["--model", "gpt2-xl", "--gpu", "a10g", "--gpus", 12, "--gpus_per_node", 4, "--global_batch_size", 384]
    done = run_here(PLAN, *words, "--run_type", "pipeline", "--pipeline_stages", 12, "--pipeline_schedule", "gpipe")
    assert done.returncode == 2 and "Without --pipeline_schedule gpipe there is room: pipeline 12" in done.stderr


@pytest.mark.parametrize("gpu", ["v100", "t4", "p100", "a100-40"])
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_a_kernel_that_the_device_does_not_have_is_refused(gpu, kernel):
    words = ["--model", "gpt2", "--gpu", gpu, "--gpus", 1, "--attention", kernel]
    done = run_here(PLAN, *words, "--precision", "fp32" if gpu == "a100-40" else "fp16")
    assert done.returncode == 2 and f"--attention {kernel}" in done.stderr
    assert run_here(PLAN, "--model", "gpt2", "--gpu", "a100-40", "--attention", kernel).returncode == 0


def test_a_batch_of_long_sequences_is_not_called_small():
    """One sequence of 131,072 tokens a data rank: a larger batch brings 3 %."""
    words = ["--model", "llama3-405b", "--seq_length", 131072, "--gpu", "h100-sxm", "--gpus", 2048]
    assert "too small" not in run_here(PLAN, *words, "--global_batch_size", 32).stdout


def test_what_is_nearly_full_is_said_with_another_that_is_not():
    done = run_here(PLAN, "--model", "llama2-7b", "--gpu", "a100-40", "--gpus", 16, "--run_type", "fsdp")
    found = re.search(r"It leaves (\S+) GiB, .*; fsdp.*, leaves (\S+) and takes (\S+) times as long", done.stdout)
    is_near_full = re.search(r"needs (\S+) of (\S+) GiB", done.stdout)
    assert is_near_full and (found is not None) == (float(is_near_full[1]) > 0.95 * float(is_near_full[2]))
