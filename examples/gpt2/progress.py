"""Output of a run: progress lines for people, and a file of exact losses for programs."""

import json
import time
from pathlib import Path


class Progress:
    """Speaks on rank 0 and is silent on the others."""

    def __init__(self, rank: int, steps: int, interval: int, losses: str = "") -> None:
        self._speaks, self._steps, self._interval, self._losses = rank == 0, steps, interval, losses
        self._last_step, self._last_time = 0, 0.0

    def say(self, text: str) -> None:
        """Print at once, also into a pipe."""
        if self._speaks:
            print(text, flush=True)

    def step(self, step: int, loss: float, lr: float, validation: float | None = None) -> None:
        """Tell of a step that was done; every so many steps in a line, and always to the file."""
        if not self._speaks:
            return
        if self._losses:
            # Hexadecimal keeps every bit, so that equal text means equal losses.
            record = {"step": step, "loss": loss.hex(), "lr": lr}
            record |= {} if validation is None else {"validation": validation.hex()}
            with Path(self._losses).open("a") as file:
                file.write(json.dumps(record) + "\n")
        if not self._last_step or step % self._interval == 0 or validation is not None:
            self._print(step, loss, lr, validation)

    def _print(self, step: int, loss: float, lr: float, validation: float | None) -> None:
        now = time.perf_counter()
        pace = 1e3 * (now - self._last_time) / (step - self._last_step) if self._last_step else 0.0
        shown = f"  {pace:5.0f} ms a step" if pace else ""
        shown += f"  validation {validation:.4f}" if validation is not None else ""
        self.say(f"step {step:5d}/{self._steps}  loss {loss:.4f}  lr {lr:.1e}{shown}")
        self._last_step, self._last_time = step, now
