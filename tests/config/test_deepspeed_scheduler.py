"""DeepSpeed's scheduler section becomes flags with its rates; what cannot be taken of a file is named at once."""

from __future__ import annotations

import json

import pytest
from support import settings

from testbed.optim.lr_schedule import learning_rate_at
from testbed.strategies.deepspeed_config import effective_config

RATE = 3e-4
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE}}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": RATE, "warmup_num_steps": 10}
LATER = 2  # steps by which DeepSpeed's rates lag, see deepspeed_scheduler.py


@pytest.fixture
def settings_of(token_files, tmp_path):
    """Settings of a run of 40 steps with a DeepSpeed file of this content, and these flags."""

    def build(*flags: str, run_type: str = "optimized", **content):
        path = tmp_path / "deepspeed.json"
        path.write_text(json.dumps(content))
        words = ["--run_type", run_type, "--deepspeed_config", str(path), "--max_train_steps", "40", "--epochs", "100"]
        return settings.settings_of(token_files, *words, *flags)

    return build


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
    run = settings_of(optimizer=OPTIMIZER, scheduler={"type": kind, "params": params})
    ours = [learning_rate_at(step, run) for step in range(35)]
    theirs = deepspeed_rates(kind, 40, **params)
    assert ours[:9] == pytest.approx(theirs[LATER : 9 + LATER])
    assert theirs[:LATER] == [0.0] * LATER and ours[9] == pytest.approx(RATE)
    assert ours[11:] == pytest.approx(theirs[11 + lag_after_warmup :][: len(ours[11:])], abs=1e-15)


def test_the_section_is_recorded_as_flags_and_deepspeed_gets_none(settings_of):
    scheduler = {"type": "WarmupLR", "params": {**WARMUP, "warmup_num_steps": 1e1}}
    run = settings_of(optimizer=OPTIMIZER, scheduler=scheduler)
    names = ("lr_schedule", "warmup_shape", "warmup_steps", "learning_rate")
    assert [run.value(name) for name in names] == ["constant", "log", 10, RATE]
    assert "scheduler" not in effective_config(run)
    baseline = settings_of(optimizer=OPTIMIZER, scheduler=scheduler, run_type="baseline")
    assert [baseline.value(name) for name in names] == ["constant", "log", 10, RATE]


def test_auto_and_absent_leave_it_to_the_flags(settings_of):
    auto = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
    run = settings_of("--warmup_steps", "7", "--learning_rate", "0.5", scheduler=auto)
    assert (run.value("warmup_steps"), run.value("learning_rate"), run.value("lr_schedule")) == (7, 0.5, "constant")
    assert settings_of(scheduler="auto").value("lr_schedule") == "cosine"
    assert settings_of().value("warmup_shape") == "linear"


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
    as_recorded = run.as_config()
    assert as_recorded["decay_share"] is None, "follows again where the file is used"


def test_a_file_of_transformers_leaves_no_place_for_another_fall(settings_of):
    message = refusal(settings_of, "--decay_share", "0.5", **HUGGING_FACE)
    assert "--decay_share 0.5 contradicts scheduler.type = WarmupDecayLR" in message
    assert "--warmup_steps 40 leaves no step" in refusal(settings_of, "--warmup_steps", "40", **HUGGING_FACE)


def test_a_cosine_ends_at_a_share_of_the_flag_s_rate(settings_of):
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.25}}
    assert settings_of("--learning_rate", "0.5", scheduler=scheduler).value("min_learning_rate") == 0.125
    message = refusal(settings_of, "--min_learning_rate", "0.1", scheduler=scheduler)
    assert "--min_learning_rate 0.1 contradicts scheduler.params.cos_min_ratio = 0.25" in message


def refusal(build, *flags: str, **content) -> str:
    with pytest.raises(ValueError) as caught:
        build(*flags, **content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--warmup_steps 5", ["--warmup_steps 5 contradicts scheduler.params.warmup_num_steps = 10"]),
        ("--lr_schedule cosine", ["--lr_schedule cosine contradicts scheduler.type = WarmupLR"]),
        ("--warmup_shape linear", ["contradicts scheduler.params.warmup_type = log (DeepSpeed's default)"]),
    ],
)
def test_a_flag_that_contradicts_the_scheduler_is_refused(settings_of, flags, said):
    message = refusal(settings_of, *flags.split(), scheduler={"type": "WarmupLR", "params": WARMUP})
    assert all(part in message for part in said), message


