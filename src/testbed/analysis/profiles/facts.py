"""Read what a run's own files say about it, for the summary of its profile: the metrics file and the launcher's."""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.analysis.runs.attributed import attribution_of
from testbed.errors import InputError, counted
from testbed.io import holding_together, read_json
from testbed.metrics.file import metrics_version, read_metrics

_METRICS, _LAUNCHER = "training_metrics.json", "launcher_metadata.json"
_PARTS_OF_A_STEP = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "exposed_communication_s", "idle_s")
# field of the summary -> where training_metrics.json has it. The first nine have the names that earlier tools read
_FIELDS = {
    "gpu": ("hardware", "gpu_name"),
    "cuda": ("env", "cuda_version"),
    "torch": ("env", "torch_version"),
    "deepspeed": ("env", "deepspeed_version"),
    "seq_length": ("training_config", "seq_len"),
    "micro_batch_size_per_gpu": ("training_config", "micro_batch_size_per_gpu"),
    "grad_accum_steps": ("training_config", "grad_accum_steps"),
    "tokens_per_sec": ("summary", "mean_tokens_per_sec_global"),
    "total_wall_time_sec": ("summary", "total_wall_time_sec"),
    "run_type": ("training_config", "run_type"),
    "precision": ("training_config", "precision"),
    "model_size": ("training_config", "model_size"),
    "global_batch_size": ("training_config", "global_batch_size"),
    "cpu": ("hardware", "cpu_name"),
    "instance_type": ("hardware", "instance_type"),
    "deepspeed_config_sha256": ("deepspeed_config", "sha256"),
}


@dataclass(frozen=True)
class Facts:
    """Both files as they are; an empty dictionary where there is none."""

    metrics: dict[str, Any]
    launcher: dict[str, Any]

    def _of(self, section: str, name: str) -> Any:
        return (self.metrics.get(section) or {}).get(name)

    @property
    def world_size(self) -> int | None:
        return self.launcher.get("world_size") or self._of("hardware", "world_size")

    @property
    def num_nodes(self) -> int | None:
        """Return the number of machines: as recorded, as the scheduler says, or as the launcher lists them."""
        told = self._of("hardware", "num_nodes") or self._of("scheduler", "nnodes") or len(self.hosts([]) or [])
        return int(told) or None

    @property
    def num_optimizer_steps(self) -> int | None:
        """Return the steps of the run. Those that fp16 skipped took part in communication, so they count."""
        if not self.metrics or metrics_version(self.metrics) == "1":
            return None
        if metrics_version(self.metrics) == "2.2":
            return len(self.metrics["steps"]) or None
        counts = [epoch.get("optimizer_steps") for epoch in self.metrics["epochs"]]
        return sum(counts) or None if None not in counts else None

    @property
    def attributed_steps(self) -> list[dict]:
        """Return the attributed steps of all ranks, one row each; empty where no step was."""
        found = attribution_of(self.metrics) or {"per_rank": []}
        return [row for rank in found["per_rank"] for row in rank["steps"]]

    @property
    def attribution(self) -> dict[str, float]:
        """Return nanoseconds of each exclusive part over all attributed steps of all ranks; empty without any."""
        rows = self.attributed_steps
        return {name.removesuffix("_s"): 1e9 * sum(row[name] for row in rows) for name in _PARTS_OF_A_STEP if rows}

    def ranks_in(self, num_traces: int) -> tuple[int | None, str]:
        """Return the ranks in `num_traces` traces, and how that is known: a trace per rank, or one per machine."""
        if self.world_size == 1 or (self.world_size and self.world_size == num_traces):
            return self.world_size, "world size"
        if self.world_size and self.num_nodes and self.world_size % self.num_nodes == 0:
            per_node = self.world_size // self.num_nodes
            ranks = min(self.world_size, per_node * num_traces)
            return ranks, f"{num_traces} x {per_node}: one trace for each of {self.num_nodes} machine(s)"
        return None, "unknown: world size or number of machines is not recorded; give --ranks_in_profile"

    def hosts(self, nsys_reports: list[str]) -> list[str] | None:
        """Return the names of the machines: the launcher's list, or those in nsys_<job>_<host>.nsys-rep."""
        told = (self.launcher.get("slurm") or {}).get("hosts") or self.launcher.get("hosts")
        if isinstance(told, str) and told.strip():
            return [host for host in told.splitlines() if host.strip()]
        named = [re.fullmatch(r"nsys_\d+_(.+?)\.(?:nsys-rep|qdrep)", report) for report in nsys_reports]
        if found := sorted({match[1] for match in named if match}):
            return found
        hostname = self._of("host", "hostname")
        return [hostname] if hostname and self._of("hardware", "num_nodes") == 1 else None

    def fields(self, nsys_reports: list[str]) -> dict[str, Any]:
        """Return what the summary repeats of the run; None is unknown."""
        return {
            "slurm_job_id": (self.launcher.get("slurm") or {}).get("job_id") or self._of("scheduler", "job_id"),
            "hosts": self.hosts(nsys_reports),
            "world_size": self.world_size,
            "run_id": self.metrics.get("run_id"),
            "git_commit": self.metrics.get("git_commit") or self.launcher.get("git_commit"),
            "command_line": self.metrics.get("command_line"),
            **{name: self._of(section, field) for name, (section, field) in _FIELDS.items()},
        }

    def warnings(self, num_steps: int | None, num_ranks: int | None) -> list[str]:
        """Return what the run's files say against its profile."""
        found = []
        if not self.metrics:
            found.append(f"There is no {_METRICS}: what was trained is not known.")
        recorded = self.num_optimizer_steps
        if recorded and num_steps and recorded != num_steps:
            found.append(f"The profile covers {num_steps} of the run's {counted(recorded, 'optimizer step')}.")
        if self.world_size and num_ranks and num_ranks < self.world_size:
            found.append(f"The profile covers {num_ranks} of {self.world_size} ranks.")
        if ((self.metrics.get("deepspeed_config") or {}).get("selected") or {}).get("wall_clock_breakdown"):
            found.append("wall_clock_breakdown was on: DeepSpeed waited for the device after every part of a step.")
        if str((self.launcher.get("nccl_env") or {}).get("NCCL_DEBUG")).upper() in ("INFO", "TRACE"):
            found.append("NCCL_DEBUG was on: NCCL wrote a log while it was measured.")
        return found


def read_facts(run_dir: Path) -> Facts:
    """Read the facts of the run in `run_dir`. InputError when a file is there but does not read."""
    metrics = read_metrics(run_dir / _METRICS) if (run_dir / _METRICS).exists() else {}
    launcher: Any = {}
    if (run_dir / _LAUNCHER).exists():
        launcher = read_json(run_dir / _LAUNCHER)
        if not isinstance(launcher, dict):
            raise InputError(f"{run_dir / _LAUNCHER} is not a JSON object")
        for name, kind in {"world_size": int, "nccl_env": dict, "slurm": dict}.items():
            value = launcher.get(name)
            if value is not None and (type(value) is not kind or (isinstance(value, int) and value < 1)):
                raise InputError(f"{run_dir / _LAUNCHER}: {name} is {reprlib.repr(value)}")
        with holding_together(run_dir / _LAUNCHER):
            json.dumps(launcher, allow_nan=False)  # the summary repeats parts of it
    return Facts(metrics, launcher)
