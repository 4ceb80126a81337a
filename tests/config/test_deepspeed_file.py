"""The DeepSpeed file and the flags are one set of settings: each key is taken, passed on or refused by name, before
torch, and DeepSpeed gets exactly the settings."""

from __future__ import annotations

import json

import pytest
from support import settings

from testbed.config.deepspeed_file import MOST_BYTES, MOST_NAMED, read_deepspeed_file
from testbed.config.deepspeed_keys import KEYS, SECTIONS, faults_of_keys
from testbed.errors import InputError
from testbed.optim.lr_schedule import learning_rate_at
from testbed.strategies.deepspeed_config import effective_config

BF16 = ("--precision", "bf16")
NATIVE = (*BF16, "--mixed_precision", "native")
RATE = 3e-4
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE}}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": RATE, "warmup_num_steps": 10}
LATER = 2  # steps by which DeepSpeed's rates lag, see deepspeed_scheduler.py


@pytest.fixture
def settings_of(token_files, tmp_path):
    """Settings of a run of 40 steps with a DeepSpeed file of this content, and these flags."""

    def build(*flags: str, run_type: str = "optimized", **content):
        path = file_of(tmp_path, content)
        words = ["--run_type", run_type, "--deepspeed_config", str(path), "--max_train_steps", "40", "--epochs", "100"]
        return settings.settings_of(token_files, *words, *flags)

    return build


def file_of(folder, content: object):
    path = folder / "deepspeed.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(build, *flags: str, **content) -> str:
    with pytest.raises(InputError) as caught:
        build(*flags, **content)
    assert "\n" not in str(caught.value) and "--deepspeed_config" in str(caught.value)
    return str(caught.value)


def refused_file(folder, **content) -> str:
    return refusal(lambda: read_deepspeed_file(file_of(folder, content)))


def zero(**section) -> dict:
    return {"zero_optimization": section}


def scheduler(kind: object, **params) -> dict:
    return {"scheduler": {"type": kind, "params": params}}


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


@pytest.mark.parametrize(("section", "flag", "value", "other"), SAME_IN_BOTH)
def test_a_value_counts_as_typed_and_a_flag_that_contradicts_it_is_refused(settings_of, section, flag, value, other):
    assert settings_of(**zero(**section)).value(flag) == value
    assert settings_of(f"--{flag}", str(value), **zero(**section)).value(flag) == value
    assert settings_of(**zero(**section), run_type="baseline").value(flag) is None
    message = refusal(settings_of, f"--{flag}", other, **zero(**section))
    key = next(reversed(section))
    written = "device = cpu" if isinstance(section[key], dict) else f"{key} = {json.dumps(section[key])}"
    assert f"--{flag} {other} contradicts zero_optimization.{key}" in message and written in message


def test_both_run_types_take_what_no_flag_gives(settings_of):
    """A baseline that names the file does the same work as the optimized run."""
    params = {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": "auto"}
    content = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "fp16": {"enabled": "auto"}}
    content |= {"gradient_clipping": 0.5, "steps_per_print": 7}
    for run_type in ("baseline", "optimized"):
        run = settings_of(run_type=run_type, **content, **zero(stage=2), optimizer={"type": "AdamW", "params": params})
        names = ("global_batch_size", "learning_rate", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
        assert [run.value(name) for name in names] == [6, 1e-4, 0.8, 0.9, 1e-7, 0.1]
        assert (run.value("max_grad_norm"), run.value("steps_per_print")) == (0.5, 7)
        assert run.value("zero_stage") == (2 if run_type == "optimized" else None)


@pytest.mark.parametrize("nothing", ["auto", None])
def test_sections_that_say_nothing_decide_nothing(settings_of, nothing):
    names = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "gradient_clipping")
    run = settings_of(**dict.fromkeys(names, nothing))
    decided = [run.value(name) for name in ("zero_stage", "max_grad_norm", "precision", "lr_schedule", "warmup_shape")]
    assert decided == [1, 1.0, "fp32", "cosine", "linear"]
    config = effective_config(run)
    assert config["zero_optimization"]["stage"] == 1 and '"auto"' not in json.dumps(config)


@pytest.mark.parametrize("nothing", ["auto", None, {"device": "auto"}, {"device": None}, {"device": "none"}, {}])
def test_an_offload_section_that_says_nothing_leaves_it_to_the_flag(settings_of, nothing):
    section = zero(stage=3, offload_optimizer=nothing, offload_param=nothing)
    without_flag = settings_of(**section)
    assert without_flag.deepspeed.offload == "none"
    assert effective_config(without_flag)["zero_optimization"]["offload_optimizer"] == {"device": "none"}
    assert settings_of("--offload", "optimizer", **section).deepspeed.offload == "optimizer"


