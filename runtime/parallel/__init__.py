"""One model on several ranks (tensor parallelism): processes of one machine, each with a shard of the weights.

``Shard`` says which part of a model a rank has, and ``RankGroup`` what the ranks share. Every rank runs a ``Decoder``
of its shard. The first one also plans and samples: a ``ParallelRunner`` publishes each step to the others
(``StepChannel``), which run ``rank_process``.
"""
