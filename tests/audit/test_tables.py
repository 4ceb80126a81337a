"""Tables of published figures: columns by exact headings or --columns, and rows that contradict each other."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pytest
from support.programs import run_here
from support.tables import saved, table

from testbed.audit.claims import FAILS, NOTE, audit
from testbed.audit.tables.columns import quantity_of
from testbed.audit.tables.figures import figure_of
from testbed.audit.tables.read import columns_named, tables_in
from testbed.errors import InputError

PROGRAM = "scripts/audit_runs.py"


SPEED_UP = table("GPUs | tokens/s | Speed-up | Efficiency", "1 | 503,225 | 1.00x | 100%", "2 | 982,114 | 1.95x | 97.6%",
                 "4 | 1,921,000 | 3.82x | 95.4%", "8 | 3,716,000 | 7.38x | 92.3%")  # fmt: skip
BATCHES = table("GPUs | micro batch | accumulation | global batch size", "1 | 4 | 8 | 32", "2 | 4 | 4 | 32",
                "4 | 4 | 2 | 32")  # fmt: skip
STEPS = table("GPUs | tokens/s | step time (ms) | global batch size | seq len", "1 | 16,384 | 500 | 8 | 1024",
              "2 | 30,340 | 540 | 16 | 1024", "4 | 58,514 | 560 | 32 | 1024")  # fmt: skip
PARALLEL = table("GPUs | DP | TP | PP | MFU", "8 | 2 | 2 | 2 | 41%", "16 | 4 | 2 | 2 | 40%", "32 | 8 | 2 | 2 | 39%")
TOTALS = table("steps | global batch size | seq len | tokens", "1000 | 512 | 1024 | 524,288,000",
               "2000 | 512 | 1024 | 1,048,576,000", "4000 | 512 | 1024 | 2,097,152,000")  # fmt: skip
MICRO = table("DP | micro batch | global batch", "1 | 4 | 32", "2 | 4 | 32", "4 | 4 | 32")
# name -> (table, its figure, the changed one, words)
PLANTED = {
    "speed-up": (SPEED_UP, "3.82x", "4.32x", "does not follow from the figures of its row"),
    "efficiency": (SPEED_UP, "92.3%", "82.3%", "does not follow from the figures of its row"),
    "more than linear": (SPEED_UP, "1.95x", "2.95x", "on 2 times the devices is more than linear"),
    "a batch": (BATCHES, "4 | 2 | 32", "4 | 4 | 32", "global batch = micro batch x accumulation x data ranks"),
    "a rate": (STEPS, "58,514", "78,514", "tokens/s x time of a step = global batch x length"),
    "ranks": (PARALLEL, "32 | 8", "32 | 4", "devices = data x tensor x pipeline ranks"),
    "tokens": (TOTALS, "1,048,576,000", "1,148,576,000", "tokens = steps x global batch x length"),
    "an MFU": (PARALLEL, "41%", "141%", "no device does more than its peak"),
    "a micro batch": (MICRO, "4 | 4 | 32", "4 | 5 | 32", "is not a multiple of micro batch x data ranks = 20"),
}


@pytest.mark.parametrize(("text", "old", "new", "words"), PLANTED.values(), ids=PLANTED)
def test_a_changed_figure_is_found_in_its_row(tmp_path, text, old, new, words):
    path = saved(tmp_path, text)
    assert audit([path]) == []
    line = 1 + text[: text.index(old)].count("\n")
    found = audit([saved(tmp_path, text.replace(old, new, 1))])
    assert any(words in f.message and f.runs == (f"{path}:{line}",) and f.severity == FAILS for f in found), found


# headings, rows, and what is said of them alone
FOUND = [
    ("Setup | GPUs | Speedup | Efficiency", ("DDP | 1 | 1.0x | 100%", "DDP | 2 | 6.6x | 330%"),
     "Speedup 6.6x on 2 times the devices is more than linear"),
    ("GPUs | Speedup", ("1 | 1.0", "2 | 0.9", "4 | 0.8"),
     "more devices were slower: Speedup 0.8 on 4 devices against 1, unless the column has efficiencies"),
    ("Strategy | Speedup | Loss", ("DDP | 1.0x | 3.20", "ZeRO-2 | 2.9x | 3.95"),
     "Speedup 2.9x with loss 3.95 against 3.2"),
    ("Strategy | GPUs | Batch | Speedup", ("DDP | 1 | 4 | 1.0x", "ZeRO-2 | 4 | 16 | 2.9x"),
     "Speedup 2.9x is not of ZeRO-2 against DDP alone"),
    ("GPUs | Global batch size | Step time (s) | Speedup", ("1 | 8 | 0.50 | 1.0", "4 | 32 | 0.40 | 1.25"),
     "Speedup 1.25 divides the step time (s) of another batch"),
    ("Config | tokens/s | Speedup", ("baseline | OOM | 1.0", "ours | 500 | 2.3"),
     "refers to a row that was not measured: OOM"),
    ("Config | GPUs | tokens/s | Speedup", ("ddp | 1 | 100 | 1.0", "ddp projected | 8 | 780 | 7.8"),
     "Speedup 7.8 is of a figure that its row does not call measured"),
    ("Config | GPUs | Speedup", ("TP=1 depth 16 | 8 | 1.0", "TP=2 depth 12 | 8 | 1.4"),
     "compares rows of other work: model depth 16 against depth 12"),
    ("#GPUs | tok/s | Speedup vs 1 GPU", ("1 | 100 | 1.00", "2 | 195 | 1.95", "4 | 381 | 4.9", "8 | 730 | 7.3"),
     "Speedup vs 1 GPU 4.9 does not follow"),
    ("Configuration | Settings",
     ("1,024 GPUs | TP2 PP4 MBS1 GBS8192", "256 GPUs | TP1 PP4 MBS3 GBS4096", "256 GPUs | TP1 PP4 MBS1 GBS4096"),
     "4,096 is not a multiple of micro batch x data ranks = 192"),
    ("| seq/s | speed-up | efficiency",
     ("1 node | 100 | 1.0x | 100 %", "2 nodes | 195 | 1.95x | 97.5 %", "4 nodes | 374 | 3.74x | 83.5 %"),
     "efficiency 83.5 % does not follow"),
    ("run | status | tokens/s | speedup", ("a | NaN from step 312, stopped | 171K | 1.0x", "b | done | 290K | 1.7x"),
     "refers to a row that was not measured: NaN from step 312"),
    ("GPUs | global batch | step time [s] | efficiency", ("8 | 64 | 1.22 | 100 %", "64 | 512 | 1.31 | 11.6 %"),
     "divides the step time [s] of another batch"),
    ("| old | new",
     ("GPUs | 8 | 8", "Global batch size | 32 | 64", "tokens/s | 100 | 210", "Speed-up | 1.0x | 2.1x"),
     "global batch size 32 against 64 (2 times)"),
    ("Variant | tok/s | Speedup", ("eager | 28,100 | 1.00x", "compile | 40,745 | 1.90x", "flash | 53,390 | 1.45x"),
     "Speedup of lines 4 and 5 would follow from their figures if they were exchanged"),
    ("Strategy | GPUs | tokens/s | Efficiency",
     ("Single | 1 | 52,595 | 100%", "DDP | 2 | 39,785 | 75.6%", "FSDP | 2 | 23,378 | 22.2%"),
     "Efficiency 75.6% is not counted as in line 5"),
    ("GPU | Precision | TFLOP/s/GPU", ("A100 | bf16 | 137", "A100 | bf16 | 410"),
     "is more than the 312 TFLOP/s of A100"),
    ("Model | GPU | dtype | TFLOPS/GPU | MFU", ("1B | A100 | bf16 | 132.1 | 42.3%", "9B | A100 | bf16 | 154.2 | 57.6%"),
     "57.6% give another peak than the 312 TFLOP/s of the other rows"),
    ("Model | GPU | TFLOPS/GPU | MFU", ("70B | H100 | 392.6 | 46.8%", "70B | A100 | 154.2 | -"),
     "give a peak of 839 TFLOP/s; the data sheet of H100 has 989 in bf16"),
    ("Nodes | rate | efficiency", ("1 | 1.92 | 100.0%", "8 | 16.15 | 105.9%"),
     "efficiency 105.9% on 8 times the nodes is more than linear"),
    ("Run | tok/s | expected tok/s | speed-up", ("bf16 | 9,870 | - | 1.00x", "fp8 | - | 16,300 | 1.65x"),
     "speed-up 1.65x is of expected tok/s 16,300: nothing was measured"),
    ("#GPUs | tokens/s/GPU | weak scaling eff.", ("8 | 10,450 | 100%", "16 | 10,312 | 98.7%", "32 | 9,020 | 92.4%"),
     "weak scaling eff. 92.4% does not follow"),
    ("Kernel | fwd (ms) | fwd+bwd (ms) | Speedup", ("cuDNN | 1.88 | 6.42 | 1.00x", "ours | 2.21 | 7.63 | 1.19x"),
     "Speedup 1.19x does not follow"),
    ("Setup | GPUs | Throughput | Speedup",
     ("FSDP1 | 2 | 3,410 tokens/s/GPU | 1.0x", "FSDP2 | 2 | 7,684 tokens/s (total) | 2.25x"), "2.25x does not follow"),
    ("GPUs | samples/s | speedup | source", ("1 | 12 | 1.0 | n1.log", "16 | 171 | 14.25 | \N{GREEK SMALL LETTER ALPHA}-"
     "\N{GREEK SMALL LETTER BETA} model"), "is of a figure that its row does not call measured"),
    ("Model | Baseline (tok/s) | With overlap, expected (tok/s) | Speedup",
     ("7B | 3,120 | 3,680 | 1.18x", "13B | 1,710 | 2,070 | 1.21x"), "With overlap, expected"),
    ("Run | img/s | Speed-up (vs DDP bf16)",
     ("DDP fp32 | 38.2 | -", "DDP bf16 | 97.6 | -", "compile | 121.5 | 3.18x", "FSDP | 118.9 | 3.11x"),
     "3.18x does not follow from the figures of its row and of line 4; it is of line 3"),
    ("Kernel | GPU | TFLOP/s | how | Speedup", ("cuDNN | A100 | 96.4 | measured | 1.0x",
     "ours | A100 | 312 | SXM peak, dense | 3.24x"), "is of a figure that its row does not call measured"),
    ("Nodes | GPUs | seq/s | Scaling factor",
     ("1 | 8 | 5,120 | 1.00", "2 | 16 | 9,830 | 0.96", "4 | 32 | 17,810 | 0.97"), "Scaling factor 0.97 does not"),
    ("GPUs | img/s | scaling", ("1 | 151.2 | 100 %", "2 | 297.9 | 99 %", "8 | 1044.0 | 93 %"), "scaling 93 % does not"),
    ("accelerator | software | tok/s | \N{MULTIPLICATION SIGN} H100",
     ("H100 | torch | 412 | 1.00", "MI300X | data sheet | 1307 | 3.17"), "3.17 is of a figure that its row does not"),
    ("Model | BS | seq/s | Speedup vs Large", ("Large | 8 | 100 | 1", "Base | 128 | 280 | 2.8"),
     "batch size 8 against 128 (16 times)"),
    ("Experiment | GPUs | Batch size | Throughput | Speed up",
     ("reference-256 | 8 | 256 | N/A | N/A", "dp-256 | 2 | 256 | 180.3/s | 1x", "pipe-4k | 8 | 4K | 378.7/s | 2.100x"),
     "not of pipe-4k against dp-256 alone: ranks 2 against 8 (4 times); batch size 256 against 4,096 (16 times)"),
    ("Run | DP | CP | Global batch | tokens/s | Speedup",
     ("plain | 8 | 1 | 64 | 100 | 1.0x", "ring | 8 | 2 | 64 | 190 | 1.9x"), "ranks 8 against 16 (2 times)"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "rows", "words"), FOUND, ids=[each[2] for each in FOUND])
def test_a_table_is_answered_row_by_row(tmp_path, header, rows, words):
    said = [finding.message for finding in audit([saved(tmp_path, table(header, *rows))])]
    assert any(words in message for message in said), said


SCALED = table("GPUs | tokens/s | Speedup", "1 | 1000 | 1.0x", "2 | 1950 | 1.95x")
# nothing is said of them
SOUND = {
    "methods": table("Strategy | GPUs | Global batch size | Speedup | Loss", "DDP | 4 | 16 | 1.0x | 3.20",
                     "FSDP | 4 | 16 | 1.3x | 3.21"),
    "weak scaling": table("GPUs | Batch/GPU | Global batch | Step time (s) | Efficiency", "1 | 16 | 16 | 0.500 | 100%",
                          "8 | 16 | 128 | 0.532 | 94%", "32 | 16 | 512 | 0.556 | 90%"),
    "a distilled model is meant to be smaller": table("Model | Parameters | Speed-up", "teacher | 109M | 1.0x",
                                                      "student | 4M | 46.5x"),
    "fewer steps to one loss": "Speed-ups in time to 3.28 val loss.\n\n" + table(
        "Optimizer | GPUs | tokens/s | Speedup", "AdamW | 8 | 1000 | 1.0x", "Muon | 8 | 950 | 1.4x",
        "SOAP | 8 | 800 | 1.3x"),
    "more devices at a lower rate of each": table("Method | GPUs | tokens/s/GPU | Speedup", "DDP | 1 | 1000 | 1.0x",
                                                  "DDP | 4 | 950 | 3.8x", "DDP | 8 | 900 | 7.2x"),
    "another peak": f"Theoretical peak throughput is 312 TFLOP/s.\n\n{SCALED}",
    "what is expected of a program": "### Expected output\n\n" + SPEED_UP,
    "a speed-up over what is in no row": table("Method | GPUs | tokens/s", "DDP | 8 | 100", "ours | 8 | 190")
    + "\nOurs is 3x faster.\n",
    "numbers that were calculated": "The perplexity numbers were calculated with a script.\n\n" + SPEED_UP,
    "a footnote is no fact of all": table("Method | Global batch | images/s | Speedup", "plain | 64 | 100 | 1.0x",
                                          "ours* | 64 | 190 | 1.9x") + "\n\\* batch size 8 in the decoder\n",
    "devices of each node": table("num_nodes | gpu_num_per_node | throughput | speedup", "1 | 1 | 149.84 | 1.00",
                                  "1 | 8 | 1158.51 | 7.73", "2 | 8 | 2257.71 | 15.07"),
    "a ratio of two columns by its heading": table(
        "GPUs | Batch size / GPU | Time to train - TF32 | Time to train speedup (TF32 to mixed precision)",
        "1 | 8 | 21 h | 2.40", "8 | 8 | 2.5 h | 1.00"),
    "a ratio of two columns by its figures": table(
        "GPUs | batch | Old (s) | New (s) | Speedup", "1 | 8 | 20.0 | 10.0 | 2.0x", "8 | 64 | 3.0 | 3.0 | 1.0x"),
    "a ratio that is 1 by chance": table("Kernel | batch | Speedup", "a | 8 | 0.97x", "b | 16 | 1.00x",
        "c | 32 | 1.3x"),
    "a precision that the heading says": table(
        "Framework | Precision | samples/s | Speed-up vs. PyT FP32", "TRT | FP16 | 370 | 4.25x",
        "TRT | FP32 | 124 | 1.43x",
        "PyTorch | FP16 | 95 | 1.09x", "PyTorch | FP32 | 87 | 1.00x"),
    "memory in M": table("Method | Peak | Latency (s) | Speedup", "USP 1 | 92,170M | 213.60 | 1.0x",
                         "USP 4 | 57,458M | 57.61 | 3.7x"),
    "a projection layer": "## Projection Benchmark\n\n" + SPEED_UP,
    "a factor of down-sampling": table("Encoder | Factor | GPUs | WER", "wav2vec | 1 | 1 | 4.09",
                                       "wav2vec | 3 | 1 | 5.47"),
    "devices in a name": table("Run | Time (s) | Speedup | Efficiency", "AGNews_1 GPU | 100 | 1.0 | 100%",
                               "AGNews_4 GPUs | 27.8 | 3.6 | 89.9%"),
    "models are compared": table("Model | BS | seq/s | Speedup vs Large", "Large | 8 | 100 | 1",
        "Base | 8 | 280 | 2.8"),
    "a batch in the name": table("Experiment | GPUs | Batch size | images/s | Speed up",
        "plain-256 | 2 | 256 | 180 | 1x",
                                 "plain-1k | 8 | 1K | 607 | 3.37x"),
    "a row that failed": table("Run | Time to target (s) | Status", "a | 93.8 | PASS",
        "b | 999999 (not reached) | FAIL"),
    "multiples of memory": table("method | tokens/s | \N{MULTIPLICATION SIGN} memory", "DDP | 10,000 | 1.0",
                                            "ZeRO-3 | 8,000 | 0.4"),
    "the memory before it is multiplied": table("Setup | tokens/s | memory (GB) | x baseline", "ddp | 1000 | 40 | 1.0",
                                                "fsdp | 800 | 20 | 0.5"),
    "each group has its own reference": table(
        "Setup | GPUs | tokens/s | speedup vs DDP", "DDP | 8 | 1000 | 1.0x", "FSDP | 8 | 1500 | 1.5x",
        "DDP, 2 nodes | 16 | 1900 | 1.0x", "FSDP, 2 nodes | 16 | 2850 | 1.5x"),
    "faster by a quarter": table("Setup | tokens/s | faster", "eager | 1000 | 1.0", "compile | 1250 | 0.25"),
    "a batch is multiplied": table("method | tokens/s | x batch", "plain | 10,000 | 1.0", "recompute | 14,000 | 4.0"),
    "a scaling factor that is a speed-up": table("GPUs | tokens/s | scaling factor", "1 | 100 | 1.00", "2 | 195 | 1.95",
                                                 "4 | 380 | 3.80"),
    "a scaling factor of positions": table("scaling factor | GPUs | tok/s | ppl", "1 | 8 | 1000 | 5.1",
                                           "4 | 16 | 2010 | 5.9"),
    "a count of devices is not a ratio": table("Code | batch | tokens/s", "HF | 8 | 169", "ours | 16 | 1,310")
    + "\nAll of it ran on one machine with 8 x A100.\n",
    "context ranks share a sequence": table("GPUs | TP | PP | CP | MBS | GBS", "64 | 4 | 4 | 1 | 1 | 8",
                                            "64 | 4 | 4 | 1 | 1 | 16", "64 | 4 | 4 | 2 | 1 | 6"),
    "devices are a product with context ranks": table("GPUs | DP | TP | PP | CP | MFU", "8 | 4 | 2 | 1 | 1 | 41%",
                                                      "16 | 8 | 2 | 1 | 1 | 40%", "32 | 8 | 2 | 1 | 2 | 39%"),
    "what is faster stands before": table("Strategy | tokens/s", "DDP | 100", "FSDP | 90", "ZeRO-2 | 148")
    + "\n- Winner: ZeRO-2.\n- 48% faster than DDP, 64% faster than FSDP.\n",
    "instances of a cloud": table("instance | gpus | images_per_sec | speedup", "p3.2xlarge | 1 | 771 | 1.0",
                                  "p3.8xlarge | 4 | 3001 | 3.89", "2x p3.16xlarge | 16 | 10949 | 14.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_table_of_each_kind_is_left_alone(tmp_path, name):
    assert audit([saved(tmp_path, SOUND[name])]) == []


def test_a_row_of_other_work_is_noted(tmp_path):
    rows = ("1 | 4 | 1024 | 100 | 1.0", "4 | 8 | 1024 | 290 | 2.9", "4 | 4 | 2048 | 290 | 2.9")
    path = saved(tmp_path, table("GPUs | global batch | seq len | tokens/s | speedup", *rows))
    said = [(f.severity, f.runs[0][-1], f.message.partition(": ")[2]) for f in audit([path])]
    devices = "ranks 1 against 4 (4 times)"
    assert said == [(NOTE, "4", f"{devices}; global batch size 4 against 8 (2 times); 0.725x per device"),
                    (NOTE, "5", f"{devices}; sequence length 1024 against 2048; 0.725x per device")]  # fmt: skip


@pytest.mark.parametrize(
    ("quantity", "headings"),
    [
        ("devices", ("#GPUs", "Number of GPUs", "GPUNum", "GPU number", "Number of A100s")),
        ("per_node", ("gpus_per_node",)),
        ("micro_batch", ("bsz/gpu", "micro-bs / GPU")),
        ("batch", ("**Global batch size**", "GlobalBatchSize", "global_bs")),
        ("device_sample_rate", ("images per second per GPU",)),
        ("step_s", ("batch time (s)", "Step time (ms)", "TimePerIter (s)", "mean_step_ms", "train time (s/iter)",
                    "s / update")),
        ("time_s", ("train_hours", "Epoch (s)", "Seconds", "time to 300B tokens", "Minutes per epoch")),
        ("sample_rate", ("examples/s", "Throughput images/sec")),
        ("token_rate", ("Throughput tokens/s", "Throughput, tokens/s", "Throughput (tokens/s)",
                        "Training Speed (tok/s)")),
        ("device_token_rate", ("tokens/sec/GPU", "kTok/s/GPU")),
        ("val_loss", ("Val. loss",)),
        ("train_loss", ("loss @ 20B tokens",)),
        ("params", ("num_params",)),
        (None, ("latency", "memory", "Projected tokens/s", "Config", "speed", "relative cost", "epoch", "total",
                "num_workers", "workers", "GPU (%)", "Speed (GPU)", "speed, GPU", "time, loss")),
    ],
)  # fmt: skip
def test_headings_are_known_by_their_words(quantity, headings):
    assert {heading: quantity_of(heading) for heading in headings} == dict.fromkeys(headings, quantity)


@pytest.mark.parametrize(
    "text",
    [
        table("Name | Colour", "a | red"),
        table("Question | Rank", "a | 10", "b | 20"),
        table("Layer | Params | vs Linear", "a | 98,304 | 1.00x", "b | 589,824 | 0.44x"),
    ],
)
def test_a_table_without_a_known_result_is_refused(tmp_path, text):
    with pytest.raises(InputError, match="--columns"):
        audit([saved(tmp_path, text)])


def test_columns_are_named_where_headings_leave_a_doubt(tmp_path):
    path = saved(tmp_path, SPEED_UP.replace("GPUs", "Karten").replace("tokens/s", "Tempo").replace("7.38x", "6.38x"))
    done = run_here(PROGRAM, path, "--columns", "gpus=Karten,token_rate=Tempo")
    assert done.returncode == 1 and "Speed-up 7.38x would follow" in done.stdout
    text = STEPS.replace("| seq len ", "").replace("| 1024 ", "").replace("58,514", "78,514")
    found = audit([saved(tmp_path, text)], columns={"length": "1024"})
    assert any("= global batch x length" in f.message for f in found)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("gpus", "write QUANTITY=HEADING"),
        ("colour=GPUs", "no such quantity"),
        ("devices=Cards", "has no column 'Cards'"),
        ("gpus=GPUs,devices=Efficiency", "devices is 'GPUs' already"),
        ("gpus=GPUs,tp=GPUs", "'GPUs' is another quantity already"),
        ("length=0", "has no figure that can be read under '0'"),
    ],
)
def test_wrong_columns_are_refused_in_one_sentence(tmp_path, typed, words):
    done = run_here(PROGRAM, saved(tmp_path, SPEED_UP), "--columns", typed)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_columns_without_a_table_are_refused(tmp_path):
    done = run_here(PROGRAM, tmp_path, saved(tmp_path, "step 1", "a.log"), "--columns", "gpus=GPUs")
    assert done.returncode == 2 and "type one, as .md, .csv, .tsv" in done.stderr


def test_csv_is_read_like_markdown(tmp_path):
    named = columns_named(["GPUs=run, token_rate=Tempo, gesamt", "speedup=faktor"])
    assert named == {"devices": "run", "token_rate": "Tempo, gesamt", "speedup": "faktor"}
    path = saved(tmp_path, "run;Tempo, gesamt;faktor\n1;100;1.00x\n2;190;1.90x\n4;301;3.70x\n8;701;7.01x\n", "a.csv")
    assert [finding.runs for finding in audit([path], columns=named)] == [(f"{path}:4",)]


@pytest.mark.parametrize(
    ("cell", "kind", "value", "low", "high"),
    [
        ("503,225", "number", 503225, 503224, 503226),
        ("184,000 \N{PLUS-MINUS SIGN} 2,100", "number", 184000, 183999, 184001),
        ("2.49e+02", "number", 249, 248, 250),
        ("1e-3", "time", 0.001, 1e-5, 0.002),
        ("108K", "number", 108e3, 107e3, 109e3),
        ("2,9x", "factor", 2.9, 2.8, 3.0),
        ("45.0%", "share", 0.45, 0.449, 0.451),
        ("607 ms", "time", 0.607, 0.606, 0.608),
        ("1.5 h", "time", 5400, 5040, 5760),
        ("8", "count", 8, 8, 8),
        ("7d", "time", 604800, 518400, 691200),
    ],
)
def test_a_cell_is_an_interval(cell, kind, value, low, high):
    figure = figure_of(cell, kind)
    assert (figure.value, figure.low, figure.high) == pytest.approx((value, low, high))


@pytest.mark.parametrize("cell", ["", "-", "OOM", "<37", "0.86^", "3-4", "8 / 4", "2h 30m", "-3", "nan", "1e999"])
def test_other_cells_are_no_figures(cell):
    assert figure_of(cell, "number") is None


def test_a_broken_table_is_read_or_refused(tmp_path):
    """Words of every table replaced by odd ones, cut short, and doubled: no error but a sentence."""
    odd = ["", "-", "nan", "-1", "0", "1e400", "9" * 5000, "0.1.2", '"', "\n", "|", "||", "\x00", "%", "x"]
    draw, outcomes = random.Random(1), []
    for number in range(300):
        words = re.split(r"(\W)", draw.choice(list(PLANTED.values()))[0])
        for _ in range(draw.randint(1, 4)):
            words[draw.randrange(len(words))] = draw.choice([*odd, draw.choice(words), draw.choice(words) * 2])
        text = "".join(words)[: draw.choice([None, None, draw.randrange(1, 200)])]
        path = saved(tmp_path, text, f"broken{number}.{draw.choice(['md', 'csv', 'tsv'])}")
        try:
            audit([path])
            outcomes.append("read")
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.append("refused")
    assert min(outcomes.count("read"), outcomes.count("refused")) > 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("letter.csv", "a" * 120_000),
        ("letter.md", "| a | b |\n|---|---|\n| 1 | " + "a" * 120_000),
        ("words.md", f"# {'h ' * 16_000}\n\n| {'step ' * 6_400} | tokens/s |\n|---|---|\n| 1 | 2 |\n"),
        ("brackets.md", f"| {'( ' * 16_000} | tokens/s |\n|---|---|\n| 1 | 2 |\n"),
        ("cell.csv", f"gpus,tokens/s\n1,{'1' * 32_000}\n2,{'a' * 32_000}"),
        ("spaces.csv", f"gpus,tokens/s\n1,{' ' * 32_000}1\n2,{'( ' * 16_000}"),
        ("digits.txt", "1" * 120_000),
    ],
)
def test_a_long_line_or_heading_takes_no_quadratic_time(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    began = time.process_time()
    with contextlib.suppress(InputError):
        audit([tmp_path / name])
    assert time.process_time() - began < 10


HTML = """# Results
<table>
<tr><th>GPUs</th><th>tokens/s</th><th>Speed-up</th></tr>
<tr><td>1</td><td>100</td><td>1.0x</td></tr>
<tr><td>2</td><td>190</td><td><b>2.9x</b></td></tr>
</table>
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.md", HTML), ("a.csv", "# 8 nodes\n# bf16\n\n\ngpus,tokens/s,Speed-up\n1,100,1.0\n2,190,2.9x\n")],
)
def test_other_forms_of_a_table_are_read(tmp_path, name, text):
    path = saved(tmp_path, text, name)
    line = 1 + text[: text.index("2.9x")].count("\n")
    (finding,) = (each for each in audit([path]) if "Speed-up 2.9x does not follow" in each.message)
    assert finding.runs == (f"{path}:{line}",)