def test_the_file_is_read_once(settings_of, tmp_path):
    """What was checked is what the run trains with, whatever becomes of the file meanwhile."""
    run = settings_of(gradient_clipping=0.5, **zero(stage=2))
    file_of(tmp_path, {"gradient_clipping": 0.1, "scheduler": {"type": "WarmupLR"}})
    config = effective_config(run)
    assert config["gradient_clipping"] == 0.5 and "scheduler" not in config


# content, and what the sentence says
REFUSED = [
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type = 'Lamb', but every run type"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode = false cannot be taken"),
    ({"optimizer": {"params": {"betas": [0.9]}}}, "betas must be a list of two"),
    ({"optimizer": {"params": {"betas": ["0.9", 0.9]}}}, "two numbers without quotes"),
    ({"optimizer": {"params": {"lr": "1e-3"}}}, "without quotes"),
    ({"optimizer": {"params": {"fused": True}}}, "'optimizer.params.fused' is not a key"),
    ({"gradient_clipping": "high"}, "gradient_clipping cannot be 'high'"),
    ({"train_batch_size": "8"}, "train_batch_size cannot be '8': write a number without quotes"),
    ({"zero_optimization": 3}, "zero_optimization must be a JSON object"),
    (zero(stage=7), "zero_optimization.stage 7 is not one of"),
    (zero(reduce_bucket_size=0), "reduce_bucket_size cannot be 0"),
    (zero(allgather_bucket_size=2.5), "allgather_bucket_size cannot be 2.5"),
    (zero(overlap_comm="yes"), "overlap_comm must be true"),
    (zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=1), "stage3_prefetch_bucket_size are two names of one"),
    (zero(offload_optimizer={"device": "nvme", "nvme_path": "/x"}), 'offload_optimizer.device = nvme, but the testbed'),
    (zero(stage=3, offload_param={"device": "nvme"}), 'write "cpu", or "auto" and give --offload'),
    (zero(offload_optimizer={"device": "gpu"}), "offload_optimizer.device must be"),
    (zero(offload_optimizer={"device": "cpu", "buffer_count": 3}), "buffer_count = 3"),
    (zero(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "none"}), "moves both"),
    (zero(cpu_offload=True), 'cpu_offload = true cannot be taken: it is an older name; write a section'),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both fp16 and bf16"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled must be"),
    ({"fp16": {"initial_scale_power": 5000}}, "initial_scale_power must be a whole number from 0 to 127"),
    ({"fp16": {"loss_scale_window": 0}}, "loss_scale_window must be a whole number from 1"),
    ({"fp16.enabled": True}, "'fp16.enabled' is not a key"),  # a dot names no other section
    ({"aio": {"block_size": 262144}}, "the section 'aio' cannot be taken"),
    ({"timers": {"throughput": {"enabled": True}}}, "would wait for the device inside the step"),
    *[(zero(sub_group_size=value), "zero_optimization.sub_group_size must be a whole number from 0")
      for value in (10**400, -1, 1.5, True, "many")],
    (scheduler("OneCycle"), "scheduler.type must be WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    ({"scheduler": 7}, "scheduler.type must be"),
    ({"scheduler": {"type": "WarmupLR", "params": [1]}}, "scheduler.params must be a JSON object"),
    (scheduler("WarmupLR", warmup_min_lr=1e-5), "warmup_min_lr = 1e-05, but warm-up begins at 0"),
    (scheduler("WarmupLR", steps=5), "scheduler.params.steps is not a parameter of WarmupLR"),
    (scheduler("WarmupLR", warmup_num_steps=2.5), "scheduler.params.warmup_num_steps cannot be 2.5"),
    (scheduler("WarmupLR", warmup_type="cubic"), "warmup_type 'cubic' is not one of linear, log"),
    (scheduler("WarmupLR", warmup_num_steps="10"), 'without quotes, or "auto"'),
    (scheduler("WarmupLR", warmup_max_lr=1) | {"optimizer": OPTIMIZER}, "lr = 0.0003 has no effect beside"),
    (scheduler("WarmupDecayLR", warmup_max_lr="auto"), "WarmupDecayLR needs"),
    (scheduler("WarmupCosineLR", cos_min_ratio=True), "cos_min_ratio must be a number from 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_way_out(tmp_path, content, said):
    message = refused_file(tmp_path, **content)
    assert said in message and len(message) < 700


CONTRADICTIONS = [
    ("--max_grad_norm 1.0", {"gradient_clipping": 0.5}, "--max_grad_norm 1.0 contradicts gradient_clipping = 0.5"),
    ("--precision bf16", {"bf16": {"enabled": False}}, "--precision bf16 contradicts bf16.enabled = false"),
    ("--warmup_steps 5", scheduler("WarmupLR", **WARMUP), "--warmup_steps 5 contradicts scheduler.params.warmup_num_s"),
    ("--lr_schedule cosine", scheduler("WarmupLR", **WARMUP), "cosine contradicts scheduler.type = WarmupLR"),
    ("--warmup_shape linear", scheduler("WarmupLR", **WARMUP), "warmup_type = log (DeepSpeed's default)"),
    ("--min_learning_rate 0.1", scheduler("WarmupCosineLR", warmup_num_steps=2, cos_min_ratio=0.25),
        "--min_learning_rate 0.1 contradicts scheduler.params.cos_min_ratio = 0.25"),
    ("", zero(offload_param={"device": "cpu"}), "--offload parameters with --zero_stage 1"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "content", "said"), CONTRADICTIONS)
def test_a_flag_and_the_file_must_not_contradict_each_other(settings_of, flags, content, said):
    assert said in refusal(settings_of, *flags.split(), **content)


def test_a_refused_value_of_the_file_is_told_from_a_flag(settings_of):
    """As in an earlier project's file: a warm-up longer than the run."""
    message = refusal(settings_of, **scheduler("WarmupLR", **WARMUP | {"warmup_num_steps": 1000}))
    assert message.startswith("--warmup_steps 1000 reaches past the end of the schedule at step 40")
    assert "; scheduler.params.warmup_num_steps = 1000 in --deepspeed_config" in message
    with pytest.raises(InputError) as caught:
        settings_of("--seq_length", "4096", **scheduler("WarmupLR", **WARMUP))
    assert "scheduler" not in str(caught.value)


def refused_everywhere(value: object) -> dict:
    """A file that gives this value to each key that is refused."""
    content: dict = {}
    for place in (place for place, fate in KEYS.items() if fate.what == "refused"):
        *sections, key = place.split(".")
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return content


def test_all_that_cannot_be_taken_is_said_at_once(tmp_path):
    content = {**refused_everywhere({"enabled": True}), "some_new_section": {"enabled": False}, "fp8": [1]}
    content |= scheduler("WarmupLR", warmup_min_lr=1e-5, warmup_type="cubic", new_parameter=1)
    named = [place for place, fate in KEYS.items() if fate.what == "refused"]
    named += ["some_new_section", *(f"scheduler.params.{name}" for name in content["scheduler"]["params"])]
    message = refused_file(tmp_path, **content)
    assert f"holds {len(named)} things that cannot be taken: (1) " in message
    faults = [fault for part in content for fault in faults_of_keys({part: content[part]}) if part != "scheduler"]
    assert [place for place in named[:-3] if not any(place in fault for fault in faults)] == []
    for way_out in ("--track", "--profile", "--save_every", "--activation_checkpointing", "--log_collectives"):
        assert any(way_out in fault for fault in faults)


def test_a_message_is_bounded(tmp_path):
    message = refused_file(tmp_path, **{f"{'k' * 200}{number}": 1 for number in range(3000)})
    assert "holds 3,000 things that cannot be taken" in message and message.endswith(f"and {3000 - MOST_NAMED:,} more")
    assert len(message) < 200 * MOST_NAMED + 200
    message = refused_file(tmp_path, **{f"key_{number}": 1 for number in range(300_000)})
    assert f"holds more than {MOST_BYTES:,} bytes" in message


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 1, "stage": 3}}', '{"fp16": {}, "fp16": {}}'])
def test_a_key_twice_is_refused(tmp_path, text):
    with pytest.raises(InputError, match="twice in one object; keep one"):
        read_deepspeed_file(file_of(tmp_path, text))


