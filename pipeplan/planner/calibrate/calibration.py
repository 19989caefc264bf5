"""Which constants of an estimate do measured iterations bear? A few of them, fitted; and what error they leave.

An iteration's time is that of its critical path: so many passes of each layer, and the rest. With the path known it is
a sum of what passes take, and each pass takes the longer of two sums that are linear in the constants
(:mod:`pipeplan.cost.roofline`). So a fit needs few simulations: one of each run for the paths, which are found again
with the constants fitted. Errors are relative. How many constants are fitted is decided by the error on runs left out.

Runs that wait for their host say what it takes, others what share of peak and bandwidth kernels reach: what too few
runs tell isn't fitted, and shares stay within 0.9. Runs of one model often say what its host takes, but hardly in which
pass: a forward that waits for its host looks like one with slow kernels. Constants of a kind (the host's times, the
device's shares) therefore keep to the ratio that they had as far as the runs let them. How much that weighs grows with
the number of runs: what an estimate gets wrong it gets wrong in all of them, and doesn't average out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...cost.roofline import Constants
from ...errors import BadInput
from .costed import Floats, Passes, Run, critical_passes

PATHS = 3  # times that critical paths are looked for
STARTS = (1.0, 3.0, 8.0)  # times the host's first guess, from which fits begin
STEPS = 30  # of a fit
PRIOR = 0.01  # relative error of one run, that a factor of e between a constant and its start counts as
TOGETHER = 0.02  # of every run, that a factor of e between two constants of a kind does
FOLDS = 10  # of more runs than twice that
FEWEST = 8  # runs that a calibration needs; fewer only adjust constants
EACH = 2  # runs that say something of its kind, for every constant that is fitted
SLOW = 3.3  # times the host's first guess: then runs that it may hold up wait for it
TOLD = 0.05  # of a run's time, by which it then differs
MOST_SHARE = 0.9  # of peak and bandwidth
BOOTSTRAPS = 20
GAIN = 0.95  # of the error on runs left out, that a further constant has to leave at most
SHARES_GAIN = 0.5  # likewise the first of a device: fitted to one model, shares are worse for another than hosts alone
LEAST_HOST_NS = 5000.0  # where none was said, from which the host's fit begins


@dataclass(frozen=True, slots=True)
class Freedom:
    """A set of constants that are fitted together: for each the fields of :class:`Constants` that it scales, by the
    factor or, for shares, by its inverse; and pairs of a kind, by their indices."""

    names: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def of_hosts(self) -> list[bool]:
        """Which constants are of hosts, and not of devices."""
        return [name.startswith("host") for name in self.names]

    def moved(self, start: Constants, factors: Sequence[float]) -> Constants:
        """Return ``start`` with each constant ``factors`` times as long; shares stay within what kernels reach."""
        values: dict[str, float] = {}
        for scaled, factor in zip(self.fields, factors, strict=True):
            most = {x: max(MOST_SHARE, getattr(start, x)) for x in scaled if x.endswith("share")}
            factor = max(factor, min((getattr(start, x) / y for x, y in most.items()), default=0.0))
            for name in scaled:
                value = getattr(start, name)
                values[name] = min(most[name], value / factor) if name in most else value * factor
        return replace(start, **values)

    def prior(self, runs: int) -> Floats:
        """Return the matrix that makes errors of the logarithms of the factors, where ``runs`` are fitted."""
        every = np.eye(len(self.names))
        pairs = [TOGETHER * np.sqrt(runs) * (every[i] - every[j]) for i, j in self.pairs]
        return np.stack([*(PRIOR * every), *pairs])


_SHARES, _HOST = ("compute_share", "bandwidth_share"), ("forward_host_ns", "backward_host_ns")
_SCALE, _APART = (*_SHARES, "kernel_ns"), tuple((x,) for x in _HOST)
FREEDOMS = (
    Freedom(("host",), (_HOST,)),
    Freedom(("scale",), (_SCALE,)),
    Freedom(("host forward", "host backward"), _APART, ((0, 1),)),
    Freedom(("scale", "host"), (_SCALE, _HOST)),
    Freedom(("scale", "host forward", "host backward"), (_SCALE, *_APART), ((1, 2),)),
    Freedom(
        ("compute", "bandwidth", "host forward", "host backward"), (*((x,) for x in _SHARES), *_APART), ((0, 1), (2, 3))
    ),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants, which of them were fitted and by which ``factors``, the mean relative error on the runs themselves and
    on runs left out (None: too few to leave any out), and each run's predicted time when it was left out, or with
    all."""

    constants: Constants
    freedom: Freedom
    factors: tuple[float, ...]
    error: float
    left_out: float | None
    predicted_ns: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """The fit that was chosen among ``tried``, the error before, and the constants that it began with; ``ranges`` has
    for each constant that was fitted the values that 9 of 10 draws of the runs lead to."""

    chosen: Fit
    ranges: dict[str, tuple[float, float]]
    tried: tuple[Fit, ...]
    start: Constants
    error_before: float
    names: tuple[str, ...]
    measured_ns: tuple[float, ...]

    @property
    def enough(self) -> bool:
        """Whether there were enough runs to call this a calibration."""
        return len(self.names) >= FEWEST

    @property
    def within(self) -> tuple[float, float]:
        """What nine of ten runs' predictions are multiplied by when measured, those of runs left out."""
        ratios = np.array(self.measured_ns) / np.array(self.chosen.predicted_ns)
        low, high = np.quantile(ratios, [0.05, 0.95]).tolist()
        return round(low, 2), round(high, 2)


