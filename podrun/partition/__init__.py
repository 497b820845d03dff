"""Partitions: who owns which IPUs of the POD, and in what state they are. The protocol and the commands are V-IPU's.

Only what decides about partitions, keeps them, or carries that out may enter::

    commands/ -> client/ -> server/ -> state/     decides (events in, changes and instructions out), then stores
                               |
                               +-----> machines/  starts, configures, watches and ends what runs the IPUs
    host/                                         processes and files of this host; all of these use it

A request goes from `client` to `server`; the allocator in `state` decides, the store commits, and then machines are
told. Launcher and monitor are clients. Importing this package or its commands imports neither gRPC nor Ray; they are
imported when first used.
"""
