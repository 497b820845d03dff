"""How much POD a service needs, answered without hardware: models, arrivals and a batching rule in virtual time.

`costs` says how long a run of a model takes, by batch size. `arrivals` says when requests come. `queueing` lets
them wait for replicas under the same `BatchingRule` that the runtime and the servers obey. `planning` tries batch
sizes, delays and partitions, and `answer` shows the choice as text, JSON and a page. Nothing here reads a clock or
starts a thread.
"""
