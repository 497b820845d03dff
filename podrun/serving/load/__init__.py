"""How a model server answers under load: `podrun load`, for servers of the v2 inference protocol over gRPC or HTTP.

`servers` asks a server for what a model takes and sends requests, `request_data` makes these. `generator` keeps so
many in flight, or sends so many a second at times of its own. `windows` counts answers by windows of time and says
when they are stable, and `figures` shows them as a table and as JSON.
"""
