"""A pack for StableLM, which none of this project's packs serves: written by the command, installed, tested, used."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import ShardcoreError
from shardcore_cli import main
from shardcore_scaffold import Example, write_pack

pytest.importorskip("transformers")

MODEL = "transformers.models.stablelm.modeling_stablelm.StableLmForCausalLM"

SMALL_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.sum()}

def example(seed=0, dropout=0.0):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    return Net().double(), {"x": torch.randn(3, 8, generator=generator, dtype=torch.float64)}
"""


def new_pack(folder: Path, name: str = "shard-stablelm", model: str = MODEL, option: str = "--model"):
    return CliRunner().invoke(main, ["new-pack", name, option, model, "--into", str(folder), "--no-check"])


class Environment:
    """An environment that sees what is installed here, and in which more can be installed."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        (site,) = folder.rglob("site-packages")
        ours = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("src"))}
        (site / "outer.pth").write_text("".join(f"{path}\n" for path in sorted(ours)))

    def install(self, folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, str(folder)], check=True, timeout=100)

    def run(self, *arguments: str, cwd: Path, timeout: float = 110) -> str:
        done = subprocess.run(
            [str(self.python), *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shardcore(self, *arguments: str, cwd: Path) -> str:
        return self.run("-c", "from shardcore_cli import main; main()", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Environment, Path]:
    """The pack as it is written, installed into an environment of its own."""
    folder = tmp_path_factory.mktemp("scaffold")
    result = new_pack(folder)
    assert result.exit_code == 0, result.output
    pack = folder / "shard-stablelm"
    environment = Environment(folder / "environment")
    environment.install(pack)
    return environment, pack


def test_it_is_a_complete_distribution(tmp_path):
    result = new_pack(tmp_path)
    assert result.exit_code == 0, result.output
    pack = tmp_path / "shard-stablelm"
    files = {str(file.relative_to(pack)) for file in pack.rglob("*") if file.is_file()}
    assert files == {
        "pyproject.toml", "README.md", "noxfile.py", ".github/workflows/tests.yml", "tests/test_conformance.py",
        *(f"src/shard_stablelm/{name}.py" for name in ("__init__", "plugin", "policy", "cases")),
    }  # fmt: skip
    assert all(str(pack / file) in result.output for file in files)
    policy = (pack / "src" / "shard_stablelm" / "policy.py").read_text()
    assert policy.count("region(") == 2
    assert 'kv=("self_attn.k_proj", "self_attn.v_proj")' in policy
    for file in files:
        if file.endswith(".py"):
            text = (pack / file).read_text()
            compile(text, file, "exec")
            assert max(map(len, text.splitlines())) <= 120, file


def test_its_stages_hold_the_model(tmp_path):
    assert new_pack(tmp_path).exit_code == 0
    policy = (tmp_path / "shard-stablelm" / "src" / "shard_stablelm" / "policy.py").read_text()
    begin = '    stages = Stages(\n        first="model.embed_tokens",\n        blocks="model.layers",\n'
    rest = '        last=("model.norm", "lm_head"),\n        everywhere="model.rotary_emb",\n    )\n'
    assert begin + rest in policy


STAGED_MODEL = (
    SMALL_MODEL.replace("class Net", "class Plain")
    + """
