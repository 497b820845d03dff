"""Formulas against the worked values of the reference (rows O1 to O16), and intervals against tables."""

from __future__ import annotations

import pytest

from podrun.checkpoint.policy import daly_interval, optimal_period, periodic_efficiency, young_interval
from podrun.simulate.intervals import mean_interval, rate_interval, student_quantile
from tests.simulate import closed_forms as cf

MINUTE = 1 / 1440


@pytest.mark.parametrize(
    ("nodes", "rate", "u0", "dt", "write_s", "expected"),
    [
        (2000, 6.5, 5, 60, 0, 0.6840),
        (2000, 6.5, 5, 5, 0, 0.9323),
        (256, 6.5, 5, 60, 0, 0.9596),
        (512, 6.5, 5, 60, 0, 0.9191),
        (1500, 6.5, 10, 7.02, 10, 0.8875),
        (1500, 6.5, 5, 7.02, 10, 0.9205),
        (1500, 1.0, 5, 98.0, 300, 0.8979),
        (2048, 3.789, 10, 11.12, 20, 0.8895),
        (2048, 3.789, 5, 11.12, 20, 0.9157),
        (2048, 3.789, 10, 43.08, 300, 0.7437),
    ],
)
def test_the_share_of_useful_time_is_the_published_one(
    nodes: int, rate: float, u0: float, dt: float, write_s: float, expected: float
) -> None:
    found = cf.ettr(nodes * rate / 1000, u0 * MINUTE, dt * MINUTE, write_s / 86_400)
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("gpus", "rate", "hours"),
    [(1024, 6.5, 28.85), (4096, 6.5, 7.21), (16384, 6.5, 1.803), (65536, 6.5, 0.451), (16384, 3.789, 3.093)],
)
def test_mean_time_between_failures(gpus: int, rate: float, hours: float) -> None:
    assert cf.job_mttf_hours(gpus / 8, rate) == pytest.approx(hours, rel=1e-3)


def test_failures_in_time() -> None:
    assert cf.fit_of(419, 16_384 * 1296) == pytest.approx(19_733, rel=1e-4)


@pytest.mark.parametrize(
    ("mttf", "cost", "young", "daly"),
    [
        (86_400, 300, 7200, 7001.4),
        (11_134.6, 20, 667.37, 654.10),
        (3600, 60, 657.27, 617.88),
        (6490.4, 300, 1973.4, 1778.4),
    ],
)
def test_intervals_of_checkpoints(mttf: float, cost: float, young: float, daly: float) -> None:
    assert young_interval(cost, mttf) == pytest.approx(young, abs=0.06)
    assert daly_interval(cost, mttf) == pytest.approx(daly, abs=0.06)


@pytest.mark.parametrize(
    ("mttf", "optimum", "share"),
    [
        (3_849_609, 68_168, 0.98228),
        (962_402, 34_189, 0.96444),
        (240_601, 17_194, 0.92848),
        (120_300, 12_218, 0.89848),
    ],
)
def test_the_best_period_and_its_efficiency_are_the_published_ones(
    mttf: float, optimum: float, share: float
) -> None:
    period = optimal_period(600, mttf)
    assert period == pytest.approx(optimum, rel=2e-4)
    assert periodic_efficiency(period, 600, mttf, 600, 60) == pytest.approx(share, abs=1e-5)
    assert daly_interval(600, mttf) + 600 == pytest.approx(period, abs=1.5)


def test_rollback_and_overhead() -> None:
    assert cf.expected_rollback(3600, 11_134.6) == pytest.approx(1703.17, abs=0.01)
    assert cf.expected_rollback(3600, 3600) == pytest.approx(1504.88, abs=0.01)
    assert cf.expected_rollback(600, 86_400) == pytest.approx(299.65, abs=0.01)
    assert cf.overhead_ettr(7.9, 0.01, 0.25, 0.05) == pytest.approx(0.9189, abs=1e-4)


@pytest.mark.parametrize(
    ("servers", "rho", "share", "mmc", "mdc", "cosmetatos"),
    [
        (2, 0.8, 0.71111, 1.77778, 0.90328, 0.90098),
        (4, 0.8, 0.59643, 0.74554, 0.38609, 0.38543),
        (4, 0.9, 0.78775, 1.96938, 0.99997, 0.99956),
        (8, 0.7, 0.27060, 0.11275, 0.06268, 0.06250),
        (8, 0.9, 0.70153, 0.87692, 0.44997, 0.45080),
    ],
)
def test_waits_in_queues_are_those_of_the_tables(
    servers: int, rho: float, share: float, mmc: float, mdc: float, cosmetatos: float
) -> None:
    assert cf.erlang_c(servers, rho) == pytest.approx(share, abs=1e-5)
    assert cf.wait_mmc(servers, rho) == pytest.approx(mmc, abs=1e-5)
    assert cf.wait_mdc(servers, rho) == pytest.approx(mdc, abs=1e-5)
    assert cf.wait_cosmetatos(servers, rho) == pytest.approx(cosmetatos, abs=1e-5)


def test_formulas_of_waits_agree_for_one_server() -> None:
    assert cf.wait_mmc(1, 0.8) == pytest.approx(4)
    assert cf.wait_mdc(1, 0.8) == pytest.approx(2, rel=1e-6)
    assert cf.wait_allen_cunneen(1, 0.8, 1, 0) == pytest.approx(2)
    assert cf.wait_sakasegawa(1, 0.8) == pytest.approx(4)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(4, 1.0294), (16, 1.7660), (64, 2.3437), (256, 2.8269), (1024, 3.2482), (4096, 3.6261), (16384, 3.9714)],
)
def test_the_largest_of_many(count: int, expected: float) -> None:
    assert cf.expected_maximum(count) == pytest.approx(expected, abs=1e-4)
    if count > 100:
        assert cf.blom_maximum(count) == pytest.approx(expected, rel=0.005)


def test_spares_and_availability() -> None:
    assert [cf.harmonic(n) for n in (64, 1024, 16384)] == pytest.approx([4.7439, 7.5092, 10.2813], abs=1e-4)
    assert cf.availability(6.5, 4) == pytest.approx(0.99892, abs=1e-5)
    assert cf.availability(6.5, 48) == pytest.approx(0.98717, abs=1e-5)
    shares = (0.95, 0.99, 0.999)
    assert [cf.spares_for(53.248, share) for share in shares] == [66, 71, 77]
    assert [cf.spares_for(212.99, share) for share in shares] == [237, 248, 259]
    assert [cf.spares_for(2.396, share) for share in shares] == [5, 7, 8]
    assert cf.blocks_available(4, 4, 0.999, 64) == pytest.approx(0.999**256)


def test_intervals_of_95_percent_are_those_of_the_tables() -> None:
    assert [student_quantile(n, 0.975) for n in (1, 2, 4, 19)] == pytest.approx(
        [12.706, 4.303, 2.776, 2.093], abs=1e-3
    )
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert mean_interval([5.0]).low is None
    assert rate_interval(0, 1.0).high == pytest.approx(3.689, abs=1e-3)
    llama = rate_interval(419, 419.0)
    assert (llama.low, llama.high) == pytest.approx((0.906, 1.101), abs=1e-3)
