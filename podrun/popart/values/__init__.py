"""What all of the front end speaks of: exceptions, enumerations, types and shapes of tensors, groups of replicas,
reserved and former names, debug contexts and the log.

Only values and names may enter; nothing here knows a session, a builder or a device.
"""
