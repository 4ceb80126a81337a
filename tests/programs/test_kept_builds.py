"""What PyTorch built of DeepSpeed's C++ is kept between runs of the suite."""

from __future__ import annotations

import os
from pathlib import Path

from support.builds import copy_builds


def build(folder: Path, name: str, content: str, built_s: float) -> Path:
    library = folder / name / f"{name}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_text(content)
    os.utime(library, (built_s, built_s))
    return library


def test_a_newer_build_takes_the_place_of_an_older_one_and_no_other(tmp_path):
    mine, kept = tmp_path / "mine", tmp_path / "kept"
    build(mine, "new", "new", 100)
    build(mine, "rebuilt", "later", 200)
    build(mine, "old", "earlier", 100)
    (build(mine, "being_built", "half", 100).parent / "lock").touch()
    build(kept, "rebuilt", "earlier", 100)
    build(kept, "old", "later", 200)
    copy_builds(mine, kept)
    assert {path.name: path.read_text() for path in kept.glob("*/*.so")} == {
        "new.so": "new", "rebuilt.so": "later", "old.so": "later",
    }  # fmt: skip
    assert {path.name for path in kept.iterdir()} == {"new", "rebuilt", "old"}
