"""The text logs of other programs that are read, each known by a line that only its program prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from testbed.audit.readers import llmc, megatron, modded_nanogpt, nanochat, nanogpt, torchtitan
from testbed.audit.reported import Reported

# what stands in a text log -> what reads it
TEXT_LOGS: dict[str, Callable[[Path, str], list[Reported]]] = {
    torchtitan.MARK: torchtitan.read_torchtitan,
    megatron.MARK: megatron.read_megatron,
    nanochat.MARK: nanochat.read_nanochat,
    modded_nanogpt.MARK: modded_nanogpt.read_modded_nanogpt,
    llmc.MARK: llmc.read_llmc,
    nanogpt.BUILD_MARK: nanogpt.read_build_nanogpt,
    nanogpt.NANOGPT_MARK: nanogpt.read_nanogpt,
    llmc.MAIN_MARK: llmc.read_llmc_main_log,
    nanogpt.BUILD_FILE_MARK: nanogpt.read_build_nanogpt_file,
}
KNOWN = "torchtitan, Megatron-LM, nanochat, modded-nanogpt, llm.c, build-nanogpt or nanoGPT"
