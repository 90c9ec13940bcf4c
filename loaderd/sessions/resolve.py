"""Resolve a request to its semantic parameters, and make the plan that serves them."""

from collections.abc import Sequence
from typing import NoReturn

from msgspec import structs

from blockstore.format import ITEM_BYTES, Manifest, NodeType, Relation
from blockstore.kernels.renumber import NODE_BITS
from loaderd.api.errors import Refused
from loaderd.api.protocol import (
    SAMPLER_VERSION,
    ArrayChoice,
    Attach,
    MacroBatch,
    Resolved,
    RowChoice,
    SeedEdges,
    Subgraph,
    Temporal,
)
from loaderd.api.requests import check_global_batch
from loaderd.memory.ledger import arrays_of, finest_rows, has_edge_rows, num_items
from loaderd.plans.base import Part
from loaderd.plans.hyperbatch import HyperbatchPlan
from loaderd.plans.macrobatch import MacrobatchPlan
from loaderd.plans.minibatch import GraphBounds, MinibatchPlan
from loaderd.plans.partitions import PartitionPlan
from loaderd.plans.roots import num_ends
from loaderd.plans.samplers import SAMPLERS
from loaderd.plans.subgraph import SubgraphPlan, option_values

MAX_TREES = (1 << 64 - NODE_BITS) - 1
NEGATIVES = ("none", "binary", "triplet")
EXCLUDE = ("none", "self", "reverse")
FRONTIERS = ("new", "layer")  # a hop expands newly found nodes, or all found so far
MAX_HOPS = 16
_FAMILIES = {MacrobatchPlan.name: "macro", PartitionPlan.name: "partitions"}  # of macro-batches
MAX_FANOUT = 1 << 16
# Pure parts of plans that sample, by the name in a request.  `auto`: as if all is in memory.
PLANS: dict[str, type[MinibatchPlan]] = {
    "auto": MinibatchPlan,
    **{p.name: p for p in (MinibatchPlan, HyperbatchPlan, MacrobatchPlan, PartitionPlan)},
}
WHOLE_COLUMNS = ((-1,),)  # fanouts of samplers that begin at no seeds


def seed_type(manifest: Manifest, request: Attach) -> NodeType:
    """The node type that the seeds belong to.  Raises Refused: it is unknown or not named."""
    if not request.seed_type and len(manifest.types) == 1:
        return manifest.types[0]
    for node_type in manifest.types:
        if node_type.name == request.seed_type:
            return node_type
    names = ", ".join(t.name for t in manifest.types)
    if not request.seed_type:
        raise Refused(f"the seeds' type was not named: expected one of {names} as input_type")
    raise Refused(f"seed type {request.seed_type!r} is not in the store: it has {names}")


def resolve_fanouts(request: Attach, relations: Sequence[Relation]) -> tuple[tuple[int, ...], ...]:
    """Fanouts [hop][relation].  Raises Refused: a relation has none, or one is out of range."""
    names = [_relation_name(r) for r in relations]
    for name in request.fanouts:
        if name not in names:
            raise Refused(f"fanouts name relation {name!r}; the store has {', '.join(names)}")
    by_relation = [request.fanouts.get(name, request.num_neighbors) for name in names]
    for name, fanouts in zip(names, by_relation, strict=True):
        if len(fanouts) != len(by_relation[0]):
            raise Refused(
                f"relation {name!r} has fanouts for {len(fanouts)} hops, expected "
                f"{len(by_relation[0])} as for {names[0]!r}; give every relation as many"
            )
    by_hop = tuple(zip(*by_relation, strict=True))
    if not 1 <= len(by_hop) <= MAX_HOPS:
        raise Refused(f"num_neighbors has {len(by_hop)} hops, expected 1 to {MAX_HOPS}")
    for hop, row in enumerate(by_hop):
        for k in row:
            if not -1 <= k <= MAX_FANOUT:
                raise Refused(
                    f"fanout {k} at hop {hop}: expected -1 (all neighbors), or up to {MAX_FANOUT}"
                )
        if not any(row):
            raise Refused(
                f"fanout 0 at hop {hop} of every relation: expected one that is drawn over; "
                "leave the hop out"
            )
    return by_hop