class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("mask", torch.ones(8))
        self.an_attribute_whose_name_is_so_long_that_only_one_fits_on_a_line = nn.LayerNorm(8)
        self.another_attribute_whose_name_is_so_long_that_only_one_fits = nn.LayerNorm(8)
        self.gone = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.mask
        x = self.an_attribute_whose_name_is_so_long_that_only_one_fits_on_a_line(x)
        return self.another_attribute_whose_name_is_so_long_that_only_one_fits(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.embed = nn.Linear(8, 8)
        self.trunk = Trunk()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": self.head(self.trunk(self.embed(x) + self.token)).sum()}
"""
)


def test_stages_are_guessed_from_the_order_of_modules(tmp_path, monkeypatch):
    (tmp_path / "staged_models.py").write_text(STAGED_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    result = new_pack(tmp_path, "shard-staged", "staged_models:example", "--example")
    assert result.exit_code == 0, result.output
    monkeypatch.syspath_prepend(tmp_path / "shard-staged" / "src")
    policy = importlib.import_module("shard_staged.policy").NetPolicy
    model = importlib.import_module("staged_models").Net()
    plan = compile_plan(policy, model, ShardConfig.of(tp=2))
    assert list(plan.stages.parts()) == [
        ("first", "token"),
        ("first", "embed"),
        ("blocks", "trunk.blocks"),
        ("last", "trunk.an_attribute_whose_name_is_so_long_that_only_one_fits_on_a_line"),
        ("last", "trunk.another_attribute_whose_name_is_so_long_that_only_one_fits"),
        ("last", "head"),
        ("everywhere", "trunk.mask"),
    ]


@pytest.mark.nightly
def test_its_tests_pass_as_it_is_written(made):
    environment, pack = made
    printed = environment.run(
        "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider", str(pack), cwd=pack, timeout=500
    )
    passed, skipped, *_ = (int(word) for word in printed.splitlines()[-1].split() if word.isdigit())
    assert passed > 20, printed
    assert skipped < 6, printed


@pytest.mark.nightly
def test_its_tests_need_no_installation(tmp_path):
    assert new_pack(tmp_path).exit_code == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "discovery or hash_seeds"]
    done = subprocess.run(
        [*command, "--quick", "shard-stablelm"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_modules_that_were_not_looked_at_are_listed(tmp_path, monkeypatch):
    table = "self.table = nn.Embedding(40, 8)\n        self.blocks ="
    (tmp_path / "unseen_models.py").write_text(SMALL_MODEL.replace("self.blocks =", table))
    monkeypatch.syspath_prepend(tmp_path)
    model, inputs = importlib.import_module("unseen_models").example()
    example = Example(model, inputs, source="unseen_models:example", unseen=["blocks.{i}.gate (Linear)"])
    _, draft = write_pack("shard-unseen", example, tmp_path)
    said = "blocks.{i}.gate (Linear) is in the model, but not in the small one that was looked at"
    assert said in draft.doubts
    assert any(doubt.startswith("embeddings and heads are whole: no vocab_size and no head") for doubt in draft.doubts)
    assert said in (tmp_path / "shard-unseen" / "src" / "shard_unseen" / "policy.py").read_text()


@pytest.mark.nightly
def test_it_is_found_and_explained(made):
    environment, pack = made
    rows = {row["name"]: row for row in json.loads(environment.shardcore("packs", "--json", cwd=pack.parent))}
    assert rows["stablelm"]["distribution"] == "shard-stablelm"
    assert rows["stablelm"]["status"] == "loaded"
    text = environment.shardcore("explain", "StableLmForCausalLM", "--tp", "2", "-v", cwd=pack.parent)
    assert "model.layers.{0-31}.self_attn.q_proj" in text


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("Shard_X", MODEL, "is no name of a distribution: lower-case letters, digits and single hyphens"),
        ("shard-x", "transformers.NoSuchModel", "NoSuchModel"),
        ("shard-x", "torch.nn.Identity", "--example package.module:function"),
        pytest.param(
            *("shard-x", "transformers.BarkModel", "no small BarkModel could be built and called"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_cannot_be_made_leaves_nothing_behind(tmp_path, name, model, message):
    result = new_pack(tmp_path, name, model)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit | ShardcoreError)
    assert message in result.output
    assert ".." not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_nowhere_is_kept(tmp_path):
    (tmp_path / "shard-stablelm").symlink_to(tmp_path / "elsewhere")
    result = new_pack(tmp_path)
    assert result.exit_code == 1
    assert "exists already" in result.output
    assert not (tmp_path / "elsewhere").exists()


def test_an_existing_folder_is_kept(tmp_path):
    (tmp_path / "shard-stablelm").mkdir()
    (tmp_path / "shard-stablelm" / "mine.txt").write_text("mine")
    result = new_pack(tmp_path)
    assert result.exit_code != 0
    assert "exists already" in result.output
    assert [file.name for file in (tmp_path / "shard-stablelm").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("import", "is a word of Python"),
        ("class", "is a word of Python"),
        ("torch", "can be imported here already"),
        ("json", "can be imported here already"),
        ("shardcore", "can be imported here already"),
        ("test", "can be imported here already"),
        ("shard-llama", "is the name of a pack of this project"),
        ("shard-whisper", "is the name of a pack of this project"),
        ("importlib-metadata", "can be imported here already"),
        ("pytest-timeout", "can be imported here already"),
        ("some-library", "is installed here already"),
        ("a" * 300, "has 300 letters; wanted at most 80"),
        ("shard-" + "-".join("x" * 60), "wanted at most 80"),
        ("Shard", "is no name of a distribution"),
    ],
)
def test_a_name_that_would_not_work_is_refused(tmp_path, monkeypatch, name, reason):
    info = tmp_path / "path" / "some_library-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-library\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    (tmp_path / "into").mkdir()
    result = new_pack(tmp_path / "into", name)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert reason in result.output
    assert "such as shard-" in result.output  # what would work
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        "Net.__name__ = 'Net\"; import os #'",
        "Net.__name__ = 'class'",
        "Net.__module__ = 'a b'",
        "Net.__qualname__ = 'Outer.Net'",
        "Block.__name__ = '\"]: os.abort(), [\"'",
    ],
)
def test_text_of_a_class_does_not_become_code(tmp_path, monkeypatch, change):
    (tmp_path / "quoted_models.py").write_text(f"{SMALL_MODEL}\n{change}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "into").mkdir()
    result = new_pack(tmp_path / "into", "shard-quoted", "quoted_models:example", "--example")
    sys.modules.pop("quoted_models", None)
    assert result.exit_code == 1
    assert "which cannot be written into a program" in result.output
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.nightly
def test_doubts_are_plain_sentences(tmp_path):
    result = new_pack(tmp_path, "shard-xlnet", "transformers.XLNetLMHeadModel")
    assert result.exit_code == 0, result.output
    assert "note: XLNetLayer: rel_attn is left whole" in result.output
    policy = (tmp_path / "shard-xlnet" / "src" / "shard_xlnet" / "policy.py").read_text()
    comments = [line.removeprefix("#").strip() for line in policy.splitlines() if line.startswith("#")]
    assert len(comments) > 1
    assert not any("#" in comment for comment in comments)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("", "gave nothing"),
        ("def example(seed=0):\n    raise OSError('gone')", "gave nothing (OSError: gone)"),
        ("def example(seed=0):\n    return 1, 2", "returned a int and a int"),
        ("def example():\n    from torch import nn; return nn.Linear(1, 1), {}", "has no parameter 'seed'"),
    ],
)
def test_an_example_that_is_none(tmp_path, monkeypatch, function, words):
    (tmp_path / "bad_examples.py").write_text(function)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "into").mkdir()
    result = new_pack(tmp_path / "into", "shard-bad", "bad_examples:example", "--example")
    sys.modules.pop("bad_examples", None)
    assert result.exit_code == 1
    assert words in result.output
    assert list((tmp_path / "into").iterdir()) == []


def test_one_of_model_and_example(tmp_path):
    result = CliRunner().invoke(main, ["new-pack", "shard-x", "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert "give --model for a class of transformers, or --example for any other" in result.output


def test_a_folder_that_is_not_there_is_made(tmp_path, monkeypatch):
    (tmp_path / "models_for_drafts.py").write_text(SMALL_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    result = new_pack(tmp_path / "drafts", "shard-drafted", "models_for_drafts:example", "--example")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "drafts" / "shard-drafted" / "pyproject.toml").exists()


def test_an_example_becomes_the_case(tmp_path, monkeypatch):
    (tmp_path / "plain_models.py").write_text(SMALL_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    result = new_pack(tmp_path, "shard-plain", "plain_models:example", "--example")
    assert result.exit_code == 0, result.output
    monkeypatch.syspath_prepend(tmp_path / "shard-plain" / "src")
    (case,) = importlib.import_module("shard_plain.cases").cases()
    model = case.build()
    assert case.inputs(model, 1)["x"].shape == (3, 8)
    assert case.layers == "blocks"
    policy = importlib.import_module("shard_plain.policy").NetPolicy
    plan = compile_plan(policy(), model, ShardConfig.of(tp=2).resolve(2))
    assert [p.name for p in plan.parameters if not p.layout.placement.is_replicate()]


def test_the_extra_for_tests_has_the_name_that_it_has_everywhere(tmp_path):
    result = new_pack(tmp_path)
    pack = tmp_path / "shard-stablelm"
    extras = tomllib.loads((pack / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["testing"] == ["shardcore-testing>=0.1,<0.2"]
    assert extras.keys() == {"tested", "testing"}
    for text in (result.output, (pack / "README.md").read_text(), (pack / "noxfile.py").read_text()):
        assert "[testing]" in text
        assert "[test]" not in text
