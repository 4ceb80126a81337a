"""Fields about what was trained, and on what hardware."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, Fraction, Name, Positive, Sha256, Whole, ZeroStage


class Hardware(TypedDict):
    device_type: Annotated[Literal["cpu", "cuda"], '"cpu" or "cuda"; model names']
    gpu_name: str | None
    cpu_name: str | None
    gpu_count_visible: Annotated[Count, "what the process may use, not what the machine has"]
    cpu_cores_visible: Positive
    world_size: Annotated[Positive, "ranks and machines"]
    num_nodes: Positive
    num_devices: NotRequired[
        Annotated[Positive, "devices that compute: one per rank, all visible ones for `dp`. MFU divides by their peak"]
    ]
    cpu_threads_per_rank: Annotated[Positive, "threads of each rank"]
    backend: Annotated[str | None, '"gloo" or "nccl"; null without a process group']
    cuda_version: Annotated[str | None, "CUDA that PyTorch was built with"]
    instance_type: NotRequired[Annotated[str, "from the environment"]]
    cluster: NotRequired[str]


class Mesh(TypedDict):
    data: Positive
    pipeline: Positive
    tensor: Positive
    shard: Positive
    context: NotRequired[Positive]


class AutomaticChoices(TypedDict):
    run_type: NotRequired[Name]
    precision: NotRequired[Literal["fp32", "bf16", "fp16"]]
    attention: NotRequired[Name]
    compile: NotRequired[bool]
    micro_batch_size_per_gpu: NotRequired[Positive]
    num_workers: NotRequired[Count]


class SubsetSizes(TypedDict):
    train: Count
    val: Count


class DatasetHashes(TypedDict):
    train: Sha256
    val: Sha256 | None


class TrainingConfig(TypedDict):
    run_type: Annotated[Name, "strategy, as in `--run_type`"]
    model_name: Annotated[str, 'size, and "n_layer=12, n_head=12, n_embd=768"']
    model_size: str
    num_layers: Annotated[Positive, "the same as numbers"]
    num_heads: Positive
    embedding_size: Positive
    vocab_size: Annotated[Positive, "without padding"]
    max_position_embeddings: Positive
    num_parameters: Annotated[Positive, "all parameters: the tied embedding once, padding not counted"]
    gelu: NotRequired[Annotated[str, '"tanh" or "exact" (older files: tanh)']]
    dropout: Annotated[
        Fraction,
        'probability; "scratch", a published model or a folder; attention kernel that trained, such as "sdpa flash" '
        '(older files: "sdpa" if PyTorch chose)',
    ]
    init_from: str
    attention: str
    label_smoothing: NotRequired[
        Annotated[Fraction, "share of a target that all tokens get alike, in the training loss only (older files: 0)"]
    ]
    seq_len: Annotated[Positive, "tokens per sequence"]
    epochs: Annotated[
        Count,
        "passes over the data; limit in optimizer steps; optimizer steps that the schedule is made for; step to stop "
        "at without changing the schedule",
    ]
    max_train_steps: Count | None
    total_steps: Count
    stop_at_step: Count | None
    micro_batch_size_per_gpu: Annotated[
        Positive,
        "sequences per forward pass; passes per step; sequences per step of all ranks; ranks that read different data. "
        "global = micro x accumulation x data ranks",
    ]
    grad_accum_steps: Positive
    global_batch_size: Positive
    data_world_size: Positive
    mesh: NotRequired[
        Annotated[
            Mesh,
            "ranks along each axis: data x pipeline x tensor x context is the world size; `shard` is the number of "
            "data ranks that share one copy of the weights (`fsdp`, `mesh`)",
        ]
    ]
    math_changes: NotRequired[
        Annotated[
            list[Name],
            "what this run computes differently from a baseline of the same precision, such as gradients averaged in "
            "bf16. Runs that differ in it did not do equal work",
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[
            Literal["none", "block", "selective"],
            "what backward recomputes; whether blocks were compiled (true, false)",
        ]
    ]
    compile: NotRequired[bool]
    matmul: NotRequired[
        Annotated[Literal["default", "fp8"], '"fp8" if the linear layers of the blocks multiplied in 8 bits']
    ]
    automatic_choices: NotRequired[
        Annotated[AutomaticChoices, "what the program chose because no flag was given; `settings` has the values too"]
    ]
    lr: Annotated[Amount, "peak and final learning rate; steps of warm-up; step at which the decay ends"]
    min_lr: Amount
    warmup_steps: Count
    lr_decay_steps: Count
    lr_schedule: NotRequired[
        Annotated[
            Literal["cosine", "wsd", "constant"],
            '"cosine", "wsd" or "constant" (older files: cosine); share of the steps in which wsd decays',
        ]
    ]
    decay_share: NotRequired[Fraction | None]
    warmup_shape: NotRequired[Annotated[Literal["linear", "log"], "rise of the learning rate (older files: linear)"]]
    weight_decay: Annotated[
        Amount, 'of AdamW, also where "Muon" (`optimizer`) updates the matrices; the weight decay is of both'
    ]
    adam_beta1: Amount
    adam_beta2: Amount
    adam_eps: Amount
    optimizer: str
    muon_learning_rate: NotRequired[
        Annotated[
            Amount | None,
            "of the matrices inside the blocks. The rate of a step is `steps[].lr` x `muon_learning_rate` / `lr`",
        ]
    ]
    muon_momentum: NotRequired[Fraction | None]
    max_grad_norm: Annotated[Amount, "limit of the global gradient norm; 0 is off"]
    precision: Annotated[Literal["fp32", "bf16", "fp16"], 'of matrix products: "fp32", "bf16" or "fp16"']
    deepspeed_enabled: Annotated[bool, "whether DeepSpeed ran the step, and its ZeRO stage"]
    zero_stage: ZeroStage | None
    seed: Annotated[Whole, "of initialisation, data order and dropout"]
    dataset_name: Annotated[str, "stem of the training file; tokenizer, null without a sidecar"]
    tokenizer: str | None
    dataset_subset_sizes: Annotated[SubsetSizes, "sequences in each file; of pairs, those that fit whole"]
    dataset_sha256: Annotated[DatasetHashes, "of each `.bin`; of pairs, of the `.bin` followed by its `.targets.bin`"]


class Data(TypedDict):
    tokens_train: Count
    tokens_val: Count
    sequences_per_epoch: Annotated[
        Count, "sequences of an epoch; sequences left over by the last incomplete batch; optimizer steps of an epoch"
    ]
    sequences_dropped_per_epoch: Count
    steps_per_epoch: Count
    target_tokens_train: NotRequired[
        Annotated[
            Count | None,
            "of pairs, tokens to learn in each file; null for text, where every token is learned. **Rates and MFU "
            "count all tokens that pass through the model**; tokens learned per second are "
            "`mean_tokens_per_sec_global` x `target_tokens_train` / (`dataset_subset_sizes.train` x `seq_len`)",
        ]
    ]
    target_tokens_val: NotRequired[Count | None]


class SelectedByDeepSpeed(TypedDict):
    fp16_enabled: bool
    wall_clock_breakdown: bool
    zero_stage: ZeroStage


class DeepSpeedConfig(TypedDict):
    path: Annotated[str | None, "the given file, and its SHA-256"]
    file_sha256: Sha256 | None
    sha256: Annotated[Sha256, "of the configuration that DeepSpeed got, and that configuration"]
    effective: dict[str, Any]
    selected: Annotated[
        SelectedByDeepSpeed, "three effective values; wall_clock_breakdown makes a run instrumented, as it synchronises"
    ]
