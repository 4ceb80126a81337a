"""Tables whose figures follow from one another, each with the change that breaks it; and real excerpts."""

from __future__ import annotations

SPEED_UP = """
| GPUs | tokens/s | Speed-up | Efficiency |
|---|---|---|---|
| 1 | 520,001 | 1.00x | 100% |
| 8 | 3,841,266 | 7.39x | 92.3% |
| 16 | 6,366,609 | 12.24x | 76.5% |
| 32 | 12,480,512 | 24.00x | 75.0% |
"""
STEPS = """
| Config | Global batch | Seq len | Step time (ms) | tokens/s |
|---|---|---|---|---|
| a | 32 | 2048 | 607 | 107,968 |
| b | 16 | 2048 | 385 | 85,112 |
| c | 16 | 2048 | 455 | 72,018 |
| d | 32 | 2048 | 1430 | 45,830 |
"""
PER_STEP = """
| Config | iter time (ms) | tokens/s | samples/s |
|---|---|---|---|
| plain | 115 | 71,235 | 34.78 |
| fused | 116 | 70,621 | 34.48 |
| eager | 145 | 56,497 | 27.59 |
| slow | 179 | 45,765 | 22.35 |
"""
FLOPS = """
| Nodes | DP | TP | PP | Micro batch | GBS | Sec/it | TFLOPs | MFU |
|---|---|---|---|---|---|---|---|---|
| 4 | 1 | 8 | 4 | 1 | 2048 | 221.21 | 94.39 | 30.25% |
| 8 | 2 | 8 | 4 | 2 | 2048 | 115.30 | 90.54 | 29.02% |
| 16 | 4 | 8 | 4 | 2 | 2048 | 58.10 | 89.84 | 28.80% |
| 32 | 8 | 8 | 4 | 1 | 2048 | 30.40 | 85.85 | 27.52% |
"""
DEVICES = """
| nodes | GPUs | DP | TP | PP | tok/s | tok/s/GPU | MFU | Aggregate PFLOP/s | TFLOP/s | GPU hours | time (h) |
|---|---|---|---|---|---|---|---|---|---|---|---|
| 4 | 16 | 4 | 4 | 1 | 229,904 | 14,369 | 21.3% | 3.37 | 210.7 | 160.0 | 10.00 |
| 8 | 32 | 8 | 4 | 1 | 442,592 | 13,831 | 20.5% | 6.49 | 202.8 | 166.4 | 5.20 |
| 16 | 64 | 16 | 2 | 2 | 832,000 | 13,000 | 19.3% | 12.20 | 190.6 | 176.6 | 2.76 |
| 32 | 128 | 32 | 2 | 2 | 1,558,016 | 12,172 | 18.0% | 22.84 | 178.4 | 188.2 | 1.47 |
"""
TOKENS = """
| run | steps | Global batch | Seq len | tokens | Total time (s) | Step time (s) | tokens/s | samples/s |
|---|---|---|---|---|---|---|---|---|
| a | 100 | 512 | 1024 | 52,428,800 | 50.0 | 0.500 | 1,048,576 | 1,024.0 |
| b | 200 | 512 | 1024 | 104,857,600 | 90.0 | 0.450 | 1,165,084 | 1,137.8 |
| c | 300 | 256 | 1024 | 78,643,200 | 75.0 | 0.250 | 1,048,576 | 1,024.0 |
"""
ACCUMULATION = """
| GPUs | Micro batch | Grad accum | Global batch |
|---|---|---|---|
| 8 | 4 | 8 | 256 |
| 16 | 4 | 4 | 256 |
| 32 | 4 | 2 | 256 |
"""
HFU = """
| Config | TFLOP/s/GPU | tok/s/GPU | HFU |
|---|---|---|---|
| a | 156.0 | 5000 | 50.0% |
| b | 140.4 | 4500 | 45.0% |
| c | 124.8 | 4000 | 40.0% |
"""
TWO_COLUMNS = """
| GPUs | Throughput - FP32 (img/s) | Throughput - mixed precision (img/s) | Speedup (FP32 to mixed precision) |
|---|---|---|---|
| 1 | 382.1 | 1261.3 | 3.30 |
| 4 | 1463.7 | 4742.3 | 3.24 |
| 8 | 2934.1 | 9506.6 | 3.24 |
"""
SAME_LAYOUT = """
### 32B
| Hardware | TFLOP/sec/chip | MFU |
|---|---|---|
| one slice | 328 | 71.47% |
| two slices | 319 | 69.43% |

### 64B
| Hardware | TFLOP/sec/chip | MFU |
|---|---|---|
| one slice | 323 | 70.31% |
| two slices | 309 | 67.26% |
"""
WHOLE = """
| Nodes | DP | MBS | GBS | Sec/it |
|---|---|---|---|---|
| 512 | 512 | 1 | 1024 | 4.2 |
| 512 | 512 | 2 | 1024 | 3.2 |
| 256 | 256 | 1 | 1024 | 7.9 |
"""
STEPS_PER_SECOND = """
| run | global_batch_size | seq_len | steps_per_sec | step_time_ms | samples_per_sec | tokens_per_sec |
|---|---|---|---|---|---|---|
| a | 512 | 1024 | 2.00 | 500 | 1024.0 | 1048576 |
| b | 512 | 1024 | 2.50 | 400 | 1280.0 | 1310720 |
| c | 256 | 1024 | 4.00 | 250 | 1024.0 | 1048576 |
"""
SEEDS = """
| Metric | Seed 1 | Seed 2 | Seed 3 | Mean |
|---|---|---|---|---|
| loss | 3.21 | 3.25 | 3.23 | 3.23 |
"""
ENDS = """
| Latency | min | avg | max |
|---|---|---|---|
| step | 10.1 | 11.4 | 15.0 |
"""
PEAKS = """
## On A100 80GB

| Params | GPUs | TFLOP/s per GPU | MFU | Memory (GB) |
|---|---|---|---|---|
| 13B | 8 | 150 | 48% | 61.5 |
| 30B | 16 | 145 | 46% | 60.1 |
"""
COPIED = """
| model | #GPU | policy | TFLOPs |
|---|---|---|---|
| gpt2_10b | 2 | cpu | 61.117 |
| gpt2_10b | 4 | cpu | 61.354 |
"""

