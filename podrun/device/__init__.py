"""One emulated IPU-M2000, and the way host processes reach it.

In the order in which a program meets them:

* The host's side: `connection` (what a host process sees), `ipuof` (how it gets there: `twin` in its own
  process, `remote` over gRPC), `client` over the `ports` to each machine, `split` (whose part lies where),
  `partition_config`; tensors in `memory` that both share, runs started by `bell`.
* The service: `server` (the machine's process), `servicer` and `session` (its gRPC side), `wire`
  (messages), `control` (its manager's client), `report` and `usage` (what it tells), `cores` (where it
  computes).
* The machine: `machine`, `job` and `jobs` (who is attached, what is loaded, who waits for whom, at a
  `meeting`), `check` and `engine` (one loaded program), `interpreter` (its instructions) with `closing` (their end),
  `buffers`, `operands`, `streams`, `mail` and `team`; `fabric` and `positions` (other machines), `health` and
  `trouble` (what is broken, and how that is said).
* The pieces it computes: `pieces` on `clients` of XLA, with convolutions put in by `rewrite`
  (`convolutions`, `epilogues`, `channels_last`, `sums`; `stablehlo`) and cut by `cutting` into `steps`,
  kept on disk (`kept_steps`, `cache_place`); `heap`.
* The chip: `target` holds its facts, `tiles` the model of its tiles.

Nothing here knows how machines are placed or who starts them; the partition service does.
"""
