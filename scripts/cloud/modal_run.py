"""Train on rented GPUs of Modal: one machine, one or several of its GPUs, files of the run in a volume.

    pip install modal && modal setup                  # once: an account, and this machine's token
    modal run scripts/cloud/modal_run.py --gpu A10G --world-size 2 --run-type ddp --n-epochs 5
    modal run scripts/cloud/modal_run.py --gpu H100 --world-size 4 --run-type pipeline --batch-size 64
    modal volume get gpt2-testbed-results modal/pipeline_4xH100 checkpoint/

The corpus is made once and kept in the volume. The same command again resumes a run that was interrupted.
docs/cloud.md says what of this was tried, and what was not.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    import modal
except ModuleNotFoundError:  # the commands below can be built, and are tested, without it
    modal = None

REPOSITORY = Path(__file__).resolve().parent.parent.parent
REMOTE_REPOSITORY, REMOTE_RESULTS = "/root/testbed", "/results"
sys.path[:0] = [str(REPOSITORY / "src"), f"{REMOTE_REPOSITORY}/src"]  # here, and on the machine that is rented
from testbed.config.run_types import STRATEGIES  # noqa: E402

VOLUME = "gpt2-testbed-results"
SOURCES = ("src", "scripts", "download_data.py", "preprocess_small.py", "pyproject.toml")
GPUS = ("T4", "L4", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "cpu")
LONGEST_S = 4 * 3600
CORES, MEMORY_MIB = 16, 64 * 1024


def check_request(run_type: str, gpu: str, world_size: int) -> None:
    """Check what can be checked before a machine is rented.

    Raises:
        ValueError: one sentence for the rule that is broken.
    """
    if run_type not in STRATEGIES:
        raise ValueError(f"--run-type {run_type} is none of {', '.join(STRATEGIES)}")
    if gpu not in GPUS:
        raise ValueError(f"--gpu {gpu} is none of {', '.join(GPUS)}")
    if not 1 <= world_size <= 8:
        raise ValueError(f"--world-size {world_size}: one machine has 1 to 8 devices")
    entry = STRATEGIES[run_type]
    if entry.devices == "one" and world_size > 1:
        raise ValueError(f"--run-type {run_type} is one device; leave --world-size {world_size} out, or take ddp")
    if entry.keeps == "stages" and world_size < 2:
        raise ValueError(f"--run-type {run_type} cuts the layers over devices; give --world-size 2 or more")


def gpu_request(gpu: str, world_size: int) -> str | None:
    """Return the GPUs as Modal wants them: "H100:4"; None for a machine without."""
    return None if gpu == "cpu" else f"{gpu}:{world_size}"


def has_tokens(data: Path) -> bool:
    return all((data / name).is_file() for name in ("train_small.bin", "val_small.bin"))


def corpus_command(data: Path, dataset: str) -> list[str]:
    """Return the command that writes documents into data/dataset/NAME; the program chooses the name."""
    return [sys.executable, "download_data.py", "--dataset", dataset, "--output_dir", str(data / "dataset")]


def tokens_command(data: Path) -> list[str]:
    """Return the command that writes tokens into `data`, of the corpus that was made last."""
    manifest = max((data / "dataset").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    return [sys.executable, "preprocess_small.py", "--input", str(manifest), "--output_dir", str(data)]


def training_command(
    run_type: str, world_size: int, run: Path, data: Path, epochs: int, batch_size: int | None, extra: str
) -> list[str]:
    """Return the command that README gives for this run type, with this run's folders. `extra` are more flags of
    gpt2.py."""
    entry = STRATEGIES[run_type]
    if not entry.is_distributed:
        launcher = [sys.executable]
    elif entry.engine == "deepspeed":
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(world_size)]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    flags = ["--run_type", run_type, "--epochs", str(epochs), "--resume", "auto", "--save_every", "100"]
    flags += ["--train_data_path", str(data / "train_small.bin"), "--val_data_path", str(data / "val_small.bin")]
    flags += ["--checkpoint_path", str(run)]
    if entry.keeps == "stages" and "--pipeline_stages" not in extra:
        flags += ["--pipeline_stages", str(world_size)]
    if batch_size is not None:
        flags += ["--global_batch_size", str(batch_size)]
    return [*launcher, "src/gpt2.py", *flags, *shlex.split(extra)]


def train_here(request: dict[str, Any], repository: str, results: str) -> dict[str, Any]:
    """Make the corpus if there is none, then the run, on the rented machine. Returns what its metrics file says.

    Raises:
        subprocess.CalledProcessError: a command failed; what it said is above it in the log.
    """
    data = Path(results) / "data" / request["dataset"].replace("/", "_")
    run = Path(results) / request["name"]
    data.mkdir(parents=True, exist_ok=True)

    def call(command: list[str]) -> None:
        print("$", shlex.join(command), flush=True)
        subprocess.run(command, cwd=repository, check=True)

    if not has_tokens(data):
        call([*corpus_command(data, request["dataset"]), "--overwrite"])
        call(tokens_command(data))
    work = [request[name] for name in ("epochs", "batch_size", "extra")]
    call(training_command(request["run_type"], request["world_size"], run, data, *work))
    metrics = json.loads((run / "training_metrics.json").read_text(encoding="utf-8"))
    return {
        "status": metrics["status"],
        "tokens_per_s": metrics["summary"]["mean_tokens_per_sec_global"],
        "final_val_loss": metrics["summary"]["final_val_loss"],
        "files": str(run),
    }


def requirements() -> list[str]:
    """Return the packages of requirements.txt without this project itself, whose source is added to the image."""
    lines = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]


def _image() -> Any:
    """Debian with a compiler (DeepSpeed builds parts of itself), the packages, and this repository's programs."""
    image = modal.Image.debian_slim(python_version="3.11").apt_install("git", "build-essential")
    if modal.is_local():  # in the container the file is alone, and its image long made
        image = image.pip_install(*requirements())
        for name in SOURCES:
            place = REPOSITORY / name
            add = image.add_local_dir if place.is_dir() else image.add_local_file
            image = add(str(place), f"{REMOTE_REPOSITORY}/{name}")
    return image


