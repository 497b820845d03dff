"""Where faults enter."""

from __future__ import annotations

from podrun.errors import error_from_dict
from podrun.faults.effects import error_for
from podrun.faults.point import FaultPoint
from podrun.faults.spec import parse_fault, parse_faults


def test_a_link_that_broke_at_its_other_end_is_broken_here_too():
    point = FaultPoint(range(4, 8), machine=1)
    point.plan(parse_faults("link:2-4@step=3:down;link:2-4@step=9:down;ipu:5@step=3:trap"))
    first, later = parse_fault("link:2-4@step=3:down"), parse_fault("link:2-4@step=9:down")
    arrived = error_from_dict(error_for(first, partition="pod").to_dict())
    assert point.other_end(arrived) == first
    assert point.other_end(arrived) is None
    assert point.other_end(error_for(parse_fault("ipu:5@step=3:trap"))) is None
    assert later in point.planned
