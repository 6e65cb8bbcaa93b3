"""Trains, saves, and trains on; or resumes from what was saved, with another number of workers. Run by test_resume.py.

horovodrun -np 2 python resume_worker.py torch|tensorflow save FOLDER
horovodrun -np 3 python resume_worker.py torch|tensorflow resume FOLDER
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from resume_data import SAVED_AFTER, STEPS, batch, evaluation, file_of, trained, write


def main() -> None:
    framework, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    trainer = importlib.import_module({"torch": "torch_resume", "tensorflow": "tf_resume"}[framework])
    hvd = trainer.hvd
    trainer.start()

    def train(training: Any, steps: range) -> None:
        for step in steps:
            training.step(*batch(step, hvd.rank(), hvd.size()))

    def save(method: str) -> None:
        """Rank 0 saves; all go on as if nothing had happened."""
        training = trainer.Training(method)
        train(training, range(SAVED_AFTER))
        training.prepare_to_save()
        if hvd.rank() == 0:
            training.save(folder / f"{framework}-{method}")
        arrays = {**training.state(), "loss": {"saved": training.loss(*evaluation())}}
        train(training, range(SAVED_AFTER, STEPS))
        arrays["loss"]["last"] = training.loss(*evaluation())
        write(file_of(folder, framework, method, "saved", hvd.rank()), arrays)

    def resume(method: str) -> None:
        """Rank 0 loads, and gives the others what it has."""
        training = trainer.Training(method)
        if hvd.rank() == 0:
            training.load(folder / f"{framework}-{method}")
        training.broadcast()
        arrays = training.state()
        arrays["raw"], arrays["reduced"] = training.step(*batch(SAVED_AFTER, hvd.rank(), hvd.size()))
        train(training, range(SAVED_AFTER + 1, STEPS))
        arrays["loss"] = {"last": training.loss(*evaluation())}
        write(file_of(folder, framework, method, "resumed", hvd.rank()), arrays)

    for method in trained(framework):
        {"save": save, "resume": resume}[task](method)


if __name__ == "__main__":
    main()
