"""Check parts of strategies that two CPU ranks cannot show: several devices in one process, three data ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from support.programs import TINY_RUN, data_flags
from support.settings import checked_run
from torch.distributed.pipelining import PipelineStage

from testbed.model.gpt2 import GPT2
from testbed.strategies import mesh, pipeline
from testbed.strategies.baseline import Baseline
from testbed.strategies.data_parallel import DataParallel
from testbed.train.batches import TrainingBatches

CPU = torch.device("cpu")


def one_step(token_files, strategy_class, precision: str = "fp32", num_devices: int = 1):
    flags = ["--global_batch_size", "8", "--micro_batch_size_per_gpu", "1", "--max_train_steps", "1"]
    checked = checked_run(token_files, *flags, "--precision", precision)
    torch.manual_seed(0)
    strategy = strategy_class(checked.settings, GPT2(checked.settings.shape), CPU)
    strategy.num_devices = num_devices
    micro_batches = TrainingBatches(checked.train_file, checked.settings, 0, CPU).of_step(0)
    return strategy, strategy.train_step(micro_batches, 0.01), micro_batches


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_micro_batches_side_by_side_make_the_same_step(token_files, num_devices):
    """3 devices and 8 micro batches: the last pass has two."""
    _, expected, _ = one_step(token_files, Baseline)
    strategy, result, micro_batches = one_step(token_files, DataParallel, num_devices=num_devices)
    assert result.num_target_tokens == expected.num_target_tokens
    assert result.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-6)
    assert result.grad_norm.item() == pytest.approx(expected.grad_norm.item(), abs=5e-6)
    evaluated = strategy.evaluate(micro_batches[:3])
    assert evaluated.num_target_tokens == 3 * micro_batches[0].num_target_tokens


def test_a_thread_of_dataparallel_computes_in_the_precision_of_the_run(token_files):
    """The type of autocast belongs to a thread, and DataParallel has one for each device."""
    strategy, _, micro_batches = one_step(token_files, DataParallel, precision="bf16")
    seen = []
    strategy.model.h["0"].mlp.c_fc.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    replica = strategy.forward_module.module
    thread = threading.Thread(target=replica, args=(micro_batches[0].inputs, micro_batches[0].targets))
    thread.start()
    thread.join()
    assert seen == [torch.bfloat16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="DataParallel copies a model to two CUDA devices or more")
def test_dataparallel_on_all_devices_makes_the_step_of_one(token_files):
    _, expected, _ = one_step(token_files, Baseline)
    flags = ["--global_batch_size", "8", "--micro_batch_size_per_gpu", "1", "--max_train_steps", "1"]
    checked = checked_run(token_files, *flags, "--device", "cuda")
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    strategy = DataParallel(checked.settings, GPT2(checked.settings.shape), device)
    result = strategy.train_step(TrainingBatches(checked.train_file, checked.settings, 0, device).of_step(0), 0.01)
    assert result.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-5)
    assert result.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=1e-4)


def test_the_tied_gradients_are_added_after_the_sum_over_data_ranks(monkeypatch):
    """A sum over three ranks or more rounds by the length of its bucket, which differs between the two ends: added
    before it, the two copies of the embedding drift apart by a bit here and there."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    done = []
    monkeypatch.setattr(mesh, "reduce_", lambda tensors, group, operation: done.append("data ranks"))
    monkeypatch.setattr(pipeline.dist, "P2POp", lambda *_, **__: None)
    monkeypatch.setattr(pipeline.dist, "batch_isend_irecv", lambda operations: done.append("the two ends") or [])
    end = object.__new__(pipeline.Pipeline)
    end.parameters, end.has_first, end.has_last = [weight], True, False
    end.axes = SimpleNamespace(data=None, pipeline=None)
    end.schedule_name, end.num_ranks, end.num_stages = "1f1b", 2, 2
    end.model = SimpleNamespace(wte=SimpleNamespace(weight=weight))
    end.synchronise_gradients()
    assert done == ["data ranks", "the two ends"]


@pytest.mark.parametrize(
    ("number", "rank", "greeted"), [(0, 0, [1, 1]), (1, 1, [0, 0]), (2, 1, [0, 0]), (3, 0, [1, 1])]
)
def test_a_stage_greets_no_neighbour_on_its_own_rank(monkeypatch, number, rank, greeted):
    """The stages of a V on two ranks. gloo cannot send to its own rank, which PyTorch 2.11 would try."""
    monkeypatch.setattr(torch.distributed, "P2POp", lambda op, tensor, group_peer, group: SimpleNamespace(**locals()))
    stage = object.__new__(pipeline._TimedStage)
    stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
    stage.stage_index, stage.num_stages, stage.group_rank, stage.group = number, 4, rank, None
    stage.device = CPU
    assert [operation.group_peer for operation in stage._get_init_p2p_neighbors_ops()] == greeted


def test_what_a_schedule_prepares_draws_no_random_numbers(monkeypatch):
    """PyTorch 2.11 runs a forward pass at every start, and a resumed run would go on with other random numbers."""
    monkeypatch.setattr(PipelineStage, "_prepare_forward_infra", lambda stage, micro_batches: torch.rand(micro_batches))
    stage = object.__new__(pipeline._TimedStage)
    stage.device = CPU
    before = torch.get_rng_state()
    assert stage._prepare_forward_infra(3).shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("flags", "gathered", "reduced"),
    [("", 2 * (1 + 2 + 2), 0), ("--reshard_after_forward off", 2 * (1 + 2), 0), ("--shard_size 2", 2 * (1 + 2 + 2), 3)],
    ids=["on", "off", "hybrid"],
)
def test_fsdp_moves_what_the_guide_says(ranks, token_files, tmp_path, flags, gathered, reduced):
    """Two micro batches, a root group and two blocks. The root's weights are gathered once per micro batch, a block's
    twice, or once when they are kept; copies of a hybrid mesh exchange gradients once per step and group."""
    work = ["--global_batch_size", "16", "--micro_batch_size_per_gpu", "2", "--max_train_steps", "1"]
    arguments = [*TINY_RUN, *data_flags(token_files), *work, "--run_type", "fsdp", *flags.split()]
    assert ranks.run("support.fsdp_traffic", tmp_path, arguments, 1) == {"gathered": gathered, "reduced": reduced}
