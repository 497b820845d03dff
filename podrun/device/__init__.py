"""One emulated IPU-M2000, and the way host processes reach it.

In the order in which a program meets them: `connection` (what a host process sees), `ipuof` (how it gets
there, over gRPC or in process), `server` and `control` (the machine's gRPC service and its manager's client),
`machine` (who is attached, what is loaded, who waits for whom), `engine` (one loaded program), `interpreter`
(its instructions), `buffers`, `streams` and `pieces` (memory, host data, numerical pieces). `target` and
`tiles` hold the chip's facts and the model of its tiles.

Nothing here knows how machines are placed or who starts them; the partition service does.
"""
