"""Environments of one torch share its files, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from environments import BACKEND, Environment, capabilities_here, find_python  # noqa: E402  # from tools/

TORCH = ("torch==2.13.0", "torchvision==0.28.0")


def printed(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def site_of(python: Path) -> Path:
    return Path(printed(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))


@pytest.fixture
def pip():
    """Instead of torch, write a module; keep the calls."""

    def install(python, *arguments):
        install.calls.append(arguments)
        (site_of(python) / "torch.py").write_text("release = 1")

    install.calls = []
    return install


@pytest.mark.nightly
def test_they_share_the_files_of_torch(tmp_path, pip):
    one, other = (Environment(name, TORCH).make(tmp_path, pip) for name in ("one", "other"))
    assert pip.calls == [("install", *TORCH, BACKEND)] * 2
    for python, name in ((one, "one"), (other, "other")):
        assert (
            Path(printed(python, "import sys; print(sys.prefix)"))
            == tmp_path / "torch-2.13.0-torchvision-0.28.0" / name
        )
        assert printed(python, "import torch, pip; print(torch.release)") == "1"
    files = [site_of(python) / "torch.py" for python in (one, other)]
    assert files[0].samefile(files[1])
    # As pip does it: what is replaced is a new file.
    files[0].unlink()
    files[0].write_text("release = 2  # longer: bytecode is kept by size and second")
    assert [printed(python, "import torch; print(torch.release)") for python in (one, other)] == ["2", "1"]


@pytest.mark.nightly
def test_an_environment_that_is_there_is_left_alone(tmp_path, pip):
    environment = Environment("one", TORCH)
    python = environment.make(tmp_path, pip)
    assert environment.make(tmp_path, pip) == python
    assert len(pip.calls) == 1


@pytest.mark.nightly
def test_one_that_was_interrupted_is_made_anew(tmp_path, pip):
    environment = Environment("one", TORCH)
    python = environment.make(tmp_path, pip)
    site = site_of(python)
    (site / "half.py").write_text("")
    python.unlink()
    assert environment.make(tmp_path, pip) == python
    assert not (site / "half.py").exists()
    assert (site / "torch.py").exists()


def test_capabilities_are_those_of_the_processor(tmp_path):
    for flags, wanted in (
        ("sse2", ["default"]),
        ("avx2 fma", ["default", "avx2"]),
        ("avx2 fma avx512f avx512dq avx512bw avx512vl", ["default", "avx2", "avx512"]),
    ):
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
        assert capabilities_here(tmp_path / "cpuinfo") == wanted
    assert capabilities_here(tmp_path / "none") == ["default"]


@pytest.mark.nightly
def test_tools_need_no_torch(tmp_path, pip):
    python = Environment("tools", ()).make(tmp_path, pip)
    assert pip.calls == []
    assert Path(printed(python, "import sys; print(sys.prefix)")) == tmp_path / "no-torch" / "tools"
    printed(python, "import pip")


@pytest.mark.nightly
def test_each_python_has_environments_of_its_own(tmp_path, pip):
    here = Environment("one", TORCH).make(tmp_path, pip)
    other = Environment("one", TORCH, python=sys.executable).make(tmp_path, pip)
    assert here != other
    assert len(pip.calls) == 2
    assert printed(other, "import torch, pip; print(torch.release)") == "1"


def test_an_interpreter_is_one_that_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"

    def script(path: Path, text: str) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    assert find_python(version) is None
    script(tmp_path / "bin" / f"python{version}", "exit 127")  # a shim of a version that is not chosen
    assert find_python(version) is None
    script(tmp_path / "pyenv/versions/3.1.0/bin/python3.1", f'exec "{sys.executable}" "$@"')
    assert find_python("3.1") is None  # says another version
    kept = script(tmp_path / f"pyenv/versions/{version}.7/bin/python{version}", f'exec "{sys.executable}" "$@"')
    assert find_python(version) == kept