class _Group:
    """Observations of one chain, by their ``rows``; their counts as matrices (runs, L), to predict all of them at
    once."""

    def __init__(self, rows: list[int], found: Sequence[Passes]) -> None:
        self.rows, self.chain = rows, found[0].chain
        self.rest: Floats = np.array([x.rest_ns for x in found])
        works = [x.work for x in self.chain.layers if x.work is not None]
        self.passes = [
            ([getattr(x, kind) for x in works], np.array([getattr(x, kind) for x in found]))
            for kind in ("forward", "backward", "optimizer")
        ]

    def predicted_ns(self, constants: Constants) -> Floats:
        """Return the time of each run."""
        ahead = self.chain.edges is not None
        (forward, forwards), (backward, backwards), (optimizer, steps) = self.passes
        found: Floats = self.rest + forwards @ np.array(constants.passes_ns(forward, False, ahead))
        found = found + backwards @ np.array(constants.passes_ns(backward[::-1], True, ahead)[::-1])
        found += steps @ np.array(constants.passes_ns(optimizer, False, False))
        return found


class _Observed:
    """All observations, grouped by chain."""

    def __init__(self, found: Sequence[Passes]) -> None:
        rows = dict[int, list[int]]()
        for row, one in enumerate(found):
            rows.setdefault(id(one.chain), []).append(row)
        self.groups = [_Group(own, [found[row] for row in own]) for own in rows.values()]
        self.measured: Floats = np.array([x.measured_ns for x in found])

    def ratios(self, constants: Constants) -> Floats:
        """Return predicted over measured, of each."""
        predicted = np.zeros(len(self.measured))
        for group in self.groups:
            predicted[group.rows] = group.predicted_ns(constants)
        return predicted / self.measured


def calibrate(
    runs: Sequence[Run], start: Constants, passes: Sequence[Passes] = (), hosts_alone: bool = False
) -> Calibration:
    """Return the constants that fit measured ``runs`` and single ``passes`` best, from ``start`` on; with
    ``hosts_alone`` kernels stay as they are.

    BadInput where there is nothing to fit, or a profile that is not an estimate.
    """
    if not runs and not passes:
        raise BadInput("there are no measured times to fit")
    chains = [*(x.chain for x in runs), *(x.chain for x in passes)]
    for chain in {id(x): x for x in chains}.values():
        if any(layer.work is None for layer in chain.layers):
            raise BadInput(
                f"profile {chain.name!r}: its times are measured, or estimated by an older version; only what was "
                "estimated is calibrated (pipeplan profile --estimate)"
            )
    begin = replace(
        start,
        forward_host_ns=start.forward_host_ns or LEAST_HOST_NS,
        backward_host_ns=start.backward_host_ns or LEAST_HOST_NS,
    )
    observed = _Observed([*(critical_passes(run, start) for run in runs), *passes])
    before, told = _mean_error(observed.ratios(start)), _told(observed, begin)
    tried: list[Fit] = []
    for freedom in FREEDOMS:
        counts = (freedom.of_hosts.count(False), freedom.of_hosts.count(True))
        borne = all(EACH * count <= rows for count, rows in zip(counts, told, strict=True))
        if (borne and not (hosts_alone and counts[0])) or (len(freedom.names) == 1 and max(told) < EACH):
            tried.append(_fit(runs, passes, freedom, begin))
    chosen = tried[0]
    for other in tried[1:]:
        gain = GAIN if all(other.freedom.of_hosts) or not all(chosen.freedom.of_hosts) else SHARES_GAIN
        if other.left_out is not None and chosen.left_out is not None and other.left_out < gain * chosen.left_out:
            chosen = other
    names = (*(run.name for run in runs), *(x.name for x in passes))
    measured = (*(x.measured_ns for x in runs), *(x.measured_ns for x in passes))
    observed = _Observed([*(critical_passes(run, chosen.constants) for run in runs), *passes])
    return Calibration(chosen, _ranges(observed, chosen, begin), tuple(tried), start, before, names, measured)


