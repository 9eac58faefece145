from __future__ import annotations

import dataclasses
import inspect
import re

import pluggy
import pytest

from shardcore import hooks
from shardcore.errors import ConfigError
from shardcore.hooks import API_VERSION, PolicySpec, hookimpl

TARGET = "package.module.Class"
POLICY = "module:Class"


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("shardcore")
    manager.add_hookspecs(hooks)
    return manager


def _hooks() -> list[str]:
    return [name for name in vars(_manager().hook) if not name.startswith("_")]


def test_defaults() -> None:
    spec = PolicySpec(target=TARGET, policy=POLICY)
    assert (spec.priority, spec.requires, spec.api) == (0, None, API_VERSION)


def test_is_plain_data() -> None:
    spec = PolicySpec(target=TARGET, policy=POLICY, requires="transformers>=5")
    assert spec == dataclasses.replace(spec)
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert not hasattr(spec, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.priority = 1  # type: ignore[misc]  # the point of the test
    with pytest.raises(TypeError):
        PolicySpec(TARGET, POLICY)  # type: ignore[call-arg]  # the point of the test


@pytest.mark.parametrize("target", ["a.B", "a.b.C", "a.b.Outer.Inner", "_a.b_1.C", "a.*.C"])
def test_target_accepted(target: str) -> None:
    assert PolicySpec(target=target, policy=POLICY).target == target


@pytest.mark.parametrize(
    "target", ["", "Class", "module:Class", "a..B", ".B", "a.1B", "a.f.<locals>.B", "a. B", "*.B", "a.*", "a.b*.C", int]
)
def test_target_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicySpec(target=target, policy=POLICY)
    assert str(caught.value) == f"PolicySpec: target is {target!r}; wanted a string like 'package.module.Class'"


@pytest.mark.parametrize("policy", ["m:C", "a.b:C", "a.b:Outer.Inner"])
def test_policy_accepted(policy: str) -> None:
    assert PolicySpec(target=TARGET, policy=policy).policy == policy


@pytest.mark.parametrize("policy", ["", "a.b.C", "a:", ":C", "a:b:C", "a b:C", "a:C()", int])
def test_policy_refused(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicySpec(target=TARGET, policy=policy)
    assert str(caught.value) == f"PolicySpec: policy is {policy!r}; wanted a string like 'module:Class'"


@pytest.mark.parametrize("requires", ["transformers", "transformers>=5,<6", "timm>=1; python_version>='3.8'"])
def test_requires_accepted(requires: str) -> None:
    assert PolicySpec(target=TARGET, policy=POLICY, requires=requires).requires == requires


@pytest.mark.parametrize("requires", ["", ">=5", "transformers=5", "two words"])
def test_requires_refused(requires: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicySpec(target=TARGET, policy=POLICY, requires=requires)
    assert str(caught.value) == (
        f"PolicySpec: requires is {requires!r}; wanted a PEP 508 requirement like 'some-library>=5'"
    )


@pytest.mark.parametrize("requires", ["transformers[torch]>=5", "transformers @ https://example.org/x.whl"])
def test_requires_cannot_be_compared(requires: str) -> None:
    with pytest.raises(ConfigError, match=r"without extras and without a URL$"):
        PolicySpec(target=TARGET, policy=POLICY, requires=requires)


def test_api_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        PolicySpec(target=TARGET, policy=POLICY, api=0)
    assert str(caught.value) == "PolicySpec: api is 0; wanted 1 or more (this shardcore knows 1)"


def test_a_later_api_can_be_named() -> None:
    assert PolicySpec(target=TARGET, policy=POLICY, api=API_VERSION + 1).api == API_VERSION + 1


def test_every_hook_is_public_and_begins_with_the_prefix() -> None:
    assert _hooks() == [name for name in hooks.__all__ if name.startswith("shardcore_")]
    assert _hooks()


@pytest.mark.parametrize("name", _hooks())
def test_every_hook_is_documented(name: str) -> None:
    documentation = inspect.getdoc(getattr(hooks, name)) or ""
    assert re.match(r"[A-Z][^\n]*\.\n\n", documentation), "a sentence, then the details"


def test_an_implementation_is_called() -> None:
    class Plugin:
        @hookimpl
        def shardcore_policies(self) -> list[PolicySpec]:
            return [PolicySpec(target=TARGET, policy=POLICY)]

    manager = _manager()
    manager.register(Plugin())
    manager.check_pending()
    assert manager.hook.shardcore_policies() == [[PolicySpec(target=TARGET, policy=POLICY)]]


def test_the_plugin_in_the_manual_works() -> None:
    example = re.search(r"^( +)from shardcore\.hooks.*?^\1 *\]$", hooks.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert example is not None
    namespace: dict[str, object] = {}
    exec(inspect.cleandoc(example[0]), namespace)
    (spec,) = namespace["shardcore_policies"]()  # type: ignore[operator]  # a function that exec defined
    assert spec.policy == "shard_llama.policy:LlamaPolicy"
