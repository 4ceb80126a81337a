"""What a plan advises beside its first row: another batch, precision, number of devices, or run type."""

from __future__ import annotations

import re

import pytest
from support.plans import asked, mostly_slow
from support.programs import run_here

from testbed.planner import advice

PLAN = "scripts/plan.py"
WIDE = "--num_layers 96 --num_heads 96 --embedding_size 12288"  # GPT-3's 175 billion
DEEP = "--gpu a100-40 --gpus 64 --num_layers 60 --num_heads 56 --embedding_size 7168"
THIRTEEN = "--num_layers 40 --num_heads 40 --embedding_size 5120 --gpus 64 --gpu h100"
XL, GPT2, LLAMA = "--model gpt2-xl --gpu", "--model gpt2 --gpu", "--model llama3-8b --gpu"

# flags -> a pattern of the answer
SAID = {
    # of small nodes, several share a long sequence
    "--model gpt2-large --gpu l4 --gpus 64 --gpus_per_node 2 --network 400gbit --seq_length 131072 "
    "--global_batch_size 32": "2 tensor x 8 context",
    f"{XL} h100 --gpus 16 --pipeline_stages 2 --zero_stage 1": "no run type has them all",
    f"{GPT2} h100 --gpus 1 --tensor_parallel_size 4 --pipeline_stages 2": "2 and --.* 4, which are for --run_type mesh",
    # also where one device has no room; with a price also where they are only as fast
    f"{XL} rtx4090 --gpus 24 --global_batch_size 8": r"With --gpus 8: 1\.\d+ times the tokens/s",
    f"{XL} rtx4090 --gpus 16 --gpus_per_node 4 --network 1gbit --tokens 10B --price_per_gpu_hour 1": r"With --gpus 4: "
    r"[\d.]+ times the tokens/s .*, cost \d",
    # a default batch that the devices divide: 448 for 7, not 512
    f"{GPT2} h100-sxm --gpus 7": r"Best: ddp.*448 x 1,024 tokens",
    f"{GPT2} h100-sxm --gpus 7 --global_batch_size 512": "With --global_batch_size 448: .* times the tokens/s .ddp",
    # from all of them, not where data parallelism alone gains
    "--gpu a100-40 --gpus 24 --num_layers 32 --num_heads 32 --embedding_size 4096 --seq_length 8192 "
    "--global_batch_size 64 --activation_checkpointing selective": r"--global_batch_size 72: 1\.1\d* times .* .mesh",
    # and of every number of devices in a sweep
    f"{GPT2} h100-sxm --global_batch_size 100 --tokens 10B --sweep gpus=7,8,16,24": "24 x h100-sxm: With --glo",
    # what the device lacks
    f"{GPT2} t4 --run_type pipeline": r"With --precision fp16, without --run_type pipeline: \d",
    f"{GPT2} v100 --gpus 7 --global_batch_size 64 --run_type pipeline": r"fp16 and --g\S+ 56, without ",
    f"{GPT2} v100 --precision bf16 --mixed_precision native": "fp16, without --mixed_precision native: ",
    f"{LLAMA} v100,h100 --gpus 64 --matmul fp8": "v100-16gb *64   --matmul fp8: v100-16gb multiplies nothing in 8 bits",
    f"{GPT2} mi300x": "No published run on mi300x is known",
    "--model gpt2-medium --gpu v100 --gpus 8 --precision bf16": r"--precision fp16: [^$]*--compile off",
    # a batch is small where most of a step is paid once, however many tokens a data rank has
    f"{GPT2} h100-sxm --gpus 512 --global_batch_size 512": "The batch is too small for so many devices",
    f"{LLAMA} b200 --gpus 512 --network 25gbit": r"too small for so many devices: 8,192 tokens .*96: \d\.\d+ times",
    # another batch, and fewer devices, on top of the flags that are left out
    "--num_layers 32 --num_heads 32 --embedding_size 2560 --gpu h200 --gpus 12 --gpus_per_node 4 --network 1gbit "
    "--seq_length 16384 --global_batch_size 256 --precision fp32": r"With --gpus 8, without --precision fp32: 7\.\d+ "
    r"times(?s:.*)With --global_batch_size 288, without --precision fp32: 8\.\d+ times",
    f"{GPT2} gb200 --gpus 128": r"--nnodes 32 --nproc-per-node 4 .*--compile o",
    # several kinds: what a plan of each would say
    f"{GPT2} t4,v100,h200 --gpus 8 --tokens 10B": "8 x t4: With --precision fp16: 5[^$]*"
    "8 x v100-16gb: With --precision fp16: [^$]*8 x h200: No published run on h200 is known",
    # fewer devices where the network or the batch holds all of them back
    "--model gpt2-medium --gpu l4 --gpus 12 --gpus_per_node 4 --network 50mbit": r"With --gpus 4: ",
    f"{GPT2} rtx4090 --gpus 8 --gpus_per_node 1 --network 100mbit --run_type pipeline": "1, without .* .baseline,",
    "--gpu h100-sxm --gpus 8 --global_batch_size 7": "With --gpus 7: ",
    # fewer and without a flag, where neither alone gains so much
    "--model llama2-13b --gpu h200 --gpus 512 --network 100mbit --seq_length 131072 --global_batch_size 32 "
    "--activation_checkpointing block --precision fp32": "With --gpus 8, without --precision fp32: ",
    "--model gpt2-medium --gpu v100 --gpus 512 --network 100mbit": r"With --precision fp16 and --gpus 8: 6\.\d+ times",
    # the devices of one node, with fp16 and offload
    "--model llama2-7b --gpu v100 --gpus 512 --network 10mbit --seq_length 2048 --global_batch_size 768": "With "
    r"--precision fp16 and --run_type optimized and --offload optimizer and --gpus 8: 12",
    # groups of 3 ranks on nodes of 4 cross nodes
    f"{GPT2} b200 --gpus 24 --gpus_per_node 4 --seq_length 65536": "Best: ddp on 24",
    # offload on fewer devices, where memory lacks on them alone
    "--num_layers 32 --num_heads 20 --embedding_size 2560 --gpu t4 --gpus 512 --gpus_per_node 1 --network 100mbit "
    "--global_batch_size 96": r"With --precision fp16 and --run_type optimized and --offload optimizer and --gpus 1: 3",
    # with one micro batch stages overlap nothing: as typed, and without a flag
    "--model mistral-7b --gpu mi300x --gpus 512 --network 200gbit --seq_length 131072 --global_batch_size 1 --run_type "
    "mesh --context_parallel_size 4": r"With --gpus 32: 1\.0\d* times(?s:.*)With --gpus 128, without --run_type m",
    # what fp16 leaves no room for, offload has room for
    "--num_layers 28 --num_heads 24 --embedding_size 3072 --ffn 8192 --kv_heads 8 --gated --vocab_size 128256 --gpu t4 "
    "--gpus 8 --seq_length 1536": r"fp16: 4\.\d+ .* 0\.0 GiB left.(?s:.*)fp16 and --run_type optimized and \S+ \S+ 7",
    # typed flags that cost more than they bring, or that no run has
    "--model gpt2-medium --gpu gb200 --gpus 1 --matmul fp8": r"With --compile on: 1\.\d+ times",
    f"{WIDE} --gpu b200 --gpus 512 --matmul fp8": r"Without --matmul fp8: \d\.\d+ times .*\(mesh",
    f"{XL} l4 --gpus 8 --offload optimizer": r"does without --offload optimizer",
    f"{XL} a100-80 --gpus 1 --mixed_precision native": r"Best: ZeRO-1 on 1 x",
    f"{XL} h100 --gpus 8 --mixed_precision native --top 0": r"Best: [^$]*not possible: ddp: --mixed_precision belongs",
    f"{LLAMA} rtx4090,h100-sxm --gpus 16 --seq_length 8192 --mixed_precision native": "16 x rtx4090: Without "
    "--mixed_precision native there is room: mesh",
    "--model llama3-405b --gpu h100 --gpus 4096 --seq_length 4096 --global_batch_size 64": ": 64 tokens a device. With",
    # a kernel of an older device: no ring, but keys and values of the whole sequence
    f"{GPT2} t4 --gpus 16 --gpus_per_node 4 --seq_length 131072 --global_batch_size 4": r"Best: mesh \d+ context(?s:.*)"
    "--context_parallel_method allgather",
    # offload where all else is tight, also with fp16 on top
    "--model gpt2-large --gpu t4 --gpus 1 --precision fp32": r"With --precision fp16 and --run_type optimized and "
    r"--offload optimizer: 7\.\d+ times the tokens/s and room .ZeRO-",
    # 4.7 % of the memory is no room
    f"{LLAMA} b200 --gpus 1 --seq_length 16384": r"--offload optimizer: 1\.2\d* times the tokens/s and room .ZeRO-",
    # a batch that gives the ranks work only where they share sequences
    f"{LLAMA} rtx4090 --gpus 64 --global_batch_size 4": r"Best: mesh .*\d context",
    "--model llama2-7b --gpu a100-80 --gpus 512 --gpus_per_node 2 --seq_length 131072 --global_batch_size 8": "Best: "
    r"mesh \d tensor x \d+ context",
    "--model gpt2-large --gpu rtx-4090 --gpus 512 --global_batch_size 128": r"Best: mesh .*\d context",
    # fewer micro batches than stages: gpipe
    "--num_layers 40 --num_heads 40 --embedding_size 5120 --gpu gb200 --gpus 24 --gpus_per_node 4 "
    "--global_batch_size 1": r"Best: mesh 3 stages x \d tensor.*, gpipe on",
    f"{XL} v100 --gpus 4096 --global_batch_size 64": r"Best: mesh \d+ stages x 8 context.*, gpipe on 4096",
    # fewer devices than an eighth of them
    "--num_layers 24 --num_heads 16 --embedding_size 2048 --gpu mi300x --gpus 1024 --network 1gbit "
    "--global_batch_size 64": r"With --gpus (8|16): ",
    # context ranks where nothing else has room
    "--num_layers 28 --num_heads 12 --embedding_size 1536 --ffn 8960 --kv_heads 2 --gated --vocab_size 151936 --gpu t4 "
    "--gpus 8 --seq_length 8192": r"Best: mesh .*\d context",
    # stages per rank, as a command has them
    f"{XL} h100 --gpus 16 --run_type mesh --pipeline_stages 8 --pipeline_schedule interleaved_1f1b --stages_per_rank 4":
    "interleaved_1f1b, 4 stages each",
    # tensor ranks over small nodes
    "--model llama3-70b --gpu a10g --gpus 256 --gpus_per_node 2 --seq_length 4096 --top 0": "8 tensor",
    # larger micro batches are 3 % faster
    f"{GPT2} gb200 --gpus 12 --gpus_per_node 4 --precision fp32": r"Best: ddp on 12 x gb200, micro batch 4 x 12",
    # why this row of those as fast
    f"{XL} rtx4090 --gpus 8 --gpus_per_node 4 --network 10gbit": "Taken is the simplest .*ones it is that with",
    "--model gpt2-large --gpu t4 --gpus 1": r"With --precision fp16: .* tight",
    # meshes
    "--model llama3-70b --gpu h200 --gpus 1024 --global_batch_size 2048 --top 0": r"mesh .* stages x .*, interleaved",
    f"{XL} h100-sxm --gpus 128 --context_parallel_size 3": "--context_parallel_size 3 does not divide 128 ranks",
}  # fmt: skip
# flags -> what the answer leaves out
NOT_SAID = {
    # said as the faster one already
    "--num_layers 32 --num_heads 32 --embedding_size 4096 --gpu l4 --gpus 12 --gpus_per_node 4 --network 25gbit "
    "--seq_length 16384 --shard_size 8": "Without --shard_size 8 there is room",
    f"{GPT2} h100 --gpus 8 --offload none": "does without",
    f"{GPT2} a100-80": "fp16: |No published run|too small|is tight|does not divide",
    f"{GPT2} p100": "--compile on",
    "--model gpt2-medium --gpu v100 --gpus 8 --precision bf16 --top 1": "--compile on",
    # a batch that divides is all that it takes
    "--model gpt2-medium --gpu h100-sxm --gpus 24 --network 1gbit --seq_length 65536 --global_batch_size 512 "
    "--attention efficient": "too small",
    # 256 sequences a data rank. Llama 3 trained well with 1,024 tokens a GPU (arXiv:2407.21783, table 4)
    "--model llama3-405b --gpu h100-sxm --gpus 4096 --global_batch_size 2048": "too small",
    # one sequence of 131,072 tokens a data rank: a larger batch brings 3 %
    "--model llama3-405b --seq_length 131072 --gpu h100-sxm --gpus 2048 --global_batch_size 32": "too small",
    "--model gpt2-medium --gpu l4 --gpus 8": "With --gpus",
    "--here --gpus 4 --global_batch_size 15": "With --gpus",  # shares of cores
    # beside a tight run, room that takes a hundred times as long
    "--num_layers 48 --num_heads 64 --embedding_size 8192 --gpu rtx-4090 --gpus 48 --network 100mbit --seq_length "
    "16384 --global_batch_size 512": r"0\.0\d* times the tokens",
    f"{XL} rtx-4090 --gpus 3 --global_batch_size 64": "With --global_batch_size",  # a pipeline is as fast
    f"{XL} h100 --matmul fp8 --top 1": "Without --matmul fp8",
    "--model gpt2-medium --gpu v100 --gpus 1 --run_type optimized --offload parameters": "not possible: optimized",
}
# flags -> a pattern of the refusal
REFUSED = {
    # fewer devices and a flag that gain only together
    "--num_layers 32 --num_heads 20 --embedding_size 2560 --gpu v100 --gpus 4096 --network 10mbit --seq_length "
    "2048 --global_batch_size 7 --tensor_parallel_size 2": "With --precision fp16 and --gpus 7 there is room: ",
    # beside the fastest of all, the fastest that keeps the batch
    "--model llama2-7b --gpu rtx-4090 --gpus 512 --network 1gbit --seq_length 2048 --global_batch_size 32 --run_type "
    "pipeline --pipeline_schedule zero_bubble": r"With --gpus \d+, without --run_type pipeline .* s a",
    # fewer devices with the asked batch, where another batch is the fastest of all
    "--num_layers 16 --num_heads 32 --embedding_size 2048 --ffn 8192 --kv_heads 8 --gated --vocab_size 128256 --gpu "
    "gb200 --gpus 4096 --network 100gbit --seq_length 32768 --global_batch_size 4 --micro_batch_size_per_gpu 8": "With "
    "--gpus 1024, without --micro_batch_size_per_gpu 8 there is room",
    # 4 does not divide 25 heads, on however many devices
    f"{XL} v100 --gpus 1 --global_batch_size 64 --run_type mesh --tensor_parallel_size 4": "it needs --gpus 8 or more.*"
    "With --precision fp16 and --run_type optimized and --offload optimizer, without --tensor_parallel_size 4 there is",
    # a mesh of one axis is another run type's
    f"{GPT2} a100-80 --gpus 1 --run_type mesh": "it needs --gpus 4 or more",
    f"{XL} rtx-4090 --gpus 1 --run_type fsdp --shard_size 8": "it needs --gpus 8 or more",
    f"{GPT2} v100 --gpus 1 --run_type tensor --context_parallel_size 2": "belongs to --run_type mesh, not to tensor",
    f"{GPT2} a100-80 --gpus 1 --run_type mesh --context_parallel_size 2": "it needs --gpus 2 or more",
    # what else is in the way of a typed flag, and how many devices would do; above 4,096 devices a way out too
    "--model llama2-70b --gpu v100 --gpus 8 --seq_length 16384 --global_batch_size 1 --run_type ddp": "Without "
    r"--run_type ddp it does not fit either: .*; \d+ of them would do",
    "--model gpt2-large --gpu h100 --gpus 8192 --global_batch_size 4096 --run_type ddp": "Without --run_type ddp th",
    # a tight run that is much faster, and fewer devices that are no half
    "--model llama2-7b --gpu a10g --gpus 24 --gpus_per_node 4 --network 10mbit --seq_length 131072 "
    "--global_batch_size 96 --run_type model_parallel": r"be 6\.\d times as fast and is tight. With --gpus 16, .* mesh",
    # what is much faster is so, and the fastest
    f"{XL} a100-40 --gpus 32 --network 10gbit --global_batch_size 50 --seq_length 2048 --zero_stage 1 "
    "--run_type optimized": "without --run_type optimized and --zero_stage 1 there is room: mesh",
    # context ranks gather keys where the ring is refused; fewer devices without a typed flag
    "--num_layers 64 --num_heads 40 --embedding_size 5120 --ffn 27648 --kv_heads 8 --gated --vocab_size 152064 "
    "--gpu a100-80 --gpus 7 --seq_length 32768 --attention math": "; 16 of them would do tightly, and 32 with room, "
    "and without --attention math 16 of them would do",
    # the run that lacks least has none of the typed flags
    "--model llama2-70b --gpu t4 --gpus 24 --gpus_per_node 4 --network 10mbit --global_batch_size 32 --offload "
    "parameters --zero_stage 3": "of 14.7, and does without --zero_stage 3 and --offload parameters, which are for",
    # what would do without a typed flag, where no number of devices does with it
    "--num_layers 40 --num_heads 40 --embedding_size 5120 --gpu v100 --gpus 8 --seq_length 8192 --dropout 0.1 "
    "--global_batch_size 480": "that was tried would do as asked, and without --dropout 0.1 16 of them would do t",
    f"{DEEP} --run_type optimized --zero_stage 3": "DeepSpeed puts the whole model on each device before it cuts it",
    f"{THIRTEEN} --matmul fp8 --mixed_precision native": "what is not multiplied in 8 bits runs in bf16 autocast",
    f"{XL} h200 --gpus 64 --mixed_precision native --global_batch_size 32": "--global_batch_size 32 is not a multiple",
    f"{GPT2} h100 --gpus 1 --run_type optimized": "optimized does on 1 device what another run type does",
    f"{XL} a10g --gpus 1": "With --run_type optimized and --offload optimizer there is room: ZeRO-",
    f"{GPT2} v100 --precision bf16 --compile on": "v100-16gb has no bf16",
    # kernels that PyTorch has from Ampere on: of a ring, and of fused attention in bf16
    f"{GPT2} v100 --seq_length 65536 --precision bf16 --run_type mesh --context_parallel_size 8 "
    "--context_parallel_method ring": "v100-16gb has no fl",
    "--model gpt2-large --gpu t4 --gpus 8 --seq_length 8192 --precision bf16 --run_type fsdp": "does not fit on 8 x t4",
    f"{GPT2} mi300x --attention cudnn": "mi300x has no cuDNN; leave --attention out",
    f"{GPT2} v100 --mixed_precision native": "has no bf16; leave --mixed_precision out. Without --mixed",
    # a batch that does not divide, and then does not fit or need not be
    "--model llama2-7b --gpu t4 --gpus 7 --seq_length 16384 --global_batch_size 2048 --run_type optimized": "does not "
    "fit on 7 x t4: the least, ",
    "--model llama3-70b --gpu h200 --gpus 512 --seq_length 8192 --global_batch_size 256 --run_type fsdp": "Without "
    "--run_type fsdp there is room: mesh.* With --global_batch_size 512 there is room: fsdp",
    f"{GPT2} a100 --gpus 7 --global_batch_size 60 --run_type ddp --attention flash --precision fp32": r"--\S+ ddp and",
    # the fastest of the numbers that divide the batch, not the largest
    f"{XL} a100-80 --gpus 512 --network 1gbit --run_type fsdp --global_batch_size 64": "With --gpus 8 there is room",
    "--model gpt2-xl --gpu a100-80 --gpus 7 --run_type mesh": "mesh does on 7 devices what another .*is room: ",
    "--model gpt2 --num_layers 32 --num_heads 32 --embedding_size 4096 --gpus 1 --gpu a10g": "6 of .* tightly, and 7 w",
    f"{GPT2} h100 --gpus 8 --run_type mesh --pipeline_stages 8": "mesh does on 8 devices what another run type does",
    # as few flags as can be, and what is much faster with fewer
    "--num_layers 40 --num_heads 40 --embedding_size 5120 --gpu gb200 --gpus 512 --network 200gbit --seq_length 32768 "
    "--global_batch_size 32 --run_type pipeline --pipeline_schedule zero_bubble": "gpipe or a larger .*Without "
    "--pipeline_schedule zero_bubble there is room: .*Without --run_type pipeline and .* mesh",
    # a typed flag that keeps all out on the asked devices, and not on fewer
    "--num_layers 22 --num_heads 32 --embedding_size 2048 --ffn 5632 --kv_heads 4 --gated --gpu l4 --gpus 7 "
    "--seq_length 65536 --run_type optimized --zero_stage 2": "With --gpus 4, without --run_type optimized and "
    "--zero_stage 2 it fits tightly: mesh",
    # whether what has room is done in time
    f"{XL} rtx-4090 --gpus 1 --tokens 1B --deadline 14d": "there is room: .*, within --deadline 14 days",
    f"{XL} rtx-4090 --gpus 1 --tokens 1B --deadline 1d": "there is room: .*, longer than --deadline 24 hours",
    f"{LLAMA} h100 --gpus 2 --run_type baseline": "Without --run_type baseline it fits tightly: [^P]*",
    # the reason is of typed flags where they are refused alone
    f"{XL} a100-80 --gpus 8 --run_type mesh --pipeline_stages 1 --pipeline_schedule gpipe": "^(?!.*--tensor_p)"
    ".*--pipeline_schedule gpipe with --pipeline_stages 1 does nothing",
    f"{WIDE} --gpu h100-sxm --gpus 512 --run_type optimized --zero_stage 3": "Without --run_type optimized and "
    "--zero_stage 3 there is room: mesh",
    f"{LLAMA} rtx4090 --gpus 16 --seq_length 8192 --mixed_precision native": "Without --mixed_precision native there",
    f"{XL} a10g --gpus 12 --gpus_per_node 4 --global_batch_size 384 --run_type pipeline --pipeline_stages 12 "
    "--pipeline_schedule gpipe": "Without --pipeline_schedule gpipe there is room: pipeline 12",
    **{
        f"{GPT2} {gpu} --gpus 1 --attention {kernel} --precision {precision}": f"--attention {kernel}"
        for gpu, kernel, precision in (("v100", "flash", "fp16"), ("t4", "cudnn", "fp16"), ("a100-40", "flash", "fp32"))
    },
}  # fmt: skip


