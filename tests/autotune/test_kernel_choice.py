"""Check the trial that chooses an attention kernel."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import pytest
import torch
from support.settings import launch, settings_of
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.autotune import attention, choices
from testbed.autotune.attention import FUSED, check_backend, fastest_backend, own_choice, why_not
from testbed.autotune.choices import ChoiceContradicts, decide_open_settings
from testbed.model.gpt2 import BACKENDS, GPT2, attention_kernel
from testbed.model.shape import ModelShape

CPU = torch.device("cpu")


def test_every_kernel_name_has_its_flag(token_files):
    assert settings_of(token_files, "--use_flash_attention").model.attention == "flash"
    assert settings_of(token_files, "--use_flash_attention").as_config()["attention"] == "flash"
    for name in (*BACKENDS, "auto"):
        assert settings_of(token_files, "--attention", name).model.attention == name


def test_on_the_cpu_there_are_two_kernels(token_files):
    settings = settings_of(token_files)
    there = [name for name in BACKENDS if why_not(name, settings, CPU, torch.float32) is None]
    assert there == ["flash", "math"]
    assert own_choice(settings, CPU) == "flash"
    assert own_choice(settings.with_values(dropout=0.5), CPU) == "math", "flash for CPU has no dropout"
    with pytest.raises(ValueError, match=r"--attention cudnn.*cpu.*leave --attention out"):
        check_backend(settings.with_values(attention="cudnn"), CPU)


def test_the_trial_takes_the_fastest_and_leaves_no_trace(token_files, monkeypatch):
    """Flash is real here; the times and a wrong kernel are planted."""
    settings = settings_of(token_files)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    chosen, trials = fastest_backend(settings, CPU)
    found = {trial.backend: trial.seconds is not None for trial in trials}
    assert chosen == "flash" and found == {"flash": True, "cudnn": False, "efficient": False}
    assert torch.equal(torch.get_rng_state(), before)
    for seconds, expected in (
        ({"flash": 3.0, "cudnn": 1.0, "efficient": 2.0}, "cudnn"),
        ({"flash": 2.0, "cudnn": 3.0, "efficient": 1.0}, "efficient"),
        ({"flash": 1.0, "cudnn": 1.04, "efficient": 1.02}, "cudnn"),  # within noise: always the same
        ({"flash": 1.04, "cudnn": 1.06, "efficient": 1.0}, "flash"),
    ):
        monkeypatch.setattr(attention, "_check_result", lambda *_: None)
        monkeypatch.setattr(attention, "_seconds_of_pass", lambda name, *_, s=seconds: s[name])
        assert fastest_backend(settings, CPU)[0] == expected


def test_a_machine_that_is_busy_for_a_while_does_not_move_the_choice_of_a_kernel(token_files, monkeypatch):
    """Kernels take turns and the least time counts: whichever pass other work falls on, cudnn is the fastest by far."""
    settings = settings_of(token_files)
    own_s, order = {"cudnn": 1.0, "flash": 2.0, "efficient": 3.0}, []
    monkeypatch.setattr(attention, "_check_result", lambda *_: None)
    for slow_from in range(24):
        passes = iter(range(100))

        def seconds(name, *_, slow_from=slow_from, passes=passes):
            order.append(name)
            return own_s[name] * (10 if slow_from <= next(passes) < slow_from + 15 else 1)

        monkeypatch.setattr(attention, "_seconds_of_pass", seconds)
        assert fastest_backend(settings, CPU)[0] == "cudnn"
    assert order[:6] == ["cudnn", "flash", "efficient"] * 2


def plant_kernel(monkeypatch, *dtypes: torch.dtype) -> None:
    """A device whose kernels run in these dtypes only, and say nothing where they do not."""

    def run(backend, settings, heads):
        if heads[0].dtype not in dtypes:
            raise RuntimeError

    monkeypatch.setattr(attention, "_forward_and_backward", run)


def test_a_kernel_that_has_one_precision_is_refused_only_once_the_other_was_chosen(token_files, monkeypatch):
    """No kernel of FlashAttention or cuDNN on CUDA computes in fp32, and --precision auto means bf16 there."""
    named = settings_of(token_files, "--use_flash_attention").with_values(precision="auto", compile=False)
    plant_kernel(monkeypatch, torch.bfloat16)
    check_backend(named, CPU)
    resolved = "bf16"
    monkeypatch.setattr(choices, "with_precision_resolved", lambda s, *_: (s.with_values(precision=resolved), "said"))
    assert decide_open_settings(named, launch(), CPU)[0].compute.precision == "bf16"
    resolved = "fp32"
    with pytest.raises(ChoiceContradicts, match=r"--attention flash.*--precision fp32.*give --precision bf16"):
        decide_open_settings(named, launch(), CPU)
    plant_kernel(monkeypatch)
    with pytest.raises(ValueError, match=r"bf16 or fp32.*\(RuntimeError\); leave --attention out"):
        check_backend(named, CPU)


def test_a_kernel_that_computes_something_else_takes_no_part(token_files, monkeypatch):
    settings = settings_of(token_files)
    plain = attention._forward_and_backward

    def wrong(backend, *arguments, **options):
        output, *gradients = plain(backend, *arguments, **options)
        return output, *((gradient * 1.1 if backend == "flash" else gradient) for gradient in gradients)

    monkeypatch.setattr(attention, "_forward_and_backward", wrong)
    chosen, trials = fastest_backend(settings, CPU)
    assert chosen == "auto" and "wrong by" in next(str(trial) for trial in trials if trial.backend == "flash")


@pytest.mark.parametrize(("result", "factor"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (0, float("nan"))])
def test_a_kernel_that_is_wrong_for_the_last_head_of_the_run_s_shape_takes_no_part(
    token_files, monkeypatch, result, factor
):
    """An index that overflows would show there alone: the last tokens of the last head of the last sequence."""
    settings = settings_of(
        token_files,
        *("--seq_length", "320", "--max_position_embeddings", "320", "--num_heads", "4"),
        *("--micro_batch_size_per_gpu", "3", "--global_batch_size", "3"),
    )
    plain, scores = attention._forward_and_backward, []

    def wrong(backend, settings, heads, **options):
        results = plain(backend, settings, heads, **options)
        if backend == "math":
            scores.append(heads[0].shape[:-2].numel() * heads[0].shape[-2] ** 2)
        elif heads[0].shape == (3, 4, 320, 8):
            results[result][-1, -1, 300:] += factor * results[result].abs().max()
        return results

    monkeypatch.setattr(attention, "_forward_and_backward", wrong)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 5 * 320**2)
    chosen, trials = fastest_backend(settings, CPU, rounds=1)
    assert chosen == "auto" and "wrong by" in str(trials[FUSED.index("flash")])
    assert scores == [5 * 320**2, 5 * 320**2, 2 * 320**2], "twelve heads, five at a time: memory is bounded"
    monkeypatch.setattr(attention, "_forward_and_backward", plain)
    assert fastest_backend(settings, CPU, rounds=1)[0] == "flash"


@pytest.mark.parametrize("recomputed", ["none", "block"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_model_computes_with_the_kernel_that_was_chosen(backend, recomputed):
    """In forward, recomputation in backward, and evaluation."""
    shape = ModelShape(num_layers=1, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16)
    model, tokens = GPT2(shape, activation_checkpointing=recomputed), torch.zeros(1, 16, dtype=torch.int64)
    passes = 1 if recomputed == "none" else 2
    with attention_kernel(backend):
        assert kernels_of(lambda: model(tokens, tokens).backward()) == {backend: passes}
        with torch.no_grad():
            assert kernels_of(lambda: model.eval()(tokens, tokens)) == {backend: 1}
    assert kernels_of(lambda: model(tokens)) == {"flash": 1}, "PyTorch's choice again"


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_threads_that_compute_at_the_same_time_keep_the_kernel(backend):
    """DataParallel's: a context in each layer, entered and left by several threads, would undo the others'."""
    shape = ModelShape(num_layers=8, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16)
    model, tokens = GPT2(shape), torch.zeros(1, 16, dtype=torch.int64)
    found = []
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with attention_kernel(backend):
        threads = [threading.Thread(target=lambda: found.append(kernels_of(lambda: model(tokens)))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [{backend: 8}] * 16
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


def test_what_the_compiler_keeps_on_disk_is_kept_by_kernel():
    """PyTorch's key of compiled graphs lacks the kernel: a run with --attention math would compute with flash."""
    before, tags = torch.compiler.config.cache_key_tag, []
    for backend in ("auto", *BACKENDS):
        with attention_kernel(backend):
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == before and len(set(tags)) == len(tags), tags
    assert all(tag.startswith(before) for tag in tags) and torch.compiler.config.cache_key_tag == before


