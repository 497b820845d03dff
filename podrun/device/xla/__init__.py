"""The numerical pieces of a program, compiled and run by XLA on the CPU.

`pieces` compiles them, once per process and host (`cache_place` says where compiled code is kept), for one of the
`clients` of XLA. `rewrite` puts calls into oneDNN in the place of convolutions (`convolutions`, `epilogues`,
`channels_last`, `sums`; `stablehlo` reads and writes the text they work on); `cutting` divides a piece with many of
them into `steps`, which `kept_steps` keeps on disk. `heap` is about the memory that pieces free.
"""
