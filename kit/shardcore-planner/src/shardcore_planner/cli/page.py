"""One page for a browser: the mesh, what is cut where, the memory of each rank. Nothing in it is from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardcore.mesh.axes import Sizes
from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import heading, names_together
from shardcore_cli.tables import in_words
from shardcore_planner import KINDS, Estimate
from shardcore_planner.cli.colours import KINDS_OF_MEMORY, STYLE
from shardcore_planner.cli.cuts import cuttings, shape_in_words
from shardcore_planner.cli.drawings import cut, mesh, schedule
from shardcore_planner.cli.explain import Explained, in_short
from shardcore_planner.cli.plan import bars_of, headline, mesh_in_words
from shardcore_planner.cli.sheet import sheet
from shardcore_planner.search import Found

_STYLE = f"""{STYLE}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 24px 16px 48px; max-width: 1000px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.1rem; margin: 32px 0 8px; }}
p, li {{ color: var(--soft); overflow-wrap: anywhere; }} ul {{ padding-left: 20px; margin: 8px 0; }}
.wide {{ overflow-x: auto; }} svg {{ display: block; max-width: none; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th, td {{ text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }}
td {{ white-space: nowrap; }} code {{ font-size: .85rem; }}
.bar {{ display: flex; height: 22px; background: var(--card); position: relative; }}
.bar i {{ display: block; height: 100%; }} .bar span {{ padding-left: 6px; white-space: nowrap;
  line-height: 22px; position: relative; z-index: 1; background: var(--card); }}
.bar b {{ position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--limit); }}
.row {{ display: grid; grid-template-columns: minmax(90px, 24%) 1fr; gap: 10px; align-items: center; margin: 6px 0; }}
.key {{ display: inline-flex; align-items: center; gap: 6px; margin-right: 18px; color: var(--soft); }}
.key i {{ width: 12px; height: 12px; }}
{" ".join(f".k{number} {{ background: {colour}; }}" for number, colour in enumerate(KINDS_OF_MEMORY))}
@media (max-width: 640px) {{ .row {{ grid-template-columns: 1fr; gap: 2px; }} .cuts th {{ display: none; }}
  .cuts tr {{ display: grid; grid-template-columns: 64px 1fr; column-gap: 10px; padding: 8px 0;
    border-bottom: 1px solid var(--line); }} .cuts tr:first-child {{ display: none; }}
  .cuts td {{ grid-column: 2; border: 0; padding: 0; white-space: normal; overflow-wrap: anywhere; }}
  .cuts td:first-child {{ grid-column: 1; grid-row: 1 / 5; }}
  .cuts td[data-of]::before {{ content: attr(data-of) ": "; color: var(--soft); }} }}
"""

#: The part of a row's width that the longest bar takes; its number stands in the rest.
_LONGEST = 78


def of_a_plan(model: str, explained: Explained) -> str:
    """Return the page of ``shardcore explain``."""
    sizes = sizes_of(explained.plan)
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


def picture_of_a_plan(model: str, explained: Explained) -> str:
    """Return the picture of ``shardcore explain``."""
    sizes = sizes_of(explained.plan)
    return sheet(f"{model}, {mesh_in_words(sizes)}", sizes, explained.plan)


def sizes_of(plan: ShardPlan) -> Sizes:
    """Return the sizes of a plan's mesh."""
    config = plan.config
    return Sizes(
        pp=config.pipeline_parallel_size or 1,
        tp=config.tensor_parallel_size or 1,
        dp_replicate=config.dp_replicate_size or 1,
        dp_shard=config.dp_shard_size or 1,
    )


def of_estimates(model: str, found: Sequence[Found], limit: int | None, plan: ShardPlan | None = None) -> str:
    """Return the page of ``shardcore plan``: of one mesh with all that is known, of several their memory.

    Args:
        model: what the user called it.
        found: the meshes.
        limit: the bytes that a rank has.
        plan: of the first mesh that could be planned; its mesh and its cuts are drawn.
    """
    plans = [f.estimate for f in found if f.estimate is not None]
    cuts = () if plan is None else _cuts(plan)
    if len(plans) == 1:
        return _page(headline(model, plans[0]), [*_mesh(plans[0].sizes), *cuts, *_of_a_step(plans[0], limit)])
    title = headline(model, plans[0], mesh=False) if plans else model
    problems = [f"{mesh_in_words(f.sizes)}: {f.problem}" for f in found if f.estimate is None]
    first = _mesh(plans[0].sizes) if plans else []
    return _page(title, [*_memory(plans, limit), *first, *cuts, _list(problems)])


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
    yield f"<h2>Cuts over tp {ranks}</h2><p>Coloured is what the first rank holds; equal blocks are shown once.</p>"
    yield '<div class="wide"><table class="cuts">'
    yield "<tr><th></th><th>parameter</th><th>whole</th><th>of a rank</th><th>how</th></tr>"
    for row in cuttings(plan):
        sizes = {"whole": shape_in_words(row.full), "of a rank": shape_in_words(row.local), "how": row.how}
        cells = "".join(f'<td data-of="{of}">{escape(said)}</td>' for of, said in sizes.items())
        drawn = cut(row.full, row.local, ranks)
        yield f"<tr><td>{drawn}</td><td><code>{escape(row.names)}</code></td>{cells}</tr>"
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
            f'<i class="k{number}" style="width:{_LONGEST * sizes.get(kind, 0) / longest:.2f}%" '
            f'title="{kind}: {in_words(sizes.get(kind, 0))}"></i>'
            for number, kind in enumerate(KINDS)
        )
        line = "" if limit is None else f'<b style="left:{_LONGEST * limit / longest:.2f}%"></b>'
        size = f"<span>{in_words(sum(sizes.values()))}</span>"
        bar = f'<div class="bar">{parts}{size}{line}</div>'
        yield f'<div class="row"><span>{escape(name)}</span>{bar}</div>'
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
