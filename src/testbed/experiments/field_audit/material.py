"""List the public files that are audited, and get each of them once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from testbed.errors import Failure, InputError
from testbed.io import read_json

TABLE = "table"
COMPANION = "companion"  # read with another file of its run, and not by itself
GROUPS = {True: "there while the rules were written", False: "collected afterwards"}  # by Material.tuned
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Material:
    """One file of a public repository at a commit."""

    repository: str  # OWNER/NAME on GitHub
    path: str  # in the repository
    commit: str
    kind: str  # TABLE, COMPANION, or the program that writes such files
    licence: str
    sha256: str
    tuned: bool  # it was there while the rules were written
    last: bool = False  # it was collected after the last change of a rule
    clean: bool = False  # its tables were recomputed by hand, and nothing was found
    in_pull_request: bool = False  # committed by the author of a pull request, not by the project
    figures_withheld: bool = False  # results of this project score our planner: none is quoted

    def place(self, folder: Path) -> Path:
        """Return where the file lies below `folder`. Files of one commit keep their places to each other."""
        return folder / f"{self.repository.replace('/', '+')}@{self.commit[:12]}" / self.path

    @property
    def address(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{quote(self.path)}"

    def page(self, line: int | None = None) -> str:
        """Return the address at which a person reads the file."""
        plain = f"?plain=1#L{line}" if line else ""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{quote(self.path)}{plain}"


def read_material(path: Path) -> list[Material]:
    """Return the files of a material.json.

    Raises:
        InputError: it cannot be read, or lacks something.
    """
    content = read_json(path)
    try:
        return [Material(**entry) for entry in content["files"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is no list of material: {error}") from None


def get_all(materials: Sequence[Material], folder: Path, offline: bool) -> None:
    """Get every file that is not there yet.

    Raises:
        InputError: `offline`, and one is missing or is another file.
        Failure: one cannot be downloaded, or what came is another file.
    """
    for material in materials:
        place = material.place(folder)
        if place.is_file() and _sha256(place.read_bytes()) == material.sha256:
            continue
        if offline:
            raise InputError(
                f"--offline: {place} is missing or has another sha256 than the list says; run once without --offline"
            )
        content = _download(material.address, folder)
        if _sha256(content) != material.sha256:
            raise Failure(f"{material.address} gave another file than the list says: its sha256 differs")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def _download(address: str, folder: Path) -> bytes:
    import requests  # 0.1 s: only for those who download

    try:
        response = requests.get(address, timeout=TIMEOUT_S)
        response.raise_for_status()
    except requests.RequestException as error:
        raise Failure(
            f"{address} cannot be downloaded ({type(error).__name__}); what came so far is kept in {folder}: run the "
            "same command again, with a network"
        ) from None
    return response.content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
