"""Each key of a DeepSpeed file is taken, passed on or refused by name, before torch and any process group."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from testbed.config.deepspeed_file import FILE_KEY_OF_FLAG, MOST_BYTES, MOST_NAMED, read_deepspeed_file
from testbed.config.deepspeed_keys import KEYS, SECTIONS, Flag
from testbed.errors import InputError


def file_of(folder, content: dict):
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(content))
    return path


def refusal(folder, **content) -> str:
    with pytest.raises(InputError) as caught:
        read_deepspeed_file(file_of(folder, content))
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLANTED = {
    "csv_monitor": {"enabled": True, "output_path": "/elsewhere"},
    "tensorboard": {"enabled": True, "output_path": "/elsewhere"},
    "wandb": {"enabled": True},
    "comet": {"enabled": True},
    "flops_profiler": {"enabled": True, "output_file": "/elsewhere"},
    "autotuning": {"enabled": True},
    "comms_logger": {"enabled": True},
    "dump_state": True,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "nebula": {"enabled": True},
    "datastates_ckpt": {"host_cache_size": 1},
    "aio": {"block_size": 1},
    "data_efficiency": {"enabled": True},
    "fp8": {"enabled": True},
    "gradient_accumulation_dtype": "bf16",
    "elasticity": {"enabled": True},
    "progressive_layer_drop": {"enabled": True},
    "sparse_attention": {"mode": "fixed"},
    "eigenvalue": {"enabled": True},
    "graph_harvesting": True,
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 2},
    "compile": {"deepcompile": True},
    "curriculum_learning": {"enabled": True},
    "some_new_section": {"enabled": False},
}
INSIDE = {
    "optimizer": {"params": {"adam_w_mode": False, "bias_correction": False, "amsgrad": True, "new_param": 1}},
    "checkpoint": {"load_universal": True},
    "zero_optimization": {
        "mics_shard_size": 2,
        "zeropp_loco_param": {"err_beta": 0.8},
        "zenflow": {"topk_ratio": 0.1},
        "new_zero": 1,
        "offload_optimizer": {"nvme_path": "/elsewhere", "new_offload": 1},
        "contiguous_gradients": "yes",
        "sub_group_size": -1,
    },
    "fp16": {"new_fp16": 1},
    "bf16": {"new_bf16": 1},
    "activation_checkpointing": {"partition_activations": True, "new_recompute": 1},
    "scheduler": {"type": "WarmupLR", "new_scheduler": 1, "params": {"warmup_num_steps": 2, "new_parameter": 1}},
}


def leaves(content: dict, prefix: str = ""):
    for key, value in content.items():
        if f"{prefix}{key}" in SECTIONS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_all_that_nobody_does_is_refused_by_name_at_once(tmp_path):
    message = refusal(tmp_path, **PLANTED, **INSIDE)
    for key in PLANTED.keys() | (set(leaves(INSIDE)) - {"scheduler.type", "scheduler.params.warmup_num_steps"}):
        assert key in message, key
    for way_out in ("--tensorboard", "--profile", "--save_every", "--activation_checkpointing", "--log_collectives"):
        assert way_out in message


@pytest.mark.parametrize("key", PLANTED)
def test_each_is_refused_alone_in_one_sentence(tmp_path, key):
    message = refusal(tmp_path, **{key: PLANTED[key]})
    assert key in message and "; remove it" in message and "(1)" not in message


def test_what_asks_for_nothing_is_taken_and_not_passed_on(tmp_path):
    nothing = {key: {"enabled": False} for key, value in PLANTED.items() if isinstance(value, dict)}
    del nothing["some_new_section"]
    params = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "lr": 1e-3}
    content = {
        **nothing, "dump_state": False, "memory_breakdown": "auto", "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": True, "activation_checkpointing": {"partition_activations": False},
        "optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"legacy_stage1": False, "stage": 2},
    }  # fmt: skip
    read = read_deepspeed_file(file_of(tmp_path, content))
    assert read.content == {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }


@pytest.mark.parametrize("value", [10**400, float("inf"), -1, 1.5, True, "many", [1]])
def test_a_value_of_another_kind_is_refused(tmp_path, value):
    zero = {"sub_group_size": value}
    said = "zero_optimization.sub_group_size must be a whole number from 0"
    message = refusal(tmp_path, zero_optimization=zero)
    assert said in message and len(message) < 400


OF_EACH_KIND = [None, True, False, 0, -1, 2.5, 1e400, float("nan"), 10**4000, "", "x", "1e8", "auto", "\x1b[2J"]
OF_EACH_KIND += [[], [1], [[]], {}, {"a": {}}, {"type": []}, {"enabled": []}, {"device": {}}, "\n" * 5000]


@pytest.mark.parametrize("place", sorted({*KEYS, *SECTIONS}))
def test_a_value_of_any_kind_is_taken_or_refused_in_a_sentence(tmp_path, place):
    for value in OF_EACH_KIND:
        *sections, key = place.split(".")
        content = {key: value}
        for section in reversed(sections):
            content = {section: {"type": "WarmupLR", **content} if section == "scheduler" else content}
        path = file_of(tmp_path, content)
        try:
            read_deepspeed_file(path)
        except InputError as error:
            assert len(str(error)) < 700 and str(error).isprintable(), (value, str(error))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"train_batch_size": "8"}, "train_batch_size cannot be '8': write a number without quotes"),
        ({"optimizer": {"params": {"lr": "1e-3"}}}, "without quotes"),
        ({"optimizer": {"params": {"betas": ["0.9", 0.9]}}}, "two numbers without quotes"),
        ({"zero_optimization": {"reduce_bucket_size": "1e8"}}, "without quotes"),
        ({"zero_optimization": {"allgather_bucket_size": -1}}, "allgather_bucket_size cannot be -1"),
        ({"zero_optimization": {"reduce_bucket_size": float("inf")}}, "reduce_bucket_size cannot be inf"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping cannot be nan"),
        ({"fp16": {"initial_scale_power": 5000}}, "initial_scale_power must be a whole number from 0 to 127"),
        ({"fp16": {"loss_scale_window": 0}}, "loss_scale_window must be a whole number from 1"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            "zero_optimization.stage3_prefetch_bucket_size are two names of one key",
        ),
        ({"optimizer": {"type": ["AdamW"]}}, 'optimizer.type = ["AdamW"], but every run type'),
        ({"optimizer": {"params": {"fused": True}}}, "'optimizer.params.fused' is no key"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode = false cannot be taken"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}}, "nvme_path"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "buffer_count": 3}}}, "buffer_count = 3"),
        ({"aio": {"block_size": 262144}}, "the section 'aio' cannot be taken"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "the section 'data_types' cannot be taken"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow"),
    ],
)
def test_what_would_be_read_otherwise_than_it_is_written_is_refused(tmp_path, content, said):
    assert said in refusal(tmp_path, **content)


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 1, "stage": 3}}', '{"fp16": {}, "fp16": {}}'])
def test_a_key_twice_is_refused(tmp_path, text):
    path = tmp_path / "deepspeed.json"
    path.write_text(text)
    with pytest.raises(InputError, match="twice in one object; keep one"):
        read_deepspeed_file(path)


@pytest.mark.parametrize("name", ["AdamW", "adamw", "Adam", "adam"])
def test_both_names_of_deepspeeds_adamw_are_ours(tmp_path, name):
    read = read_deepspeed_file(file_of(tmp_path, {"optimizer": {"type": name, "params": {"adam_w_mode": True}}}))
    assert read.decided["optimizer"].value == "adamw"


OFF = {
    "timers": {"throughput": {"enabled": False, "synchronized": True}},
    "checkpoint": {"load_universal": False, "parallel_write": {"pipeline_stage": False}},
    "data_efficiency": {"enabled": "auto", "data_sampling": {"enabled": False, "num_epochs": 3}},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True},
    "compile": {"deepcompile": False, "double_buffer": True},
    "tensor_parallel": {"autotp_size": 0},
    "pipeline": {"stages": "auto", "partition": "best", "pipe_partitioned": True},
    "monitor_config": {"tensorboard": {"enabled": False}},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
}


@pytest.mark.parametrize("name", OFF)
def test_a_section_in_which_all_is_off_is_taken(tmp_path, name):
    assert read_deepspeed_file(file_of(tmp_path, {name: OFF[name]})).content == {}


def test_a_message_is_bounded(tmp_path):
    message = refusal(tmp_path, **{f"{'k' * 200}{number}": 1 for number in range(3000)})
    assert "holds 3,000 things that cannot be taken" in message and message.endswith(f"and {3000 - MOST_NAMED:,} more")
    assert len(message) < 200 * MOST_NAMED + 200
    message = refusal(tmp_path, **{f"key_{number}": 1 for number in range(300_000)})
    assert f"holds more than {MOST_BYTES:,} bytes" in message


def test_a_dot_in_a_key_names_no_other_section(tmp_path):
    assert "'fp16.enabled' is no key" in refusal(tmp_path, **{"fp16.enabled": True})


@pytest.mark.launches
def test_a_refusal_needs_no_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from testbed.config.deepspeed_file import read_deepspeed_file\n"
        "try: read_deepspeed_file(Path(sys.argv[1]))\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, str(file_of(tmp_path, {"wandb": {"enabled": True}}))]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "'wandb'" in said and said.strip().endswith("False")


def test_the_table_has_each_key_that_a_flag_takes():
    for flag, keys in FILE_KEY_OF_FLAG.items():
        assert KEYS[".".join(keys)] == Flag(flag)


class Noting(dict):
    """A section that notes each key that is looked for."""

    def __init__(self, place: str, looked_for: set[str], **content):
        super().__init__(**content)
        self.place, self.looked_for = place, looked_for

    def __contains__(self, key):
        self.looked_for.add(f"{self.place}{key}")
        return super().__contains__(key)

    def get(self, key, default=None):
        self.looked_for.add(f"{self.place}{key}")
        return super().get(key, default)

    def keys(self):
        return self

    def __deepcopy__(self, memo):
        return self


def test_the_table_says_something_of_each_key_that_deepspeed_knows():
    config = pytest.importorskip("deepspeed.runtime.config")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    known: set[str] = set()
    sections = {
        name: Noting(f"{name}.", known) for name in ("optimizer", "scheduler", "checkpoint", "activation_checkpointing")
    }
    config.DeepSpeedConfig(Noting("", known, train_batch_size=1, **sections))
    known |= config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    known |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for place, model in models.items():
        for name, field in model.model_fields.items():
            known |= {f"{place}.{each}" for each in (name, field.alias) if each}
    assert len(known) > 100
    assert sorted(known - KEYS.keys() - set(SECTIONS)) == []
