"""What tools/_site.py makes of pages; needs no mkdocs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import _site  # noqa: E402  # from tools/


def table(*cells: str) -> str:
    rows = "".join(f"<tr>\n<td><code>LlamaForCausalLM</code></td>\n<td>{cell}</td>\n</tr>" for cell in cells)
    return f"<table>\n<tbody>\n{rows}\n</tbody>\n</table>"


@pytest.mark.parametrize(
    ("cells", "kind"),
    [(("✓", "1e-15"), "narrow"), (("", "<strong>0.93</strong>"), "narrow"), (("1", "more words than fit"), "wide")],
)
def test_tables_of_numbers_and_marks_are_narrow(cells, kind):
    assert _site.on_page_content(f"<p>{table(*cells)}</p>").startswith(f'<p><div class="{kind}"><table>')


def test_names_in_tables_break_between_their_words():
    html = _site.on_page_content(f"<p><code>a_name_outside</code></p>{table('<code>some_field|None</code>')}")
    assert "<code>Llama<wbr>For<wbr>CausalLM</code>" in html
    assert "<code>some_<wbr>field|None</code>" in html
    assert "<code>a_name_outside</code>" in html


def test_a_bar_in_code_needs_no_backslash():
    assert "<code>cuda|cpu</code>" in _site.on_page_content(table(r"<code>cuda\|cpu</code>"))


def test_a_drawn_tree_is_a_list_of_lists():
    text = _site.expand("{{ docstring shardcore.errors }}")
    assert "* `ShardcoreError`\n    * `ConfigError` (ValueError): a configuration" in text
    assert "\n    * `RegistryError`\n        * `PackError` (ImportError): " in text
    assert not re.search("[├│└]", text)


def test_families_are_what_base_models_begin_with():
    names = ["BartModel", "BartForCausalLM", "MBartModel", "MarianMTModel", "MarianModel", "CLIPTextModel"]
    assert _site.families(names) == ["Bart", "MBart", "Marian", "CLIP"]
    assert _site.families(["Transformer", "MultiheadAttention"]) == ["Transformer", "MultiheadAttention"]


def test_every_pack_is_on_the_first_page():
    linked = set(re.findall(r"\(models\.md#([\w-]+)\)", _site.served("MODELS.md")))
    assert linked == {path.name for path in (ROOT / "packs").glob("shard-*")}


def test_every_decision_is_listed():
    page = _site.expand((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"))
    for file in (ROOT / "docs" / "adr").glob("*.md"):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert f"* [{title}](adr/{file.name})" in page


def test_an_unknown_line_is_an_error():
    with pytest.raises(KeyError, match="verbatim"):
        _site.expand("{{ verbatim shardcore.errors }}")


def test_a_page_from_a_folder_needs_no_network(tmp_path, caplog):
    for name in ("search/search_index.js", "js/iframe-worker.js"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    page = tmp_path / "page.html"
    page.write_text('<a href="https://pytorch.org">torch</a><script src="js/iframe-worker.js"></script>')
    _site.on_post_build(config={"site_dir": str(tmp_path)})
    assert caplog.messages == []
    page.write_text('<script src="https://unpkg.com/iframe-worker/shim"></script>')
    (tmp_path / "search" / "search_index.js").unlink()
    _site.on_post_build(config={"site_dir": str(tmp_path)})
    assert [message.split()[0] for message in caplog.messages] == ["page.html", "search/search_index.js"]
