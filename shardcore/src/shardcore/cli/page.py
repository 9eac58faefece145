"""One page for a browser: the mesh, what is cut where, the memory of each rank. Nothing in it is from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardcore.cli.drawings import cut, mesh, schedule
from shardcore.cli.explain import Explained, in_short
from shardcore.cli.plan import bars_of, headline, mesh_in_words
from shardcore.cli.tables import in_words
from shardcore.mesh import Sizes
from shardcore.plan import ShardPlan
from shardcore.plan.render import heading, names_together
from shardcore.planner import KINDS, Estimate
from shardcore.planner.memory import local_shape
from shardcore.planner.search import Found

__all__ = ["of_a_plan", "of_estimates"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #cfd6df; --back: #ffffff; --card: #f5f7fa;
  --k0: #2f6fa8; --k1: #67b0de; --k2: #8fcbbd; --k3: #f4a259; --limit: #c1121f; --keep: #2f6fa8; --away: #dfe6ee; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf2; --soft: #9aa7b6; --line: #3a4553; --back: #12171d;
  --card: #1b222b; --away: #2b3541; --limit: #ff6b6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 48px; max-width: 1000px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p, li { color: var(--soft); } ul { padding-left: 20px; margin: 8px 0; }
.wide { overflow-x: auto; } svg { display: block; max-width: none; } svg text { fill: var(--ink); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
td { white-space: nowrap; } code { font-size: .85rem; }
.bar { display: flex; height: 22px; background: var(--card); position: relative; }
.bar i { display: block; height: 100%; } .bar b { position: absolute; top: -3px; bottom: -3px; width: 2px;
  background: var(--limit); }
.row { display: grid; grid-template-columns: minmax(90px, 24%) 1fr 80px; gap: 10px;
  align-items: center; margin: 6px 0; }
.key { display: inline-flex; align-items: center; gap: 6px; margin-right: 18px; color: var(--soft); }
.key i { width: 12px; height: 12px; }
.k0 { background: var(--k0); } .k1 { background: var(--k1); } .k2 { background: var(--k2); }
.k3 { background: var(--k3); }
"""


def of_a_plan(model: str, explained: Explained) -> str:
    """Return the page of ``shardcore explain``."""
    config = explained.plan.config
    sizes = Sizes(
        pp=config.pipeline_parallel_size or 1,
        tp=config.tensor_parallel_size or 1,
        dp_replicate=config.dp_replicate_size or 1,
        dp_shard=config.dp_shard_size or 1,
    )
    head, *about = heading(explained.plan)
    parts = [_list([head, *about, *in_short(explained)]), *_mesh(sizes), *_cuts(explained.plan)]
    if explained.stages:
        rows = [
            (str(s.stage), str(s.rank), names_together(s.blocks), ", ".join(s.parts), in_words(s.bytes))
            for s in explained.stages
        ]
        parts += ["<h2>Stages</h2>", _table(("stage", "rank on pp", "blocks", "also", "parameters"), rows)]
    if isinstance(explained.step, Estimate):
        parts += _of_a_step(explained.step, None)
    return _page(f"{model}, {mesh_in_words(sizes)}", parts)


def of_estimates(model: str, found: Sequence[Found], limit: int | None) -> str:
    """Return the page of ``shardcore plan``: of one mesh with all that is known, of several their memory."""
    plans = [f.estimate for f in found if f.estimate is not None]
    if len(plans) == 1:
        return _page(headline(model, plans[0]), [*_mesh(plans[0].sizes), *_of_a_step(plans[0], limit)])
    title = headline(model, plans[0], mesh=False) if plans else model
    problems = [f"{mesh_in_words(f.sizes)}: {f.problem}" for f in found if f.estimate is None]
    first = _mesh(plans[0].sizes) if plans else []
    return _page(title, [*_memory(plans, limit), *first, _list(problems)])


