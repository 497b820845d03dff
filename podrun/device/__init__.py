"""One emulated IPU-M2000, and the way host processes reach it.

* `connection` is what a host process sees, `ipuof` how it gets there; `host` is what lies behind them.
* `service` is a machine's process and its gRPC side.
* `machine` is the machine itself: with `job` and `jobs` (who is attached, what is loaded, who waits for whom, at a
  `meeting`), `health` and `trouble` (what is broken, and how that is said), and `usage`.
* `program` is one program loaded on it, `xla` the numerical pieces that it computes.
* The chip: `target` holds its facts, `tiles` the model of its tiles.

Nothing here knows how machines are placed or who starts them; the partition service does.
"""
