from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdvanceRequest(_message.Message):
    __slots__ = ("at_most_seconds",)
    AT_MOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    at_most_seconds: float
    def __init__(self, at_most_seconds: _Optional[float] = ...) -> None: ...

class SubmittedJob(_message.Message):
    __slots__ = ("name", "size", "requested_seconds", "user", "submitted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    requested_seconds: float
    user: str
    submitted: float
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., requested_seconds: _Optional[float] = ..., user: _Optional[str] = ..., submitted: _Optional[float] = ...) -> None: ...

class AdvanceReply(_message.Message):
    __slots__ = ("now", "submitted", "ended", "done", "waiting")
    NOW_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    now: float
    submitted: _containers.RepeatedCompositeFieldContainer[SubmittedJob]
    ended: _containers.RepeatedScalarFieldContainer[str]
    done: bool
    waiting: int
    def __init__(self, now: _Optional[float] = ..., submitted: _Optional[_Iterable[_Union[SubmittedJob, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ..., done: _Optional[bool] = ..., waiting: _Optional[int] = ...) -> None: ...
