"""One model on several ranks: processes of one machine, each with a part of the weights.

``RankGroup`` says what the ranks share. Every rank runs a ``Decoder`` of its part, one of them in the process of the
engine, the others in a ``rank_process``.

Tensor parallelism: a rank has a ``Shard`` of each layer, and all compute the same step together. The first one plans
and samples (``ParallelRunner``). What it runs it publishes to the others (``FirstRank``, ``StepChannel``).

Pipeline parallelism: a ``Stage`` has some of the layers, and each computes another step. The last one plans and
samples; a ``PipelineRunner`` publishes steps to the first stage, and they travel from stage to stage
(``StageChannel``).

Both: each stage has several ranks. The first one of each is in the pipeline, and the others do as it does.
"""