OF_EACH_KIND = [None, True, False, 0, -1, 2.5, 1e400, float("nan"), 10**4000, "", "x", "1e8", "auto", "\x1b[2J"]
OF_EACH_KIND += [[], [1], [[]], {}, {"a": {}}, {"type": []}, {"enabled": []}, {"device": {}}, "\n" * 5000]


def test_a_value_of_any_kind_at_any_place_is_taken_or_refused_in_a_sentence(tmp_path):
    for place in sorted({*KEYS, *SECTIONS}):
        for value in OF_EACH_KIND:
            *sections, key = place.split(".")
            content = {key: value}
            for section in reversed(sections):
                content = {section: {"type": "WarmupLR", **content} if section == "scheduler" else content}
            try:
                read_deepspeed_file(file_of(tmp_path, content))
            except InputError as error:
                assert len(str(error)) < 700 and str(error).isprintable(), (place, value, str(error))


OFF = [
    *(refused_everywhere(value) for value in ({}, {"enabled": False}, {"inside": {"a": False, "b": "auto"}}, None)),
    {"timers": {"throughput": {"enabled": False, "synchronized": True}}},
    {"dump_state": False, "memory_breakdown": "auto", "gradient_predivide_factor": 1.0, "sequence_parallel_size": 1},
]


@pytest.mark.parametrize("content", OFF)
def test_what_asks_for_nothing_is_taken_and_not_passed_on(tmp_path, content):
    left = read_deepspeed_file(file_of(tmp_path, content)).content
    assert left.keys() <= {"zero_optimization", "optimizer", "fp16", "bf16"} and "enabled" not in json.dumps(left)


