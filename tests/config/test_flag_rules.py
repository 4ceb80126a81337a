"""What each flag's row decides, written out a second time: a row that changes by mistake must be missed here.

A new flag is added to the lists that it belongs to. CONSENT is the rest of what a resumed run may change.
"""

from __future__ import annotations

import pytest

from testbed.analysis.runs.arms import NOT_PART_OF_AN_ARM
from testbed.checkpoint.changed_settings import (
    FREE_TO_CHANGE,
    NEVER_TO_CHANGE,
    SETTING_THE_MATHEMATICS,
    WAYS_OF_SPREADING,
)
from testbed.config.table import FLAGS, flags_where

# A resumed run may have other values of these: none changes what is trained.
FREE = (
    "bind_cores checkpoint_path stop_at_step eval_every save_every save_at_end keep_last async_mode keep_best "
    "max_val_steps num_workers steps_per_print timing_warmup_steps timing_sample_every profile profile_steps "
    "profile_mode log_collectives tensorboard quiet_nccl_monitor sample_prompt sample_tokens run_inference_benchmark "
    "threads_per_rank enforce_global_batch_size deepspeed_config grace_seconds collective_timeout train_data_path "
    "val_data_path"
)
# The same work on other ranks or in other pieces: losses move by rounding.
SPREAD = (
    "run_type backend micro_batch_size_per_gpu grad_accum_steps activation_checkpointing zero_stage offload shard_size "
    "reshard_after_forward bucket_cap_mb reduce_bucket_size allgather_bucket_size overlap_comm pipeline_stages "
    "pipeline_schedule stages_per_rank tensor_parallel_size"
)
MATHEMATICS = "mixed_precision gradient_compression skip_gradient_sync"
NEVER = "num_layers num_heads embedding_size vocab_size max_position_embeddings optimizer"
# Repeats of one configuration may differ in these. Where a run computed is compared as hardware.
WITHIN_AN_ARM = (
    "checkpoint_path seed steps_per_print sample_prompt sample_tokens run_inference_benchmark train_data_path "
    "val_data_path save_every save_at_end keep_last keep_best timing_sample_every tensorboard grace_seconds "
    "collective_timeout device enforce_global_batch_size"
)
# A strategy is called by these where runs differ in them.
NAMES_AN_ARM = (
    "run_type zero_stage offload overlap_comm reduce_bucket_size allgather_bucket_size deepspeed_config "
    "mixed_precision gradient_compression skip_gradient_sync bucket_cap_mb reshard_after_forward shard_size "
    "pipeline_stages pipeline_schedule stages_per_rank tensor_parallel_size micro_batch_size_per_gpu grad_accum_steps "
    "activation_checkpointing backend deterministic compile attention matmul num_workers threads_per_rank bind_cores "
    "async_mode optimizer lr_schedule warmup_shape decay_share muon_learning_rate muon_momentum eval_only"
)
ONE_START = flags_where(lambda flag: flag.of_one_start or not flag.field)


@pytest.mark.parametrize(
    ("derived", "written"),
    [
        (FREE_TO_CHANGE, FREE),
        (WAYS_OF_SPREADING, f"{SPREAD} {MATHEMATICS}"),
        (SETTING_THE_MATHEMATICS, MATHEMATICS),
        (NEVER_TO_CHANGE, NEVER),
        (NOT_PART_OF_AN_ARM, WITHIN_AN_ARM),
        (flags_where(lambda flag: flag.names_arm), NAMES_AN_ARM),
    ],
    ids=["free", "spread", "mathematics", "never", "within an arm", "names an arm"],
)
def test_the_rows_decide_what_is_written_here(derived, written):
    assert sorted(derived - ONE_START) == sorted(written.split())


def test_every_other_flag_changes_with_consent_only():
    decided = {*FREE.split(), *SPREAD.split(), *MATHEMATICS.split(), *NEVER.split()} | ONE_START
    asked = sorted(name for name in FLAGS if name not in decided)
    assert {"learning_rate", "precision", "matmul", "adam_beta1", "seed", "init_from", "global_batch_size"} <= {*asked}
    assert flags_where(lambda flag: flag.resume.name == "CONSENT") - ONE_START == {*asked}