def test_a_latex_table_is_read_with_its_caption(tmp_path):
    rows = "1 & 8 & 341.6 & 1.00 \\\\\n2 & 16 & 668.1 & 1.96 \\\\\n\\hline\n4 & 32 & 1,290.4 & 3.98$\\times$ \\\\\n"
    head = "\\toprule\nNodes & GPUs & Samples/s & \\textbf{Speedup} \\\\\n\\midrule\n"
    text = f"\\caption{{BERT in bf16.}}\n\\begin{{tabular}}{{rrrr}}\n{head}{rows}\\end{{tabular}}\n"
    path = saved(tmp_path, text, "a.tex")
    (grid,) = tables_in(path, text)[0].details["grids"]
    assert grid.said.of_all("precision") == "bf16" and list(grid.lines) == [6, 7, 9]
    (finding,) = audit([path])
    assert "Speedup 3.98 x does not follow" in finding.message and finding.runs == (f"{path}:9",)


def test_a_latex_head_has_its_rule_in_its_own_line_or_none(tmp_path):
    rows = "1 & 100 & 1.0 \\\\\n2 & 190 & 2.9 \\\\ \\hline\n"
    for rule in (" \\hline", "", " [2pt]\n\\midrule"):
        text = f"\\begin{{tabular}}{{rrr}}\nGPUs & Tokens/s & Speedup \\\\{rule}\n{rows}\\end{{tabular}}\n"
        found = audit([saved(tmp_path, text, "a.tex")])
        (finding,) = (each for each in found if "Speedup 2.9 does not follow" in each.message)
        assert finding.runs == (f"{tmp_path / 'a.tex'}:{4 + (chr(10) in rule)}",)