if modal is not None:
    app = modal.App("gpt2-testbed")
    volume = modal.Volume.from_name(VOLUME, create_if_missing=True)

    @app.cls(
        image=_image(), volumes={REMOTE_RESULTS: volume}, timeout=LONGEST_S, cpu=CORES, memory=MEMORY_MIB,
        retries=modal.Retries(max_retries=2, initial_delay=10.0),
    )  # fmt: skip
    class Machine:
        """One machine; which GPUs it has is asked for with `with_options` when it is rented."""

        @modal.method()
        def train(
            self, request: dict[str, Any], repository: str = REMOTE_REPOSITORY, results: str = REMOTE_RESULTS
        ) -> dict[str, Any]:
            """`train_here`; however it ends, the files are kept, and a retry resumes from its checkpoints."""
            try:
                return train_here(request, repository, results)
            finally:
                if not modal.is_local():
                    volume.commit()

    @app.local_entrypoint()
    def main(
        run_type: str = "ddp",
        gpu: str = "A10G",
        world_size: int = 2,
        n_epochs: int = 1,
        batch_size: int = 0,
        dataset: str = "stdlib",
        name: str = "",
        extra: str = "",
    ) -> None:
        """Rent a machine, train on it, say what came of it.

        Args:
            run_type: of gpt2.py.
            gpu: kind of GPU, or cpu.
            world_size: how many, on one machine.
            n_epochs: passes over the training file.
            batch_size: sequences of all devices together; 0 for gpt2.py's own.
            dataset: as download_data.py has it.
            name: folder of the run in the volume; the same name resumes the same run.
            extra: more flags of gpt2.py, in one text.
        """
        try:
            check_request(run_type, gpu, world_size)
        except ValueError as error:
            print(f"modal_run.py: error: {error}", file=sys.stderr)
            sys.exit(2)
        request = {
            "run_type": run_type, "world_size": world_size, "epochs": n_epochs, "batch_size": batch_size or None,
            "dataset": dataset, "name": name or f"modal/{run_type}_{world_size}x{gpu}", "extra": extra,
        }  # fmt: skip
        machine: Any = Machine  # modal's decorator has made it something else than the class above
        if gpu != "cpu":
            machine = machine.with_options(gpu=gpu_request(gpu, world_size))
        said = machine().train.remote(request)
        print(json.dumps(said, indent=2))
        print(f"modal volume get {VOLUME} {request['name']} checkpoint/")


if __name__ == "__main__":
    needs = "" if modal is not None else " (and pip install modal: it is not installed here)"
    print(f"modal_run.py is started by Modal: modal run {os.path.relpath(__file__)} --help{needs}", file=sys.stderr)
    sys.exit(2)
