"""A claim is answered: it stands, it does not, or the files cannot tell. Each condition is named."""

from __future__ import annotations

import json

import pytest
from support.audit_cases import CASES, edited, ours
from support.programs import run_here
from support.tables import saved, table

from testbed.audit.answer import FALLS, OPEN, STANDS, Answer
from testbed.audit.claims import answered, audit
from testbed.audit.conditions import DIFFERS, UNKNOWN
from testbed.audit.conditions import SAME as EQUAL
from testbed.errors import InputError

PROGRAM = "scripts/audit_runs.py"


def written(tmp_path, header: str, *rows: str):
    return saved(tmp_path, table(header, *rows))


def of_rows(tmp_path, header: str, *rows: str, claimed: float | None = None) -> Answer:
    """The answer to the claim that the last row is faster than the first."""
    path = written(tmp_path, header, *rows)
    found = answered([path], claimed, (":3", f":{2 + len(rows)}"))
    assert found is not None
    return found


def states(found: Answer) -> dict[str, str]:
    return {each.name: each.state for each in found.conditions}


FULL = "Strategy | GPUs | GPU type | Model | Global batch size | Seq len | Precision | tokens/s | Loss"
DDP = "DDP | 4 | A100 | 124M | 16 | 1024 | bf16 | 10000 | 3.20"


def test_the_claim_that_began_it_does_not_stand(tmp_path):
    """ZeRO-2 on 4 GPUs with batch 16 against DDP on 1 GPU with batch 4."""
    header = "Strategy | GPUs | Batch | Speedup"
    found = of_rows(tmp_path, header, "DDP | 1 | 4 | 1.0x", "ZeRO-2 | 4 | 16 | 2.9x", claimed=2.9)
    assert found.verdict == FALLS
    assert found.reasons[0].startswith("Ranks 1 against 4 (4 times): ZeRO-2 and DDP differ")
    assert found.reasons[1].startswith("Batch size 4 against 16 (4 times)")
    assert found.instead == ("2.9x on 4 times the devices, 0.725x for one device.",)
    for claimed in ("2.9", "2.9x", "2,9"):
        done = run_here(PROGRAM, tmp_path / "table.md", "--claim", claimed, "--a", "DDP", "--b", "zero-2")
        assert done.returncode == 1
        assert done.stdout.startswith("ZeRO-2 against DDP on 4 devices against 1, 2.9x: does not stand\n")


@pytest.mark.parametrize(
    ("row", "condition"),
    [
        ("ZeRO-2 | 8 | A100 | 124M | 16 | 1024 | bf16 | 18000 | 3.20", "ranks"),
        ("ZeRO-2 | 4 | H100 | 124M | 16 | 1024 | bf16 | 29000 | 3.20", "devices"),
        ("ZeRO-2 | 4 | A100 | 355M | 16 | 1024 | bf16 | 29000 | 3.20", "model"),
        ("ZeRO-2 | 4 | A100 | 124M | 64 | 1024 | bf16 | 29000 | 3.20", "global batch size"),
        ("ZeRO-2 | 4 | A100 | 124M | 16 | 512 | bf16 | 29000 | 3.20", "sequence length"),
        ("ZeRO-2 | 4 | A100 | 124M | 16 | 1024 | fp32 | 29000 | 3.20", "precision"),
        ("ZeRO-2 (projected) | 4 | A100 | 124M | 16 | 1024 | bf16 | 29000 | 3.20", "figures are"),
        ("ZeRO-2 | 4 | A100 | 124M | 16 | 1024 | bf16 | 29000 | 3.95", "loss"),
    ],
)
def test_each_condition_that_differs_spoils_a_claim(tmp_path, row, condition):
    sound = of_rows(tmp_path, FULL, DDP, "ZeRO-2 | 4 | A100 | 124M | 16 | 1024 | torch.bfloat16 | 29000 | 3.21")
    assert (sound.verdict, sound.reasons) == (STANDS, ())
    assert [name for name, state in states(sound).items() if state == DIFFERS] == []
    found = of_rows(tmp_path, FULL, DDP, row)
    assert found.verdict == FALLS and len(found.reasons) == 1
    assert [name for name, state in states(found).items() if state == DIFFERS] == [condition]
    turned = answered([tmp_path / "table.md"], None, ("table.md:4", "table.md:3"))
    assert turned is not None and turned.verdict == FALLS


