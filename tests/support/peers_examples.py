"""Examples of peers.json."""

from __future__ import annotations

from testbed.experiments.peers import PEERS

MOMENT = "2026-01-01T00:00:00Z"


def example(rates: dict[tuple[str, str], list[float]], sets: list[dict], **changes: object) -> dict:
    """A peers.json: steps of 100 tokens after one of warm-up, losses around 5, a ceiling of 1 TFLOP/s in fp32."""
    runs = [
        {
            "peer": peer, "precision": precision, "round": number, "started_utc": MOMENT, "seconds": 9.0,
            # each trainer times its steps in its own way, here ours by a clock that sees half: the ratio must not
            "step_times_s": [77.0, *(100 / rate * each * (0.5 if peer == "ours" else 1) for each in (1, 1.1, 0.9))],
            "losses": [9.0, 7.0, 6.0, 5.5], "val_loss": 5.25, "measured_loop_s": 3 * 100 / rate,
        }
        for (peer, precision), of_arm in rates.items()
        for number, rate in enumerate(of_arm, start=1)
    ]  # fmt: skip
    ceilings = [
        {"precision": precision, "round": number, "started_utc": "2026-01-01T00:00:00Z", "seconds": 1.0,
         "flops_per_s": 1e12 * (2 if precision == "bf16" else 1), "source": "measured: a test"}
        for precision in {precision for _, precision in rates}
        for number in range(1, 6)
    ]  # fmt: skip
    content = {
        "schema_version": "1.1", "status": "complete", "timestamp_utc": "2026-01-01T00:00:00Z", "command_line": "c",
        "git_commit": "0123456789abcdef", "git_dirty": False, "env": {"torch_version": "2.13.0"},
        "host": {"hostname": "h"}, "is_bf16_fast": True, "threads": 2, "nanogpt": None,
        "hardware": {"device_type": "cpu", "gpu_name": None, "cpu_name": "a CPU", "cpu_cores_visible": 2},
        "work": {
            "model_name": "gpt2", "model_size": "n_layer=12", "num_parameters": 10,
            "vocab_size": 300, "padded_vocab_size": 384, "batch_size": 4,
            "micro_batch_size": 4, "seq_length": 25, "steps": 4, "warmup_steps": 1, "learning_rate": 6e-4, "seed": 42,
            "val_sequences": 16, "flops_per_token_palm": 10**9, "repeats": 5, "only_ours": [],
        },
        "peers": {
            peer: {"summary": PEERS[peer].summary, "differs": list(PEERS[peer].differs), "commands": {},
                   "has_our_batches": PEERS[peer].has_our_batches}
            for peer in dict.fromkeys(peer for peer, _ in rates)
        },
        "sets": sets, "not_measured": {}, "skipped": {}, "runs": runs, "ceilings": ceilings, "results": [],
    }  # fmt: skip
    return {**content, **changes}


def one_set(*arms: tuple[str, str], names: tuple[str, ...] = ("own",)) -> list[dict]:
    return [{"names": list(names), "arms": [{"peer": peer, "precision": precision} for peer, precision in arms]}]


OURS, TRAINER, NANOGPT = ("ours", "bf16"), ("transformers", "fp32"), ("nanogpt", "fp32")
THREE = {
    OURS: [600.0, 606, 594, 603, 597],
    TRAINER: [200.0, 202, 198, 201, 199],
    NANOGPT: [590.0, 640, 560, 610, 600],
}