def resolve(manifest: Manifest, request: Attach, seeds_name: str, num_seeds: int) -> Resolved:
    """The semantic parameters of a session, fixed at its first attach.  Raises Refused."""
    if request.plan in SAMPLERS and not SAMPLERS[request.plan].rooted:
        fanouts: tuple[tuple[int, ...], ...] = WHOLE_COLUMNS
    else:
        fanouts = resolve_fanouts(request, manifest.relations)
    if num_seeds < 1:
        raise Refused(f"seeds {seeds_name!r}: there are none")
    check_global_batch(request)
    if request.frontier not in FRONTIERS:
        raise Refused(f"frontier {request.frontier!r}: expected {' or '.join(FRONTIERS)}")
    if request.replace and any(-1 in row for row in fanouts):
        raise Refused("replace=True: expected no fanout -1 (all neighbors); leave one of them out")
    if request.weighted and not all(r.has_weights for r in manifest.relations):
        raise Refused("weighted=True: the store has no edge weights; ingest a graph that has them")
    if request.labor is not None and (request.replace or request.weighted or request.temporal):
        what = "replace=True" if request.replace else "weighted=True"
        what = "times of the seeds" if request.temporal else what
        raise Refused(
            f"sampler 'labor': found {what}, expected neither replace nor weighted nor times, as "
            "one rank of each neighbor holds for all columns; leave it out, or take "
            "sampler 'neighbor'"
        )
    if request.return_e_id and any(r.edge_id_dtype is None for r in manifest.relations):
        raise Refused("return_e_id: the store has no edge ids; ingest with --edge-ids")
    for name, asked, held in (
        ("edge_weights", request.edge_weights, any(r.has_weights for r in manifest.relations)),
        ("edge_times", request.edge_times, any(r.has_times for r in manifest.relations)),
    ):
        if asked and not held:
            what = name.removeprefix("edge_")
            raise Refused(
                f"{name}: the store has no {what} of edges; ingest it with an array of its edges "
                f"that is named {what[:-1]!r}, or leave {name} out"
            )
    if request.edge_features:
        _check_edge_features(manifest)
    edges = _resolve_edges(manifest, request)
    temporal = _resolve_temporal(manifest, request, fanouts)
    macro = _resolve_macro(manifest, request) if request.plan in _FAMILIES else None
    subgraph = _resolve_subgraph(manifest, request)
    family = _FAMILIES.get(request.plan, "neighbor")
    return Resolved(
        family=family if subgraph is None else "subgraph",
        fingerprint=manifest.fingerprint,
        sampler=SAMPLER_VERSION,
        seeds=seeds_name,
        seed_type=seed_type(manifest, request).name if edges is None else "",
        num_seeds=num_seeds,
        fanouts=fanouts,
        frontier=request.frontier if subgraph is None else "layer",
        replace=request.replace,
        weighted=request.weighted,
        batch_size=request.batch_size,
        shuffle=request.shuffle,
        seed=request.seed,
        edge_ids=request.return_e_id,
        macro=macro,
        edges=edges,
        temporal=temporal,
        edge_features=request.edge_features,
        edge_weights=request.edge_weights,
        edge_times=request.edge_times,
        rows=resolve_rows(manifest, request),
        labor=request.labor,
        cycle=request.cycle,
        subgraph=subgraph,
    )


def _resolve_subgraph(manifest: Manifest, request: Attach) -> Subgraph | None:
    """The sampler of a plan of subgraphs, and its options; None: another plan.  Raises Refused."""
    sampler = SAMPLERS.get(request.plan)
    if sampler is None:
        if request.subgraph:
            raise Refused(
                f"subgraph: found plan {request.plan!r}, expected one of {', '.join(SAMPLERS)}; "
                "leave subgraph out"
            )
        return None
    for found, is_so in (
        ("a store of several node types or relations",
         max(len(manifest.types), len(manifest.relations)) > 1),
        ("edges as seeds", request.edges is not None),
        ("times of the seeds", request.temporal is not None),
        ("replace, weighted or labor",
         request.replace or request.weighted or request.labor is not None),
        (f"owners {request.owners!r}", bool(request.owners)),
        (f"reuse {request.reuse}", request.reuse != 1),
    ):  # fmt: skip
        if is_so:
            raise Refused(
                f"plan {request.plan!r}: found {found}, expected nodes as seeds in a store of one "
                "type and relation, and a plain epoch; take plan 'auto' for what it does not do"
            )
    if sampler.trees:
        _check_trees(manifest, request.batch_size)
    options = option_values(sampler.of(request.subgraph))
    return Subgraph(
        request.plan, tuple(options), tuple(options.values()), manifest.types[0].num_partitions,
        sampler.trees,
    )  # fmt: skip


def _check_edge_features(manifest: Manifest) -> None:
    """Raises Refused: there are none, or more than can be numbered."""
    if not has_edge_rows(manifest):
        raise Refused(
            "edge_features: the store has no arrays of edges; ingest a graph that has them "
            "(docs/layouts.md)"
        )
    items, finest = num_items(manifest, edges=True), finest_rows(manifest)
    if items >= 2 ** (8 * ITEM_BYTES[manifest.id_dtype]) - 2 or items // finest >= 2**31 - 1:
        raise Refused(
            f"edge_features: {items:,} nodes and edges together, expected fewer than 2^32 and than "
            "2^31 blocks' worth of the widest row"
        )


