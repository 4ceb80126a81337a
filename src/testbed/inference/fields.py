"""All fields of inference_metrics.json, which scripts/evaluate.py writes of one checkpoint (docs/inference.md).

A scheme that was not measured for something has null there.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from testbed.metrics.fields.steps import Share
from testbed.metrics.fields.types import LARGEST, AboveZero, Amount, Count, Number, OneOrMore, Positive, Whole

Verdict = Literal["faster", "slower", "no detectable difference", "not enough repeats"]


class Environment(TypedDict):
    env: dict[str, str | None]
    host: dict[str, str]
    hardware: dict[str, Any]


class Checkpoint(TypedDict):
    name: str
    model_size: str
    num_parameters: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    weights_sha256: str  # of model.safetensors; of weights from the hub, of the tensors in the order of their names


class Data(TypedDict):
    name: str
    sha256: str
    num_tokens: Positive
    window: Positive
    stride: Positive
    num_windows: Positive
    num_target_tokens: Positive  # scored, each once
    num_bytes: Count | None  # of text that they stand for; null without a tokenizer


class Interval(TypedDict):
    value: AboveZero
    low: Number | None
    high: Number | None


class Comparison(TypedDict):
    """Decode tokens/s over another's: medians over repeats, 95 % interval, null below five repeats."""

    ratio: AboveZero
    low: Number | None
    high: Number | None
    verdict: Verdict


class Percentiles(TypedDict):
    """Null where there are too few samples for one to be expected beyond it."""

    p50: Number | None
    p95: Number | None
    p99: Number | None


class Perplexity(TypedDict):
    value: Annotated[float, Meta(ge=1, le=LARGEST)]
    low: Number | None
    high: Number | None
    nats_per_token: Amount
    bits_per_byte: Number | None
    window_nats: OneOrMore[Amount]
    window_tokens: OneOrMore[Positive]


class LatencyPercentiles(TypedDict):
    prefill_s: Percentiles
    time_to_first_token_s: Percentiles
    per_token_s: Percentiles


class Latency(TypedDict):
    prompt_tokens: Positive
    new_tokens: Positive
    warmup: Count
    repeats: Positive
    prefill_s: list[AboveZero]  # the forward pass over the prompt, per repeat
    time_to_first_token_s: list[AboveZero]  # with the choice of the token, on the host
    per_token_s: list[list[AboveZero]]  # from token to token, after the first
    percentiles: LatencyPercentiles
    prefill_tokens_per_s: AboveZero  # median over repeats
    decode_tokens_per_s: AboveZero  # median over repeats


class Scheme(TypedDict):
    unavailable: str | None  # why it does not run here; then all numbers are null
    summary: str
    bits: Whole  # of a weight of a linear layer, its scales apart
    num_parameters: Whole | None
    num_quantized_parameters: Whole | None
    num_products: Whole | None  # matrix products of the model, the head is one
    num_quantized_products: Whole | None
    bytes_in_memory: Whole | None  # of the distinct storages behind the weights
    bytes_on_disk: Whole | None  # of a file that torch.save wrote
    bytes_expected: Whole | None  # by arithmetic from the bit widths, scales included
    perplexity: Perplexity | None
    perplexity_ratio: Interval | None  # to none, windows resampled in pairs
    latency: Latency | None
    speed_ratio: Comparison | None  # to none, repeats interleaved
    speed_ratio_bf16: Comparison | None  # to bf16, of the same repeats; null where bf16 was not measured


class Request(TypedDict):
    arrival_s: Amount
    first_token_s: Amount
    end_s: Amount
    prompt_tokens: Positive
    new_tokens: Positive


class Point(TypedDict):
    requests: Positive
    completed: Count
    rejected: Count
    wall_s: Amount
    tokens_per_s: Amount
    latency_s: Percentiles  # from the arrival, drawn beforehand in the open loop, to the last token
    time_to_first_token_s: Percentiles
    samples: list[Request]


class ClosedPoint(Point):
    concurrency: Positive
    rate_per_s: NotRequired[AboveZero]


class OpenPoint(Point):
    concurrency: NotRequired[Positive]
    rate_per_s: AboveZero


class Saturation(TypedDict):
    tokens_per_s: Number | None  # the best of the closed loops
    concurrency: Whole | None  # the smallest that reached 95 % of it
    rate_per_s: Number | None  # the highest at which most requests start at once (load_test.saturation)


class Load(TypedDict):
    scheme: str
    prompt_tokens: Positive  # of the longest; each request has half of it to all
    new_tokens: Positive  # of the longest; each request has half of it to all
    max_batch: Positive
    max_queue: Count
    seed: Whole
    cache_bytes: Positive  # of the keys and values of max_batch slots, allocated beforehand
    peak_allocated_bytes: Count | None  # of the CUDA device during the loads, all weights included; null on the CPU
    closed: list[ClosedPoint]
    open: list[OpenPoint]
    saturation: Saturation | None


class Arm(TypedDict):
    unavailable: str | None
    same_tokens: bool | None  # whether it wrote what the plain module wrote
    latency_s: list[AboveZero]  # of a whole answer, one number per repeat
    decode_tokens_per_s: list[AboveZero]


class Wrapped(TypedDict):
    prompt_tokens: Positive
    new_tokens: Positive
    warmup: Count
    repeats: Positive
    arms: dict[Literal["plain", "training_engine", "init_inference"], Arm]
    comparisons: dict[str, Comparison | None]


class Bleu(TypedDict):
    pairs: Count
    score: Number
    signature: str
    max_new_tokens: Positive
    num_empty: Count


class MultipleChoice(TypedDict):
    name: str
    sha256: str
    num_questions: Positive
    chance: AboveZero  # accuracy of guessing
    accuracy: dict[Literal["by_sum", "by_character", "by_token"], Share]  # by what an ending's likelihood is divided
    labels: OneOrMore[Count]
    ending_nats: OneOrMore[list[Amount]]  # minus log-likelihood of each ending of each question


class InferenceMetrics(TypedDict):
    schema_version: Literal["1.0"]
    status: Literal["running", "complete", "failed"]
    failure: str | None  # why the status is failed
    timestamp_utc: str
    command_line: str
    git_commit: str | None
    git_dirty: bool | None
    environment: Environment
    device: Literal["cpu", "cuda"]
    threads: Positive
    checkpoint: Checkpoint
    data: Data | None
    schemes: dict[
        Literal["none", "bf16", "int8_dynamic", "int8_weight_only", "int4_weight_only", "torch_dynamic"], Scheme
    ]
    load: Load | None
    wrapped: Wrapped | None
    bleu: Bleu | None
    multiple_choice: NotRequired[MultipleChoice | None]  # missing in files from before it was measured
