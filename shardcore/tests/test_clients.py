"""A library is known through an entry point: what its client says is asked where classes of the library are."""

from __future__ import annotations

import sys

import pytest
from given_packs import install_entries
from tiny import TinyPolicy, build
from torch import nn

import shardcore
from shardcore import clients
from shardcore.errors import ConfigError

LIBRARY = """
from torch import nn

class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
"""
CLIENT = """
import their_library
from shardcore.clients import Attached

seen = []

class Theirs(Attached):
    def __init__(self, model):
        self.model = model

    def begin(self): seen.append("begin")
    def give_up(self): seen.append("give_up")
    def check(self, plan): seen.append("check")
    def apply(self, context, plan): seen.append(context)

def attached_to(model):
    return Theirs(model.inner) if isinstance(model, their_library.Around) else None

def change():
    seen.append("changed")
    return lambda: seen.append("changed back")

CHANGES = (change,)
"""


@pytest.fixture
def fresh(target, monkeypatch):
    monkeypatch.setattr(clients, "_offered", clients._offered.__wrapped__)
    return target


def test_what_a_library_has_around_a_model_is_taken_off_and_put_back(fresh):
    sources = {"their_client": CLIENT, "their_library": LIBRARY}
    install_entries(fresh, "their-client", clients.GROUP, {"their_library": "their_client"}, sources)
    import their_client
    import their_library

    model = their_library.Around(build())
    assert shardcore.shard(model, tp=1, policy=TinyPolicy) is model
    assert their_client.seen == ["begin", "check", None]  # one rank has nothing to share
    assert their_client.change in clients.changes_of_libraries()
    assert clients.attached_to(nn.Linear(2, 2)) is None


def test_a_client_that_cannot_be_imported_is_named(fresh):
    install_entries(fresh, "their-client", clients.GROUP, {"torch": "not_there_at_all"}, {})
    with pytest.raises(ConfigError, match=r"their-client, the client for torch, cannot be imported: .*not_there"):
        clients.attached_to(nn.Linear(2, 2))


def test_two_clients_for_one_library_are_named(fresh):
    for name in ("their-client", "another-client"):
        module = name.replace("-", "_")
        install_entries(fresh, name, clients.GROUP, {"two_libraries": module}, {module: ""})
    with pytest.raises(ConfigError, match="another-client and their-client each have a client for two_libraries"):
        clients.client_of("two_libraries")


def test_what_is_not_installed_is_named_with_its_line(monkeypatch, tmp_path):
    monkeypatch.setattr(clients, "_offered", dict)
    with pytest.raises(
        ConfigError, match=r"none is installed that loads.*pip install .*/clients/shardcore-transformers\."
    ):
        shardcore.from_pretrained("LlamaForCausalLM", tmp_path)


LOADER = """
def from_pretrained(model_class, path, **options):
    return None
"""


def test_the_client_of_a_class_loads(fresh):
    clients_by_library = {"a_library": "a_client", "b_library": "b_client", "c_library": "c_client"}
    sources = {"a_client": "import not_there_at_all", "b_client": LOADER, "c_client": LOADER, "c_library": LIBRARY}
    install_entries(fresh, "their-clients", clients.GROUP, clients_by_library, sources)
    from c_library import Around

    class Derived(Around):
        pass

    assert clients.loader_of(Derived).__module__ == "c_client"
    assert clients.loader_of("c_library.Around").__module__ == "c_client"
    assert clients.loader_of("b_library.Other").__module__ == "b_client"
    sys.modules.pop("c_library")
    found = {clients.loader_of(name).__module__ for name in ("Around", "users.module.Class")}
    assert len(found) == 1
    assert found <= {"b_client", "shardcore_transformers.loading"}


def test_a_loader_that_cannot_be_imported_is_told(monkeypatch):
    def broken(library):
        raise ConfigError(f"the client for {library} cannot be imported")

    monkeypatch.setattr(clients, "_offered", lambda: {"a_library": []})
    monkeypatch.setattr(clients, "client_of", broken)
    with pytest.raises(ConfigError, match=r"the client for .* cannot be imported"):
        clients.loader_of("Around")
