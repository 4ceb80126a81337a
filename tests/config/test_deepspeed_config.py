"""The DeepSpeed file and the flags of an optimized run are one set of settings, and DeepSpeed gets exactly those."""

from __future__ import annotations

import json

import pytest
from support import settings

from testbed.strategies.deepspeed_config import effective_config

BF16 = ("--precision", "bf16")
NATIVE = (*BF16, "--mixed_precision", "native")


@pytest.fixture
def settings_of(token_files, tmp_path):
    """Settings of an optimized run whose DeepSpeed file has this zero_optimization section, and these flags."""

    def build(*flags: str, zero: dict | None = None, run_type: str = "optimized", **content):
        path = tmp_path / "deepspeed.json"
        path.write_text(json.dumps({"zero_optimization": zero or {}, **content}))
        return settings.settings_of(token_files, "--run_type", run_type, "--deepspeed_config", str(path), *flags)

    return build


def refusal(build, *flags: str, **content) -> str:
    with pytest.raises(ValueError) as caught:
        build(*flags, **content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# what the file says, its flag, the setting that both stand for, and another value
SAME_IN_BOTH = [
    ({"reduce_bucket_size": 4000}, "reduce_bucket_size", 4000, "5000"),
    ({"reduce_bucket_size": 5e8}, "reduce_bucket_size", 500_000_000, "5000"),  # as it is commonly written
    ({"allgather_bucket_size": 4000}, "allgather_bucket_size", 4000, "5000"),
    ({"overlap_comm": False}, "overlap_comm", "off", "on"),
    ({"overlap_comm": True}, "overlap_comm", "on", "off"),
    ({"offload_optimizer": {"device": "cpu"}}, "offload", "optimizer", "none"),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, "offload", "parameters", "optimizer"),
]


@pytest.mark.launches
@pytest.mark.parametrize(("zero", "flag", "value", "other"), SAME_IN_BOTH)
def test_a_value_in_the_file_counts_as_typed_and_may_be_typed_too(settings_of, zero, flag, value, other):
    assert settings_of(zero=zero).value(flag) == value
    assert settings_of(f"--{flag}", str(value), zero=zero).value(flag) == value
    assert settings_of(zero=zero, run_type="baseline").value(flag) is None


@pytest.mark.launches
@pytest.mark.parametrize(("zero", "flag", "value", "other"), SAME_IN_BOTH)
def test_a_flag_that_contradicts_the_file_is_refused_and_both_are_named(settings_of, zero, flag, value, other):
    message = refusal(settings_of, f"--{flag}", other, zero=zero)
    key = next(reversed(zero))
    written = "device = cpu" if isinstance(zero[key], dict) else f"{key} = {json.dumps(zero[key])}"
    assert f"--{flag} {other}" in message and f"zero_optimization.{key}" in message and written in message