@pytest.mark.parametrize("words", mostly_slow(SAID))
def test_advice_that_can_be_followed(words: str):
    done = run_here(PLAN, *words.split())
    assert done.returncode == 0, done.stderr
    assert re.search(SAID[words], done.stdout), done.stdout[:3000]


@pytest.mark.parametrize("words", mostly_slow(NOT_SAID))
def test_advice_that_would_be_wrong_is_not_given(words: str):
    done = run_here(PLAN, *words.split())
    assert done.returncode == 0 and not re.search(NOT_SAID[words], done.stdout), done.stdout[:3000] + done.stderr


@pytest.mark.parametrize("words", mostly_slow(REFUSED))
def test_what_cannot_be_is_refused_with_what_would_do(words: str):
    done = run_here(PLAN, *words.split())
    assert done.returncode == 2 and re.search(REFUSED[words], done.stderr), done.stdout[:1000] + done.stderr


def test_a_table_gives_the_reason_of_the_run_types_that_have_the_typed_flags():
    done = run_here(PLAN, *f"{XL} h100-sxm,h200 --gpus 64 --mixed_precision native --global_batch_size 32".split())
    assert done.returncode == 2 and "no run is possible" in done.stdout, done.stderr
    assert "--global_batch_size 32 is not a multiple" in done.stdout and "not to allreduce" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model llama3-70b --gpu a100-80 --sweep gpus=2,4,8", r"8 x a100-80gb: the least, .*; \d+ of them would do"),
        (
            "--model llama2-7b --gpu a10g --sweep gpus=8,16,32 --seq_length 8192 --global_batch_size 4096 "
            "--run_type optimized --zero_stage 3",
            "8 x a10g: Without --run_type optimized and --zero_stage 3 there is room",
        ),
    ],
)
def test_a_sweep_without_a_run_says_what_would_do(words: str, said: str):
    done = run_here(PLAN, *words.split())
    assert done.returncode == 2 and re.search(said, done.stdout), done.stdout


