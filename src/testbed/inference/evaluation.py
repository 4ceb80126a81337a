"""Measure the parts of an evaluation one after the other, and save the file after each."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from testbed.analysis.statistics import compare
from testbed.data.disk_array import DiskArray
from testbed.errors import first_line
from testbed.inference.batching import BatchingEngine
from testbed.inference.cached_model import CachedModel
from testbed.inference.evaluated_model import EvaluatedModel
from testbed.inference.latency import latency_fields, time_in_turn
from testbed.inference.load_test import SHARES_OF_CAPACITY, Traffic, load_test
from testbed.inference.loading import unfinished
from testbed.inference.multiple_choice import ending_nats, multiple_choice
from testbed.inference.perplexity import perplexity, perplexity_ratio, scored_bytes, sliding_windows, window_nats
from testbed.inference.prompts import draw_prompt
from testbed.inference.quantize import Quantized, quantize
from testbed.inference.report import check_inference
from testbed.inference.schemes import NONE, SCHEMES
from testbed.inference.wrapped import PLAIN, TRAINING_ENGINE, compare_wrapped
from testbed.io import result_head, write_text
from testbed.metrics import environment
from testbed.model.gpt2 import GPT2

BF16 = "bf16"
SCHEMA_VERSION = "1.0"
MEASURED = (
    "num_parameters num_quantized_parameters num_products num_quantized_products bytes_in_memory bytes_on_disk "
    "bytes_expected perplexity perplexity_ratio latency speed_ratio speed_ratio_bf16"
).split()


def first_record(command_line: str, device: torch.device, subject: EvaluatedModel, model: GPT2) -> dict[str, Any]:
    """Return the content of inference_metrics.json before anything is measured."""
    facts, shape = environment.facts(device, "torchao"), subject.shape
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
        "multiple_choice": None,
    }


def _weights_sha256(subject: EvaluatedModel, model: GPT2) -> str:
    """Return the hash of the weights' file; of published weights, whose file is not at hand, and of a checkpoint the
    hash of the tensors in the order of their names."""
    if subject.directory is not None and unfinished(subject.source) is None:
        with (subject.directory / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def scheme_entry(scheme: str, unavailable: str | None = None, **measured: Any) -> dict[str, Any]:
    """Return an entry of `schemes`: what was measured, null for all else. `unavailable`: why it does not run here."""
    facts = {"unavailable": unavailable, "summary": SCHEMES[scheme].summary, "bits": SCHEMES[scheme].bits}
    return facts | dict.fromkeys(MEASURED) | measured


class Evaluation:
    """Measure what was asked for, part by part, into `content`.

    Args:
        arguments: the flags of scripts/evaluate.py.
        content: `first_record`, with an entry of each scheme.
    """

    def __init__(
        self, arguments: argparse.Namespace, subject: EvaluatedModel, device: torch.device, content: dict[str, Any]
    ):
        self.arguments, self.subject, self.device, self.content = arguments, subject, device, content
        self.saved: str | None = None  # what the file was last given

    def run(self, model: GPT2, schemes: Sequence[str]) -> None:
        """Measure all parts. Whatever ends it early, an interruption included, is in the file with all parts that were
        complete by then, and raised again. An earlier evaluation's file stays until the first part of this one is
        complete."""
        if not self.subject.out.exists():
            self.save()
        try:
            self._measure(model, schemes)
            self.content["status"] = "complete"
            self.save()
        except BaseException as error:
            is_interrupted = not isinstance(error, Exception)
            self._save_failure("interrupted" if is_interrupted else first_line(error))
            raise

    @property
    def failed_parts(self) -> list[str]:
        """Return a sentence for what was asked for by name and could not be measured, though all else was."""
        arm = (self.content["wrapped"] or {"arms": {}})["arms"].get(TRAINING_ENGINE)
        if arm is None or arm["unavailable"] is None:
            return []
        return [f"--wrapped: DeepSpeed's training engine does not run here ({arm['unavailable']})"]

    def _measure(self, model: GPT2, schemes: Sequence[str]) -> None:
        quantized = self.measure_sizes(model, schemes)
        if self.subject.data is not None and self.arguments.perplexity:
            self.measure_perplexity(quantized)
        if self.arguments.bleu is not None:
            self.measure_bleu(model)
        if self.arguments.multiple_choice is not None:
            self.measure_multiple_choice(model)
        if self.arguments.latency:
            self.measure_latency(quantized)
        if self.arguments.load:
            self.measure_load(quantized[self.arguments.load_scheme].model)
        if self.arguments.wrapped:
            self.measure_wrapped(model)

    def save(self) -> None:
        """Replace the file in one move. InputError when it would not be one that can be read."""
        check_inference(self.content)
        self.saved = json.dumps(self.content, indent=1) + "\n"
        write_text(self.subject.out, self.saved)

    def _save_failure(self, reason: str) -> None:
        """Into what was last saved: whatever came since may be what breaks the file."""
        if self.saved is not None:
            content = json.loads(self.saved) | {"status": "failed", "failure": reason}
            write_text(self.subject.out, json.dumps(content, indent=1) + "\n")

    def bar(self, total: int, what: str) -> tqdm:
        """Progress on a terminal; elsewhere a line when a part begins."""
        if not sys.stderr.isatty():
            print(f"{what} ...", flush=True)
        return tqdm(total=total, desc=what, leave=False, dynamic_ncols=True, disable=None)

    def measure_sizes(self, model: GPT2, schemes: Sequence[str]) -> dict[str, Quantized]:
        found = {}
        with self.bar(len(schemes), "quantizing") as bar:
            for scheme in schemes:
                found[scheme] = quantize(model, scheme)
                self.content["schemes"][scheme] = scheme_entry(scheme, **found[scheme].size)
                bar.update()
        self.save()
        return found

    def measure_perplexity(self, quantized: dict[str, Quantized]) -> None:
        subject, data = self.subject, self.subject.data
        assert data is not None
        tokens = data.tokens
        windows = sliding_windows(len(tokens), subject.window, subject.stride, subject.max_windows)
        tokenizer, num_bytes = subject.tokenizer, None
        if tokenizer is not None and tokenizer.is_bytewise:
            num_bytes = scored_bytes(tokens, windows, tokenizer)
        self.content["data"] = {
            "name": data.path.name, "sha256": subject.data_sha256, "num_tokens": len(tokens),
            "window": subject.window, "stride": subject.stride, "num_windows": len(windows),
            "num_target_tokens": sum(window.scored for window in windows), "num_bytes": num_bytes,
        }  # fmt: skip
        for scheme, of in quantized.items():
            with self.bar(len(windows), f"perplexity of {scheme}") as bar:
                entry = self.content["schemes"][scheme]
                at_once = 1 if SCHEMES[scheme].mixes_neighbours else None
                nats = window_nats(of.model, tokens, windows, bar.update, at_once)
                entry["perplexity"] = perplexity(nats, windows, num_bytes)
            if scheme != NONE:
                against = self.content["schemes"][NONE]["perplexity"]
                entry["perplexity_ratio"] = perplexity_ratio(entry["perplexity"], against)
            self.save()

    def measure_latency(self, quantized: dict[str, Quantized]) -> None:
        prompts, warmup = self.prompts(), self.arguments.warmup
        modules = {scheme: CachedModel(of.model).eval() for scheme, of in quantized.items()}
        with self.bar(len(prompts) * len(modules), "latency") as bar:
            answers = time_in_turn(
                modules, self.subject.shape, prompts, self.arguments.new_tokens, warmup, self.device, bar.update
            )
        rates = {scheme: [answer.decode_tokens_per_s for answer in of] for scheme, of in answers.items()}
        for scheme, of in answers.items():
            entry = self.content["schemes"][scheme]
            entry["latency"] = latency_fields(of, len(prompts[0]), warmup)
            if scheme != NONE:
                entry["speed_ratio"] = self.comparison(rates[scheme], rates[NONE])
            if scheme != BF16 and BF16 in rates:
                entry["speed_ratio_bf16"] = self.comparison(rates[scheme], rates[BF16])
        self.save()

    def measure_load(self, model: GPT2) -> None:
        arguments = self.arguments
        names = ("prompt_tokens", "new_tokens", "max_batch", "max_queue", "seed")
        facts = {"scheme": arguments.load_scheme, **{name: getattr(arguments, name) for name in names}}
        prompt, new = arguments.prompt_tokens, arguments.new_tokens
        traffic = Traffic(self.tokens(), prompt, new, arguments.requests, arguments.seed)
        batch, queue = arguments.max_batch, arguments.max_queue

        def save(found: dict[str, Any]) -> None:
            self.content["load"] = {**facts, **found}
            self.save()

        loops = len(arguments.concurrency) + len(arguments.rates or SHARES_OF_CAPACITY)
        with self.bar(loops * arguments.requests, "load") as bar:
            load_test(
                lambda: BatchingEngine(model, max_batch=batch, max_queue=queue, max_length=prompt + new),
                traffic, arguments.concurrency, arguments.rates, self.device, bar.update, save,
            )  # fmt: skip

    def measure_wrapped(self, model: GPT2) -> None:
        prompts, arguments = self.prompts(), self.arguments
        with self.bar(len(prompts) * 3, "wrapped") as bar:
            found = compare_wrapped(model, prompts, arguments.new_tokens, arguments.warmup, self.device, bar.update)
        found["comparisons"] = {}
        for name, arm in found["arms"].items():
            if name != PLAIN and arm["unavailable"] is None:
                plain = found["arms"][PLAIN]["decode_tokens_per_s"]
                found["comparisons"][name] = self.comparison(arm["decode_tokens_per_s"], plain)
        self.content["wrapped"] = found
        self.save()

    def measure_bleu(self, model: GPT2) -> None:
        from testbed.inference.bleu import score_pairs  # and sacrebleu with it

        tokenizer = self.subject.tokenizer
        assert tokenizer is not None
        with self.bar(1, "bleu"):
            self.content["bleu"] = score_pairs(
                model, tokenizer, self.arguments.bleu, self.arguments.bleu_max_new_tokens
            )
        self.save()

    def measure_multiple_choice(self, model: GPT2) -> None:
        questions, path = self.subject.questions, self.arguments.multiple_choice
        with self.bar(sum(len(each.endings) for each in questions), "multiple choice") as bar:
            nats = ending_nats(model, questions, bar.update)
        self.content["multiple_choice"] = multiple_choice(path, questions, nats)
        self.save()

    def comparison(self, of: Sequence[float], against: Sequence[float]) -> dict[str, Any]:
        """A ratio of rates as the file has it."""
        found = compare(of, against)
        return {"ratio": found.ratio, "low": found.low, "high": found.high, "verdict": found.verdict}

    def tokens(self) -> np.ndarray | DiskArray:
        """Ids to cut prompts from: the data's, or random ones."""
        if self.subject.data is not None:
            return self.subject.data.tokens
        random = np.random.default_rng(self.arguments.seed)
        return random.integers(0, self.subject.shape.vocab_size, 100 * self.arguments.prompt_tokens)

    def prompts(self) -> list[list[int]]:
        """One for each repeat, warm-up included."""
        random, tokens = np.random.default_rng(self.arguments.seed), self.tokens()
        number = self.arguments.warmup + self.arguments.repeats
        return [draw_prompt(tokens, self.arguments.prompt_tokens, random) for _ in range(number)]
