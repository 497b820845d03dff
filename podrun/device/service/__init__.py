"""A machine as a service.

`server` is its process, `servicer` the gRPC side, `session` what it does for one host process. `wire` turns messages
into values and back, `memory` is what both sides share, and `bell` starts a run there. `control` is what the partition
service asks of a machine; `report` what it tells about itself.
"""