def resolve_rows(manifest: Manifest, request: Attach) -> RowChoice | None:
    """The row arrays that batches bring, type by type.  Raises Refused: no such array."""
    choice = request.rows
    if choice is None:
        return None
    held = {t.name: set(arrays_of(t)) - {"y"} for t in manifest.types}
    relations = {_relation_name(r): set(r.features) for r in manifest.relations}
    owners, found = held | relations, list[ArrayChoice]()
    given = {own.owner: own.names for own in choice.arrays}

    def refuse(what: str) -> NoReturn:
        named = (f"{name} of {owner}" for owner, own in owners.items() for name in sorted(own))
        raise Refused(f"features: {what}: the store has {', '.join(named) or 'none'}")

    for owner, names in given.items():
        if owner not in owners and owner not in ("", "*"):
            refuse(f"found the type or relation {owner!r}")
        every = set[str]().union(*(held if owner == "" else relations).values())
        there = owners.get(owner, every)
        for name in names:
            if name not in there:
                refuse(f"found the array {name!r}" + (f" of {owner!r}" if owner in owners else ""))
    for owner, own in owners.items():
        asked = given.get(owner, given.get("" if owner in held else "*"))
        if asked is not None:
            found.append(ArrayChoice(owner, tuple(sorted(own & set(asked)))))
    if choice.label and not any(choice.label in own for own in held.values()):
        refuse(f"found the array {choice.label!r} as labels")
    return RowChoice(tuple(found), choice.labels, choice.label)


def find_relation(manifest: Manifest, name: str) -> int:
    """The relation of this name, "src__name__dst"; "": the only one.  Raises Refused."""
    names = [_relation_name(r) for r in manifest.relations]
    if not name and len(names) == 1:
        return 0
    if name not in names:
        found = f"relation {name!r} is not in the store" if name else "no relation was named"
        raise Refused(f"edges: {found}: expected one of {', '.join(names)}")
    return names.index(name)


def seed_relation(manifest: Manifest, request: Attach) -> Relation | None:
    """The relation that seed edges belong to; None: seeds are nodes.  Raises Refused."""
    if request.edges is None:
        return None
    return manifest.relations[find_relation(manifest, request.edges.relation)]


def _resolve_edges(manifest: Manifest, request: Attach) -> SeedEdges | None:
    """Resolve the parameters of seed edges.  Raises Refused."""
    edges = request.edges
    if edges is None:
        return None
    if request.plan in _FAMILIES:
        raise Refused(
            f"plan {request.plan!r}: its seeds are nodes, an edge has ends in two partitions; "
            "take plan 'auto' for edges"
        )
    for name, value, known in (
        ("negatives", edges.negatives, NEGATIVES), ("exclude", edges.exclude, EXCLUDE),
    ):  # fmt: skip
        if value not in known:
            raise Refused(f"edges.{name} is {value!r}, expected one of {', '.join(known)}")
    if (edges.negatives == "none") != (edges.amount == 0):
        raise Refused(
            f"edges.amount is {edges.amount:g} with negatives {edges.negatives!r}: expected 0 with "
            "'none', else more"
        )
    if edges.negatives == "triplet" and edges.amount % 1:
        raise Refused(f"edges.amount is {edges.amount:g}: expected a whole number for triplets")
    seeds = manifest.relations[find_relation(manifest, edges.relation)]
    reverse = ""
    if edges.exclude == "reverse":
        reverse = _relation_name(_reverse_of(manifest, seeds, edges.reverse))
    return SeedEdges(
        _relation_name(seeds), edges.negatives, float(edges.amount), edges.exclude, reverse
    )


def _resolve_temporal(
    manifest: Manifest, request: Attach, fanouts: tuple[tuple[int, ...], ...]
) -> Temporal | None:
    """Resolve the parameters of sampling by time.  Raises Refused."""
    temporal, edges = request.temporal, request.edges
    if temporal is None:
        return None
    if request.plan in _FAMILIES:
        raise Refused(f"plan {request.plan!r} does not sample by time; take plan 'auto'")
    if request.replace or request.weighted or any(-1 in row for row in fanouts):
        raise Refused(
            "temporal sampling: expected neither replace nor weighted nor fanout -1; leave them out"
        )
    drawn = [r for r, *row in zip(manifest.relations, *fanouts, strict=True) if any(row)]
    own = temporal.times == "edges"
    if own and edges is not None:
        drawn.append(manifest.relations[find_relation(manifest, edges.relation)])
    for relation in drawn:
        if not relation.has_times:
            raise Refused(
                f"temporal sampling: relation {_relation_name(relation)!r} has no times; ingest it "
                "with an array of its edges that is named 'time'"
            )
    if own and (edges is None or request.split != "all"):
        raise Refused("temporal.times 'edges': expected all edges as seeds; give the seeds' times")
    if edges is not None and edges.exclude != "none":
        raise Refused(
            f"edges.exclude is {edges.exclude!r} with temporal sampling, which excludes by time; "
            "expected 'none' (and strict, for edges with times of their own)"
        )
    trees = num_ends(edges, request.batch_size) if edges is not None else request.batch_size
    _check_trees(manifest, trees)
    return temporal


