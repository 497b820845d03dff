"""The numerical pieces of a program, compiled and run by XLA and oneDNN on the CPU.

StableHLO enters through `pieces`, which compiles it once per host (for one of the `clients`, under the name of the
`instruction_set`) after `rewrite` has replaced convolutions by calls of oneDNN (`onednn`, `convolutions`, `epilogues`,
`channels_last`, `sums`, `stablehlo`). Compiled calls go to `podrun.device.program`; nothing here knows of IPUs.
"""