def test_what_no_column_says_is_asked_for(tmp_path):
    found = of_rows(tmp_path, "Strategy | GPUs | tokens/s", "DDP | 4 | 100", "FSDP | 4 | 210")
    assert found.verdict == OPEN
    assert found.ask[:4] == ("model", "global batch size", "sequence length", "precision")
    assert states(found)["model"] == UNKNOWN and states(found)["ranks"] == EQUAL
    done = run_here(PROGRAM, tmp_path / "table.md", "--a", "DDP", "--b", "FSDP")
    assert done.returncode == 3 and "It cannot be known without: model" in done.stdout


def test_one_device_without_a_strategy_is_what_any_strategy_scales_from(tmp_path):
    header = FULL
    one = "Single GPU | 1 | A100 | 124M | 16 | 1024 | bf16 | 10000 | 3.20"
    assert of_rows(tmp_path, header, one, DDP.replace("10000", "36000")).verdict == STANDS
    weak = of_rows(tmp_path, header, one, DDP.replace("10000", "36000").replace("| 16 |", "| 64 |"))
    assert weak.verdict == FALLS and "weak scaling" in weak.reasons[0]


def test_two_arms_of_a_sound_sweep_stand_with_their_interval(tmp_path):
    ours(tmp_path)
    found = answered([tmp_path / "first", tmp_path / "other"])
    assert found is not None and found.verdict == STANDS
    question = found.in_question
    assert question is not None and question.low is not None and 1 < question.low < question.ratio
    done = run_here(PROGRAM, tmp_path / "first", tmp_path / "other", "--json", tmp_path / "answer.json")
    assert done.returncode == 0 and f"{question.ratio_in_words}: stands" in done.stdout.splitlines()[0]
    written = json.loads((tmp_path / "answer.json").read_text())
    assert [each["message"] for each in written["findings"]] == [each.message for each in found.findings]
    assert written["verdict"] == STANDS and written["measures"][0]["low"] == pytest.approx(question.low)


def test_equal_arms_are_no_speed_up(tmp_path):
    ours(tmp_path, {"step_time_s": 0.2})
    found = answered([tmp_path / "first", tmp_path / "other"])
    assert found is not None and found.verdict == FALLS
    assert found.reasons[0].startswith("No detectable difference")


def test_unequal_work_of_our_own_runs_names_every_field(tmp_path):
    edited(ours(tmp_path)[5:], lambda m: m["training_config"].update(lr=1e-3, precision="bf16"))
    found = answered([tmp_path / "first", tmp_path / "other"])
    assert found is not None and found.verdict == FALLS
    assert {name for name, state in states(found).items() if state == DIFFERS} == {"precision", "lr"}


@pytest.mark.parametrize(
    ("case", "claimed", "instead"),
    [
        ("unequal batch and steps", 3.5, "3.47x on 4 times the devices, 0.868x for one device."),
        ("v1: a rate of one rank", 3.5, "4 x 11,213.5 = 44,854 tokens/s over all ranks, 3.47x the first"),
        ("more than linear", 4.25, "2.95x = 2,082.29 s / 706.41 s by the slowest rank, instead of 4.25x."),
        ("DataParallel counts its batch for each device", 4.75, "1.19x = 0.8362 s / 0.7035 s instead of 4.75x."),
        ("identical batches on both ranks", 1.91, "Counted once, 8.068 TFLOP/s are useful: 0.96x the first"),
    ],
)
def test_the_headlines_of_the_earlier_projects_do_not_stand(tmp_path, case, claimed, instead):
    found = answered(CASES[case][3](tmp_path), claimed)
    assert found is not None and found.verdict == FALLS
    assert any(instead in sentence for sentence in found.instead), found.instead


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("DDP", "nothing"), "--b 'nothing' is in no row of a table that is read; there are 'DDP"),
        (("D", "ZeRO-2"), "--a 'D' is in 2 rows; give the line of one of them: :3, :4"),
        (("DDP", None), "--a and --b name two rows of a table: give both"),
        ((":3", ":8"), "--b ':8': line 8 is of a table without a known heading of a result"),
    ],
)
def test_a_row_that_is_not_clear_is_refused(tmp_path, words, said):
    path = written(tmp_path, "Strategy | GPUs | tokens/s", "DDP | 1 | 10", "ZeRO-2 D | 2 | 19")
    path.write_text(path.read_text() + "\n| Name | Colour |\n|---|---|\n| a | red |\n")
    with pytest.raises(InputError) as error:
        answered([path], None, words)
    assert said in str(error.value)