def _check_trees(manifest: Manifest, trees: int) -> None:
    """Raises Refused: nodes of so many trees cannot be told apart."""
    if trees >= MAX_TREES or manifest.num_nodes > 1 << NODE_BITS:
        raise Refused(
            f"nodes that seeds do not share: {trees} trees a batch and {manifest.num_nodes} nodes, "
            f"expected fewer than {MAX_TREES} and at most 2^{NODE_BITS}; ask for a smaller "
            "batch_size"
        )


def _relation_name(relation: Relation) -> str:
    return "__".join((relation.src, relation.name, relation.dst))


def _reverse_of(manifest: Manifest, seeds: Relation, asked: str) -> Relation:
    """The relation whose edges lead back.  Raises Refused."""
    back = [r for r in manifest.relations if (r.src, r.dst) == (seeds.dst, seeds.src)]
    if asked:
        found = [r for r in back if _relation_name(r) == asked]
    elif seeds.src == seeds.dst:
        found = [seeds]
    else:
        added = [r for r in back if r.reverse_of == seeds.name or seeds.reverse_of == r.name]
        found = added or back
    if len(found) != 1:
        names = ", ".join(map(_relation_name, back)) or "none"
        raise Refused(
            f"edges.reverse is {asked!r}: expected a relation from {seeds.dst!r} to {seeds.src!r}; "
            f"the store has {names}; name it as reverse, or exclude 'self' alone"
        )
    return found[0]


def _resolve_macro(manifest: Manifest, request: Attach) -> MacroBatch:
    """Resolve the parameters of macro-batches.  Raises Refused."""
    count = max(t.num_partitions for t in manifest.types)
    if not count:
        raise Refused(
            f"plan {request.plan!r}: the store is not partitioned; make one that is by `blockstore "
            "repartition STORE NEW --partitions 64`"
        )
    partitions = request.macro_partitions or max(1, count // 8)
    if request.plan == PartitionPlan.name:
        _check_whole(manifest, request)
        request = structs.replace(request, hubs=False, halos=False)
    if request.waiting and request.world_size > 1:
        raise Refused("reuse while waiting: expected one rank; ask for a number of passes instead")
    if partitions > count:
        raise Refused(f"macro_partitions is {partitions}, expected 1 to the store's {count}")
    return MacroBatch(
        num_partitions=count,
        partitions=partitions,
        reuse=request.reuse,
        waiting=request.waiting,
        hubs=request.hubs and any(t.hubs for t in manifest.types),
        halos=request.halos and has_halos(manifest),
    )


def _check_whole(manifest: Manifest, request: Attach) -> None:
    """Raises Refused: macro-batches cannot each be sampled as one batch."""
    several = max(len(manifest.types), len(manifest.relations)) > 1
    for found, is_so in (
        (f"frontier {request.frontier!r}", request.frontier != "layer"),
        ("a store of several node types or relations", several),
        (f"reuse {request.reuse}", request.reuse != 1),
        (f"owners {request.owners!r}", bool(request.owners)),
    ):
        if is_so:
            raise Refused(
                f"plan 'partitions': found {found}, expected frontier 'layer', one pass over seeds "
                "of a store of one node type and relation, and no owners"
            )


def has_halos(manifest: Manifest) -> bool:
    """Whether partitions store nodes from outside; the last group has only the hubs."""
    return any(
        t.halo is not None and t.halo.nodes.num_rows > (t.hubs.num_rows if t.hubs else 0)
        for t in manifest.types
    )


def asked_part(request: Attach) -> Part:
    return Part(request.rank, request.world_size, request.home)


def make_plan(manifest: Manifest, resolved: Resolved, part: Part, name: str) -> MinibatchPlan:
    """The plan of this name that serves these parameters."""
    bounds = GraphBounds(manifest.num_nodes, tuple(r.num_edges for r in manifest.relations))
    if resolved.subgraph is not None:
        asked = resolved.subgraph
        options = dict(zip(asked.options, asked.values, strict=True))
        return SubgraphPlan(resolved, part, bounds, SAMPLERS[asked.sampler].of(options))
    return PLANS[name](resolved, part, bounds)