def test_a_refused_value_of_the_file_is_told_from_a_flag(settings_of):
    """As in an earlier project's file: a warm-up longer than the run."""
    scheduler = {"type": "WarmupLR", "params": {**WARMUP, "warmup_num_steps": 1000}}
    message = refusal(settings_of, scheduler=scheduler)
    assert message.startswith("--warmup_steps 1000 reaches past the end of the schedule at step 40")
    assert "; scheduler.params.warmup_num_steps = 1000 in --deepspeed_config" in message
    assert "scheduler" not in refusal(settings_of, "--seq_length", "4096", scheduler={**scheduler, "params": WARMUP})


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"type": "OneCycle", "params": {}}, "scheduler.type must be WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ({"type": "CosineAnnealingLR"}, "not 'CosineAnnealingLR'"),
        (7, "scheduler.type must be"),
        ({"type": "WarmupLR", "params": [1]}, "scheduler.params must be a JSON object"),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}, "warmup_min_lr = 1e-05, but warm-up begins at 0"),
        ({"type": "WarmupLR", "params": {"steps": 5}}, "scheduler.params.steps is no parameter of WarmupLR"),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}},
            "scheduler.params.warmup_num_steps cannot be 2.5",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "warmup_type 'cubic' is not one of linear, log"),
        ({"type": ["WarmupLR"]}, "scheduler.type must be WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ({"type": None}, "scheduler.type must be"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}, 'without quotes, or "auto"'),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 1}}, "optimizer.params.lr = 0.0003 has no effect beside"),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto"}}, "WarmupDecayLR needs"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_max_lr": RATE}},
            "leaves no step after 1000 of warm-up",
        ),
        ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": True}}, "cos_min_ratio must be a number from 0 to 1"),
    ],
)
def test_a_scheduler_that_flags_cannot_express_is_refused(settings_of, scheduler, said):
    assert said in refusal(settings_of, scheduler=scheduler, optimizer=OPTIMIZER)


def test_all_that_cannot_be_taken_is_said_at_once(settings_of):
    """The sections of an earlier project's file, and the values of another's."""
    message = refusal(
        settings_of,
        optimizer={"type": "Lamb", "params": {"lr": RATE}},
        gradient_clipping=True,
        pipeline={"enabled": True, "num_stages": 4},
        scheduler={"type": "WarmupCosine", "params": WARMUP},
        zero_optimization={"stage": 2, "cpu_offload": True},
        amp={"enabled": True},
    )
    for part in (
        *(
            "holds 6 things that cannot be taken",
            "(1)",
            "(6)",
            "optimizer.type = 'Lamb'",
            "gradient_clipping cannot be",
        ),
        *(
            "section 'pipeline'",
            "section 'amp'",
            "not 'WarmupCosine'",
            "cpu_offload = true cannot be taken: it is an older name",
        ),
    ):
        assert part in message, message
    assert "(7)" not in message


def test_all_faults_of_a_scheduler_are_said_at_once(settings_of):
    params = {"warmup_min_lr": 1e-5, "steps": 5, "warmup_type": "cubic"}
    message = refusal(settings_of, scheduler={"type": "WarmupLR", "params": params})
    for part in ("holds 3 things", "warmup_min_lr = 1e-05", "params.steps is no parameter", "warmup_type 'cubic'"):
        assert part in message, message


def test_an_earlier_projects_file_runs_without_its_pipeline_section(settings_of):
    content = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "steps_per_print": 100,
        "optimizer": OPTIMIZER, "gradient_clipping": 1.0, "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
        "pipeline": {"enabled": True, "num_stages": 4, "balance": [3, 3, 3, 3]},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
    }  # fmt: skip
    message = refusal(settings_of, **content)
    assert "'pipeline' cannot be taken: ZeRO does not cut the model into stages; remove it" in message
    del content["pipeline"]
    assert settings_of(**content).value("lr_schedule") == "constant"