FOLLOW, POSSIBLE = "figures follow from one another", "within what is possible"
# name -> (rule, the table, what stands in a row, what it is changed to, words of the message, words of the correction)
CASES = {
    "speed-up": (FOLLOW, SPEED_UP, "| 7.39x", "| 8.39x", "Speed-up does not follow", "Speed-up 7.39x"),
    "efficiency": (FOLLOW, SPEED_UP, "| 76.5%", "| 86.5%", "Efficiency does not follow", "Efficiency 76.5%"),
    "efficiency of a changed rate": (FOLLOW, SPEED_UP, "12,480,512", "14,480,512", "speed-up is a rate", None),
    "the reference": (FOLLOW, SPEED_UP, "| 520,001", "| 620,001", "do not refer to this row", "tokens/s 52"),
    "known step": (FOLLOW, STEPS, "72,018", "82,018", "per second x time of a step = batch x length", None),
    "same step": (FOLLOW, PER_STEP, "56,497", "66,497", "tokens per second x time of a step is what", "tokens/s 56,5"),
    "samples of a step": (FOLLOW, PER_STEP, "27.59", "32.59", "samples per second x time of a step is what", None),
    "length": (FOLLOW, PER_STEP, "| 56,497", "| 66,497", "tokens/s / samples/s is the length", None),
    "FLOPs of a step": (FOLLOW, FLOPS, "58.10", "14.50", "is the work of a sample", "Sec/it 58.1"),
    "MFU": (FOLLOW, FLOPS, "| 89.84 | 28.80%", "| 89.84 | 38.80%", "is the peak of the device", "MFU 28.79%"),
    "HFU": (FOLLOW, HFU, "45.0%", "55.0%", "FLOP/s / HFU", "HFU 45.0%"),
    "nodes": (FOLLOW, FLOPS, "| 16 | 4 | 8", "| 16 | 2 | 8", "parallel / nodes is what a node has", "DP 4"),
    "devices": (FOLLOW, DEVICES, "| 64 | 16 | 2", "| 64 | 8 | 2", "devices = data x tensor", "GPUs 32"),
    "devices of nodes": (FOLLOW, DEVICES, "| 8 | 32", "| 8 | 48", "devices / nodes", None),
    "MFU of rates": (FOLLOW, DEVICES, "20.5%", "25.5%", "MFU is the same for one model", "MFU 20.5%"),
    "rate of all": (FOLLOW, DEVICES, "832,000", "932,000", "rate of one device x devices", "tok/s 832,0"),
    "FLOP/s of all": (FOLLOW, DEVICES, "12.20", "15.20", "FLOP/s of all = FLOP/s of one x devices", "PFLOP/s 12."),
    "work of a token": (FOLLOW, DEVICES, "190.6", "230.6", "FLOP/s / rate is the work of a token", None),
    "device hours": (FOLLOW, DEVICES, "176.6", "196.6", "device hours = devices x time", "GPU hours 176"),
    "tokens": (FOLLOW, TOKENS, "78,643,200", "87,643,200", "tokens = steps x batch x length", "tokens 78,643,200"),
    "time of steps": (FOLLOW, TOKENS, "90.0 |", "80.0 |", "time = steps x time of a step", None),
    "steps per second": (FOLLOW, STEPS_PER_SECOND, "| 2.50", "| 3.50", "steps/s x time of a step = 1", "sec 2.50"),
    "samples of steps": (FOLLOW, STEPS_PER_SECOND, "1280.0", "1480.0", "samples/s = steps/s x samples of", None),
    "tokens of steps": (FOLLOW, STEPS_PER_SECOND, "1310720", "1510720", "tokens/s = steps/s x tokens of", None),
    "tokens per second": (FOLLOW, TOKENS, "1,165,084", "865,084", "tokens/s = tokens / time", None),
    "samples per second": (FOLLOW, TOKENS, "| 1,137.8", "| 1,337.8", "tokens/s = samples/s x length", None),
    "global batch": (FOLLOW, ACCUMULATION, "| 16 | 4 | 4 | 256", "| 16 | 4 | 4 | 320", "= micro batch x accumulation",
                     "Global batch 256"),
    "two columns": (FOLLOW, TWO_COLUMNS, "| 3.24 |", "| 2.18 |", "to mixed precision) does not follow", "3.24"),
    "tables of one layout": (FOLLOW, SAME_LAYOUT, "| 67.26%", "| 57.26%", "is the peak of the device", "MFU 67."),
    "whole micro batches": (FOLLOW, WHOLE, "| 2 | 1024", "| 2 | 24", "does not divide it", None),
    "mean of seeds": (FOLLOW, SEEDS, "3.23 |\n", "3.32 |\n", "does not follow from the 3 values", "3.23"),
    "an average outside": (POSSIBLE, ENDS, "11.4", "16.4", "is not between min 10.1 and max 15.0", None),
    "MFU over 100 %": (POSSIBLE, PEAKS, "48%", "148%", "no device does more than its peak", None),
    "over the peak": (POSSIBLE, PEAKS, "| 145", "| 1450", "over the peak of a100", None),
    "memory below the weights": (POSSIBLE, PEAKS, "| 60.1", "| 1.5", "less than one byte for each of 30B", None),
    "two rows, one measurement": (FOLLOW, COPIED, "61.117", "61.354", "61.354 to the last digit", None),
}  # fmt: skip
ONLY_NOTES = {"two rows, one measurement"}