@pytest.mark.parametrize("name", ["AdamW", "adamw", "Adam", "adam"])
def test_both_names_of_deepspeeds_adamw_are_ours(tmp_path, name):
    params = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "lr": 1e-3}
    read = read_deepspeed_file(file_of(tmp_path, {"optimizer": {"type": name, "params": params}}))
    assert read.decided["optimizer"].value == "adamw"
    assert read.content == {"optimizer": {"type": name, "params": {"lr": 1e-3}}}


# Everything that DeepSpeed is told, so that a default that waits for the device or changes the mathematics is seen.
EFFECTIVE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
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
ZERO = {
    "reduce_bucket_size": 200_000_000,
    "allgather_bucket_size": 200_000_000,
    "overlap_comm": True,
    "offload_optimizer": {"device": "none"},
    "offload_param": {"device": "none"},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_effective_configuration_names_every_decision(settings_of, stage):
    config = effective_config(settings_of("--zero_stage", str(stage)))
    assert config.pop("zero_optimization") == {"stage": stage, **ZERO}
    clipping = 0.0 if stage == 0 else 1.0  # the strategy clips there
    assert config == EFFECTIVE | {"gradient_clipping": clipping}
    assert effective_config(settings_of("--max_grad_norm", "0"))["gradient_clipping"] == 0.0, "its own default is 1.0"


@pytest.mark.launches
@pytest.mark.parametrize("flags", [(), NATIVE, ("--zero_stage", "3", "--offload", "parameters")])
def test_deepspeed_reads_the_configuration_and_waits_for_no_device(settings_of, flags):
    """A misspelt key would be refused by its own models, a changed default would differ."""
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    typed = settings_of(*flags)
    read = deepspeed.DeepSpeedConfig(effective_config(typed))
    assert not read.timers_config.enabled and not read.wall_clock_breakdown and not read.memory_breakdown
    assert not read.flops_profiler_config.enabled and not read.comms_config.comms_logger_enabled
    assert not read.dump_state and read.gradient_predivide_factor == 1.0 and not read.prescale_gradients
    zero = read.zero_config
    assert (zero.stage, zero.reduce_bucket_size, zero.overlap_comm) == (typed.deepspeed.zero_stage, 200_000_000, True)
    assert (zero.offload_param.device == "cpu") == (typed.deepspeed.offload == "parameters")
    assert read.bfloat16_config.enabled == (flags == NATIVE) and read.bfloat16_config.check_grad_overflow is True


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


def test_host_memory_is_pinned_for_a_gpu_unless_the_file_refuses(settings_of):
    for pin_memory, is_pinned in ((None, True), ("auto", True), (True, True), (False, False)):
        section = {"device": "cpu", "pin_memory": pin_memory, "ratio": 1.0}
        on_cpu = settings_of(**zero(offload_optimizer=section))
        sections = effective_config(on_cpu.with_values(device="cuda"))["zero_optimization"]
        assert sections["offload_optimizer"] == {"device": "cpu", "pin_memory": is_pinned, "ratio": 1.0}
        assert effective_config(on_cpu)["zero_optimization"]["offload_optimizer"]["pin_memory"] is False


@pytest.mark.parametrize(
    ("flags", "bf16", "autocast", "dtype"),
    [
        (("--precision", "fp32"), {"enabled": False}, False, "fp32"),
        (("--precision", "fp16"), {"enabled": False}, False, "fp16"),
        (BF16, {"enabled": False}, True, "fp32"),  # weights and gradients stay in fp32
        (NATIVE, {"enabled": True, "immediate_grad_update": False, "check_grad_overflow": True}, False, "bf16"),
    ],
)
def test_each_precision_names_what_deepspeed_would_decide(settings_of, flags, bf16, autocast, dtype):
    config = effective_config(settings_of(*flags))
    assert config["bf16"] == bf16 and config["torch_autocast"]["enabled"] is autocast
    # its default list would average the gradients of linear layers in bf16
    assert not autocast or config["torch_autocast"]["lower_precision_safe_modules"] == []
    assert config["data_types"] == {"grad_accum_dtype": dtype} and config["communication_data_type"] == dtype
    assert ("fp16" in config) == (dtype == "fp16")
    own = effective_config(settings_of(*flags, bf16={"enabled": "auto", "check_grad_overflow": False}))
    assert flags != NATIVE or own["bf16"] == bf16 | {"check_grad_overflow": False}


def deepspeed_rates(kind: str, num_steps: int, **params) -> list[float]:
    """Return the rate of each optimizer step by DeepSpeed itself."""
    torch = pytest.importorskip("torch")
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = getattr(schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "params", "lag_after_warmup"),
    [
        ("WarmupLR", WARMUP, 2),
        ("WarmupLR", {**WARMUP, "warmup_type": "linear"}, 2),
        ("WarmupDecayLR", {**WARMUP, "total_num_steps": 30, "warmup_type": "linear"}, 2),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 30, "cos_min_ratio": 0.25}, 0),
    ],
)
def test_the_rates_are_deepspeeds(settings_of, kind, params, lag_after_warmup):
    run = settings_of(optimizer=OPTIMIZER, **scheduler(kind, **params))
    ours = [learning_rate_at(step, run) for step in range(35)]
    theirs = deepspeed_rates(kind, 40, **params)
    assert ours[:9] == pytest.approx(theirs[LATER : 9 + LATER])
    assert theirs[:LATER] == [0.0] * LATER and ours[9] == pytest.approx(RATE)
    assert ours[11:] == pytest.approx(theirs[11 + lag_after_warmup :][: len(ours[11:])], abs=1e-15)