def _told(observed: _Observed, start: Constants) -> tuple[int, int]:
    """Return how many runs say something of devices, and how many of hosts, as far as these may be slower."""
    slow = FREEDOMS[0].moved(start, [SLOW])
    waiting, device = observed.ratios(slow), FREEDOMS[1].moved(slow, [1 / (1 - TOLD)])
    by_device = np.log(observed.ratios(device) / waiting) / -np.log(1 - TOLD)
    return int(np.sum(by_device > 0.5)), int(np.sum(np.log(waiting / observed.ratios(start)) > TOLD))


def _ranges(observed: _Observed, fit: Fit, start: Constants) -> dict[str, tuple[float, float]]:
    """Return between which values nine of ten draws of as many runs have each constant that was fitted."""
    random, count, found = np.random.default_rng(0), len(observed.measured), []
    for _ in range(BOOTSTRAPS):
        rows = random.integers(0, count, count)
        found.append(_least_squares(observed, rows, fit.freedom, start, [np.log(fit.factors)])[0])
    return {
        name: tuple(np.quantile([getattr(x, name) for x in found], [0.05, 0.95]).tolist())
        for scaled in fit.freedom.fields
        for name in scaled
    }


def _fit(runs: Sequence[Run], passes: Sequence[Passes], freedom: Freedom, start: Constants) -> Fit:
    constants, begins = start, [np.log([x if host else 1.0 for host in freedom.of_hosts]) for x in STARTS]
    for _ in range(PATHS):
        observed = _Observed([*(critical_passes(run, constants) for run in runs), *passes])
        every = np.arange(len(observed.measured))
        constants, factors = _least_squares(
            observed, every, freedom, start, begins if any(freedom.of_hosts) else begins[:1]
        )
    ratios = observed.ratios(constants)
    left_out = None
    predicted = ratios
    if len(every) > len(freedom.names):
        predicted = ratios.copy()
        for fold in _folds(len(every)):
            others, _ = _least_squares(observed, np.setdiff1d(every, fold), freedom, start, [np.log(factors)])
            predicted[fold] = observed.ratios(others)[fold]
        left_out = _mean_error(predicted)
    times = tuple((predicted * observed.measured).tolist())
    return Fit(constants, freedom, factors, _mean_error(ratios), left_out, times)


def _folds(count: int) -> Iterable[NDArray[np.int64]]:
    """Leave each run out once: alone, or of many a tenth of them together."""
    folds = count if count <= 2 * FOLDS else FOLDS
    return [np.arange(first, count, folds) for first in range(folds)]


def _mean_error(ratios: Floats) -> float:
    return float(np.mean(np.abs(ratios - 1)))


def _least_squares(
    observed: _Observed, rows: NDArray[np.int64], freedom: Freedom, start: Constants, begins: Sequence[Floats]
) -> tuple[Constants, tuple[float, ...]]:
    """Return the constants with the least squares of relative errors on ``rows``, and their factors: Levenberg and
    Marquardt, on the logarithms of the factors, from where it ``begins``."""
    best: tuple[float, Floats] | None = None
    for begin in begins:
        found = _descend(
            lambda x: observed.ratios(freedom.moved(start, np.exp(x).tolist()))[rows] - 1,
            begin,
            freedom.prior(len(rows)),
        )
        if best is None or found[0] < best[0] - 1e-12:
            best = found
    assert best is not None
    factors = tuple(np.exp(best[1]).tolist())
    return freedom.moved(start, factors), factors


def _descend(errors: Callable[[Floats], Floats], begin: Floats, prior: Floats) -> tuple[float, Floats]:
    """Return the least sum of squares found, and where; constants that errors say nothing of stay where ``prior``, a
    matrix that makes errors of them, has them."""

    def every(x: Floats) -> Floats:
        return np.concatenate([errors(x), prior @ x])

    x, damping = begin, 1e-3
    now = every(x)
    for _ in range(STEPS):
        slopes = np.stack([(every(x + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        moved = x - np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), slopes.T @ now)
        moved = np.clip(moved, -5.0, 5.0)
        then = every(moved)
        if then @ then < now @ now:
            gained = 1 - (then @ then) / (now @ now)
            x, now, damping = moved, then, damping / 5
            if gained < 1e-7:
                break
        else:
            damping *= 10
            if damping > 1e6:
                break
    return float(now @ now), x
