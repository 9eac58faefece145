"""What is said of a model class that no installed pack serves: every way out, then who was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import importlib_metadata
from packaging.requirements import Requirement

from shardcore.hooks import PolicySpec
from shardcore.plugins.isolation import in_one_line
from shardcore.plugins.loading import Pack
from shardcore.plugins.versions import installed

__all__ = ["FIRST_PARTY", "first_party", "for_a_shell", "full_name", "installing", "unserved"]

_IN_PYTHON = "  way out in Python: "

#: What this project has for libraries, besides packs.
CLIENTS = ("shardcore-peft", "shardcore-shardformer", "shardcore-trainer", "shardcore-transformers")

#: Start of a class's full name -> the pack of this project that serves the family.
FIRST_PARTY = {
    "transformers.models.llama.": "shard-llama",
    "transformers.models.mistral.": "shard-mistral",
    "transformers.models.mixtral.": "shard-mistral",
    "transformers.models.bert.": "shard-bert",
    "transformers.models.gpt2.": "shard-gpt2",
    "transformers.models.vit.": "shard-vit",
    "transformers.models.beit.": "shard-beit",
    "transformers.models.dinov2.": "shard-dinov2",
    "transformers.models.dinov2_with_registers.": "shard-dinov2",
    "transformers.models.swin.": "shard-swin",
    "transformers.models.swinv2.": "shard-swin",
    "transformers.models.whisper.": "shard-whisper",
    "transformers.models.t5.": "shard-t5",
    "transformers.models.mt5.": "shard-t5",
    "transformers.models.umt5.": "shard-t5",
    "transformers.models.bart.": "shard-bart",
    "transformers.models.mbart.": "shard-bart",
    "transformers.models.marian.": "shard-bart",
    "transformers.models.pegasus.": "shard-bart",
    "transformers.models.qwen2.": "shard-qwen",
    "transformers.models.qwen3.": "shard-qwen",
    "transformers.models.qwen2_moe.": "shard-qwen",
    "transformers.models.qwen3_moe.": "shard-qwen",
    "transformers.models.gemma.": "shard-gemma",
    "transformers.models.gemma2.": "shard-gemma",
    "transformers.models.gemma3.": "shard-gemma",
    "transformers.models.phi.": "shard-phi",
    "transformers.models.phi3.": "shard-phi",
    "transformers.models.glm.": "shard-glm",
    "transformers.models.glm4.": "shard-glm",
    "transformers.models.opt.": "shard-opt",
    "transformers.models.gpt_neo.": "shard-gpt-neo",
    "transformers.models.gptj.": "shard-gpt-neo",
    "transformers.models.gpt_neox.": "shard-gpt-neo",
    "transformers.models.gpt_neox_japanese.": "shard-gpt-neo",
    "transformers.models.roberta.": "shard-roberta",
    "transformers.models.xlm_roberta.": "shard-roberta",
    "transformers.models.modernbert.": "shard-modernbert",
    "transformers.models.albert.": "shard-albert",
    "transformers.models.ernie.": "shard-ernie",
    "transformers.models.deberta.": "shard-deberta",
    "transformers.models.deberta_v2.": "shard-deberta",
    "transformers.models.deepseek_v2.": "shard-deepseek",
    "transformers.models.deepseek_v3.": "shard-deepseek",
    "transformers.models.bloom.": "shard-bloom",
    "transformers.models.falcon.": "shard-falcon",
    "transformers.models.clip.": "shard-clip",
    "transformers.models.siglip.": "shard-clip",
    "transformers.models.sam.": "shard-sam",
    "transformers.models.blip_2.": "shard-blip2",
    "transformers.models.wav2vec2.": "shard-wav2vec2",
    "timm.": "shard-vit",
    "torch.nn.modules.transformer.": "shard-torch",
    "torch.nn.modules.activation.MultiheadAttention": "shard-torch",
}


def full_name(cls: type) -> str:
    """Return the name by which packs name a class: its module and its qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def unserved(
    cls: type, packs: Sequence[Pack], offers: Mapping[str, Iterable[tuple[PolicySpec, Pack]]]
) -> Iterator[str]:
    """Yield the lines of a `NoPolicyError`.

    Args:
        cls: the class that no pack serves.
        packs: those that are installed, loaded or not.
        offers: full name of a class -> the policies for it, of which the installed libraries meet no requirement.
    """
    names = [full_name(base) for base in cls.__mro__ if base is not object]
    yield f"no installed pack serves {names[0]}."
    yield from _ways_out(names, packs)
    yield f"{_IN_PYTHON}pass policy= (a Policy class or an instance), which needs no pack"
    for spec, pack in (offer for name in names for offer in offers.get(name, ())):
        if spec.requires is not None:
            have = installed(Requirement(spec.requires).name) or "not installed"
            yield f"  left out: {spec.policy} of pack {pack} requires {spec.requires} (here: {have})"
    yield f"  looked for: {', '.join([names[0], *(name for name in names[1:] if _is_of_a_model(name))])}"
    yield "  installed packs:" if packs else "  installed packs: none"
    yield from (f"    {pack}: {pack.status}: {in_one_line(pack.error)}" for pack in packs if pack.error)
    for status, by in (("blocked", " by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS"), ("loaded", "")):
        if found := [pack.name for pack in packs if pack.status == status and not pack.error]:
            yield f"    {status}{by}: {', '.join(found)}"


