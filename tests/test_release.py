"""What has to agree before a release, and what the project's files for contributors say of themselves."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "RELEASING", "SECURITY")]
PACKS = sorted(ROOT.glob("packs/*/pyproject.toml"))
KITS = sorted(ROOT.glob("kit/*/pyproject.toml"))
CLIENTS = sorted(ROOT.glob("clients/*/pyproject.toml"))
# The last one writes a workflow for new packs.
WORKFLOWS = [*sorted(ROOT.glob(".github/workflows/*.yml")), *ROOT.glob("kit/**/shardcore_scaffold/files.py")]


def project(file: Path) -> dict:
    return tomllib.loads(file.read_text())["project"]


CORE = project(ROOT / "shardcore" / "pyproject.toml")


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r'"([\w-]+)==([\w.]+)"', text))


@pytest.mark.parametrize("file", PACKS, ids=lambda file: file.parent.name)
def test_a_pack_takes_this_core_and_no_later_second_number(file):
    (needs,) = [r for r in map(Requirement, project(file)["dependencies"]) if r.name == "shardcore"]
    version = Version(CORE["version"])
    assert needs.specifier.contains(version)
    assert not needs.specifier.contains(f"{version.major}.{version.minor + 1}.0")
    assert project(file)["requires-python"] == CORE["requires-python"]
    (tested,) = [extra for extra in project(file)["optional-dependencies"].items() if extra[0] == "tested"]
    matrix = tomllib.loads(file.read_text())["tool"]["shardcore"]["matrix"]
    for requirement in map(Requirement, tested[1]):
        for release in matrix.get(requirement.name, ()):
            assert requirement.specifier.contains(release), (requirement, release)


def test_what_is_around_the_core_is_an_extra_and_packs_are_none():
    extras = {name: set(needs) for name, needs in CORE["optional-dependencies"].items()}
    around = {f"{file.parent.name}>=0.1,<0.2" for file in KITS}
    assert (extras.pop("testing"), extras.pop("tools")) == ({"shardcore-testing>=0.1,<0.2"}, around)
    assert extras.pop("loop") == {"shardcore-loop>=0.1,<0.2"}
    assert extras.pop("flash") == {"flash-attn>=2.7"}
    # What knows several libraries, each an extra of its own, is installed for one of them.
    clients = {file.parent.name: project(file).get("optional-dependencies") for file in CLIENTS}
    of_one = {name.removeprefix("shardcore-"): {f"{name}>=0.1,<0.2"} for name, own in clients.items() if not own}
    of_several = {extra: {f"{name}[{extra}]>=0.1,<0.2"} for name, own in clients.items() for extra in own or ()}
    assert extras == of_one | of_several
    for file in (*PACKS, *KITS, *CLIENTS):
        needs = Requirement(f"{file.parent.name}>=0.1,<0.2")
        assert needs.specifier.contains(project(file)["version"]), file


@pytest.mark.parametrize("file", [*PACKS, *KITS, *CLIENTS], ids=lambda file: file.parent.name)
def test_metadata_says_who_and_for_what(file):
    found = project(file)
    assert found["authors"] == CORE["authors"] == [{"name": "The shardcore authors"}]
    assert found["classifiers"] == CORE["classifiers"]
    page = f"https://pypi.org/project/{found['name']}/"
    assert found["urls"] == {"Homepage": page, "Core": CORE["urls"]["Homepage"], "History": f"{page}#history"}
    assert set(CORE["urls"].values()) == {
        "https://pypi.org/project/shardcore/",
        "https://pypi.org/project/shardcore/#history",
    }


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    said = dict(re.findall(r"^([\w-]+): (.+)$", text, re.M))
    assert (said["title"], said["version"], said["license"]) == (CORE["name"], CORE["version"], CORE["license"])
    assert re.findall(r"^  - name: (.*)$", text, re.M) == [author["name"] for author in CORE["authors"]]
    assert CORE["description"] in " ".join(text.split())


def test_the_changelog_has_this_version_or_what_will_be():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\]", text, re.M)
    assert versions[0] == "Unreleased"
    assert CORE["version"] in versions or f"will be {CORE['version']}" in text
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\(([^)#:\s]+)(?:#([\w-]+))?\)", page.read_text()):
        file = page.parent / path
        assert file.exists(), path
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w-]+", "-", heading.lower()) for heading in headings}, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"`((?:\.ci|docs|shardcore|tests|packs)/[\w./*-]+|[A-Z_]+\.md)`", page.read_text()):
        assert list(ROOT.glob(name)), name
    for name in re.findall(r"pytest -q (\S+)", page.read_text()):
        assert (ROOT / name).is_file(), name


def test_sessions_that_a_page_names_exist():
    source = "".join((ROOT / name).read_text() for name in ("noxfile.py", "tools/nightly.py"))
    functions = set(re.findall(r"^def (\w+)\(session: nox.Session\)", source, re.M)) | {"transformers"}  # -5.0.0
    tags = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"tags ?= ?\[(.*?)\]", source))))
    for page in [*PAGES, ROOT / "README.md"]:
        text = page.read_text()
        for session in re.findall(r"\bnox -s ([\w-]+)", text):
            assert f'name="{session}"' in source or session.partition("-")[0] in functions, (page, session)
        for words in re.findall(r"\bnox -t ([\w ]+)(?<! )", text):
            packs = {file.parent.name for file in PACKS}
            assert all(word in tags or any(pack.startswith(word) for pack in packs) for word in words.split()), words


def test_tools_are_pinned_alike():
    wanted = pins((ROOT / "noxfile.py").read_text())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.findall(r'"(\w+)==([\w.]+)"', hooks)
    assert found
    assert all(wanted[name] == version for name, version in found)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_and_say_their_release(workflow):
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert len(WORKFLOWS) > 1
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_every_push_runs_what_the_readme_says():
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_the_weekly_workflow_runs_what_nightly_runs():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]
    (lists,) = [step["run"] for step in jobs["sessions"]["steps"] if step.get("id") == "list"]
    source = (ROOT / "noxfile.py").read_text()
    tags = re.search(r"every = \[(.*?)\]", source)[1].replace('"', "").replace(",", "")
    assert f"nox --list --json -t {tags} >" in lists
    assert jobs["session"]["strategy"]["matrix"] == {"session": "${{ fromJSON(needs.sessions.outputs.names) }}"}
    assert set(jobs["green"]["needs"]) == set(jobs) - {"green", "newest-release"}  # which is of others' releases
    # What is read from the event goes into a variable, never into a command.
    for job in jobs.values():
        assert all("${{" not in step.get("run", "") for step in job["steps"])


def test_forms_are_valid():
    yaml = pytest.importorskip("yaml")
    for file in [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(file.read_text()), file


def test_git_ignores_what_is_made_here():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    made = [".nox/x", "site/x", "dist/x", ".coverage", "htmlcov/x"]
    done = subprocess.run(["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == set(made)
