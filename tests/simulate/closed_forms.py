"""Formulas that simulations are checked against, and that answer at once where their assumptions hold.

Sources: Kokolis et al. (arXiv 2410.21680) for ETTR; Young, Daly, and Aupy et al. (arXiv 1302.3752) for checkpoints;
Erlang, Cosmetatos (1976), Sakasegawa (1977), Kingman and Allen-Cunneen for queues; Blom for the largest of many. Times
are in any one unit unless the name says which. `podrun.checkpoint.policy` has the intervals,
and the formulas that the product uses.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np


def ettr(failures_per_day: float, overhead_days: float, interval_days: float, write_days: float) -> float:
    """Expected share of useful time: (1 - f (u0 + dt/2)) / (1 + w/dt), f the failures of the job per day. A line that
    is too low, and below 0, where failures are frequent."""
    lost = failures_per_day * (overhead_days + interval_days / 2)
    return (1 - lost) / (1 + write_days / interval_days)


def job_mttf_hours(units: float, per_1000_unit_days: float) -> float:
    """Mean hours between failures of a job of so many units."""
    return 24_000 / (units * per_1000_unit_days)


def fit_of(failures: float, unit_hours: float) -> float:
    """Failures in 1e9 hours of one unit."""
    return failures / unit_hours * 1e9


def expected_rollback(interval: float, mttf: float) -> float:
    """Work lost at a failure, given that it comes within the interval."""
    return mttf - interval / math.expm1(interval / mttf)


def overhead_ettr(mttf: float, cost: float, restore: float, queued: float) -> float:
    """1 / (1 + f) with f = sqrt(2 C / M) + (R + q) / M."""
    return 1 / (1 + math.sqrt(2 * cost / mttf) + (restore + queued) / mttf)


def stalled_efficiency(mttf: float, stall: float) -> float:
    """Share of useful time of a job whose replicas only stall to regroup after a failure: (M - stall) / M."""
    return max(0.0, 1 - stall / mttf)


# --- queues: service time 1, utilisation rho, c servers ----------------------------------------------------------


def erlang_c(servers: int, rho: float) -> float:
    """The share of arrivals that wait in M/M/c."""
    load = servers * rho
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - rho * (1 - blocked))


def wait_mmc(servers: int, rho: float) -> float:
    """The mean wait in a queue with ``servers`` servers (M/M/c) at load ``rho``, in mean service times."""
    return erlang_c(servers, rho) / (servers * (1 - rho))


def wait_mdc(servers: int, rho: float) -> float:
    """Mean wait in M/D/c, exact: the chain of the number in the system at times one service apart, and Little's law."""
    load = servers * rho
    states = servers + int(60 / (1 - rho)) + 200
    steps = np.arange(states)
    logs = steps * math.log(load) - load - np.cumsum(np.log(np.maximum(steps, 1)))
    arrivals = np.exp(logs)
    chain = np.zeros((states, states))
    for n in range(states):
        left = max(n - servers, 0)
        chain[n, left:] = arrivals[: states - left]
        chain[n, -1] += max(0.0, 1.0 - chain[n].sum())
    equations = np.vstack([(chain.T - np.eye(states))[:-1], np.ones(states)])
    shares = np.linalg.solve(equations, np.append(np.zeros(states - 1), 1.0))
    return float((shares @ steps - load) / load)


def wait_cosmetatos(servers: int, rho: float) -> float:
    """Mean wait in M/D/c by Cosmetatos."""
    more = (1 - rho) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * rho * servers)
    return 0.5 * wait_mmc(servers, rho) * (1 + more)


def wait_sakasegawa(servers: int, rho: float) -> float:
    """Mean wait in M/M/c by Sakasegawa."""
    return float(rho ** (math.sqrt(2 * (servers + 1)) - 1)) / (servers * (1 - rho))


def wait_allen_cunneen(servers: int, rho: float, arrivals_cv: float, service_cv: float) -> float:
    """Mean wait in G/G/c: M/M/c's times the mean of the squared coefficients of variation. One server: Kingman."""
    return wait_mmc(servers, rho) * (arrivals_cv**2 + service_cv**2) / 2


# --- the slowest of many, spares ---------------------------------------------------------------------------------


def expected_maximum(count: int) -> float:
    """The mean of the largest of ``count`` standard normal numbers, by integrating its distribution."""
    grid = np.linspace(-9.0, 9.0, 200_001)
    below = 0.5 * (1 + _erf(grid / math.sqrt(2)))
    powers = below**count
    right, left = grid >= 0, grid < 0
    return float(np.trapezoid(1 - powers[right], grid[right]) - np.trapezoid(powers[left], grid[left]))


def _erf(values: np.ndarray) -> np.ndarray:
    """The error function of an ascending array that ends where it is 1: its density, summed up."""
    density = 2 / math.sqrt(math.pi) * np.exp(-(values**2))
    steps = np.diff(values) * (density[1:] + density[:-1]) / 2
    summed = np.concatenate([[0.0], np.cumsum(steps)])
    return np.asarray(summed / summed[-1] * 2 - 1)


def blom_maximum(count: int) -> float:
    """Blom's approximation of `expected_maximum`, .3 to .4 % low."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def harmonic(count: int) -> float:
    """The mean of the largest of ``count`` exponential times of mean 1."""
    return math.fsum(1.0 / n for n in range(1, count + 1))


def availability(per_1000_unit_days: float, repair_hours: float) -> float:
    """Share of time that a unit works."""
    return 1 / (1 + per_1000_unit_days / 1000 * repair_hours / 24)


def spares_for(mean_down: float, share: float) -> int:
    """The fewest spares s so that P(down <= s) >= share, if units fail independently: Poisson. Bursts and lemons need
    about twice as many."""
    spares, term = 0, math.exp(-mean_down)
    total = term
    while total < share:
        spares += 1
        term *= mean_down / spares
        total += term
    return spares


def blocks_available(blocks: int, needed_blocks: int, chip_availability: float, chips: int) -> float:
    """P(at least so many of the blocks work), a block working if all its chips do."""
    works = chip_availability**chips
    return math.fsum(
        math.comb(blocks, k) * works**k * (1 - works) ** (blocks - k)
        for k in range(needed_blocks, blocks + 1)
    )
