"""A machine's own account of its work, over programs and jobs."""

from __future__ import annotations

from dataclasses import replace

from podrun.device.health import WorkDone
from tests.device.programs import linear


def test_samples_are_unknown_until_the_next_job_once_a_program_does_not_say() -> None:
    known = replace(linear(2), metadata={"samples_per_micro_batch": 4})
    unknown = replace(known, metadata={})
    done = WorkDone().and_a_run(known, 3, 0.5, 1.0)
    assert done.samples
    assert done.of_a_new_job() == done
    lost = done.and_a_run(unknown, 1, 0.5, 1.0).and_a_run(known, 1, 0.5, 1.0)
    assert lost.samples is None
    assert lost.batches == done.batches + 2 * known.batches_per_pass
    begun = lost.of_a_new_job()
    assert (begun.samples, begun.batches, begun.modelled_s) == (0, lost.batches, lost.modelled_s)
    assert begun.and_a_run(known, 3, 0.5, 1.0).samples == done.samples
