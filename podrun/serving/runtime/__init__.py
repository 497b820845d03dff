"""The runtime of compiled models beside `podrun.serving.runner`: its settings, its queue, and the runners for special
uses.

`config` has the settings, `requests` the queue of a runner. `light_runner` runs exact batches and exchanges weights,
`pack_runner` puts short samples into one row, `host_concat` joins many small inputs on the host, `devices` names IPUs;
`views` and `factory` give all that the SDK's names. Nothing of a server's may enter.
"""
