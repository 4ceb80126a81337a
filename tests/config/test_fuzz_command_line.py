"""Give every program thousands of odd command lines: it runs, or says one sentence and ends with 1 or 2.

In this process, so that thousands take seconds; test_bad_input_programs.py starts the programs themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import string
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import strategies as st
from support.data_fixtures import offline_environment
from support.fuzz import READ, REFUSED, Fuzz, Refused, gpt2_accepts, run_in_process
from support.metrics_examples import example_metrics, save, v1_metrics
from support.programs import REPOSITORY, TINY_RUN, data_flags

from testbed.config.flags import build_parser
from testbed.config.run_types import STRATEGIES
from testbed.optim.lr_schedule import learning_rate_at
from testbed.strategies.deepspeed_config import effective_config
from testbed.sweep import request

SCRIPTS = REPOSITORY / "scripts"
ODD_TEXTS = [
    *("", " ", "-", "--", "-1", "0", "1", "2", "4", "7", "32", "1000", "-7", "+3", "1_000", " 5 ", "٣", "0x10", "1e3"),
    "1e300", "1000000", "100000000",
    *("1E400", "-1e-3", "1e-400", "0.5", "1.0", ".5", "5.", "nan", "-nan", "inf", "-Infinity", "1,2", "1;2", "True"),
    *("9" * 18, "9" * 19, "9" * 400, "9" * 5000, "a" * 300, "a/" * 3000, "é" * 200, "汉字", "🙂", "\u202e", "\ufeff"),
    *("a\nb", "1\n", "\n", "\t", "\r\nx", "a\x00b", "\udcff", "\ud800", "\x1b[2J", "auto", "off", "on", "scratch"),
    *("..", "../..", ".", "/", "/dev/null", "/proc/self/mem", "/root/x", "~", "~nobody/x", "~no_such_user/x"),
    *("-h", "--help", "--run_type", "--no_such_flag", "--config", "@file", "%s", "{}", "$(id)", "`id`", "*"),
    *("--seed=3", "none", "null", "gpt2", "nano", "fp16", "file:///etc"),
]  # fmt: skip
# values that belong to some flag, so that combinations come past the first rule
GOOD_TEXTS = [
    *("1", "2", "3", "4", "8", "16", "32", "64", "100", "1e-3", "0.9", "0.2", "auto", "on", "off", "none", "all"),
    *("fp32", "bf16", "fp16", "native", "autocast", "muon", "wsd", "constant", "gpipe", "zero_bubble", "alternate"),
    *("block", "selective", "fp8", "optimizer", "parameters", "flash", "nano", "interleaved_1f1b"),
]  # fmt: skip
words = st.one_of(
    st.sampled_from(ODD_TEXTS),
    st.text(max_size=12),
    st.text(alphabet=string.printable, max_size=20),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
)


ACTIONS = {option: action for action in build_parser()._actions for option in action.option_strings}
SWITCHES = {option for option, action in ACTIONS.items() if action.nargs == 0}
WHOLE = ("positive", "not_negative", "positive_or_auto", "int", "thread_count", "steps_ahead", "sample_length")


def fitting(flag: str) -> st.SearchStrategy[str]:
    """Values that the flag alone would take."""
    action = ACTIONS[flag]
    if action.choices:
        return st.sampled_from(list(map(str, action.choices)))
    kind = getattr(action.type, "__name__", "str")
    return st.sampled_from(["1", "2", "4", "8", "16", "100"] if kind in WHOLE else ["0.25", "1e-3", "auto", "scratch"])


@st.composite
def command_lines(draw) -> tuple[list[str], int]:
    """A run type on some ranks, up to five flags of any run type, and what is typed after them."""
    line = ["--run_type", draw(st.sampled_from(list(STRATEGIES)))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 5))):
        flag = draw(st.sampled_from(sorted(ACTIONS.keys() - {"-h", "--help", "--config", "--resume"})))
        texts = st.one_of(fitting(flag), fitting(flag), fitting(flag), st.sampled_from(GOOD_TEXTS), words)
        style = draw(st.integers(0, 11))
        if flag in SWITCHES and style:
            line.append(flag)
        else:
            line += [f"{flag}={draw(texts)}"] if style == 0 else [flag] if style == 1 else [flag, draw(texts)]
    if draw(st.integers(0, 9)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(words))
    return line, draw(st.sampled_from([1, 1, 2, 4]))


def is_argument(word: str) -> bool:
    """Whether a process can be given it: neither NUL nor a surrogate that stands for no byte."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def is_for_programs(word: str) -> bool:
    """Not the whole machine, which they would search for runs; no line break, which they show as it was typed."""
    is_one_line = word.splitlines(keepends=True) in ([], [word]) and word.splitlines() in ([], [word])
    return is_argument(word) and is_one_line and (word in ("", ".") or word.strip("/.~ ") != "")


