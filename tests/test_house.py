"""The rules of place that docs/architecture.md states: what may import what, and who may read what."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "testbed"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = path
    return found


# A module may import from the lines above its own, and within its line only what does not import it back.
LAYERS = [
    # strategies here is the seam and the registry; the files in the folder are the last line
    "atomic_file watchdog build_locks batch launch model_shape step network strategies earlier_settings error_text "
    "json_file regular_file schema recorded_environment instruments openmp scatter typed_paths",
    "held_folder metrics_file manifest sidecar disk_array token_file run_directory flops flag_parser flag_values flags "
    "segments streams parallelism stages memory_model trace meeting store_port",
    "deepspeed_config tokenizer hub sources corpus pairs preprocess windows schedule starting_shape trained_run",
    "settings progress",
    "sweep_request sweep sweep_state sweep_run peers peers.plan peers.nanogpt peers.running peers.record "
    "drill drill.faults drill.work drill.start drill.damage drill.verdict drill.record drill.drills "
    "lab lab.links lab.relay lab.keeper lab.hosts lab.study",
    "step_clock measure environment run_facts distributed attention_backend float8 device profiling utilization "
    "collective_log scalars attribution announce",
    "model muon optimizer data tensor_archive weights recorder "
    "inference inference.loading inference.kv_cache inference.cached_model inference.sampling inference.batching "
    "inference.generate inference.peers sample "
    "inference.schemes inference.prompts inference.subject inference.record inference.quantize inference.perplexity "
    "inference.latency inference.load_test inference.after_training inference.bleu",
    # and the strategies: whatever lies in their folder
    "largest_micro_batch automatic_choices run_ending checkpoint whole_checkpoints folder_owner setting_changes resume "
    "model_states peers.worker trials inference.wrapped inference.evaluation",
]
STRATEGY_FILES = sorted(f"strategies.{path.stem}" for path in (PACKAGE / "strategies").glob("[a-z]*.py"))
LAYERS[-1] = " ".join([LAYERS[-1], *STRATEGY_FILES])
RANK = {module: number for number, line in enumerate(LAYERS) for module in line.split()}
ANALYSIS = {name for name in modules() if name.split(".")[0] == "analysis"}
ANALYSIS_MAY_IMPORT = ANALYSIS | {"metrics_file", "flops", "model_shape", "atomic_file", "run_directory", "trace"}
ANALYSIS_MAY_IMPORT |= {"earlier_settings", "error_text", "json_file", "instruments", "schema", "scatter"}
ANALYSIS_MAY_IMPORT |= {"regular_file", "typed_paths"}


class Imports(ast.NodeVisitor):
    """Names of testbed's modules that a file imports when it runs; imports for type checking do not count."""

    def __init__(self, path: Path):
        self.found: set[str] = set()
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name.removeprefix("testbed.") for alias in node.names if alias.name.startswith("testbed.")}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "relative imports hide where an arrow points"
        if node.module == "testbed":
            self.found |= {alias.name for alias in node.names}
        elif node.module and node.module.startswith("testbed."):
            self.found.add(node.module.removeprefix("testbed."))


def test_every_module_has_its_place():
    assert set(modules()) == set(RANK) | ANALYSIS


@pytest.mark.parametrize("module", RANK)
def test_arrows_point_down(module):
    for imported in Imports(modules()[module]).found:
        assert imported not in ANALYSIS, f"{module} imports {imported}: training writes files, analysis reads them"
        assert RANK[imported] <= RANK[module], f"{module} imports {imported}, which lies above it"
        if RANK[imported] == RANK[module]:
            assert module not in Imports(modules()[imported]).found, f"{module} and {imported} import each other"


@pytest.mark.parametrize("module", sorted(ANALYSIS))
def test_analysis_reads_files_only(module):
    assert Imports(modules()[module]).found <= ANALYSIS_MAY_IMPORT


def test_what_answers_help_and_refusals_loads_no_torch():
    """torch costs seconds. Asked of the interpreter itself, so that no import hides."""
    code = (
        "import sys, json; import testbed.settings, testbed.analysis.charts, testbed.corpus, testbed.preprocess, "
        "testbed.metrics_file, testbed.run_directory, testbed.sweep_run, testbed.inference.subject; "
        "print(json.dumps([m for m in ('torch', 'deepspeed', 'transformers') if m in sys.modules]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY / "src"
    )
    assert json.loads(said.stdout) == []


def test_only_launch_reads_the_ranks_of_the_launcher():
    names = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    readers = set()
    for module, path in modules().items():
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        if names & {value for value in constants if isinstance(value, str)}:
            readers.add(module)
    assert readers == {"launch"}


def test_no_file_has_outgrown_its_idea():
    for path in [*modules().values(), *REPOSITORY.glob("*.py"), *(REPOSITORY / "src").glob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


ONE_PLACE = {"say": "error_text", "say_if_read": "error_text", "stop_as_interrupt": "launch"}


def test_what_is_said_and_how_a_program_is_interrupted_is_in_one_place():
    """Each of these had copies. What raises KeyboardInterrupt is one of the last, whatever its name."""
    places = {name: [] for name in ONE_PLACE}
    programs = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    paths = modules() | {path.stem: path for path in programs}
    for module, path in paths.items():
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in places:
                places[node.name].append(module)
        assert "raise KeyboardInterrupt" not in text or module == ONE_PLACE["stop_as_interrupt"]
    assert places == {name: [module] for name, module in ONE_PLACE.items()}
