"""Read the set-up that DeepSpeed prints. A batch that is only printed excuses nothing."""

from __future__ import annotations

from support.audit_cases import deepspeed_pair, wandb_pair
from support.deepspeed_log import deepspeed_lines

from testbed.audit.claims import FAILS, audit
from testbed.audit.printed_setup import printed_setup
from testbed.audit.readers import read_text_log


def test_the_lines_of_a_real_log_are_read(tmp_path):
    one, two = (read_text_log(path)[0] for path in deepspeed_pair(tmp_path))
    assert (one.global_batch_size, one.micro_batch_size, one.world_size) == (8, 8, 1)
    assert (two.global_batch_size, two.micro_batch_size, two.world_size) == (8, 4, 2)
    assert two.settings == {"offload": "optimizer on the cpu", "precision": "fp32", "ZeRO stage": "2"}
    assert two.batch_is_printed and not any("batch" in words for words in two.unread)


def test_a_log_without_such_lines_says_that_the_batch_is_missing(tmp_path):
    item = read_text_log(wandb_pair(tmp_path, 2, {})[0])[0]
    assert item.global_batch_size is None and not item.batch_is_printed and item.settings == {}
    assert "batch (this log does not print it)" in item.unread


def test_a_batch_stands_in_flags_and_json_too():
    said = "cmd = python -u train.py --micro-batch-size 8 --global-batch-size=32"
    found = printed_setup(said)
    assert (found["micro_batch_size"], found["global_batch_size"]) == (8, 32)
    assert printed_setup('json = {\n    "train_batch_size": 64, \n')["global_batch_size"] == 64
    spawned = "spawned with command: ['python', '--global-batch-size', '16']"
    assert printed_setup(spawned)["global_batch_size"] == 16
    assert "global_batch_size" not in printed_setup(said + "\n--global-batch-size 64")  # of which run?


def test_other_ways_to_print_offloading():
    older = "print]  zero_config .. stage=3 offload_param=X(device=<OffloadDeviceEnum.nvme: 'nvme'>, buffer_count=5)"
    assert printed_setup(older)["settings"] == {"offload": "param on the nvme"}
    nowhere = "print]  zero_config .. offload_optimizer=X(device='none', nvme_path=None)"
    assert printed_setup(nowhere)["settings"] == {}
    assert printed_setup("[stage_1_and_2.py:151:__init__] CPU Offload: True")["settings"]["offload"].endswith("cpu")


def test_a_printed_batch_does_not_excuse_equal_losses(tmp_path):
    """The real logs: 8 per step by the header on one and on two ranks, one loss to the last digit, one rate x time."""
    second = {"losses": [2.3204553] * 2, "val_loss": 2.283445405960083, "printed": deepspeed_lines(2)}
    found = audit(wandb_pair(tmp_path, 2, second, printed=deepspeed_lines(1)))
    assert any("every rank trained on identical batches" in f.message for f in found if f.severity == FAILS)
