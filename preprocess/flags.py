"""Options of the `blockstore` command that have much to say, or that several commands have."""

from enum import StrEnum
from typing import Annotated

import typer

from preprocess.influence import HubScore
from preprocess.layouts import LAYOUTS
from preprocess.options import FeatureDtype, HopRows, Ids, Keep, NodeOrder
from preprocess.partition import Neighbors, Partitioner, Visit


class Operator(StrEnum):
    """`OperatorKind`: typer takes no list of literals."""

    sym = "sym"
    row = "row"
    ppr = "ppr"
    heat = "heat"


Mem = Annotated[str, typer.Option(help="memory to use, such as 512M or 2G")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="begin anew, do not go on where a run stopped")
]
Json = Annotated[bool, typer.Option("--json", help="for scripts")]

Layout = Annotated[
    str, typer.Option(help=f"of the source, where it is not recognised: {', '.join(LAYOUTS)}")
]
Undirected = Annotated[
    bool | None,
    typer.Option(
        "--undirected/--directed",
        help="add the reverse of each edge, drop duplicates; else as the source says",
        show_default=False,
    ),
]
StoredDtype = Annotated[FeatureDtype, typer.Option(help="of features in the store")]
BlockSize = Annotated[str, typer.Option(help="unit of disk I/O: 4K to 16M")]
EdgeIds = Annotated[bool, typer.Option(help="keep the id of each edge")]
Order = Annotated[NodeOrder, typer.Option(help="of nodes in the store")]
Duplicates = Annotated[Keep, typer.Option(help="equal edges")]
SelfLoops = Annotated[Keep, typer.Option(help="edges from a node to itself")]
AllowNan = Annotated[bool, typer.Option(help="take NaN features as they are")]
IdWidth = Annotated[Ids, typer.Option(help="width of node ids")]
IngestSeed = Annotated[int, typer.Option(help="of the random order and of seeded splits")]
Shares = Annotated[
    str, typer.Option(help="where there are no splits: shares of train, valid and test")
]
Partitions = Annotated[int, typer.Option(help="partition the nodes, for macro-batches; 0: do not")]
HopsAtOnce = Annotated[
    int, typer.Option(help="propagate features right away, as the command hops does; 0: do not")
]
HopLoops = Annotated[bool, typer.Option(help="of hops: a node is its own neighbor")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what it would take, and do nothing")]
Summary = Annotated[bool, typer.Option(help="look at the graph when it is there")]
Events = Annotated[
    bool, typer.Option("--json", help="for scripts: an event a line, see docs/preprocessing.md")
]

PartitionerOption = Annotated[
    Partitioner, typer.Option(help="gap balances labels of training nodes too")
]
Slack = Annotated[float, typer.Option(help="a partition holds so many times the mean")]
Gamma = Annotated[float, typer.Option(help="exponent of the cost of nodes")]
Passes = Annotated[int, typer.Option(help="over all edges")]
Alpha = Annotated[float, typer.Option(help="times the cost of FENNEL")]
Soften = Annotated[
    float, typer.Option(help="nodes of a class a partition below which it costs less; 0: none")
]
Deviations = Annotated[
    float,
    typer.Option(help="of a random partition, that a class may exceed its mean by; 0: any"),
]
Relative = Annotated[bool, typer.Option(help="sizes count relative to the share of the class")]
VisitOption = Annotated[Visit, typer.Option(help="in which order nodes are placed")]
NeighborsOption = Annotated[
    Neighbors, typer.Option(help="edges that draw a node; auto: both ways, unless symmetric")
]
Hubs = Annotated[
    str,
    typer.Option(help="of partitions: share of nodes, or bytes such as 64M; 0.01 if not given"),
]
HubScoreOption = Annotated[HubScore, typer.Option(help="walk: from training nodes, backwards")]
Halo = Annotated[
    float, typer.Option(help="outside nodes stored with a partition, as a share of its nodes")
]

Operators = Annotated[
    list[Operator] | None,
    typer.Option(help="of hops: sym if not given; several may be", show_default=False),
]
HopType = Annotated[
    str, typer.Option("--type", help="of hops: whose features, where it is not clear")
]
HopFeature = Annotated[str, typer.Option(help="of hops: which of several features")]
HopRelation = Annotated[
    str, typer.Option(help="of hops: which of several, its name or src-name-dst")
]
HopRowsOption = Annotated[
    HopRows, typer.Option(help="of hops: those of splits that have labels, or of all nodes")
]
HopAlpha = Annotated[float, typer.Option(help="of ppr: probability to go back")]
HopTime = Annotated[float, typer.Option(help="of heat: time")]
HopWeighted = Annotated[bool, typer.Option("--weighted", help="hops by weights of edges")]