def for_a_shell(text: str) -> str:
    """Return what an error says without the ways out that only a program has."""
    return "\n".join(line for line in text.split("\n") if not line.startswith(_IN_PYTHON))


def _ways_out(names: Sequence[str], packs: Sequence[Pack]) -> Iterator[str]:
    """Say which pack to install or to write."""
    starts = (pack for name in names for start, pack in FIRST_PARTY.items() if name.startswith(start))
    family = next(starts, None)
    here = next((pack for pack in packs if pack.distribution == family), None)
    if family and here is None:
        yield f"  way out: install {family}, the first-party pack for this family{installing(family)}"
        return
    if here is not None and here.status == "blocked":
        yield f"  the first-party pack for this family, {family}, is installed and blocked"
        yield f"  way out: let {here.name} into SHARDCORE_PACKS, or out of SHARDCORE_DISABLE_PACKS"
        return
    if here is not None and here.error is None:
        yield f"  the first-party pack for this family, {family}, is installed and serves other classes of it"
    if names[0].startswith("transformers."):
        yield f"  way out: have a pack drafted: shardcore new-pack {_drafted(names[0])} --model {names[0]}"
        yield f'{_IN_PYTHON}policy="infer", which derives a policy from a small copy of the model and proves it there'
    else:
        yield "  way out: have a pack drafted: shardcore new-pack shard-mine --example module:function"


def installing(name: str) -> str:
    """Return the end of a sentence with the line that installs a distribution of this project; no index has any yet.

    What is around the core is installed together: some of it needs the rest.
    """
    room = "packs" if name.startswith("shard-") else "clients" if name in CLIENTS else "kit"
    folder, sources = f"{room}/{name if room != 'kit' else 'shardcore-*'}", _sources()
    if sources is not None and next(sources.glob(folder), None) is not None:
        return f": python -m pip install {sources / folder}"
    return f", from a checkout of shardcore: python -m pip install ./{folder}"


def _sources() -> Path | None:
    """Return the checkout that shardcore was installed from, as far as its metadata tells."""
    try:
        said = json.loads(importlib_metadata.distribution("shardcore").read_text("direct_url.json") or "{}")
        parts = urlsplit(said.get("url", ""))
    except Exception:  # not installed, or metadata that is damaged in any way
        return None
    return Path(url2pathname(parts.path)).parent if parts.scheme == "file" else None


def first_party() -> frozenset[str]:
    """Return the names of the packs of this project."""
    return frozenset(FIRST_PARTY.values())


def _is_of_a_model(name: str) -> bool:
    """Tell bases that a policy may be for from what every model of torch and transformers derives from."""
    package, _, rest = name.partition(".")
    return package != "torch" and (package != "transformers" or rest.startswith("models."))


def _drafted(name: str) -> str:
    """Return what a pack for a class of transformers would be called."""
    family = re.match(r"transformers\.models\.(\w+)\.", name)
    taken = family is None or f"shard-{family[1].replace('_', '-')}" in first_party()
    return "shard-mine" if family is None or taken else f"shard-{family[1].replace('_', '-')}"
