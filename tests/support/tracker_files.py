"""Files of experiment trackers: real ones, shortened, with source and licence, and ones built with chosen figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

# Of jhinpan/nanochat (MIT), wandb/run-20251015_024018-z9s7cd4f/files/wandb-summary.json at 961dd2e2bf1e, without the
# results of its tasks: eight H100, 524,288 tokens a step.
NANOCHAT_SUMMARY = (
    '{"core_metric":0.22836977461790442,"train/lrm":0.02336448598130841,"train/mfu":48.07067232997405,"step":21400,'
    '"val/bpb":0.811805479183393,"_step":311,"total_training_time":10485.119116783142,'
    '"_timestamp":1.7605074470754519e+09,"_runtime":11431,"train/tok_per_sec":1089236,'
    '"total_training_flops":3.917669880928666e+19,"train/loss":2.71014912564309,"_wandb":{"runtime":11431},'
    '"train/dt":0.4813351631164551}'
)
# and config.yaml next to it, without the machine
NANOCHAT_CONFIG = """\
_wandb:
    value:
        cli_version: 0.21.3
        t:
            "1":
                - 1
depth:
    value: 20
device_batch_size:
    value: 32
max_seq_len:
    value: 2048
total_batch_size:
    value: 524288
"""
# Of 10tanmay100/DEEPCNNCLASSIFIER (MIT), mlruns/0/cb0096518b0e4c66a94428555f05420b at 36cea4ee43cf
MLFLOW_META = """\
end_time: null
entry_point_name: ''
experiment_id: '0'
lifecycle_stage: active
name: ''
run_id: cb0096518b0e4c66a94428555f05420b
run_uuid: cb0096518b0e4c66a94428555f05420b
source_type: 4
start_time: 1664364007025
status: 1
"""
MLFLOW_LOSS = "1664364007310 3.2727866172790527 0\n"
# Of LiuTaowen-Tony/xKV (Apache-2.0), lightning_logs/version_0/metrics.csv at 43af65148673
LIGHTNING_CSV = """\
compression_ratio_step,epoch,step,train_loss_step,train_mae_step,train_mse_step,train_reconstruction_loss_step
32.0,0,9,6.5751519203186035,1.0026079416275024,3.287576198577881,6.5751519203186035
32.0,0,19,6.386987686157227,0.9867267608642578,3.1934938430786133,6.386987686157227
"""
# Of leandrosnazareth/whisper-medium-portuguese (Apache-2.0), trainer_state.json at 5724c632ac97: 32 samples a step. Two
# of its 240 logged losses and two of its four evaluations.
TRAINER_STATE = """\
{"best_metric": 6.598745817992301, "best_model_checkpoint": "./checkpoint-3000", "epoch": 11.0045, "global_step": 6000,
 "is_hyper_param_search": false, "max_steps": 6000, "num_train_epochs": 9223372036854775807,
 "total_flos": 1.9595614224384e+20, "log_history": [
 {"epoch": 0.0, "learning_rate": 3.96e-07, "loss": 1.249, "step": 25},
 {"epoch": 5.05, "eval_loss": 0.2628188133239746, "eval_runtime": 4477.0926, "eval_samples_per_second": 1.942,
  "eval_steps_per_second": 0.122, "eval_wer": 6.598745817992301, "step": 3000},
 {"epoch": 11.0, "learning_rate": 4.90909090909091e-09, "loss": 0.0004, "step": 6000},
 {"epoch": 11.0, "eval_loss": 0.32118794322013855, "eval_runtime": 4478.9685, "eval_samples_per_second": 1.941,
  "eval_steps_per_second": 0.121, "eval_wer": 6.6794438560212495, "step": 6000},
 {"epoch": 11.0, "step": 6000, "total_flos": 1.9595614224384e+20, "train_loss": 0.04298678698204458,
  "train_runtime": 52040.1074, "train_samples_per_second": 3.689, "train_steps_per_second": 0.115}]}
