"""Describe a store's contents, as text and for scripts."""

from typing import Any

import msgspec

from blockstore.errors import StoreError
from blockstore.format import HopSet, Influence, graph_geometry, row_geometry
from blockstore.owners import list_owners, read_facts
from blockstore.store import Store
from blockstore.units import format_bytes
from preprocess.partition.report import partition_lines

_OWNER_FACTS = {  # facts of a map, and their titles
    "cross": "cross edges", "imbalance": "greatest load", "node_imbalance": "nodes",
    "row_imbalance": "rows loaded",
}  # fmt: skip


def store_info(store: Store) -> dict[str, Any]:
    """Manifest and sizes on disk, as plain values."""
    manifest = store.manifest
    arrays = {}
    for relation in manifest.relations:
        geometry = graph_geometry(relation.num_blocks, manifest.block_bytes)
        arrays[relation.path] = geometry.num_blocks * geometry.slot_bytes
    for rows in manifest.row_arrays():
        geometry = row_geometry(rows, manifest.block_bytes)
        arrays[rows.path] = geometry.num_blocks * geometry.slot_bytes
    folders = [store.path, *(store.stripes.parts() if store.stripes else ())]
    on_disk = sum(
        min(found.st_size, found.st_blocks * 512)  # a part has holes
        for folder in folders
        for found in (p.stat() for p in folder.rglob("*") if p.is_file())
    )
    built: dict[str, Any] = msgspec.to_builtins(manifest)
    return {
        "path": str(store.path),
        "disk_bytes": on_disk,
        "stripes": store.stripes.folders if store.stripes else (),
        "num_nodes": manifest.num_nodes,
        "num_edges": sum(r.num_edges for r in manifest.relations),
        "array_bytes": arrays,
        "manifest": built,
    }


def info_text(store: Store) -> str:
    """The facts of `store_info` as a short table."""
    manifest, facts = store.manifest, store_info(store)
    lines = [
        f"{store.path}",
        f"  fingerprint   {manifest.fingerprint}",
        f"  format        {manifest.format}, blocks of {format_bytes(manifest.block_bytes)}, ids "
        f"{manifest.id_dtype}, order {manifest.order}",
        f"  on disk       {format_bytes(facts['disk_bytes'])}",
    ]
    if store.part is not None:
        lines.append(f"  {store.part}")
    if store.stripes is not None:
        lines.append(f"  stripes       {store.stripes}")
    for t in manifest.types:
        lines.append(f"  {t.name:<13} {t.num_nodes:,} nodes")
        held = {**t.features, **({"label": t.label} if t.label else {})}
        for name, rows in held.items():
            shape = "x".join(str(n) for n in (rows.num_rows, *rows.row_shape))
            size = format_bytes(facts["array_bytes"][rows.path])
            lines.append(f"    {name:<11} {rows.dtype} {shape}, {size}")
        for name, rows in t.splits.items():
            lines.append(f"    {name:<11} {rows.num_rows:,} nodes")
        lines += [f"    hops, {name:<5} {hops_text(found)}" for name, found in t.hops.items()]
    for r in manifest.relations:
        ids = f", edge ids {r.edge_id_dtype}" if r.edge_id_dtype else ""
        size = format_bytes(facts["array_bytes"][r.path])
        lines.append(f"  {r.title}  {r.num_edges:,} edges in {r.num_blocks:,} blocks, {size}{ids}")
        for name, rows in r.splits.items():
            as_what = "pairs of nodes" if rows.row_shape else "positions"
            lines.append(f"    {name:<11} {rows.num_rows:,} edges, as {as_what}")
    policy = "reverses added, " if manifest.undirected else ""
    lines.append(
        f"  edges         {policy}duplicates {manifest.duplicates}, self-loops "
        f"{manifest.self_loops}"
    )
    if manifest.partitioning is not None:
        first, *rest = partition_lines(manifest.partitioning)
        lines += [f"  partitions    {first}", *(f"                {line}" for line in rest)]
    if manifest.influence is not None:
        first, *rest = influence_lines(manifest.influence)
        lines += [f"  hubs, halos   {first}", *(f"                {line}" for line in rest)]
    return "\n".join(lines)


def owner_lines(store: Store) -> list[str]:
    """A line for each owner map; for one that cannot be read, the reason."""
    lines = []
    for name in list_owners(store):
        try:
            found = read_facts(store, name)
        except StoreError as error:
            lines.append(f"  owners        {error}")
            continue
        stale = "" if found.fingerprint == store.manifest.fingerprint else ", of another store"
        line = owner_line(name, found.owners, found.facts)
        lines.append(f"  owners        {line}{stale}")
    return lines


def owner_line(name: str, owners: int, facts: dict[str, Any]) -> str:
    """Describe a map; facts may be missing if other software made it."""
    words = [f"{name}: {owners:,} owners by {facts.get('method', 'others')}"]
    for fact, text in _OWNER_FACTS.items():
        if fact in facts:
            words.append(f"{text} {facts[fact]:.3f}")
    return ", ".join(words)


def hops_text(found: HopSet) -> str:
    applied = "; ".join(f"{name}, {len(a) - 1} hops" for name, a in found.operators.items())
    x = next(iter(found.operators.values()))[0]
    width = "x".join(str(n) for n in x.row_shape)
    rows = f"{found.nodes.num_rows:,} rows of {width} from {found.feature}"
    return f"{x.dtype} {rows}: {applied}"


def influence_lines(found: Influence) -> list[str]:
    how = {"walk": f"{found.steps} lazy steps back from training nodes", "degree": "in-degree"}
    hubs = f"{found.num_hubs:,} hubs by {how[found.hub_score]}" if found.hub_score else "no hubs"
    halos = f"{found.num_slots:,} nodes in halos of at most {found.halo:g} of their partition"
    lines = [f"{hubs}; {halos if found.halo else 'no halos'}"]
    for kept in found.kept:
        alone, hubs_too, halos_too = (f"{share:.3f}" for share in kept.nodes)
        lines.append(
            f"of a training node's neighbors {kept.num_partitions:,} partitions keep {alone}, with "
            f"hubs {hubs_too}, with halos {halos_too}, and load {kept.loaded[2]:.3f} of the nodes"
        )
    return lines