def _page(title: str, parts: Iterable[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    top = f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>'
    return f"{top}\n<body>\n{body}\n</body></html>\n"


def _mesh(sizes: Sizes) -> Iterator[str]:
    yield f"<h2>Mesh: {escape(mesh_in_words(sizes))}</h2>"
    yield f'<div class="wide">{mesh(sizes)}</div>'
    said = ["A square is a rank, with its number."]
    if sizes.tp > 1:
        said.append("Ranks side by side (tp) share a model, each with a part of its weights, and see the same batch.")
    if sizes.replicas > 1:
        over = "shards its parameters over them" if sizes.dp_shard > 1 else "holds whole parameters"
        said.append(f"Rows (dp) see batches of their own; FSDP2 {over}.")
    if sizes.pp > 1:
        said.append("Frames (pp) hold the stages of a pipeline, one after the other.")
    yield f"<p>{' '.join(said)}</p>"


def _cuts(plan: ShardPlan) -> Iterator[str]:
    ranks = plan.config.tensor_parallel_size or 1
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[str]] = {}
    for parameter in plan.parameters:
        local = local_shape(parameter, ranks, 0)
        pattern = "".join("*" if part.isdigit() else f".{part}" for part in parameter.name.split("."))
        key = (pattern, parameter.shape, local, str(parameter.layout or "by user code"))
        alike.setdefault(key, []).append(parameter.name)
    yield f"<h2>Cuts over tp {ranks}</h2><p>Coloured is what the first rank holds; equal blocks are shown once.</p>"
    yield '<div class="wide"><table><tr><th></th><th>parameter</th><th>whole</th><th>of a rank</th><th>how</th></tr>'
    for (_, full, local, how), names in alike.items():
        cells = (f"<code>{escape(names_together(names))}</code>", _shape(full), _shape(local), escape(how))
        yield f"<tr><td>{cut(full, local, ranks)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table></div>"


def _of_a_step(found: Estimate, limit: int | None) -> Iterator[str]:
    yield from _memory([found], limit)
    rows = [
        (t.phase, t.operation, t.axis, str(t.ranks), str(t.count), in_words(t.bytes), in_words(t.sent))
        for t in found.traffic
    ]
    yield "<h2>What is sent in a step</h2>"
    yield _table(("phase", "operation", "axis", "ranks", "how many", "bytes", "sent by each rank"), rows)
    if found.pipeline is not None:
        waits = f"{found.pipeline.bubble:.1%} of the time is waiting, at least; sending takes none here."
        yield f"<h2>Schedule: {escape(found.pipeline.schedule)}</h2>"
        yield f'<div class="wide">{schedule(found.pipeline.slots)}</div><p>{waits}</p>'


def _memory(plans: Sequence[Estimate], limit: int | None) -> Iterator[str]:
    bars = [bar for plan in plans for bar in bars_of(plan)]
    longest = max([sum(sizes.values()) for _, sizes in bars] + [limit or 0, 1])
    yield "<h2>Memory of a rank at the peak</h2>"
    keys = (f'<span class="key"><i class="k{number}"></i>{kind}</span>' for number, kind in enumerate(KINDS))
    yield f"<div>{''.join(keys)}</div>"
    for name, sizes in bars:
        parts = "".join(
            f'<i class="k{number}" style="width:{100 * sizes.get(kind, 0) / longest:.2f}%" '
            f'title="{kind}: {in_words(sizes.get(kind, 0))}"></i>'
            for number, kind in enumerate(KINDS)
        )
        line = "" if limit is None else f'<b style="left:{100 * limit / longest:.2f}%"></b>'
        size = in_words(sum(sizes.values()))
        bar = f'<div class="bar">{parts}{line}</div>'
        yield f'<div class="row"><span>{escape(name)}</span>{bar}<span>{size}</span></div>'
    for plan in plans[:1]:
        yield f"<p>{escape(headline('', plan, mesh=False))}. What is no tensor (a CUDA context, NCCL) comes on top.</p>"
    if limit is not None:
        yield f"<p>The line is the limit: {in_words(limit)}.</p>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line.strip())}</li>' for line in lines)}</ul>" if lines else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"