def test_where_nothing_fits_all_strategies_are_built_all_the_same(monkeypatch):
    built: list[list] = []

    def note(jobs, *_):
        built.append(jobs)
        return []

    monkeypatch.setattr("testbed.autotune.check_mesh.check_jobs", note)
    words = "--check --num_layers 40 --num_heads 40 --embedding_size 5120 --gpu t4 --gpus 4"
    done = run_here(PLAN, *words.split())
    assert len({job.run_type for job in built[0]}) >= 8, done.stdout + done.stderr


def test_a_table_says_what_is_in_the_way_without_the_typed_flags_too():
    model = "--num_layers 60 --num_heads 56 --embedding_size 7168 --ffn 20480 --kv_heads 8 --gated --vocab_size 64000"
    done = run_here(PLAN, *f"{model} --gpu h100-sxm,l4 --gpus 4 --seq_length 8192 --run_type baseline".split())
    said = r"4 x h100-sxm: Without --run_type baseline it does not fit either: the least, .*; \d+ of them would do"
    assert done.returncode == 2 and re.search(said, done.stdout), done.stdout


def test_a_sweep_names_the_first_number_with_room_and_not_one_that_is_tight():
    model = "--num_layers 48 --num_heads 64 --embedding_size 8192 --seq_length 4096 --global_batch_size 4096"
    done = run_here(PLAN, *f"{model} --gpu a10g --sweep gpus=32,64 --network 200gbit --run_type ddp".split())
    said = r"64 x a10g: Without --run_type ddp there is room"
    assert done.returncode == 2 and re.search(said, done.stdout), done.stdout


class Choice:
    """A choice without a run, and the changes that let one fit: whether each is tight."""

    def __init__(self, *are_tight: bool, fits: bool = False):
        self.are_tight, self.fits = are_tight, fits

    def fitting(self) -> object:
        return self if self.fits else None


@pytest.mark.parametrize(
    ("choices", "first"),
    [
        ([Choice(True), Choice(True, False), Choice(False)], 1),
        ([Choice(), Choice(True), Choice()], 1),
        ([Choice(True), Choice(fits=True)], 1),
        ([Choice(), Choice()], 1),
    ],
)
def test_of_a_sweep_the_first_with_room_is_named_then_a_tight_one_then_the_last(monkeypatch, choices, first):
    monkeypatch.setattr(advice, "with_room", lambda choice: list(choice.are_tight))
    monkeypatch.setattr(advice, "is_tight", lambda way: way)
    assert advice._first_of(choices) is choices[first]


def test_a_model_that_is_not_tied_has_not_the_name_of_one_that_is():
    shape = "--num_layers 24 --num_heads 16 --embedding_size 1024 --gpu h100-sxm"
    assert (asked(shape).model_name, asked(f"{shape} --untied").model_name != "gpt2-medium") == ("gpt2-medium", True)
