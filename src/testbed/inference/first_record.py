"""inference_metrics.json before anything is measured."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from testbed.inference.evaluated_model import EvaluatedModel
from testbed.inference.schemes import SCHEMES
from testbed.io import result_head
from testbed.metrics import environment
from testbed.model.gpt2 import GPT2

SCHEMA_VERSION = "1.0"
MEASURED = (
    "num_parameters num_quantized_parameters num_products num_quantized_products bytes_in_memory bytes_on_disk "
    "bytes_expected perplexity perplexity_ratio latency speed_ratio speed_ratio_bf16"
).split()


def beginning(command_line: str, device: torch.device, subject: EvaluatedModel, model: GPT2) -> dict[str, Any]:
    """The file without measurements."""
    facts = environment.facts(device, "torchao")
    shape = subject.shape
    return {
        **result_head(SCHEMA_VERSION, command_line),
        "status": "running",
        "failure": None,
        **{name: facts[name] for name in ("git_commit", "git_dirty")},
        "environment": {name: facts[name] for name in ("env", "host", "hardware")},
        "device": device.type,
        "threads": torch.get_num_threads(),
        "checkpoint": {
            "name": subject.name,
            "model_size": shape.describe(),
            "num_parameters": shape.num_parameters,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_position_embeddings,
            "weights_sha256": _weights_sha256(subject, model),
        },
        "data": None,
        "schemes": {},
        "load": None,
        "wrapped": None,
        "bleu": None,
    }


def _weights_sha256(subject: EvaluatedModel, model: GPT2) -> str:
    """Of the file; of weights from the hub, whose file we do not know, of the tensors in the order of their names."""
    if subject.directory is not None:
        with (subject.directory / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def scheme_entry(scheme: str, unavailable: str | None = None, **measured: Any) -> dict[str, Any]:
    """An entry of `schemes`: what was measured, null for all else. `unavailable`: why it does not run here."""
    facts = {"unavailable": unavailable, "summary": SCHEMES[scheme].summary, "bits": SCHEMES[scheme].bits}
    return facts | dict.fromkeys(MEASURED) | measured