def test_a_page_with_a_log_and_a_table_gives_both(tmp_path):
    log = "\n".join(f"iter {step}: loss {4 - step / 100:.4f}, time 600.00ms, mfu 30.00%" for step in range(0, 100, 10))
    (tmp_path / "page.md").write_text(f"| GPUs | Speedup |\n|---|---|\n| 1 | 1.0 |\n| 2 | 6.6 |\n\n{log}\n")
    done = run_here(PROGRAM, tmp_path / "page.md")
    assert "1 run and 1 file of tables" in done.stdout and "more than linear" in done.stdout


@pytest.mark.parametrize(
    ("header", "a", "b", "condition", "values"),
    [
        ("Method | images/s | Resolution", "base | 100 | 224", "ours | 190 | 160", "resolution", ("224", "160")),
        ("Method | tokens/s | Warmup steps", "base | 100 | 0", "ours | 190 | 10", "warm-up", ("0", "10")),
        ("Method | tokens/s | Notes", "base | 100 | includes data loading", "ours | 190 | ", "warm-up",
         ("includes data loading", "not said")),
        ("Method | training time | tokens", "base | 40 h | 52.4B", "ours | 20 h | 26.2B", "training tokens",
         (52_400_000_000, 26_200_000_000)),
        ("Method | Tokens/s", "DDP | OOM", "ZeRO-3 | 31,500", "figures are", ("not measured: OOM", "measured")),
        ("Strategy | Hardware | tok/s", "DDP | 1 x 8 A100-80GB | 126k", "FSDP | 2 x 8 A100 | 240k", "ranks", (8, 16)),
        ("Nodes | GPUs | Speedup", "1 | 8 | 1.0", "4 | 8 | 3.2", "ranks", (8, 32)),
        ("Nodes | Speedup", "1 | 1.0", "4 | 3.2", "ranks", UNKNOWN),
        ("num_workers | s/epoch | gain", "4 | 71.5 | 1.34x", "16 | 83.0 | 1.16x", "ranks", UNKNOWN),
        ("Hardware | chips | s/step", "v4-8 | 4 | 6.1", "v4-32 | 16 | 1.6", "devices", EQUAL),
    ],
)  # fmt: skip
def test_each_condition_is_read_from_columns_and_words(tmp_path, header, a, b, condition, values):
    found = next(each for each in of_rows(tmp_path, header, a, b).conditions if each.name == condition)
    assert values in ((found.a, found.b), found.state)
    assert found.state in (EQUAL, UNKNOWN) or found.spoils or condition == "ranks"


SAME = "| 8 | A100 | 124M | 64 | 1024 | bf16 |"  # and then the rate


def pair(tmp_path, one: str, other: str, header: str = FULL.removesuffix(" | Loss"), claimed=None) -> Answer:
    return of_rows(tmp_path, header, one, other, claimed=claimed)


@pytest.mark.parametrize(
    ("rates", "claimed", "verdict"),
    [
        ((10000, 15100), 2.0, FALLS),
        ((10000, 29000), 2.9, STANDS),
        ((10000, 5100), 1.0, FALLS),
    ],
)
def test_a_claimed_ratio_is_held_against_the_figures_and_its_digits_excuse_no_other(tmp_path, rates, claimed, verdict):
    found = pair(tmp_path, f"DDP {SAME} {rates[0]}", f"FSDP {SAME} {rates[1]}", claimed=claimed)
    assert found.verdict == verdict, found.reasons
    is_other = claimed and verdict == FALLS
    assert not is_other or found.reasons[0].startswith(f"The files give {rates[1] / rates[0]:.3g}x")


def test_the_ratio_of_one_device_is_no_claim(tmp_path):
    """8 devices at 15,000 against 4 at 10,000: B is slower, whatever each of its devices does."""
    found = pair(tmp_path, f"DDP {SAME} 15000", f"DDP {SAME} 10000".replace("| 8 |", "| 4 |"), claimed=1.333)
    assert found.verdict == FALLS and found.reasons[0].startswith("The files give 0.667x")


@pytest.mark.parametrize("cell", ["NaN", "inf"])
def test_a_loss_that_is_no_number_is_no_result(tmp_path, cell):
    found = of_rows(tmp_path, FULL, DDP, DDP.replace("DDP", "FSDP").replace("10000 | 3.20", f"20000 | {cell}"))
    assert found.verdict == FALLS and found.reasons[0].startswith(f"B is not measured: a loss of {cell}")


