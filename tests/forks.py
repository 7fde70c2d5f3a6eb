"""Real processes, forked from one that has the imports behind it: a fresh interpreter spends seconds on them."""

from __future__ import annotations

import multiprocessing

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
CONTEXT.set_forkserver_preload(["dapo_runner.train", "dapo_runner.logging.report", "transformers.models.llama"])
