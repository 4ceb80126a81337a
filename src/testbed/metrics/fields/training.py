"""The fields of a metrics file about what was trained, and on what hardware."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, Fraction, Name, Positive, Sha256, ZeroStage


class Hardware(TypedDict):
    device_type: Annotated[Literal["cpu", "cuda"], '"cpu" or "cuda"; model names, null when not found']
    gpu_name: str | None
    cpu_name: str | None
    gpu_count_visible: Annotated[Count, "what the process may use, not what the machine has"]
    cpu_cores_visible: Positive
    world_size: Annotated[
        Positive, "ranks and machines. v1 read the world size as 1 on every rank, so its throughput is per rank"
    ]
    num_nodes: Positive
    num_devices: NotRequired[
        Annotated[
            Positive,
            "devices that compute: one per rank, but all visible ones in the single process of `dp`. MFU divides "
            "by their peak. Not in files before this field came",
        ]
    ]
    cpu_threads_per_rank: Annotated[
        Positive, "threads of each rank; two runs on CPU compare only if ranks x threads is told"
    ]
    backend: Annotated[str | None, '"gloo" or "nccl"; null without a process group']
    cuda_version: Annotated[str | None, "CUDA that PyTorch was built with"]
    instance_type: NotRequired[
        Annotated[
            str, "optional, as the environment names them. **2.0:** the cluster was a fixed name for every Slurm job"
        ]
    ]
    cluster: NotRequired[str]


class Mesh(TypedDict):
    data: Positive
    pipeline: Positive
    tensor: Positive
    shard: Positive


class AutomaticChoices(TypedDict):
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
    run_type: Annotated[Name, "the strategy, as `--run_type` names it. **2.0:** not recorded"]
    model_name: Annotated[str, 'size name, and "n_layer=12, n_head=12, n_embd=768". **2.0:** the name was always gpt2']
    model_size: str
    num_layers: Annotated[Positive, "the same as numbers"]
    num_heads: Positive
    embedding_size: Positive
    vocab_size: Annotated[Positive, "real sizes, without padding"]
    max_position_embeddings: Positive
    num_parameters: Annotated[Positive, "all parameters, the tied embedding once, padding not counted"]
    dropout: Annotated[
        Fraction,
        'dropout probability; "scratch", a published model or a directory; which attention ran in training: '
        '"sdpa" and the kernel\'s name, as `--attention` has it (files from before: "sdpa" alone where PyTorch '
        "chose)",
    ]
    init_from: str
    attention: str
    seq_len: Annotated[Positive, "tokens per sequence"]
    epochs: Annotated[
        Count,
        "passes over the data; limit in optimizer steps or null (**2.0:** micro steps); optimizer steps that "
        "the schedule plans; step to stop at without changing the schedule, or null",
    ]
    max_train_steps: Count | None
    total_steps: Count
    stop_at_step: Count | None
    micro_batch_size_per_gpu: Annotated[
        Positive,
        "sequences per data rank and pass; passes per step; sequences per step over all ranks; ranks that "
        "read different data (data ranks). global = micro x accumulation x data ranks",
    ]
    grad_accum_steps: Positive
    global_batch_size: Positive
    data_world_size: Positive
    mesh: NotRequired[
        Annotated[
            Mesh,
            "ranks along each axis; data x pipeline x tensor is the world size, `shard` says how many of the data "
            "ranks share one copy of the weights under `fsdp` (1 elsewhere)",
        ]
    ]
    math_changes: NotRequired[
        Annotated[
            list[Name],
            "in words, what makes this run compute something else than the baseline does at the same precision "
            "(gradients averaged in bf16, an engine's own mixed precision); empty for equal mathematics. Runs "
            "that differ in it did not do equal work",
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[
            Literal["none", "block", "selective"],
            "what backward computes again, whether blocks were compiled (what `--compile auto` came to)",
        ]
    ]
    compile: NotRequired[bool]
    matmul: NotRequired[
        Annotated[
            Literal["default", "fp8"],
            '"fp8" where the linear layers of the blocks multiplied in 8 bits, else "default". Not in files '
            "before this field came",
        ]
    ]
    automatic_choices: NotRequired[
        Annotated[
            AutomaticChoices,
            "what the program chose because nobody set it, and what it came to (`settings` holds it too, as if it "
            "had been given); what somebody set is left out. Not in files before this field came",
        ]
    ]
    lr: Annotated[Amount, "peak and final learning rate; linear warm-up to step; the step at which the fall ends"]
    min_lr: Amount
    warmup_steps: Count
    lr_decay_steps: Count
    lr_schedule: NotRequired[
        Annotated[
            Literal["cosine", "wsd", "constant"],
            'after the warm-up: "cosine", "wsd" (constant, then a straight line over the last share of the steps) '
            'or "constant"; that share, null but for wsd. Files from before these fields: cosine',
        ]
    ]
    decay_share: NotRequired[Fraction | None]
    weight_decay: Annotated[
        Amount,
        'the optimizer, "AdamW" or "Muon"; with Muon these are of the AdamW beside it, and the decay is of '
        "both. **2.0:** only lr and a name",
    ]
    adam_beta1: Amount
    adam_beta2: Amount
    adam_eps: Amount
    optimizer: str
    muon_learning_rate: NotRequired[
        Annotated[
            Amount | None,
            "of the matrices inside the blocks; null without Muon. The rate of a step is `steps[].lr` "
            "x `muon_learning_rate` / `lr`",
        ]
    ]
    muon_momentum: NotRequired[Fraction | None]
    max_grad_norm: Annotated[Amount, "clip the global gradient norm to this; 0 is off"]
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        'of the matrix products: "fp32", "bf16", "fp16". **2.0:** mixed it with the library that did it '
        '("fp16_deepspeed")',
    ]
    deepspeed_enabled: Annotated[bool, "whether DeepSpeed ran the step; its stage, null without it (**2.0:** 0)"]
    zero_stage: ZeroStage | None
    seed: Annotated[int, "of initialisation, data order and dropout"]
    dataset_name: Annotated[str, "stem of the training file; tokenizer of its sidecar, null without one"]
    tokenizer: str | None
    dataset_subset_sizes: Annotated[SubsetSizes, "sequences in each file; of pairs, those that fit whole"]
    dataset_sha256: Annotated[
        DatasetHashes,
        "SHA-256 of the token files; of pairs, of the `.bin` followed by its `.targets.bin`. **2.0:** not "
        "recorded, so two data sets of one size looked alike",
    ]


class Data(TypedDict):
    tokens_train: Count
    tokens_val: Count
    sequences_per_epoch: Annotated[
        Count,
        "windows of an epoch; windows of the incomplete last global batch, not trained on; optimizer steps of an epoch",
    ]
    sequences_dropped_per_epoch: Count
    steps_per_epoch: Count
    target_tokens_train: NotRequired[
        Annotated[
            Count | None,
            "of pairs, the tokens to be learned in all windows of each file; null of text, where every token that "
            "is read is learned. Not in files before these fields came. **Every rate in this file "
            "(`tokens_per_sec_global`, MFU) counts the tokens that pass through the model**, prompts and filling "
            "included, for that is what a device computes; learned per second are `tokens_per_sec_global` x "
            "`target_tokens_train` / (`dataset_subset_sizes.train` x `seq_len`)",
        ]
    ]
    target_tokens_val: NotRequired[Count | None]


class SelectedByDeepSpeed(TypedDict):
    fp16_enabled: bool
    wall_clock_breakdown: bool
    zero_stage: ZeroStage


class DeepSpeedConfig(TypedDict):
    path: Annotated[str | None, "the file that was given, and its hash"]
    file_sha256: Sha256 | None
    sha256: Annotated[
        Sha256,
        "hash of the configuration that DeepSpeed got, and that configuration. **2.0:** `sha256` was of the "
        "file, before flags changed it",
    ]
    effective: dict[str, Any]
    selected: Annotated[
        SelectedByDeepSpeed,
        "three effective values; wall_clock_breakdown synchronises after each part and makes a run instrumented",
    ]