@pytest.mark.parametrize(
    "row",
    [
        "FSDP | 4 | NVIDIA A100 80GB | 124M | 16 | 1024 | bf16 mixed | 20000 | 3.20",
        "FSDP (without activation checkpointing) | 4 | A100 | 124M | 16 | 1k | amp bf16 | 20000 | 3.20",
    ],
)
def test_spellings_are_no_differences(tmp_path, row):
    found = of_rows(tmp_path, FULL, DDP, row)
    assert (found.verdict, found.reasons) == (STANDS, ())


@pytest.mark.parametrize("names", [("recompute=1", "recompute=0"), ("recompute", "baseline")])
def test_recomputation_that_the_names_compare_is_no_reason(tmp_path, names):
    header, (one, two) = f"{FULL} | recompute", (DDP.replace("DDP", name) for name in names)
    found = of_rows(tmp_path, header, f"{one} | on", f"{two.replace('10000', '13000')} | off", claimed=1.3)
    assert (found.verdict, found.reasons, states(found)["recomputation"]) == (STANDS, (), DIFFERS)


def test_losses_after_other_numbers_of_steps_are_no_reason(tmp_path):
    def curve(name: str, steps: int, seconds: float):
        rows = [f"{step},{4 - step / 100},{seconds}" for step in range(1, steps + 1)]
        (tmp_path / name).write_text("step,loss,step_time_s\n" + "\n".join(rows) + "\n")
        return tmp_path / name

    found = answered([curve("a.csv", 40, 2.0), curve("b.csv", 10, 1.0)])
    assert found is not None and states(found)["loss"] == UNKNOWN and not found.reasons