# AI-Hypercomputer/maxtext, docs/advanced_docs/runtime_performance_results.md, commit
# 9797b463d2893d1498056d23f0d4497c85147c0d, Apache-2.0. One row's MFU is of other FLOP/s than it states.
MAXTEXT = """
## TPU v5p

| No. of params | Accelerator Type | TFLOP/chip/sec | Model flops utilization (MFU) |
|---|---|---|---|
| 128B | v5p-512 | 3.15e+02 | 68.53% |
| 256B | v5p-1024 | 3.16e+02 | 68.82% |
| 512B | v5p-1024 | 2.94e+02 | 63.99% |
| 1024B | v5p-2048 | 2.49e+02 | 64.05% |
| 1024B | v5p-4096 | 2.97e+02 | 64.80% |
"""
# Oneflow-Inc/DLPerf, MxNet/BERT/README.md, commit c89430bac64f64caabb0445ff7eb80175641454c, Apache-2.0. The last
# speed-up has two digits changed: 14822.31 / 544.31 = 27.23.
DLPERF = """
| node_num | gpu_num | samples/s | speedup |
| -------- | ------- | --------- | ------- |
| 1        | 1       | 544.31    | 1       |
| 1        | 2       | 1000.15   | 1.84    |
| 1        | 4       | 1970.59   | 3.62    |
| 1        | 8       | 3825.21   | 7.03    |
| 2        | 16      | 7327.5    | 13.46   |
| 4        | 32      | 14822.31  | 27.33   |
"""
# bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, commit
# 9e64edec2ad1fb9263bf39ba616a84ff64b4d947, Apache-2.0. Nothing is wrong: the first model is another.
BIGSCIENCE = """
| Nodes | Size | NHIDDEN | DP | TP | PP | MBS |  GBS | Mem  | Sec/it | TFLOPs | Notes |
| ----: | ---: |    ---: | -: | -: | -: | --: |  --: | ---: | -----: | -----: | ----: |
|    40 | 200B |   14400 |  4 |  8 | 10 |   1 | 2048 | 35GB | 221.21 |  94.39 | 02-20 |
|    40 | 187B |   13824 |  4 |  8 | 10 |   1 | 2048 | 33GB | 160.29 | 120.05 | 02-20 |
|    40 | 187B |   13824 |  4 |  8 | 10 |   2 | 2048 | 39GB | 151.07 | 127.38 | 02-20 |
|    40 | 187B |   13824 |  4 |  8 | 10 |   4 | 2048 | 53GB | 147.43 | 130.53 | 02-20 |
|    40 | 187B |   13824 |  4 |  8 | 10 |   8 | 2048 | 73GB | 152.51 | 126.18 | 02-20 |
|       |      |         |    |    |    |     |      |      |        |        |       |
"""
# kakaobrain/torchgpipe, benchmarks/resnet101-accuracy/README.md, commit a1b4ee25, BSD-3-Clause. Nothing is wrong.
TORCHGPIPE = """
Experiment                | GPUs | Batch size | Learning rate | Top-1 error (%) | Throughput | Speed up
------------------------- | ---: | ---------: | ------------: | --------------: |----------: | -------:
reference-256 ([paper][]) |    8 |        256 |           0.1 |      22.08±0.06 |        N/A |      N/A
dataparallel-256          |    2 |        256 |           0.1 |      22.02±0.11 |  180.344/s |       1×
dataparallel-1k           |    8 |         1K |           0.4 |      22.04±0.24 |  606.916/s |   3.365×
dataparallel-4k           |    8 |         4K |           1.6 |   Out of memory |        N/A |      N/A
pipeline-256              |    2 |        256 |           0.1 |      21.99±0.13 |  117.432/s |   0.651×
pipeline-4k               |    8 |         4K |           1.6 |      22.13±0.09 |  378.746/s |   2.100×
"""  # noqa: RUF001
# wenqin-chen/gpt2-fsdp-triton, RESULTS.md, commit 5589c0d7ecb14886a96259335cafd82a0512d23d, MIT. Nothing is wrong.
WENQIN = """
| run | parallel | GPUs | tokens/s | speed-up vs 1 GPU | efficiency vs linear | MFU |
|---|---|---|---|---|---|---|
| `cal1_mb64` | none | 1 | 520,001 | 1.00× | 100.0% | 45.0% |
| `cal8_ddp_mb64` | ddp | 8 | 3,841,266 | 7.39× | 92.3% | 41.5% |
| `cal8_fsdp_mb64` | fsdp | 8 | 3,216,333 | 6.19× | 77.3% | 34.8% |
| `scaling_fsdp_2x8` | fsdp | 16 | 6,366,609 | 12.24× | 76.5% | 34.4% |
"""  # noqa: RUF001
SWAPPED = """
| GPUs | Throughput - mixed precision | Throughput - FP32 | Weak scaling - FP32 | Weak scaling - mixed precision |
|---|---|---|---|---|
| 1 | 31.04 | 8.12 | 1.00 | 1.00 |
| 4 | 101.50 | 29.91 | 3.27 | 3.68 |
| 8 | 199.70 | 58.22 | 6.43 | 7.17 |
"""
WRONG_EXCERPTS = {"maxtext": (MAXTEXT, 9, "MFU) 54.24%"), "dlperf": (DLPERF, 9, "speedup 27.23")}
SOUND_EXCERPTS = {"bigscience": BIGSCIENCE, "torchgpipe": TORCHGPIPE, "wenqin": WENQIN}