# Everything that DeepSpeed is told, so that a default that waits for the device or changes the mathematics is seen.
EFFECTIVE = {
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_clipping": 1.0,
    "steps_per_print": 2**31,
    "timers": {"throughput": {"enabled": False}},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def test_the_effective_configuration_names_every_decision(settings_of):
    settings = settings_of()
    config = effective_config(settings)
    assert config.pop("train_batch_size") == settings.batch.global_batch_size
    assert config.pop("train_micro_batch_size_per_gpu") == settings.batch.micro_batch_size_per_gpu
    assert config.pop("gradient_accumulation_steps") == settings.batch.grad_accum_steps
    assert config.pop("zero_optimization")["stage"] == 1
    assert config == EFFECTIVE


@pytest.mark.launches
def test_deepspeed_takes_no_default_that_waits_for_the_device(settings_of):
    """Read by DeepSpeed itself: what would synchronise inside a step is off."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig(effective_config(settings_of()))
    assert not read.timers_config.enabled and not read.wall_clock_breakdown and not read.memory_breakdown
    assert not read.flops_profiler_config.enabled and not read.comms_config.comms_logger_enabled
    assert not read.dump_state and read.gradient_predivide_factor == 1.0 and not read.prescale_gradients


def test_a_timer_of_deepspeeds_is_refused(settings_of):
    message = refusal(settings_of, timers={"throughput": {"enabled": True}})
    assert "'timers'" in message and "inside the step" in message


@pytest.mark.parametrize("nothing", ["auto", None, {"device": "auto"}, {"device": None}, {"device": "none"}, {}])
def test_an_offload_section_that_says_nothing_leaves_it_to_the_flag(settings_of, nothing):
    zero = {"stage": 3, "offload_optimizer": nothing, "offload_param": nothing}
    without_flag = settings_of(zero=zero)
    assert without_flag.deepspeed.offload == "none"
    assert effective_config(without_flag)["zero_optimization"]["offload_optimizer"] == {"device": "none"}
    assert settings_of("--offload", "optimizer", zero=zero).deepspeed.offload == "optimizer"


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, ["offload_optimizer.device = nvme", '"cpu"']),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, ["offload_param.device = nvme", "--offload"]),
        ({"offload_optimizer": {"device": "gpu"}}, ["offload_optimizer.device", "gpu"]),
        ({"offload_optimizer": True}, ["offload_optimizer", "JSON object"]),
        ({"cpu_offload": True}, ["cpu_offload", "offload_optimizer", "--offload"]),
        ({"offload_param": {"device": "cpu"}}, ["--offload parameters", "--zero_stage 3"]),
        (
            {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}},
            ["offload_param", "offload_optimizer", "both"],
        ),
        ({"overlap_comm": "yes"}, ["overlap_comm", "true"]),
        ({"reduce_bucket_size": 0}, ["reduce_bucket_size"]),
        ({"allgather_bucket_size": 2.5}, ["allgather_bucket_size", "2.5"]),
    ],
)
def test_what_the_testbed_cannot_do_is_refused_with_the_way_out(settings_of, zero, said):
    message = refusal(settings_of, zero=zero)
    for part in said:
        assert part in message


def test_the_default_file_leaves_everything_with_a_flag_to_the_flag(token_files):
    flags = "--zero_stage 3 --offload parameters --reduce_bucket_size 1000 --allgather_bucket_size 500"
    words = ["--run_type", "optimized", *flags.split(), "--overlap_comm", "off"]
    config = effective_config(settings.settings_of(token_files, *words))
    assert config["zero_optimization"] == {
        "stage": 3,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 500,
        "overlap_comm": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_flags_the_defaults_are_named(settings_of, stage):
    zero = effective_config(settings_of("--zero_stage", str(stage)))["zero_optimization"]
    assert zero == {
        "stage": stage,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
        "overlap_comm": True,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    }


def test_host_memory_is_pinned_for_a_gpu_unless_the_file_refuses(settings_of):
    for pin_memory, is_pinned in ((None, True), ("auto", True), (True, True), (False, False)):
        section = {"device": "cpu", "pin_memory": pin_memory, "ratio": 1.0}
        on_cpu = settings_of(zero={"offload_optimizer": section})
        sections = effective_config(on_cpu.with_values(device="cuda"))["zero_optimization"]
        assert sections["offload_optimizer"] == {"device": "cpu", "pin_memory": is_pinned, "ratio": 1.0}
        assert effective_config(on_cpu)["zero_optimization"]["offload_optimizer"]["pin_memory"] is False


def test_autocast_keeps_weights_and_gradients_in_fp32(settings_of):
    config = effective_config(settings_of(*BF16))
    assert config["bf16"] == {"enabled": False}
    # its default list would average the gradients of linear layers in bf16
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"} and config["communication_data_type"] == "fp32"


def test_native_is_deepspeeds_own_bf16_with_its_defaults_named(settings_of):
    config = effective_config(settings_of(*NATIVE))
    assert config["bf16"] == {"enabled": True, "immediate_grad_update": False, "check_grad_overflow": True}
    assert config["torch_autocast"] == {"enabled": False}
    assert config["data_types"] == {"grad_accum_dtype": "bf16"} and config["communication_data_type"] == "bf16"
    own = effective_config(settings_of(*NATIVE, bf16={"enabled": "auto", "check_grad_overflow": False}))
    assert own["bf16"] == {"enabled": True, "immediate_grad_update": False, "check_grad_overflow": False}


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "fp32"), ("fp16", "fp16")])
def test_other_precisions_use_no_bf16(settings_of, precision, dtype):
    config = effective_config(settings_of("--precision", precision))
    assert config["bf16"] == {"enabled": False} and config["torch_autocast"]["enabled"] is False
    assert config["data_types"] == {"grad_accum_dtype": dtype} and ("fp16" in config) == (precision == "fp16")


@pytest.mark.parametrize("flags", [(), NATIVE, ("--zero_stage", "3", "--offload", "parameters")])
def test_deepspeed_itself_accepts_and_reads_the_configuration(settings_of, flags):
    """DeepSpeed's own model of the section: a misspelt key would be refused, a changed default would differ."""
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    precision_config = pytest.importorskip("deepspeed.runtime.precision_config")
    typed = settings_of(*flags)
    config = effective_config(typed)
    zero = zero_config.DeepSpeedZeroConfig(**config["zero_optimization"])
    assert (zero.stage, zero.reduce_bucket_size, zero.overlap_comm) == (typed.deepspeed.zero_stage, 200_000_000, True)
    assert (zero.offload_param.device == "cpu") == (typed.deepspeed.offload == "parameters")
    bf16 = precision_config.DeepSpeedBF16Config(**config["bf16"])
    assert bf16.enabled == (flags == NATIVE) and bf16.check_grad_overflow is True