@pytest.mark.launches
def test_what_was_compiled_with_one_kernel_is_not_taken_from_disk_for_another():
    heads, found = torch.zeros(1, 2, 16, 8), []
    with fresh_cache():
        for backend in ("flash", "math", "flash"):
            torch._dynamo.reset()  # as in a process of its own
            counters.clear()
            with attention_kernel(backend), torch.no_grad():
                torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(heads)
            found.append("taken" if counters["aot_autograd"]["autograd_cache_hit"] else "compiled")
    assert found == ["compiled", "compiled", "taken"]


def test_what_was_compiled_with_one_kernel_does_not_compute_for_another_in_the_same_process():
    """PyTorch's guards lack the kernel too. The first call, outside of any context, has PyTorch's choice."""
    found = []

    def note(graph: torch.fx.GraphModule, _) -> Callable:
        found.append("flash" if "flash_attention_for_cpu" in graph.print_readable(print_output=False) else "math")
        return graph.forward

    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), backend=aot_autograd(fw_compiler=note)
    )
    heads = torch.zeros(1, 2, 16, 8)
    compiled(heads)
    for _ in range(2):
        with attention_kernel("math"):
            compiled(heads)
            compiled(heads)
    compiled(heads)
    assert found == ["flash", "math", "math", "flash"], "once where the kernel stays"


def kernels_of(work) -> dict[str, int]:
    """How often each kernel of attention runs."""
    with Kernels() as kernels:
        work()
    return dict(kernels.found)


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function)
        if "flash_attention_for_cpu" in name or "_safe_softmax" in name:  # which the plain kernel alone uses
            self.found["math" if "softmax" in name else "flash"] += "backward" not in name
        return function(*arguments, **(options or {}))
