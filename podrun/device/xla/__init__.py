"""The numerical pieces of a program, compiled and run by XLA and oneDNN on the CPU.

StableHLO enters through `pieces`, which compiles it once per host, for one of the `clients`. `vetting` first reads
pieces that podrun did not export, in a process of their own, and `custom_calls` lists what a piece may call. `rewrite`
replaces convolutions by calls of oneDNN (`convolutions`, `epilogues`, `channels_last`, `sums`). Compiled calls go to
`podrun.device.program`; nothing here knows IPUs.
"""
