"""The benchmark of a GPU machine: comparison, summary, missing packages, and the program."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gpu_benchmark_examples import EVERYTHING, content_of, done_rows, machine
from support.metrics_examples import example_metrics, save
from support.programs import REPOSITORY, run_here, script

from testbed.errors import InputError
from testbed.experiments.gpu_benchmark import packages, record, summary
from testbed.experiments.gpu_benchmark.install import install
from testbed.experiments.gpu_benchmark.packages import Package
from testbed.experiments.gpu_benchmark.record import FAILED, LEFT_OUT, PENDING
from testbed.experiments.gpu_benchmark.steps import plan
from testbed.experiments.gpu_benchmark.summary import Curve, compare

PROGRAM = "scripts/more/benchmark_gpu.py"


MOST = {"loss": 0.1, "norm": 0.01}


@pytest.mark.parametrize(
    ("losses", "norms", "holds", "steps"),
    [
        ([5.0, 4.0], [2.0, 1.0], True, 2),
        ([5.05, 4.05], [2.01, 1.005], True, 2),
        ([5.0, 4.2], [2.0, 1.0], False, 2),  # a loss
        ([5.0, 4.0], [2.0, 1.02], False, 2),  # a norm, relative
        ([5.0, 9.0], [None, 1.0], True, 1),  # fp16 skipped the first update: what follows is other work
        ([5.2, 4.0], [None, 1.0], False, 1),
    ],
)
def test_losses_and_norms_of_every_step_are_compared(losses, norms, holds, steps):
    def curve(losses: list, norms: list) -> Curve:
        return Curve(dict(enumerate(losses, 1)), dict(enumerate(norms, 1)))

    curves = {"a": curve([5.0, 4.0], [2.0, 1.0]), "b": curve(losses, norms)}
    found = compare(curves, "a", "b", MOST)
    assert (found["holds"], found["compared_steps"]) == (holds, steps)
    assert compare(curves, "a", "c", MOST)["holds"] is None
    later = {"a": curves["a"], "b": Curve({2: losses[1]}, {2: 1.0})}
    assert compare(later, "a", "b", MOST)["compared_steps"] == 1, "a resumed run has the later steps"
    assert compare({"a": curves["a"], "b": Curve({9: 5.0}, {9: 1.0})}, "a", "b", MOST)["holds"] is False


def benchmark(folder: Path, **statuses: str) -> dict:
    """Write a benchmark of two runs that are compared, and return what its summary says."""
    names = ("corpus", "fp32", "ddp_1rank", "fp8")
    steps = [step for step in plan(machine(packages=EVERYTHING - {"torchao"}), "out") if step.name in names]
    content = done_rows(content_of(steps), *names)
    for row in content["steps"]:
        row["status"] = statuses.get(row["name"], LEFT_OUT if row["name"] == "fp8" else row["status"])
    for name in ("fp32", "ddp_1rank"):
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)
        save(folder / "runs" / name, example_metrics(num_steps=3, warmup_steps=1))
    record.STEPS_FILE.write(folder / "steps.json", content)
    return summary.summarise(folder)


def test_the_summary_says_what_ran_what_agrees_and_what_did_not_pass(tmp_path, capsys):
    found = benchmark(tmp_path)
    assert found["runs"]["fp32"]["mfu_of_matrix_rate"] is None, "none was measured"
    precision = found["runs"]["fp32"]["precision"]
    (tmp_path / "matrix_rate.json").write_text(json.dumps({precision: {"flops_per_s": 4e11, "source": "measured"}}))
    found = benchmark(tmp_path)
    assert found["failed"] == [] and found["pending_parts"] == [] and set(found["runs"]) == {"fp32", "ddp_1rank"}
    agreement = {check["run"]: check for check in found["agreement"]}
    assert agreement["ddp_1rank"]["holds"] is True and agreement["ddp_1rank"]["compared_steps"] == 3
    run = found["runs"]["fp32"]
    per_token = example_metrics(num_steps=3, warmup_steps=1)["flops"]["per_token_palm"]
    assert run["mfu_of_matrix_rate"] == pytest.approx(run["tokens_per_s"] * per_token / 4e11 / run["ranks"])
    summary.print_summary(found)
    said = capsys.readouterr().out
    assert f"attention {run['attention']}" in said
    assert "ddp_1rank with fp32, as fp32: agrees; 3 steps" in said and "left out: fp8: the package torchao" in said
    other = benchmark(tmp_path, ddp_1rank=FAILED, corpus=PENDING)
    assert other["failed"] == ["ddp_1rank"] and other["pending_parts"] == [1] and "ddp_1rank" not in other["runs"]


def test_runs_that_do_not_agree_fail_the_benchmark(tmp_path):
    benchmark(tmp_path)
    metrics = json.loads((tmp_path / "runs" / "ddp_1rank" / "training_metrics.json").read_text())
    metrics["steps"][1]["grad_norm"] *= 1.01
    (tmp_path / "runs" / "ddp_1rank" / "training_metrics.json").write_text(json.dumps(metrics))
    assert summary.summarise(tmp_path)["failed"] == ["ddp_1rank against fp32"]


@pytest.mark.launches  # tar
def test_the_results_are_two_files_without_weights(tmp_path):
    benchmark(tmp_path)
    for name in ("runs/fp32/model.safetensors", "runs/fp32/tokenizer.json", "data/train.json", "site/a.json",
                 "compiled/b.json", "runs/fp32/checkpoints/step_000003/checkpoint.json",
                 "runs/fp32/profiler_logs/rank0.pt.trace.json", "logs/fp32.log"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    results, traces = summary.pack(tmp_path)
    with tarfile.open(results) as packed:
        assert set(packed.getnames()) == {
            "steps.json", "summary.json", "logs/fp32.log", "runs/fp32/training_metrics.json",
            "runs/ddp_1rank/training_metrics.json",
        }  # fmt: skip
    with tarfile.open(traces) as packed:
        assert packed.getnames() == ["runs/fp32/profiler_logs/rank0.pt.trace.json"]


# --- packages


def test_what_a_machine_lacks_is_listed_with_the_commands_that_fetch_it(tmp_path):
    """As on a machine with PyTorch and much else, but not what our files and DeepSpeed need."""
    there = "Package  Version\n-------\ntorch  2.11.0\n" + "\n".join(
        "numpy scipy tqdm psutil safetensors tokenizers matplotlib transformers accelerate einops msgpack ninja "
        "packaging py_cpuinfo".split()
    )
    has = packages.is_listed_in(there)
    assert [package.name for package in packages.missing(has)] == "jsonschema torchao deepspeed hjson pydantic".split()
    folder = tmp_path / ".wheels"
    lines, is_all = packages.report(has, folder, "3.12")
    assert not is_all
    whole, alone, source = [line.strip() for line in lines if "pip" in line]
    versions = packages.pinned_versions()
    assert whole.startswith("python3 -m pip download --only-binary=:all:") and "--python-version 3.12" in whole
    assert whole.endswith(f"-d {folder} jsonschema=={versions['jsonschema']} hjson pydantic")
    assert "--no-deps" in alone and alone.endswith(f"-d {folder} torchao=={versions['torchao']}")
    assert source == f"DS_BUILD_OPS=0 python3 -m pip wheel --no-deps -w {folder} deepspeed=={versions['deepspeed']}"
    folder.mkdir()
    for name in "jsonschema-4 torchao-0 deepspeed-0 hjson-3 pydantic-2".split():
        (folder / f"{name}-py3-none-any.whl").write_bytes(b"x")
    lines, is_all = packages.report(has, folder, "3.12")
    assert is_all and not any("pip" in line for line in lines) and "of 60 MiB" in lines[-1]
    with (folder / "pydantic-2-py3-none-any.whl").open("wb") as wheel:
        wheel.truncate(packages.MOST_BYTES)
    lines, is_all = packages.report(has, folder, "3.12")
    assert not is_all and "too large" in lines[-1]
    lines, is_all = packages.report(packages.is_listed_in("numpy"), folder, None)
    assert not is_all and "PyTorch is not fetched" in lines[-1]


@pytest.mark.launches
def test_wheels_are_installed_into_the_benchmarks_own_folder_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel = tmp_path / "carried_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("carried_package.py", "number = 7\n")
        head = "Metadata-Version: 2.1\nName: carried-package\nVersion: 1.0\n"
        content.writestr("carried_package-1.0.dist-info/METADATA", head)
        content.writestr(
            "carried_package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        content.writestr("carried_package-1.0.dist-info/RECORD", "")
    carried = Package("carried-package", "carried_package")
    assert not packages.is_here(carried)
    install(packages.wheels_in(tmp_path), tmp_path / "out")
    assert packages.is_here(carried) and packages.in_wheels(tmp_path)(carried)
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: pytest.fail("it is installed"))
    install(packages.wheels_in(tmp_path), tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "other-1.0-cp27-none-any.whl").write_bytes(b"x")
    with pytest.raises(InputError, match="cannot install them"):
        install(packages.wheels_in(tmp_path), tmp_path / "out")


def test_the_folder_of_wheels_is_ignored():
    assert "/.wheels/" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_without_a_package_that_everything_needs_nothing_begins():
    lacking = [package for package in packages.PACKAGES if package.name in ("jsonschema", "deepspeed")]
    with pytest.raises(InputError, match=r"lacks jsonschema; .*--check"):
        packages.check_needed(lacking)
    packages.check_needed([package for package in lacking if package.used_for])


# --- the program


def test_a_dry_run_prints_the_parts_and_makes_nothing(tmp_path):
    done = run_here(PROGRAM, tmp_path / "out", "--dry_run", "--gpus", 8)
    assert done.returncode == 0 and "part 1: " in done.stdout and "pipeline_8ranks" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_what_is_chosen(tmp_path):
    """The part and the name that a run would take, and no figure of all parts."""
    done = run_here(PROGRAM, tmp_path / "out", "--dry_run", "--part", 1, "--only", "^(zero|saved)")
    steps = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"  \w", line)]
    assert steps == ["zero1_1rank", "zero0_1rank", "zero2_1rank", "zero3_1rank"], done.stderr
    assert done.stdout.count("part 1: ") == 1 and "part 2: " not in done.stdout
    assert "all parts: " not in done.stdout and "left out: " not in done.stdout


def test_a_dry_run_says_first_what_is_missing(monkeypatch, capsys):
    program = script("more/benchmark_gpu.py")
    lacking = {"torch", "deepspeed", "einops", "torchao"}
    monkeypatch.setattr(packages, "is_here", lambda package: package.name not in lacking)
    monkeypatch.setattr(packages, "missing", lambda: [each for each in packages.PACKAGES if each.name in lacking])
    monkeypatch.setattr(sys, "argv", [PROGRAM, "--dry_run"])
    monkeypatch.delenv("NANOGPT_DIR", raising=False)
    assert program.main() == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()[:4]
    assert first == "missing: torch; nothing runs without that"
    assert second == (
        "missing: torchao, deepspeed, einops, NANOGPT_DIR; left out without that: zero1_1rank, zero0_1rank, "
        "zero2_1rank, zero3_1rank, peers_nanogpt, fp8, zero1_compiled_1rank"
    )
    assert "--check" in third and fourth.startswith("part 1: ")
    lacking.clear()
    monkeypatch.setenv("NANOGPT_DIR", "nanoGPT")
    assert program.main() == 0
    assert capsys.readouterr().out.startswith("part 1: ")


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        (["--part", "0"], "--part"),
        (["--part", "99", "--dry_run"], "--part 99: the plan has"),
        (["--only", "(", "--dry_run"], "no regular expression"),
        (["--only", "nothing", "--dry_run"], "matches no step"),
        (["--quick"], "--quick is not a flag"),
        (["--wheels", "nowhere"], "holds no wheel"),
        (["FOLDER"], "something else"),
        (["--summarise", "nowhere"], "steps.json"),
        (["--check", "--python_version", "three"], "3.12"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(tmp_path, words, piece):
    (tmp_path / "mine.txt").write_text("keep me")
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    with contextlib.chdir(tmp_path):
        done = run_here(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 2 and piece in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_refused_call_does_not_lock_its_folder(tmp_path):
    program = script("more/benchmark_gpu.py")
    program.check_folder(tmp_path / "new")
    (tmp_path / "site").mkdir()
    (tmp_path / ".sweep.lock").touch()
    program.check_folder(tmp_path)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InputError, match="something else"):
        program.check_folder(tmp_path)
    (tmp_path / "steps.json").touch()
    program.check_folder(tmp_path)


def test_a_part_or_a_name_that_is_not_there_is_refused():
    program = script("more/benchmark_gpu.py")
    steps = plan(machine(), "out")

    def wanted(part: int | str, only: str | None = None) -> set[str]:
        return program.wanted_steps(steps, SimpleNamespace(part=part, only=only))

    assert wanted("all", "peers") == {"peers_nanogpt", "peers_transformers"}
    assert "cpu_fp32" in wanted(1) and not wanted(1) & wanted(2)
    with pytest.raises(InputError, match="--part 99: the plan has"):
        wanted(99)
    with pytest.raises(InputError, match="--only nothing matches no step"):
        wanted("all", "nothing")
    with pytest.raises(InputError, match="no regular expression"):
        wanted("all", "(")


@pytest.mark.launches
def test_it_starts_with_the_standard_library_alone_and_says_what_is_missing(tmp_path):
    """Isolated, so without any package: --check and --dry_run work, a run and a summary are refused in a sentence."""
    command = [sys.executable, "-I", "-S", str(REPOSITORY / PROGRAM)]

    def said(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *words], capture_output=True, text=True, check=False, cwd=tmp_path)

    checked = said("--check")
    assert checked.returncode == 1 and "missing: jsonschema" in checked.stdout and "pip download" in checked.stdout
    assert said("--dry_run").returncode == 0
    refused = said("out")
    assert refused.returncode == 2 and "lacks torch, numpy" in refused.stderr and "Traceback" not in refused.stderr
    benchmark(tmp_path / "done")
    refused = said("--summarise", "done")
    assert refused.returncode == 2 and "lacks numpy, scipy" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.launches
def test_the_shell_script_takes_an_interpreter_with_torch(tmp_path):
    command = ["bash", str(REPOSITORY / "scripts" / "more" / "benchmark_gpu.sh"), "--dry_run", "--device", "cpu"]
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0 and "part 1: " in done.stdout, done.stderr
