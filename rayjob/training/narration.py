"""Progress lines of a run: one per interval, with rate, ETA and cost; implements `Sink`."""

import logging
import statistics
import time
from collections.abc import Sequence

from rayjob.training.metrics import MetricsRow

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class Narration:
    """Logs a line for each validation, and otherwise the newest step every ten seconds.

    Args:
        n_steps: of the whole run.
        step: that this attempt goes on from; earlier ones have been told.
    """

    name = "narration"

    def __init__(self, n_steps: int, step: int) -> None:
        self._n_steps = n_steps
        self._step = step
        self._last_s = 0.0

    def open(self) -> int:
        return self._step

    def send(self, rows: Sequence[MetricsRow]) -> None:
        rate = statistics.median(row.tokens_per_s for row in rows)
        for row in rows:
            is_due = row is rows[-1] and time.monotonic() - self._last_s >= _INTERVAL_S
            if is_due or row.val_loss is not None:
                self._last_s = time.monotonic()
                logger.info(progress_line(row, self._n_steps, rate))

    def close(self, status: str) -> None:
        pass


def progress_line(row: MetricsRow, n_steps: int, tokens_per_s: float) -> str:
    """Returns one line about a step, the rate smoothed by the caller."""
    eta_s = (n_steps - row.step) * (row.tokens / row.step) / tokens_per_s
    parts = [
        f"step {row.step}/{n_steps}",
        f"loss {row.loss:.4f}",
        f"lr {row.lr:.1e}",
        f"grad {row.grad_norm:.2f}",
        f"{tokens_per_s:,.0f} tok/s",
        f"data {row.data_wait_pct:.1f}%",
        f"eta {format_duration(eta_s)}",
        f"${row.cost_usd:.2f}",
    ]
    if row.mfu_pct is not None:
        parts.insert(5, f"mfu {row.mfu_pct:.1f}%")
    if row.val_loss is not None:
        parts.insert(2, f"val {row.val_loss:.4f} ({row.val_bits_per_byte:.3f} bits/byte)")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """Returns 2h31m, 4m05s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"