@pytest.mark.parametrize(
    "page",
    [
        f"{SCALED}\n{sentence}\n" for sentence in (
            "Memory efficiency on 2 GPUs is 40%.", "Less than 110% efficiency on 2 GPUs.",
            "The paper reports 85% efficiency on 2 GPUs.", "We reached 80% efficiency on 2 GPUs without it.",
            "That is 90% efficiency on 2 GPUs relative to 1 node.")
    ] + [
        table("GPUs | TFLOPS | MFU", "8 | 3200 | 40.4%", "8 | 3300 | 41.7%", "64 | 24000 | 37.9%"),
        table("Strategy | GPUs | Tokens/s | Speedup", "DDP | 8 | 8000 (1000/GPU) | 1x", "TP | 8 | 4000 | 0.5x"),
    ],
)  # fmt: skip
def test_another_efficiency_the_flops_of_all_and_a_rate_in_brackets_contradict_nothing(tmp_path, page):
    assert audit([saved(tmp_path, page)]) == []


# what a reader of a page sees -> (the page, words that a finding has, the same without it)
SEEN = {
    "a batch behind a speed": (table("Config | Speed", "Small (BS=8) | 1x", "Large (BS=32) | 3.5x"),
                               "batch size 8 against 32 (4 times)", ("=32", "=8")),
    "a batch behind a claim of the text": (
        table("Method | GPUs | global batch | tokens/s", "DDP | 8 | 64 | 100", "ours | 8 | 128 | 190")
        + "\nOurs is 1.9x as fast.\n", "global batch size 64 against 128 (2 times)", ("1.9x as fast", "better")),
    "a length behind a claim of the text": (
        table("Method | GPUs | seq len | tokens/s", "DDP | 8 | 2048 | 100", "ours | 8 | 1024 | 190")
        + "\nOurs is 90 % faster.\n", "sequence length 2048 against 1024", ("90 % faster", "better")),
    "a claim that the figures do not give": (
        table("Method | GPUs | tokens/s", "DDP | 8 | 100", "ours | 8 | 190") + "\nOurs is 2.5x faster than DDP.\n",
        "the figures give 1.9x", ("2.5x faster than", "better than")),
    "an efficiency in a sentence": (SCALED + "\nScaling efficiency on 2 GPUs is 91%.\n",
                                    "give 98% of line 3 for one device", ("91%", "97%")),
    "a page of placeholders": ("All numbers are projected.\n\n" + SPEED_UP, "All numbers are projected",
                               ("projected", "measured")),
    "two losses": (table("Compression | ms / step | Speed-up", "none | 612 | 1.00", "8-bit | 405 | 1.51")
                   + "\nThe 8-bit run ends at a validation loss of 3.61 while the uncompressed run ends at 3.28.\n",
                   "with loss 3.61 against 3.28", ("3.61", "3.28")),
    "a diverged run": (table("Optimizer | Tokens/s | Speedup", "AdamW | 402k | 1.00x",
                             "Sophia\N{DOUBLE DAGGER} | 538k | 1.34x")
                       + "\n\N{DOUBLE DAGGER} The loss diverged after 12k steps.\n", "does not call measured",
                       ("diverged", "was logged")),
    "a debugged reference": (table("Pipeline | img/s | Speedup", "old | 610 | 1.0x", "new | 1,037 | 1.7x")
                             + "\nThe old pipeline was timed with CUDA_LAUNCH_BLOCKING=1.\n",
                             "instrumentation CUDA_LAUNCH_BLOCKING against none said",
                             ("CUDA_LAUNCH_BLOCKING=1", "care")),
    "a model of the figures": ("The figures below come from our roofline model.\n\n" + SPEED_UP,
                               "the text says of it: The figures below", ("roofline model", "cluster")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_a_reader_sees_is_said_and_nothing_else(tmp_path, name):
    page, words, (old, new) = SEEN[name]
    found = [finding.message for finding in audit([saved(tmp_path, page)])]
    assert len(found) == 1 and words.lower() in found[0].lower(), found
    assert page != page.replace(old, new) and audit([saved(tmp_path, page.replace(old, new))]) == []


def test_a_batch_that_grows_is_held_against_what_is_called_strong_scaling(tmp_path):
    rows = table("GPUs | global batch | images/s | speedup", "8 | 64 | 101 | 1.00x", "16 | 128 | 198 | 1.96x")
    for title, words in (("Weak scaling", []), ("Strong scaling", ["is called strong scaling, and the batch grows"]),
                         ("Scaling", [])):  # fmt: skip
        found = audit([saved(tmp_path, f"# {title}\n\n{rows}")])
        assert len(found) == len(words) and all(word in each.message for word, each in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("text", "quantity", "values"),
    [
        ("Total batch size 524,288 tokens.\n\n" + table("run | tokens/s", "a | 9", "b | 8"), "any_batch", None),
        ("Falcon-7B, 4 nodes x 8 A100, bf16\n\n" + table("Fabric | tokens/s", "a | 9", "b | 8"), "devices", [32, 32]),
        ("2 nodes with 8x V100 each.\n\n" + table("Fabric | tokens/s", "a | 9", "b | 8"), "devices", [16, 16]),
        ("Each VM has one V100.\n\n" + table("Fabric | tokens/s", "a | 9", "b | 8"), "devices", None),
        ("batch size = 96\n\n" + table("gpus | batch_size_per_device | tokens/s", "1 | 96 | 9", "8 | 96 | 70"),
         "any_batch", None),
        (table("GPUs | tokens/s | scaling factor", "1 | 100 | 1.00", "4 | 380 | 3.80"), "efficiency", None),
        (table("GPUs | tokens/s | scaling factor", "1 | 100 | 1.00", "4 | 380 | 0.95"), "efficiency", [1.0, 0.95]),
        (table("run | tokens/s", "a [1] | 9", "b [1] | 8") + "\n[1] 2 x 8 H100, batch of 64\n", "devices", [16, 16]),
        ("<table><caption>Run on 8 A100.</caption><tr><th>run</th><th>tokens/s</th></tr><tr><td>a</td><td>9</td></tr>"
         "</table>", "devices", [8]),
    ],
)  # fmt: skip
def test_a_figure_is_of_what_the_page_says(tmp_path, text, quantity, values):
    (item,) = tables_in(tmp_path / "a.md", text)
    column = item.details["grids"][0].column(quantity)
    assert (column and [figure and figure.value for figure in column.figures]) == values
