"""Try a foreign tokenizer.json in a process of its own, which may die of it.

The `tokenizers` library ends the whole process on some files: a panic while another one is handled, or memory that it
cannot have. This file is started with the file's text on stdin. It imports nothing of the package. It prints a sentence
about what failed, and nothing about a file that can be used.
"""

from __future__ import annotations

import resource
import sys
import time

MOST_MEMORY = 4 << 30  # bytes of addresses: a vocabulary of a million tokens takes less than one GiB
LONGEST_S = 30  # of CPU time for all of it: a vocabulary of a million tokens takes 3
# Text that shows a pattern which backtracks: 64 equal characters and another take it a microsecond each, or minutes.
REPEATED = [chr(code) * 64 + "\0" for code in range(32, 127)]
LONGEST_TRIAL_S = 0.5  # of CPU time for 65 characters
# Every character of the first plane: a map of characters can make megabytes of one.
EVERY_CHARACTER = "".join(chr(code) for code in range(32, 0x10000) if not 0xD800 <= code < 0xE000)


def fault_of(text: str) -> str | None:
    """Return what is wrong with a tokenizer.json, to follow its name; None if nothing was found."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises Exception itself, and panics, which are not Exception
        return f"holds no tokenizer ({_one_line(error)})"
    library.no_truncation()  # neither applies, and a length of 10^12 is memory that is not there
    library.no_padding()
    for tried in [*REPEATED, EVERY_CHARACTER]:
        shown = f"the text {tried[:8]}..." if tried != EVERY_CHARACTER else "a text of every character"
        start_s = time.thread_time()
        try:
            ids = library.encode(tried, add_special_tokens=False).ids
            library.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            return f"fails at {shown} ({_one_line(error)}); take another one"
        seconds = time.thread_time() - start_s
        if tried != EVERY_CHARACTER and seconds > LONGEST_TRIAL_S:
            return f"takes {seconds:.1f} s for a text of {len(tried)} characters, {tried[:8]}...; take another one"
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _limit(kind: int, most: int) -> None:
    soft, hard = resource.getrlimit(kind)
    lowest = min([most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(kind, (lowest, hard))


if __name__ == "__main__":
    _limit(resource.RLIMIT_AS, MOST_MEMORY)
    _limit(resource.RLIMIT_CPU, LONGEST_S)
    _limit(resource.RLIMIT_CORE, 0)
    sys.stdout.buffer.write((fault_of(sys.stdin.buffer.read().decode()) or "").encode())