def test_no_command_line_breaks_gpt2(tmp_path, token_files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz = Fuzz("command lines of src/gpt2.py", (Refused,), tmp_path)

    def one_line(drawn: tuple[list[str], int]) -> None:
        line = [word for word in drawn[0] if is_argument(word)]

        def run() -> None:
            checked = gpt2_accepts([*data_flags(token_files), *TINY_RUN, "--global_batch_size", "8", *line], drawn[1])
            settings = checked.settings
            json.dumps(settings.as_config(), allow_nan=False)
            for step in {0, min(3, settings.plan.total_steps), settings.plan.total_steps}:
                assert learning_rate_at(step, settings) >= 0
            if settings.deepspeed.zero_stage is not None:
                effective_config(settings)

        fuzz.case(run, drawn)

    fuzz.draw(command_lines(), 750, one_line)
    fuzz.check(READ, REFUSED)


def test_no_environment_of_a_launcher_breaks_gpt2(tmp_path, token_files):
    """WORLD_SIZE and its like, as a broken wrapper sets them; RANK would start threads that watch a launcher."""
    fuzz = Fuzz("variables of a launcher", (Refused,), tmp_path)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMP_NUM_THREADS")
    texts = words.filter(lambda word: is_argument(word) and len(word) < 1000)

    def one_environment(variables: dict[str, str]) -> None:
        def run() -> None:
            with mock.patch.dict(os.environ, variables):
                gpt2_accepts([*data_flags(token_files), *TINY_RUN, "--run_type", "ddp"], ranks=None)

        fuzz.case(run, variables)

    values = st.one_of(st.sampled_from(["0", "1", "2"]), texts)
    fuzz.draw(st.dictionaries(st.sampled_from(names), values), 100, one_environment)
    fuzz.check(READ, REFUSED)


PLACES = ["run", "old.json", "run/training_metrics.json", "nowhere", "text.txt", "empty", "loop", ".", "", "a" * 300]
# program -> its flags, each with whether it takes a value; "" is a place on its own
PROGRAMS = {
    "generate_charts.py": "--baseline-json= --optimized-json= --runs= --target_val_loss= --report= --markdown= "
    "--inference=",
    "preprocess_small.py": "--input= --max_train_docs= --max_val_docs= --val_fraction= --tokenizer= --num_workers=",
    "download_data.py": "--dataset= --config= --split= --text_field= --max_bytes= --max_docs=",
    "scripts/audit_runs.py": "= = --baseline= --claim= --a= --b= --columns=",
    "scripts/compare_runs.py": "= --against= --allow-mismatch",
    "scripts/find_fastest.py": "--ranks= --budget= --run_types= --over= --equivalent= --calibration= --batch_size= "
    "--steps= --seq_length= --seed= --warmup_runs= --run_timeout_s=",
    "scripts/more/generate_scaling_table.py": "--dir= --protocol= --target_val_loss= --table= --allow-mismatch",
    "scripts/more/verify_run_artifacts.py": "--dir= --metrics_only",
    "scripts/more/benchmark_gpu.py": "--out_dir= --only= --device= --gpus= --run_timeout_s=",
    "scripts/profiling/parse_nsys_stats.py": "--run_dir= --optimizer_steps= --ranks_in_profile= --rows=",
    "scripts/profiling/diff_profiles.py": "= = --rows=",
    "scripts/profiling/merge_traces.py": "= --out=",
    "scripts/more/compare_peers.py": "--repeats= --peers= --threads= --out_dir= --run_timeout_s=",
    "scripts/plan.py": "--gpu= --gpus= --gpus_per_node= --network= --model= --tokens= --sweep= --run_type= "
    "--seq_length= --global_batch_size= --calibration= --score= --zero_stage= --mtbf_hours=",
    "scripts/run_scaling_benchmarks.py": "--run_types= --ranks= --batch_sizes= --repeats= --protocol= --steps= "
    "--epochs= --target_val_loss= --seq_length= --seed= --warmup_runs= --profile_runs= --run_timeout_s=",
}  # fmt: skip
# what makes a program look and not work, so that a case that is accepted ends at once
ALWAYS = {
    "generate_charts.py": ["--output-dir", "../made"],
    "preprocess_small.py": ["--output_dir", "../made"],
    "download_data.py": ["--output_dir", "../made"],
    "scripts/run_scaling_benchmarks.py": ["--dry_run", "--out_dir", "sweep"],
    "scripts/more/compare_peers.py": ["--dry_run"],
    "scripts/more/benchmark_gpu.py": ["--dry_run"],
    "scripts/find_fastest.py": ["--dry_run", "--out_dir", "race"],
}
MACHINE = {"devices": 0, "commit": "c" * 40, "is_dirty": False}


@pytest.fixture
def places(tmp_path, token_files) -> Path:
    """A folder with a run, an old file, tokens, a text, an empty folder and a circle of links."""
    folder = tmp_path / "places"
    save(folder / "run", example_metrics(num_steps=3, warmup_steps=1))
    (folder / "old.json").write_text(json.dumps(v1_metrics(2)))
    for path, name in zip(token_files, ("train_small", "val_small"), strict=True):
        shutil.copy(path, folder / f"{name}.bin")
        shutil.copy(path.with_suffix(".json"), folder / f"{name}.json")
    (folder / "text.txt").write_text("one line\n")
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_command_line_breaks_a_program(places, program, monkeypatch):
    monkeypatch.chdir(places)
    for name, value in offline_environment(places.parent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(request, "facts_of_machine", lambda: dict(MACHINE))
    flags = PROGRAMS[program].split()
    texts = st.one_of(st.sampled_from(PLACES), st.sampled_from(GOOD_TEXTS), words).filter(is_for_programs)
    writes = program == "generate_charts.py"  # where it is told to, which can be any of these
    fuzz = Fuzz(f"command lines of {program}", (Refused,), None if writes else places)

    def one_line(drawn: list[tuple[str, str]]) -> None:
        line = []
        for flag, text in drawn:
            name, takes_value, _ = flag.partition("=")
            line += [word for word in (name, text if takes_value else "") if word or (takes_value and not name)]
        fuzz.case(lambda: run_in_process(REPOSITORY / program, *ALWAYS.get(program, []), *line), line)

    fuzz.draw(st.lists(st.tuples(st.sampled_from(flags), texts), max_size=4), 20, one_line)
    fuzz.check(REFUSED)
