"""Metrics of a stranger's run that mean harm."""

from __future__ import annotations

from support.report_cases import run_metrics

EVIL = '"><script>document.title="it ran"</script><img src=http://evil.example/x onerror=alert(1)>'


def evil_metrics(number: int) -> dict:
    """A run that says EVIL wherever a file may say what it likes."""
    metrics = run_metrics("ddp", 2, number)
    metrics["run_id"] = f"{EVIL}{number}"
    metrics["git_commit"] = metrics["timestamp_utc"] = EVIL
    metrics["command_line"] = f"python src/gpt2.py --sample_prompt '{EVIL}'"
    metrics["status"], metrics["failure"] = "failed", {"reason": EVIL, "step": 3}
    metrics["completion"] = None
    metrics["host"] = dict.fromkeys(metrics["host"], EVIL)
    metrics["env"] = dict.fromkeys(metrics["env"], EVIL)
    metrics["hardware"] |= {"cpu_name": EVIL, "backend": EVIL}
    metrics["training_config"] |= {
        "run_type": f"ddp{EVIL}{number}", "model_name": EVIL, "model_size": EVIL, "tokenizer": EVIL, "init_from": EVIL,
        "dataset_name": EVIL, "attention": EVIL, "math_changes": [EVIL],
    }  # fmt: skip
    metrics["settings"] |= dict.fromkeys(("attention", "init_from", "overlap_comm", "train_data_path"), EVIL)
    metrics["settings"]["run_type"] = f"ddp{EVIL}{number}"
    metrics["flops"] |= {"peak_source": EVIL}
    return metrics


def complete_again() -> dict:
    return {"status": "complete", "failure": None, "completion": run_metrics("ddp", 2, 1)["completion"]}