def test_the_same_thing_twice_is_no_claim(tmp_path):
    path = written(tmp_path, FULL, DDP, DDP)
    for paths, named in (([path], (":3", ":3")), ([path, path], (None, None))):
        with pytest.raises(InputError, match=r"both the row|given twice"):
            answered(paths, None, named)
    for words in (["--a", "", "--b", ""], ["--json", ""], ["--claim", "1,000"], ["--claim", "2", "--baseline", path]):
        done = run_here(PROGRAM, path, *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_the_paragraph_beside_a_table_names_what_all_rows_share(tmp_path):
    header, rows = "Strategy | GPUs | tokens/s", ("DDP | 4 | 10000", "ZeRO-2 | 4 | 29000")
    path = written(tmp_path, header, *rows)
    plain, words = (
        path.read_text(),
        "GPT-2 124M on A100s: global batch 64, sequence length 1024, everything in bf16.\n\n",
    )
    path.write_text(f"# Results\n\n{words}{plain}\nWe used 8 GPUs for something else.\n")
    found = answered([path], 2.9, ("DDP", "ZeRO-2"))
    assert found is not None and (found.verdict, found.ask) == (STANDS, ())
    assert {states(found)[name] for name in ("model", "global batch size", "sequence length", "precision")} == {EQUAL}
    path.write_text(f"{words}# Results\n\n{plain}")  # of another section
    found = answered([path], 2.9, ("DDP", "ZeRO-2"))
    assert found is not None and found.verdict == OPEN


def test_figures_of_the_two_rows_that_contradict_each_other_are_reasons(tmp_path):
    header = "GPUs | tokens/s | Speedup | Efficiency"
    rows = ("1 | 100,000 | 1.00x | 100%", "2 | 190,000 | 1.90x | 95%", "4 | 360,000 | 3.60x | 90%")
    found = of_rows(tmp_path, header, *rows, "8 | 620,000 | 6.20x | 57.5%", claimed=6.2)
    assert found.verdict == FALLS and any("does not follow" in reason for reason in found.reasons)


NOTED = "Optimizer | step (ms) | Speedup", ("AdamW | 38.6 | 1.00x", "fused | 21.9 | 1.76x", "ours | 19.3 | 2.00x")


@pytest.mark.parametrize(
    ("row", "text", "words"),
    [
        ("AdamW", "The AdamW number was read off the Nsight Systems trace run; the others are plain runs.", "nsight"),
        ("ours*", "\\* extrapolated from shorter runs", "not call measured"),
        ("ours[^2]", "[^2]: timer started after 20 untimed warm-up iterations.", "warm-up"),
        ("ours (roofline model)", "", "not call measured"),
        ("AdamW (with torch.profiler, record_shapes=True)", "", "torch.profiler"),
    ],
)
def test_what_is_said_of_one_row_alone_is_held_against_it(tmp_path, row, text, words):
    header, rows = NOTED
    rows = [each.replace(row.rstrip("*[^2]\N{DAGGER}").split(" (")[0], row) for each in rows]
    path = written(tmp_path, header, *rows)
    path.write_text(f"{path.read_text()}\n{text}\n")
    said = " ".join(finding.message.lower() for finding in audit([path]))
    assert words in said and "fused" not in said, said
    found = answered([path], 2.0, (":3", ":5"))
    assert found is not None and found.verdict == FALLS, found.reasons
    path.write_text(
        path.read_text()
        .replace(text or "with torch.profiler", "Nothing else; no profiler ran.")
        .replace(" (roofline model)", "")
    )
    assert audit([path]) == []


def test_words_that_are_not_understood_and_differ_are_asked_for(tmp_path):
    header = FULL.replace("Loss", "launcher")
    found = of_rows(tmp_path, header, DDP.replace("3.20", "srun"), DDP.replace("10000 | 3.20", "29000 | torchrun"))
    assert (found.verdict, found.ask) == (OPEN, ("whether `launcher` srun against torchrun decides it too",))
    assert of_rows(tmp_path, header, DDP, DDP.replace("10000 | 3.20", "29000 | 9.1")).verdict == STANDS, "a figure"


def test_a_time_to_one_loss_is_of_any_number_of_steps(tmp_path):
    path = written(
        tmp_path,
        "Optimizer | steps | minutes | final val loss",
        "AdamW | 9500 | 45.0 | 3.279",
        "Muon | 6200 | 30.0 | 3.278",
    )
    rows = path.read_text()
    for title, number in (("Time to 3.28 val loss", 0), ("Whole runs", 1)):
        path.write_text(f"{title}, 124M on 8x H100\n\n{rows}")
        found = answered([path], 1.5, ("AdamW", "Muon"))
        assert (
            found is not None and len([each for each in found.reasons if each.startswith("Optimizer steps")]) == number
        )


@pytest.mark.parametrize(
    ("heading", "a", "b", "words"),
    [
        ("Top-1 (%)", "76.1", "73.0", "Top-1 (%) 73.0 against Top-1 (%) 76.1 where it is faster"),
        ("WER", "4.1%", "5.2%", "WER 5.2% against WER 4.1% where it is faster"),
        ("BLEU", "27.9", "27.8", None),
        ("Top-1", "73.0", "76.1", None),
    ],
)
def test_what_a_faster_run_learned_is_no_loss_alone(tmp_path, heading, a, b, words):
    header = f"Method | GPUs | Model | Global batch size | Seq len | Precision | images/s | {heading}"
    work = "8 | R50 | 256 | 1 | bf16"
    found = of_rows(tmp_path, header, f"base | {work} | 1000 | {a}", f"ours | {work} | 1900 | {b}")
    assert found.verdict == (FALLS if words else STANDS)
    assert words is None or words in found.reasons[0]


@pytest.mark.parametrize(
    ("name", "heading", "title", "words"),
    [
        ("a.md", "Expected speedup", "", "(expected)"),
        ("a.md", "Speedup", "## Expected performance", "('Expected performance')"),
        ("projected_scaling.md", "Speedup", "", "('projected_scaling.md')"),
        ("a.md", "Speedup", "## Performance", ""),
    ],
)
def test_two_figures_that_nobody_measured_give_no_ratio(tmp_path, name, heading, title, words):
    rows = table(f"Setup | GPUs | {heading}", "single | 2 | 1.0x", "DDP | 2 | 1.9x")
    found = answered([saved(tmp_path, f"{title}\n\n{rows}", name)], 1.9, ("single", "DDP"))
    assert found is not None and found.verdict == (FALLS if words else OPEN)
    assert not words or f"Neither side is measured {words}" in found.reasons[0]


def test_ranks_and_batch_of_a_file_are_in_its_name_where_it_does_not_say_them(tmp_path):
    curve = "step,loss,samples_per_sec\n" + "".join(f"{step},3.{90 - step},{{}}\n" for step in range(40))
    for one, other, rates, words in (
        ("a_1gpu_bs16.csv", "b_1gpu_bs64.csv", (100, 250), "Batch size 16 against 64 (4 times)"),
        ("a_1gpu.csv", "b_4gpu.csv", (100, 500), "5.00x (throughput of all devices) on 4 times the ranks is more than"),
    ):
        paths = [
            saved(tmp_path, curve.replace("{}", str(rate)), name)
            for name, rate in zip((one, other), rates, strict=True)
        ]
        found = answered(paths)
        assert found is not None and any(reason.startswith(words) for reason in found.reasons), found.reasons


def test_folders_name_the_device_and_what_is_compared(tmp_path):
    log = "".join(NANO.format(step=step, ms=50) + "\n" for step in range(30))
    for folder in ("eager_v100", "flash_a100"):
        (tmp_path / folder).mkdir()
        saved(tmp_path / folder, log, "train.log")
    found = answered([tmp_path / "eager_v100/train.log", tmp_path / "flash_a100/train.log"])
    assert found is not None and states(found)["devices"] == "differs", found


@pytest.mark.parametrize(
    ("header", "a", "b", "condition"),
    [
        ("Card | GPU | tokens/s", "H800 SXM | H800 | 100", "H200 SXM | H200 | 106", "devices"),
        ("Run | seq len | global batch | tokens/s", "Baseline | 1024 | 8 | 100", "Longer context | 4096 | 2 | 85",
         "sequence length"),
    ],
)  # fmt: skip
def test_what_alone_tells_two_rows_apart_is_what_they_compare(tmp_path, header, a, b, condition):
    found = of_rows(tmp_path, header, a, b)
    assert states(found)[condition] == DIFFERS and not found.reasons[1:], found.reasons
    assert all("slower" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("header", "a", "b", "words"),
    [
        ("Way | GPUs | throughput (img/s)", "DDP (per GPU) | 8 | 388.6", "GPipe (total) | 8 | 2214", "give 0.712x"),
        ("Backend | ms/step", "ring-nccl | 962", "tacos-sim | 659", "B is tacos-sim: a ratio needs two"),
        ("Run | GPUs | tokens/s", "ZeRO-0 | 1 | 100", "ZeRO-1 | 8 | 910", "on 8 times the ranks is more than linear"),
        ("Run | tokens/s | val bpb", "a | 100 | 0.9513", "b | 140 | 0.9744", "Loss 0.9744 against 0.9513"),
    ],
)  # fmt: skip
def test_what_rows_say_of_scope_simulators_and_bits_is_read(tmp_path, header, a, b, words):
    found = of_rows(tmp_path, header, a, b, claimed=5.7 if "0.712" in words else None)
    assert any(words.lower() in reason.lower() for reason in found.reasons), found.reasons


def test_a_slower_single_run_is_no_claim_that_falls(tmp_path):
    for name, ms in (("ddp", 500), ("fsdp", 515)):
        saved(tmp_path, "".join(NANO.format(step=step, ms=ms) + "\n" for step in range(30)), f"{name}.log")
    found = answered([tmp_path / "ddp.log", tmp_path / "fsdp.log"])
    assert found is not None and found.verdict == OPEN


def test_the_batch_of_an_update_is_what_the_trainer_saves_the_rates_of(tmp_path):
    for name, micro in (("a", 4), ("b", 8)):
        end = {"step": 600, "train_loss": 1.2, "train_runtime": 5053.0, "train_samples_per_second": 15.2}
        state = {"global_step": 600, "train_batch_size": micro, "log_history": [{"step": 10, "loss": 2.0}, end]}
        saved(tmp_path, json.dumps(state), f"{name}_trainer_state.json")
    found = answered([tmp_path / "a_trainer_state.json", tmp_path / "b_trainer_state.json"])
    assert found is not None and states(found)["global batch size"] == EQUAL


@pytest.mark.parametrize(("name", "other", "spoils"), [("eager", "compiled", False), ("ddp", "fsdp", True)])
def test_compile_is_no_fault_where_it_is_what_is_compared(tmp_path, name, other, spoils):
    for file, compiled in ((name, "False"), (other, "True")):
        log = "".join(NANO.format(step=step, ms=50) + "\n" for step in range(30))
        saved(tmp_path, f"compile = {compiled}\n{log}", f"{file}.log")
    found = answered([tmp_path / f"{name}.log", tmp_path / f"{other}.log"])
    assert found is not None
    (compiled,) = (each for each in found.conditions if each.name == "compile")
    assert (compiled.state, compiled.spoils) == ("differs", spoils)


def test_a_ratio_of_whole_runs_is_told_from_a_faster_step(tmp_path):
    for name, steps in (("base", 100), ("short", 70)):
        saved(tmp_path, "".join(NANO.format(step=step, ms=50) + "\n" for step in range(steps)), f"{name}.log")
    found = answered([tmp_path / "base.log", tmp_path / "short.log"], 1.43)
    assert found is not None and any("whole runs of 100 and 70 steps" in reason for reason in found.reasons), found


LOGGED = table("run | log | tokens/s | Speedup", "base | {} | 100 | 1.0x", "ours | {} | 198 | 1.98x")


@pytest.mark.parametrize("names", [("a.log", "b.log"), ("-", "-")], ids=["by file", "by name"])
def test_logs_that_a_table_names_are_compared(tmp_path, names):
    saved(tmp_path, LOGGED.format(*names), "README.md")
    for name, ranks in ((names[0], 4), (names[1], 8)):
        log = "".join(MEGATRON.format(step=step, ms=50) + "\n" for step in range(1, 30))
        name = name if name != "-" else {4: "base.log", 8: "ours.log"}[ranks]
        head = f"using world size: {ranks}, data-parallel-size: {ranks}, tensor-model-parallel size: 1"
        saved(tmp_path, f"{head}, pipeline-model-parallel size: 1\n{log}", name)
    (found,) = (each for each in audit([tmp_path]) if "a table compares these" in each.message)
    assert "ranks 4 against 8" in found.message and found.severity == "claim does not stand"


@pytest.mark.parametrize(
    ("heading", "cells", "of_logs", "differs"),
    [
        ("GPUs", (1, 8), ("world_size={} global_batch_size=8", "world_size={} global_batch_size=64"), False),
        ("Batch", (64, 128), ("world_size=8 global_batch_size={}",) * 2, False),
        ("Seq length", (1024, 2048), ("world_size=8 seq_len={}",) * 2, False),
        ("Precision", ("fp32", "bf16"), ("world_size=8 dtype={}",) * 2, False),
        ("Precision", ("fp32", "bf16"), ("global_batch_size=8 dtype={}", "global_batch_size=64 dtype={}"), True),
    ],
)
def test_what_the_rows_show_is_no_finding_on_their_logs(tmp_path, heading, cells, of_logs, differs):
    rows = (f"{cell} | {name} | {rate}" for cell, name, rate in zip(cells, ("a.log", "b.log"), (100, 190), strict=True))
    saved(tmp_path, table(f"{heading} | log | tokens/s", *rows), "README.md")
    for name, cell, head in zip("ab", cells, of_logs, strict=True):
        steps = (f"step {step} | loss 3.{99 - step} | step time 50.{step} ms" for step in range(30))
        saved(tmp_path, "\n".join((head.format(cell), *steps, "")), f"{name}.log")
    found = [each.message for each in audit([tmp_path]) if "a table compares these" in each.message]
    assert len(found) == differs and all("batch" in each and "precision" not in each for each in found), found


def test_what_a_footnote_says_of_one_row_is_no_fact_of_the_other(tmp_path):
    rows = table("Config | it/s", "eager | 2.4", "compile\N{DAGGER} | 3.9")
    path = saved(tmp_path, f"{rows}\n\N{DAGGER} batch size 12, 8x A100 per node, on two nodes\n")
    found = answered([path], None, ("eager", "compile"))
    assert found is not None and states(found)["global batch size"] == states(found)["ranks"] == UNKNOWN


NANO = "iter {step}: loss 3.{step:02d}00, time {ms}.{step:02d}ms, mfu 30.00%"
MEGATRON = " iteration {step:8d}/  100 | elapsed time per iteration (ms): {ms}.{step} | lm loss: 3.{step:02d}E+00 |"
SIZES = "  num_layers .................... {}\n  hidden_size .................... {}\n"


@pytest.mark.parametrize(
    ("line", "one", "other", "words"),
    [
        (NANO, "dtype = 'bfloat16'", "dtype = 'float16'", "Precision bf16 against fp16"),
        (NANO, "n_layer = 24\nn_embd = 1024", "n_layer = 12\nn_embd = 768",
         "Model 24 layers, width 1024 against 12 layers, width 768"),
        (MEGATRON, SIZES.format(24, 1024), SIZES.format(12, 768), "Model 24 layers, width 1024 against 12 layers"),
        (MEGATRON, "profile ................... True", "", "Instrumentation a profiler ran (--profile) against none"),
        (NANO, "export CUDA_LAUNCH_BLOCKING=1", "", "Instrumentation the host waited for each kernel"),
        (NANO, "detect_anomaly = True", "", "Instrumentation autograd looked for anomalies"),
    ],
)  # fmt: skip
def test_what_logs_print_of_their_set_up_is_compared(tmp_path, line, one, other, words):
    paths = []
    for name, head, ms in (("a.log", one, 500), ("b.log", other, 250)):
        lines = [line.format(step=step, ms=ms) for step in range(1, 20)]
        paths.append(saved(tmp_path, "\n".join([head, *lines, ""]), name))
    found = answered(paths)
    assert found is not None and found.verdict == FALLS
    assert any(reason.startswith(words) for reason in found.reasons), found.reasons


def test_a_claim_is_about_the_time_of_the_whole_job_that_gives_it(tmp_path):
    """A slower epoch, and fewer of them: 1.2 times as fast to the accuracy, and not by the rate."""
    header = "Optimizer | img/s | wall clock to 75 % (min)"
    rows = "SGD | 9810 | 82.7", "LAMB | 9640 | 68.7"
    found = of_rows(tmp_path, header, *rows, claimed=1.2)
    assert found.verdict == OPEN and found.in_question is not None and "75 %" in found.in_question.name
    assert of_rows(tmp_path, header, *rows, claimed=1.5).reasons[0].startswith("The files give 0.983x")


def test_two_logs_may_be_named_as_the_sides(tmp_path):
    runs = [ours(tmp_path / name) for name in ("a", "b")]
    plain = run_here(PROGRAM, *runs)
    named = run_here(PROGRAM, "--a", runs[0], "--b", runs[1])
    assert (named.returncode, named.stdout) == (plain.returncode, plain.stdout)
    done = run_here(PROGRAM, "--a", "DDP", "--b", runs[1])
    assert done.returncode == 2 and "DDP does not exist" in done.stderr
    done = run_here(PROGRAM, "--a", runs[0])
    assert done.returncode == 2 and "FILE is missing" in done.stderr


def test_two_columns_of_a_turned_table_are_two_rows(tmp_path):
    rows = table(
        "metric | Trainer | Streamline", "tokens/s | 100 | 430", "seq len | 2048 | 512", "batch size | 16 | 16"
    )
    found = answered([saved(tmp_path, rows)], 4.3, ("Trainer", "Streamline"))
    assert found is not None and any("Sequence length 2048 against 512" in reason for reason in found.reasons)


def test_a_rate_of_one_device_beside_one_of_all_is_no_ratio(tmp_path):
    rows = table("method | throughput", "ddp | 2,480 tokens/s/GPU", "ours | 19,900 tokens/s total")
    found = answered([saved(tmp_path, rows)], 8.0, ("ddp", "ours"))
    assert found is not None and found.verdict == OPEN and found.in_question is None


def test_a_mark_of_a_footnote_is_no_part_of_a_name(tmp_path):
    rows = table("optimizer | tokens/s", "AdamW[^1] | 100", "AdamW-8bit[^1] | 150")
    assert answered([saved(tmp_path, f"{rows}\n[^1]: bf16\n")], 1.5, ("AdamW", "AdamW-8bit")) is not None


@pytest.mark.parametrize(
    ("heading", "a", "b"),
    [
        ("Precision", "DDP fp32 | fp32", "ZeRO-2 bf16 | bf16"),
        ("Precision", "DDP | fp32", "ZeRO-2 (bf16) | bf16"),
    ],
)
def test_a_precision_in_a_name_that_says_more_spoils_a_claim(tmp_path, heading, a, b):
    """A claim of the precision itself has names that differ in it alone."""
    header = f"Strategy | {heading} | GPUs | Model | Global batch size | Seq len | tokens/s | Loss"
    found = of_rows(
        tmp_path, header, f"{a} | 4 | 124M | 64 | 1024 | 1000 | 3.2", f"{b} | 4 | 124M | 64 | 1024 | 2900 | 3.2"
    )
    assert found.verdict == FALLS and "recision" in found.reasons[0]


@pytest.mark.parametrize(
    ("heading", "a", "b", "verdict"),
    [
        ("Model", "dense 1.3B", "MoE 8x350M", OPEN),
        ("Device", "A100-80G", "H100-80G", OPEN),
        ("Run", "DDP 1.3B", "FSDP 350M", FALLS),
        ("Run", "DDP on A100", "FSDP on H100", FALLS),
    ],
)
def test_models_or_devices_that_rows_are_called_by_are_what_is_compared(tmp_path, heading, a, b, verdict):
    found = of_rows(tmp_path, f"{heading} | GPUs | tokens/s", f"{a} | 8 | 100", f"{b} | 8 | 190")
    assert found.verdict == verdict, found.reasons


@pytest.mark.parametrize(
    ("note", "is_measured"),
    [("GPU peak 20 GB", True), ("peak over 5 runs", True), ("at peak", True), ("SXM peak, dense", False)],
)
def test_a_peak_of_memory_or_of_repeats_is_a_measurement(tmp_path, note, is_measured):
    found = of_rows(tmp_path, "Setup | GPUs | tokens/s | note", "DDP | 8 | 1000 | -", f"FSDP | 8 | 1500 | {note}")
    assert (states(found)["figures are"] != "differs") is is_measured