"""
# Of jhinpan/nanochat (MIT), wandb/run-20251015_183235-md4wekyz/run-md4wekyz.wandb at c3d8a94ce914: the records of steps
# 10, 410 and 760 of its midtraining, 524,288 tokens a step.
WANDB_LOG = base64.b64decode(
    "OlcmQuG+AF8ISeJTAQEIbBLOAgoLEgRzdGVwggECMTAKKhIUdG90YWxfdHJhaW5pbmdfZmxvcHOCARExNjQ3NjE4MTc0MjIyMzM2MAodEhF0"
    "cmFpbi90b2tfcGVyX3NlY4IBBzExMDEwNDMKHxIJdHJhaW4vbWZ1ggERNDguNTkxNzE0MDU2MzE1MDMKJBIKX3RpbWVzdGFtcIIBFTEuNzYw"
    "NTUzMjA1NDQ1Mjc2ZSswOQoYEghfcnVudGltZYIBCzQ5LjIxMTQzMjg5CgsSBV9zdGVwggEBMQoZEhN0b3RhbF90cmFpbmluZ190aW1lggEB"
    "MAohEgp0cmFpbi9sb3NzggESMi40MjY5ODI4NTU1NDI5MDQzCiISCXRyYWluL2xybYIBFDAuMDE1MDA5MDkwMDEyMjYwOTQ3CiASCHRyYWlu"
    "L2R0ggETMC40NzYxNzM4Nzc3MTYwNjQ0NRICCAGeVUWDYQEBCLIIEtsCCgwSBHN0ZXCCAQM0MTAKKxIUdG90YWxfdHJhaW5pbmdfZmxvcHOC"
    "ARI3NDg3NTA5MjU4NDEwMzkzNjAKIRIKdHJhaW4vbG9zc4IBEjEuNDYzNDU2NzE3NTUzMTMyMwojEgpfdGltZXN0YW1wggEUMS43NjA1NTM0"
    "ODEzNDAwMmUrMDkKDBIFX3N0ZXCCAQI0MwonEhN0b3RhbF90cmFpbmluZ190aW1lggEPMjYxLjM1MzIwNTIwNDAxCiASCXRyYWluL2xybYIB"
    "EjAuNTMzNDIxNjQ5NzMxNTI3NQofEgh0cmFpbi9kdIIBEjAuNjUxNzUxOTk1MDg2NjY5OQocEhF0cmFpbi90b2tfcGVyX3NlY4IBBjgwNDQy"
    "OAoeEgl0cmFpbi9tZnWCARAzNS41MDEzOTQ4MjczMjA1ChoSCF9ydW50aW1lggENMzI1LjEwNjIyNTk1MRICCCu4bA5KaAEBCIQPEuICCh0S"
    "EXRyYWluL3Rva19wZXJfc2VjggEHMTA4NTUxOQolEgpfdGltZXN0YW1wggEWMS43NjA1NTM3MDM1OTI5NDkyZSswOQoMEgVfc3RlcIIBAjgx"
    "CiESCnRyYWluL2xvc3OCARIxLjM1MDAzMDE5NTUyNDQ5NjIKIBIJdHJhaW4vbHJtggESMC45ODY4OTM0NzA2OTM1MTg2Ch8SCXRyYWluL21m"
    "dYIBETQ3LjkwNjYwNjgyMDE1MDk1ChoSCF9ydW50aW1lggENNTQ3LjM1ODk4OTc0OQoMEgRzdGVwggEDNzYwCiwSFHRvdGFsX3RyYWluaW5n"
    "X2Zsb3BzggETMTM4OTQ5MTMyNjkyNzUwMzM2MAopEhN0b3RhbF90cmFpbmluZ190aW1lggERNDYxLjQ4ODQyMzgyNDMxMDMKHxIIdHJhaW4v"
    "ZHSCARIwLjQ4Mjk4MzU4OTE3MjM2MzMSAghR"
)
# Of elena-lyulina/Megatron-LM-Attention-Benchmark (Megatron-LM's licence: BSD-3-Clause),
# attn_bench/results/correctness/correctness_full_flash_1node_1gpu_tp1_pp1_1728401/tensorboard/
# events.out.tfevents.1774532589.nid006827.122730.0 at 4e1ee1fe110a: the first record, two arguments, three
# steps of three curves.
EVENTS = base64.b64decode(
    "SAAAAAAAAAD+kkidCVIcfPtNcdpBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2ZW50X2ZpbGVfd3Jp"
    "dGVyFp9CdkUAAAAAAAAA6+ZosAlw5Xj9TXHaQSo6CjgKHmdsb2JhbF9iYXRjaF9zaXplL3RleHRfc3VtbWFyeUIMCAcSBBICCAFCAjgwSggK"
    "BgoEdGV4dJ6h0Lw9AAAAAAAAAGBJ8ewJmXZ7/U1x2kEqMgowChd3b3JsZF9zaXplL3RleHRfc3VtbWFyeUILCAcSBBICCAFCATFKCAoGCgR0"
    "ZXh07xKesB0AAAAAAAAAYC/fIwnWXH8rTnHaQRANKhAKDgoHbG0gbG9zcxXF9QZB5glWvR0AAAAAAAAAYC/fIwkRLewuTnHaQRAOKhAKDgoH"
    "bG0gbG9zcxWbGAZBWbDIph0AAAAAAAAAYC/fIwkEfVkyTnHaQRAPKhAKDgoHbG0gbG9zcxWa5AVB+fp74iAAAAAAAAAAKe2pUAnBf38rTnHa"
    "QRANKhMKEQoKdGhyb3VnaHB1dBXurbtD/KzKayAAAAAAAAAAKe2pUAmfT+wuTnHaQRAOKhMKEQoKdGhyb3VnaHB1dBUb1rtD4kczaSAAAAAA"
    "AAAAKe2pUAluoVkyTnHaQRAPKhMKEQoKdGhyb3VnaHB1dBWturtDohtuSiQAAAAAAAAAQiuATQmoeH8rTnHaQRANKhcKFQoOaXRlcmF0aW9u"
    "LXRpbWUVcWJbQUVXdPkkAAAAAAAAAEIrgE0Js0jsLk5x2kEQDioXChUKDml0ZXJhdGlvbi10aW1lFYQzW0GnoRYkJAAAAAAAAABCK4BNCRCZ"
    "WTJOcdpBEA8qFwoVCg5pdGVyYXRpb24tdGltZRWMU1tBqw/eaQ=="
)


def wandb_folder(run: Path, summary: str = NANOCHAT_SUMMARY, config: str = NANOCHAT_CONFIG) -> Path:
    """Write the files of a W&B run below its folder. Returns the summary."""
    files = run / "files"
    files.mkdir(parents=True)
    (files / "config.yaml").write_text(config, encoding="utf-8")
    (files / "wandb-summary.json").write_text(summary, encoding="utf-8")
    return files / "wandb-summary.json"


def mlflow_run(run: Path, metrics: dict[str, str] | None = None, params: dict[str, str] | None = None) -> Path:
    """Write a run of MLflow's file store. Returns its meta.yaml."""
    run.mkdir(parents=True)
    for kind, texts in (("metrics", metrics or {"loss": MLFLOW_LOSS}), ("params", params or {})):
        for name, text in texts.items():
            (run / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (run / kind / name).write_text(text, encoding="utf-8")
    (run / "meta.yaml").write_text(MLFLOW_META, encoding="utf-8")
    return run / "meta.yaml"


def event_file(folder: Path, scalars: dict[str, Sequence[float]], start: int = 0, suffix: str = "") -> Path:
    """Write an event file with TensorBoard's own writer: values by tag, a step and a second apart. Returns it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    before = {*folder.glob("*tfevents*")} if folder.is_dir() else set()
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for tag, values in scalars.items():
        for index, value in enumerate(values):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1.7e9 + start + index, step=start + index, summary=summary))
    writer.close()
    (path,) = {*folder.glob("*tfevents*")} - before
    return path


def trainer_state(folder: Path, losses: Sequence[float], every: int = 100, **changes: float) -> Path:
    """Write a trainer_state.json of a whole run, with 8 sequences a step and a tenth of a second each. Returns it.

    `changes` are other figures at the end, or other fields of the state.
    """
    steps = every * len(losses)
    final = {
        "train_loss": sum(losses) / len(losses),
        "train_runtime": steps / 10,
        "train_samples_per_second": 80.0,
        "train_steps_per_second": 10.0,
    }
    rows: list[dict[str, float]] = [
        {"epoch": round(number / len(losses), 2), "loss": loss, "step": number * every}
        for number, loss in enumerate(losses, start=1)
    ]
    rows.append({"epoch": 1.0, "step": steps} | {name: changes.get(name, value) for name, value in final.items()})
    state = {"global_step": steps, "max_steps": steps, "train_batch_size": 8, "epoch": 1.0}
    state |= {name: value for name, value in changes.items() if name not in final}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps(state | {"log_history": rows}), encoding="utf-8")
    return path
