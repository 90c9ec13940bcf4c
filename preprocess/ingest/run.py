"""One run of an ingest: what all its stages share."""

import numpy as np
from numpy.typing import NDArray

from blockstore.writer import StoreWriter
from preprocess.ingest.graph import GraphStages
from preprocess.ingest.plan import IngestJob
from preprocess.pipeline.progress import Progress
from preprocess.pipeline.stage import PipelineRun, Stage
from preprocess.pipeline.work import WorkFolder


class IngestRun(PipelineRun):
    """The store that is written, and the graph between its stages."""

    def __init__(
        self,
        job: IngestJob,
        partition: NDArray[np.uint32] | None,
        work: WorkFolder,
        progress: Progress,
        writer: StoreWriter,
    ) -> None:
        """`partition`: uint32 (num_nodes,), of each node, if one is given."""
        super().__init__(work, progress, writer)
        self.writer, self.partition = writer, partition
        self.graph = GraphStages(
            job.source, job.contents, job.options, job.share, work.path, progress
        )


IngestStage = Stage[IngestRun]
