"""Which gradient norms are outliers: a z-score over the norms of the steps before."""

import statistics
from collections import deque
from collections.abc import Iterable
from math import isfinite

WINDOW = 100  # steps
OUTLIER_Z = 6.0  # norms have a heavy tail: three deviations come up every few hundred steps of a healthy run
_FEWEST = 20  # norms, before which a deviation means nothing


class GradientWatch:
    """Scores each norm against the last WINDOW finite ones.

    Args:
        norms: of the steps so far, oldest first; a resumed run takes them from its metrics, so that it scores as the
            undisturbed one.
    """

    def __init__(self, norms: Iterable[float]) -> None:
        self._norms = deque((norm for norm in norms if isfinite(norm)), WINDOW)

    def score(self, norm: float) -> float | None:
        """Returns how many standard deviations `norm` is above the mean, None if that says nothing; remembers it."""
        z = self._score(norm)
        if isfinite(norm):
            self._norms.append(norm)
        return z

    def _score(self, norm: float) -> float | None:
        if len(self._norms) < _FEWEST or not isfinite(norm):
            return None
        mean = statistics.fmean(self._norms)
        deviation = statistics.pstdev(self._norms, mean)
        return (norm - mean) / deviation if deviation > 0 else None
