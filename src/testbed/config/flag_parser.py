"""The parser of every program: one-sentence errors, suggestions for misspelt flags, dashes as underscores. No torch."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from testbed.config.environment_variables import check_no_secret
from testbed.errors import printable

SUGGESTIONS = 2
ALIKE = 0.55  # difflib's ratio from which a flag is suggested
LONGEST_SHOWN = 500  # characters of what was typed
SHORTEST_PART = 4  # of a flag that is suggested because it holds what was typed, as --global_batch_size --batch_size
_NUMBERS = {int: "whole number", float: "number"}
# For "did you mean": the names in nanoGPT, nanochat, llm.c, transformers, Lightning, torchtitan, Megatron-LM and
# DeepSpeed, by our flag, with a value where theirs is a switch
_THEIRS = {
    "--seq_length": "block_size context_length ctx_len max_length max_seq_len max_seq_length seq_len sequence_length "
    "max_sequence_length training.seq_len",
    "--num_layers": "n_layer n_layers depth num_hidden_layers",
    "--num_heads": "n_head n_heads num_attention_heads",
    "--embedding_size": "n_embd d_model hidden_size hidden_dim embed_dim n_embed",
    "--max_position_embeddings": "n_positions n_ctx",
    "--max_train_steps": "max_iters max_steps train_iters steps num_steps num_iterations total_steps iterations iters "
    "num_train_steps training.steps",
    "--max_tokens": "train_tokens num_tokens token_budget total_tokens target_tokens max_train_tokens",
    "--eval_every": "eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval val_every "
    "val_loss_every eval_freq validation.freq",
    "--max_val_steps": "eval_iters eval_batches limit_val_batches val_max_steps",
    "--steps_per_print": "log_interval logging_steps logging_strategy log_every_n_steps log_every log_freq "
    "metrics.log_freq print_freq",
    "--max_grad_norm": "grad_clip clip_grad gradient_clipping gradient_clip_val clip_grad_norm max_norm grad_norm_clip "
    "training.max_norm",
    "--warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps warmup_ratio warmup_fraction lr_warmup_fraction "
    "num_warmup_steps warmup lr_scheduler.warmup_steps",
    "--lr_decay_steps": "lr_decay_iters",
    "--lr_schedule": "lr_scheduler_type lr_scheduler scheduler decay_lr lr_decay_style schedule",
    "--decay_share": "warmdown_ratio cooldown_frac lr_wsd_decay_iters lr_scheduler.decay_ratio",
    "--learning_rate": "lr max_lr peak_lr optimizer.lr",
    "--min_learning_rate": "min_lr min_lr_ratio lr_min",
    "--weight_decay": "wd optimizer.weight_decay",
    "--adam_beta1": "beta1 optimizer.beta1",
    "--adam_beta2": "beta2 betas optimizer.beta2",
    "--adam_eps": "adam_epsilon eps epsilon optimizer.eps",
    "--optimizer": "optim optimizer_type optimizer_name optimizer.name",
    "--muon_learning_rate": "matrix_lr muon_lr",
    "--global_batch_size": "train_batch_size total_batch_size training.global_batch_size",
    "--micro_batch_size_per_gpu": "per_device_train_batch_size per_device_eval_batch_size device_batch_size mbs "
    "per_gpu_train_batch_size training.local_batch_size local_batch_size",
    "--grad_accum_steps": "gradient_accumulation_steps accumulate_grad_batches grad_accumulation_steps accum_steps "
    "gas gradient_accumulation",
    "--epochs": "num_train_epochs num_epochs max_epochs n_epochs epoch",
    "--seed": "random_seed manual_seed rng_seed torch_seed data_seed train_seed debug.seed training.seed",
    "--precision": "dtype torch_dtype amp amp_dtype training.dtype",
    "--precision bf16": "bf16 bfloat16 use_bf16",
    "--precision fp16": "fp16 float16 half use_fp16",
    "--precision fp32": "fp32 float32 no_amp",
    "--matmul fp8": "fp8 float8 fp8_format",
    "--activation_checkpointing block": "gradient_checkpointing recompute_activations grad_checkpointing "
    "recompute_granularity activation_checkpoint.mode",
    "--compile": "torch_compile use_compile compile.enable",
    "--attention": "attn_implementation use_flash_attn flash_attn attention_backend attn_backend",
    "--device cpu": "no_cuda use_cpu",
    "--device": "accelerator",
    "--backend": "dist_backend ddp_backend distributed_backend",
    "--deterministic": "full_determinism use_deterministic_algorithms deterministic_mode training.deterministic",
    "--threads_per_rank": "num_threads omp_num_threads cpu_threads",
    "--num_workers": "dataloader_num_workers num_data_workers",
    "--train_data_path": "dataset dataset_name data_path data_dir train_file train_data input_bin train_path data "
    "training.dataset training.dataset_path",
    "--val_data_path": "validation_file val_file val_data input_val_bin valid_data_path",
    "--init_from": "model_name_or_path pretrained from_pretrained checkpoint.initial_load_path",
    "--model": "model_size model_type model_name model.flavor",
    "--dropout": "attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop",
    "--checkpoint_path": "output_dir out_dir save_dir run_dir ckpt_dir checkpoint_dir default_root_dir save "
    "job.dump_folder dump_folder",
    "--overwrite": "overwrite_output_dir overwrite_cache force",
    "--resume": "resume_from_checkpoint resume_from load ckpt_path load_checkpoint checkpoint.load_step",
    "--save_every": "save_steps save_strategy save_interval save_freq checkpoint_every checkpoint_interval "
    "ckpt_interval always_save_checkpoint checkpoint.interval",
    "--keep_last": "save_total_limit keep_latest_k checkpoint.keep_latest_k",
    "--keep_best": "load_best_model_at_end save_best",
    "--async_mode async": "async_save checkpoint.async_mode",
    "--stop_at_step": "exit_interval",
    "--early_stop_patience": "early_stopping_patience early_stopping patience es_patience",
    "--eval_only": "do_eval test_only",
    "--tensorboard": "tensorboard_dir log_dir logging_dir use_tensorboard metrics.enable_tensorboard",
    "--sample_prompt": "start",
    "--track": "report_to logger loggers tracker trackers log_with",
    "--track wandb": "wandb wandb_log wandb_project wandb_run_name use_wandb metrics.enable_wandb enable_wandb",
    "--track mlflow": "mlflow use_mlflow mlflow_tracking_uri",
    "--profile": "wall_clock_breakdown enable_profiling profiling.enable_profiling profiler flops_profiler",
    "--collective_timeout": "ddp_timeout distributed_timeout_minutes nccl_timeout dist_timeout",
    "--run_type": "strategy distributed_strategy parallelism",
    "--run_type ddp": "ddp",
    "--run_type fsdp": "fsdp fsdp2 use_torch_fsdp2",
    "--bucket_cap_mb": "ddp_bucket_cap_mb ddp_bucket_size",
    "--deepspeed_config": "deepspeed ds_config deepspeed_config_file",
    "--zero_stage": "zero stage zero_optimization use_distributed_optimizer",
    "--offload": "cpu_offload offload_optimizer offload_param training.enable_cpu_offload",
    "--overlap_comm": "overlap_grad_reduce",
    "--tensor_parallel_size": "tensor_model_parallel_size tp tp_size tensor_parallel_degree "
    "parallelism.tensor_parallel_degree",
    "--pipeline_stages": "pipeline_model_parallel_size pp pp_size pipeline_parallel_size pipeline_parallel_degree "
    "parallelism.pipeline_parallel_degree",
    "--pipeline_schedule": "pipeline_parallel_schedule parallelism.pipeline_parallel_schedule",
    "--stages_per_rank": "num_layers_per_virtual_pipeline_stage",
    "--shard_size": "data_parallel_shard_degree parallelism.data_parallel_shard_degree fsdp_size",
    "--context_parallel_size": "cp cp_size context_parallel_degree parallelism.context_parallel_degree",
    "--sequence_parallel": "enable_sequence_parallel",
    "--reshard_after_forward": "fsdp_reshard_after_forward parallelism.fsdp_reshard_after_forward",
}
OF_OTHERS = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


MOST_UNKNOWN = 12  # flags that one sentence names
CONFIGS = (".toml", ".yaml", ".yml", ".json", ".py")


class FlagParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with `--save-every` and `--save_every` as one flag, and errors of one sentence."""

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            check_no_secret("a flag", *words)
        except ValueError as error:
            self.refuse(str(error))
        unknown = [] if self._subparsers else list(filter(self._is_unknown, _before_the_end(words)))
        if unknown:  # first: else what is missing would be said of what is misspelt
            if not words[0].startswith("-") and not self._get_positional_actions():
                unknown.insert(0, words[0])  # train.py config/train_gpt2.py --batch_size=8
            self.error("; ".join(map(self._not_a_flag, unknown[:MOST_UNKNOWN])))
        parsed, left = self.parse_known_args(words, namespace)
        if left:
            self.error(self._not_a_flag(next((word for word in left if word.startswith("-")), left[0])))
        return parsed

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        flags = _before_the_end(words)
        return super().parse_known_args([*map(self._as_declared, flags), *words[len(flags) :]], namespace)

    def error(self, message: str) -> NoReturn:
        """Refuse in one sentence, without other names of the flag."""
        said = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)*:", r"\1:", message)
        said = re.sub(rf"('[^']{{{LONGEST_SHOWN}}})[^']*'", r"\1...'", said)
        said = re.sub(
            r":? ignored explicit argument ('.*')$",
            r" takes no value, and \1 is one; give the flag or leave it out",
            said,
        )
        if choice := re.match(r"(--\w+): invalid choice: '([^']+)'", said):
            meant = OF_OTHERS.get(choice[2].lower(), "")
            said += f" (did you mean {meant}?)" if meant.startswith(f"{choice[1]} ") else ""
        self.refuse(f"{said}; --help lists every flag")

    def refuse(self, sentence: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, printable(f"{self.prog}: error: {sentence}", kept="\n\t") + "\n")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        if action.type not in _NUMBERS:
            return super()._get_value(action, text)
        try:
            return action.type(text)
        except ValueError:
            raise argparse.ArgumentError(action, f"{text!r} is not a {_NUMBERS[action.type]}") from None

    def _as_declared(self, word: str) -> str:
        """Return a flag in its declared spelling; any other word as it is."""
        matches = self._flags_like(word)
        name, has_value, value = word.partition("=")
        return f"{matches[0]}{has_value}{value}" if len(matches) == 1 and name not in matches else word

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("--") and " " not in word and not self._flags_like(word)

    def _flags_like(self, word: str) -> list[str]:
        """Return the declared flags that a word may mean: itself, or all that it abbreviates."""
        if not word.startswith("--"):
            return []
        name = _plain(word.partition("=")[0])
        flags = {flag: _plain(flag) for flag in self._option_string_actions if flag.startswith("--")}
        same = [flag for flag, plain in flags.items() if plain == name]
        return same or [flag for flag, plain in flags.items() if self.allow_abbrev and plain.startswith(name)]

    def _not_a_flag(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            said = f"{word!r} stands there without a flag"
            if word.endswith(".bin"):
                return f"{said}; a pattern of several files must be quoted, such as 'DIR/train_*.bin'"
            if word.endswith(CONFIGS):
                return f"{said}; settings from a file are --config FILE, as TOML, YAML, JSON or nanoGPT's .py"
            return said
        return f"{name} is not a flag{self.meant_by(name)}"

    def meant_by(self, name: str) -> str:
        """Return " (did you mean --FLAG?)" for a flag that is none; nothing if none is like it."""
        flags = {_plain(flag).strip("-"): flag for flag in self._visible_flags()}
        typed = _plain(name).strip("-")
        same = OF_OTHERS.get(typed.replace("-", "_"), "")
        if same.partition(" ")[0] in flags.values():
            return f" (did you mean {same}?)"
        shorter = [flag for flag in flags.values() if same.startswith(f"{flag}_") or same.endswith(f"_{flag[2:]}")]
        if shorter:  # --checkpoint of --checkpoint_path, --prompt of --sample_prompt
            return f" (did you mean {shorter[0]}?)"
        longer = [flag for flag in flags if len(typed) >= SHORTEST_PART and typed in flag]
        close = difflib.get_close_matches(typed, longer or flags, n=SUGGESTIONS, cutoff=0 if longer else ALIKE)
        meant = " or ".join(flags[each] for each in close)
        return f" (did you mean {meant}?)" if meant else ""

    def _visible_flags(self) -> list[str]:
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [each for parser in action.choices.values() for each in parser._actions]
        return [flag for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings]


def _before_the_end(words: Sequence[str]) -> list[str]:
    """Return the words up to a bare `--`."""
    return list(words[: words.index("--")] if "--" in words else words)


def _plain(flag: str) -> str:
    return flag.replace("_", "-")