def test_a_scheduler_is_recorded_as_flags_and_deepspeed_gets_none(settings_of):
    names = ("lr_schedule", "warmup_shape", "warmup_steps", "learning_rate")
    for run_type in ("optimized", "baseline"):
        section = scheduler("WarmupLR", **WARMUP | {"warmup_num_steps": 1e1})
        run = settings_of(optimizer=OPTIMIZER, run_type=run_type, **section)
        assert [run.value(name) for name in names] == ["constant", "log", 10, RATE]
        assert run_type == "baseline" or "scheduler" not in effective_config(run)
    auto = scheduler("WarmupLR", **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"))
    run = settings_of("--warmup_steps", "7", "--learning_rate", "0.5", **auto)
    assert [run.value(name) for name in names] == ["constant", "log", 7, 0.5]
    cosine = scheduler("WarmupCosineLR", warmup_num_steps=2, cos_min_ratio=0.25)
    assert settings_of("--learning_rate", "0.5", **cosine).value("min_learning_rate") == 0.125


# as in the documentation of transformers, which fills in each "auto"
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
        ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip


def test_a_file_of_transformers_follows_the_flags(settings_of):
    run = settings_of("--warmup_steps", "10", "--learning_rate", str(RATE), **HUGGING_FACE)
    assert (run.value("zero_stage"), run.value("offload"), run.value("lr_schedule")) == (3, "parameters", "wsd")
    theirs = deepspeed_rates("WarmupDecayLR", 42, warmup_max_lr=RATE, warmup_num_steps=10, total_num_steps=40)
    ours = [learning_rate_at(step, run) for step in range(40)]
    assert ours[:9] == pytest.approx(theirs[LATER:11]) and ours[11:] == pytest.approx(theirs[13:42], abs=1e-15)
    assert "scheduler" not in effective_config(run)
    assert run.as_config()["decay_share"] is None, "follows again where the file is used"
    message = refusal(settings_of, "--decay_share", "0.5", **HUGGING_FACE)
    assert "--decay_share 0.5 contradicts scheduler.type = WarmupDecayLR" in message
    with pytest.raises(InputError, match="--warmup_steps 40 leaves no step"):
        settings_of("--warmup_steps", "40", **HUGGING_FACE)
    with pytest.raises(InputError, match=r"--warmup_steps 1000 reaches past .*warmup_num_steps = 1000"):
        settings_of(**scheduler("WarmupDecayLR", total_num_steps=5, warmup_max_lr=RATE))
